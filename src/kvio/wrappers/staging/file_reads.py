"""Blocks of a tier or its store that are read as binary files."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any, Final

from kvio import _native
from kvio.buffers import view_bytes
from kvio.errors import BlockSizeError, CorruptBlockError, TransientStorageError
from kvio.store import Store
from kvio.types import BlockStat, KiB, MiB
from kvio.wrappers.staging.file_room import FileRoom
from kvio.wrappers.staging.pending import Entry

#: Buffer sizes for small reads: of staged blocks, and of stored ones, where requests cost more.
_STAGED_BYTES: Final = 128 * KiB
_STORED_BYTES: Final = 1 * MiB

_fill: Final = io.BufferedReader.readinto


class StagedReader(io.BufferedReader):
    """A block that is read as a binary file; made by `StagingTier.open`.

    It reads the block that the key had when it was opened. A staged block keeps its memory until
    the reader is closed. A stored block is read in ranges, of which the store checks only the
    trailer; if it is replaced meanwhile, the next read from the store fails. If it is read in
    order from beginning to end, its checksum is compared: the read of its last bytes raises
    `CorruptBlockError` if it is wrong.

    Attributes:
        key: the key of the block.
        nbytes: its length.
    """

    raw: _Block

    def __init__(self, raw: _Block, buffer_bytes: int) -> None:
        super().__init__(raw, buffer_size=buffer_bytes)
        self.key = raw.name
        self.nbytes = raw.nbytes

    def readinto(self, out: Any, /) -> int:
        """Fill *out* as files do; raises `TypeError` for memory of objects or pointers."""
        return _fill(self, out if type(out) is bytearray else view_bytes(out))

    def readinto1(self, out: Any, /) -> int:
        """Fill *out* with at most one read from the store; raises as `readinto` does."""
        return super().readinto1(view_bytes(out))

    def __del__(self) -> None:
        """Do nothing: `io.IOBase` would close, and take a lock that this thread may hold."""


class _Block(io.RawIOBase):
    """A block with a position; `drop` is `close` for destructors."""

    mode = "rb"

    def __init__(
        self,
        key: str,
        nbytes: int,
        fetch: Callable[[memoryview, int], object],
        *,
        release: Callable[[], None] | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__()
        self.name = key
        self.nbytes = nbytes
        self._fetch = fetch
        self._release = release
        self._later = later
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, out: Any, /) -> int:
        view = view_bytes(out)
        n = max(0, min(len(view), self.nbytes - self._at))
        if n:
            self._fetch(view[:n], self._at)
        self._at += n
        return n

    def readall(self) -> bytes:
        """Read the rest at once; the method of the base class reads small pieces."""
        rest = bytearray(max(0, self.nbytes - self._at))
        return bytes(memoryview(rest)[: self.readinto(rest)])

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at = offset + (0, self._at, self.nbytes)[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
        super().close()

    def drop(self) -> None:
        release, self._release = self._release, None
        if release is not None and self._later is not None:
            self._later(release)

    def __del__(self) -> None:
        self.drop()


def open_block(room: FileRoom, key: str, *, timeout: float | None) -> StagedReader:
    """Open the block that reads see now; raises as `Store.stat_block`."""
    room.start()
    entry = room.pin(key)
    if entry is not None:
        return StagedReader(_staged(room, entry), _STAGED_BYTES)
    stat = room.store.stat_block(key, timeout=timeout)
    stored = _Stored(room.store, stat, timeout)
    return StagedReader(_Block(key, stat.nbytes, stored.fetch), _STORED_BYTES)


def _staged(room: FileRoom, entry: Entry) -> _Block:
    return _Block(
        entry.key,
        entry.nbytes,
        lambda view, at: room.memory.fetch(entry.spans, [view], at),
        release=lambda: room.unpin(entry),
        later=room.later,
    )


class _Stored:
    """Range reads of one block of a store, which must not be replaced meanwhile."""

    def __init__(self, store: Store, stat: BlockStat, timeout: float | None) -> None:
        self._store = store
        self._stat = stat
        self._timeout = timeout
        #: The number of bytes read in order from the beginning, and their checksum.
        self._summed = self._crc = 0

    def fetch(self, view: memoryview, at: int) -> None:
        """Fill *view*; raise an error if the block was replaced or is corrupt."""
        key, wanted = self._stat.key, len(view)
        store, limit = self._store, self._timeout
        try:
            got = store.read_block_into(key, view, offset=at, nbytes=wanted, timeout=limit)
        except BlockSizeError:
            got = 0
        if got < wanted or not self._same(store.stat_block(key, timeout=limit)):
            text = f"block {key!r} was replaced while it was being read"
            raise TransientStorageError(text, errno=errno.ESTALE, key=key)
        self._check(view, at)

    def _check(self, view: memoryview, at: int) -> None:
        wanted = self._stat.checksum
        if wanted is None or at not in (0, self._summed):
            return
        crc = _native.crc32c(view, self._crc if at else 0)
        if at + len(view) == self._stat.nbytes and crc != wanted:
            key = self._stat.key
            self._store._damaged.note(key)  # noqa: SLF001  # the store itself checks no ranges
            text = f"block {key!r} is corrupt: the payload's checksum is wrong"
            raise CorruptBlockError(text, key=key)
        self._summed, self._crc = at + len(view), crc

    def _same(self, now: BlockStat) -> bool:
        then = self._stat
        if now.nbytes != then.nbytes:
            return False
        if now.checksum is not None and then.checksum is not None:
            return now.checksum == then.checksum
        return now.mtime_ns == then.mtime_ns
