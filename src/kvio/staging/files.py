"""Blocks of a tier as binary files: written into staging memory, read from tier or store."""

from __future__ import annotations

import errno
import io
import mmap
import os
import tempfile
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvio import _native
from kvio.core import threads
from kvio.core.buffers import PAGE_BYTES, view_bytes
from kvio.core.store import Store
from kvio.errors import (
    BlockSizeError,
    CorruptBlockError,
    KvioError,
    StorageError,
    StorageFullError,
    StoreClosedError,
    TransientStorageError,
    storage_error,
)
from kvio.staging.allocator import Span, whole_pages
from kvio.staging.host import crc32c_of, cut_spans
from kvio.staging.ledger import Ledger
from kvio.staging.options import TierOptions
from kvio.staging.pending import Entry, deadline_of, left
from kvio.staging.writing import StagedWrites
from kvio.types import BlockStat, IfExists, KiB, MiB, Parts

if TYPE_CHECKING:
    from kvio.staging.memory import StagingMemory
    from kvio.staging.receipts import StagedReceipt


_SPOOL_PIECE_BYTES = 64 * MiB


class Spool:
    """A temporary file of mode 0600 that is removed with this object or its process.

    Raises:
        StorageError: the directory takes none.
    """

    def __init__(self, directory: str, key: str) -> None:
        self._key = key
        with self._errors("make a file to spill to"):
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115

    def write(self, parts: Parts, at: int) -> None:
        """Write parts one after the other, from *at* on.

        Raises:
            StorageError: the disk failed or is full.
        """
        with self._errors("spill"):
            for part in parts:
                done = 0
                while done < len(part):  # in pieces: handlers of signals run between them
                    piece = part[done : done + _SPOOL_PIECE_BYTES]
                    done += os.pwrite(self._file.fileno(), piece, at + done)
                at += len(part)

    @contextmanager
    def view(self) -> Iterator[memoryview]:
        """Lend the bytes without reading them into memory of our own.

        No other process can truncate the file; a disk that cannot read back its bytes ends the
        process (SIGBUS), as with every mapped file.
        """
        with self._errors("map what was spilled"):
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        yield memoryview(mapped)  # unmapped with its last view: an abandoned call may still read it

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if isinstance(exc, StorageError):
                raise
            raise storage_error(exc.errno or 0, doing, key=self._key) from exc


# --------------------------------------------------------------------------------------------------
# What open files hold of a tier: room for bytes that are written, bytes that are read.


_WINDOW_BYTES: Final = 1 * MiB
_PIECE_BYTES: Final = 16 * MiB
#: A file takes no more than this part of a tier at once.
_PIECES: Final = 8


class FileRoom:
    """The part of a tier that its open files share.

    Attributes:
        memory, store, writes: the tier's.
        checksum: sum what is staged.
        window_bytes: small writes are gathered up to this.
        piece_bytes: room is taken in pieces of at most this.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: StagingMemory,
        store: Store,
        writes: StagedWrites,
        options: TierOptions,
    ) -> None:
        self.memory = memory
        self.store = store
        self.writes = writes
        self.checksum = options.checksum
        self.piece_bytes = min(_PIECE_BYTES, whole_pages(memory.capacity_bytes // _PIECES))
        self.window_bytes = min(_WINDOW_BYTES, self.piece_bytes)
        self._ledger = ledger
        self._directory = options.spool
        self._readers: dict[Entry, int] = {}
        self._returns: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    # Writing

    def check_fork(self) -> None:
        """Refuse a child process, whose spool is its parent's, with `UnsupportedError`."""
        self._ledger.tier_state.check_fork()

    def check_free(self, key: str, deadline: float | None) -> None:
        """Refuse a key that is staged or stored with `BlockExistsError`."""
        self.writes.look(key, deadline)

    def give(self, spans: Sequence[Span]) -> None:
        """Free the room of a file whose bytes are no longer wanted."""
        if self._ledger.tier_state.forked:
            return  # the room is the parent's
        with self._ledger.lock:
            self._unhold_locked(spans)
            self._ledger.allocator.release(spans)
        self._ledger.deliver()

    def publish(
        self,
        key: str,
        spans: Sequence[Span],
        *,
        nbytes: int,
        checksum: int | None,
        if_exists: IfExists,
    ) -> StagedReceipt:
        """Make one block of the bytes in *spans*, as a write would; the room is the tier's again.

        Raises:
            StoreClosedError: the tier is closed.
            BlockExistsError: as `Ledger.commit`.
        """
        ledger = self._ledger
        ledger.tier_state.check_fork()
        with ledger.lock:
            self._unhold_locked(spans)
            if ledger.closing:
                ledger.allocator.release(spans)
                raise StoreClosedError("the staging tier is closed")
            ledger.filling += 1
        try:
            return ledger.commit(key, spans, nbytes=nbytes, checksum=checksum, if_exists=if_exists)
        finally:
            ledger.deliver()

    def open_spool(self, key: str) -> Spool:
        """Make a file to spill to.

        Raises:
            StorageFullError: there is no directory for it.
        """
        if self._directory is None:
            text = f"no room for file {key!r} in the staging tier beside what others hold"
            raise StorageFullError(f"{text}, and no spool= to spill to: give stage() one", key=key)
        return Spool(self._directory, key)

    def _unhold_locked(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._ledger.allocator.remove_open(span.nbytes)

    # Reading

    def pin(self, key: str) -> Entry | None:
        """Keep a staged block where it is until `unpin`; None: ask the store."""
        ledger = self._ledger
        with ledger.lock:
            ledger.check_open_locked()
            entry = ledger.pin_locked(key)
            if entry is not None:
                self._readers[entry] = self._readers.get(entry, 0) + 1
                if self._readers[entry] == 1:
                    ledger.allocator.add_open(entry.nbytes)
        return entry

    def unpin(self, entry: Entry) -> None:
        """Let go of a block."""
        if self._ledger.tier_state.forked:
            return  # the pin is the parent's
        with self._ledger.lock:
            self._readers[entry] -= 1
            if not self._readers[entry]:
                del self._readers[entry]
                self._ledger.allocator.remove_open(entry.nbytes)
        self._ledger.unpin((entry,))

    # Files that were never closed

    def start(self) -> None:
        """Start a thread for `later`, if there is none."""
        with self._starting:
            if self._thread is None:
                name = "kvio-dropped-files"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                threads.start(thread)
                self._thread = thread

    def later(self, call: Callable[[], None]) -> None:
        """Call soon, on another thread: a destructor may run while this one has the lock."""
        self._returns.put(call)

    def end(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._returns.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _work(self) -> None:
        while (call := self._returns.get()) is not None:
            try:
                call()
            except KvioError as exc:
                text = f"staging memory was not released: {exc}"
                warnings.warn(text, RuntimeWarning, stacklevel=1)


# --------------------------------------------------------------------------------------------------
# Blocks of a tier or its store that are read as binary files.


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


# --------------------------------------------------------------------------------------------------
# Blocks that are written as binary files: directly into staging memory, published at close.
#
# Every byte is copied once, when it is written: large writes from the caller's memory, small ones
# from a window that collects them. The bytes can be changed until the file is closed, so a writer
# may seek back and write a header.


_ZEROS: Final = memoryview(bytes(1 * MiB))


class _Piece:
    """Bytes of a file in spans of staging memory; *crc32c* is None if they were changed since."""

    __slots__ = ("crc32c", "nbytes", "spans", "start")

    def __init__(self, start: int, nbytes: int, spans: Sequence[Span], crc32c: int | None) -> None:
        self.start = start
        self.nbytes = nbytes
        self.spans = spans
        self.crc32c = crc32c


class StagedFile(io.BufferedIOBase):
    """A block that is written as a binary file; made by `StagingTier.open`.

    Readers see nothing of it until `close`, which makes it one staged block, as
    `StagingTier.write_block` does. An exception in the ``with`` block, `abort`, or dropping the
    file publishes nothing and frees its memory. So does `close` after a write that failed.

    It may be written at any position, as `io.BytesIO`: a gap after its end is filled with zeros.
    It cannot be read, has no descriptor, and is for one thread at a time.

    Attributes:
        key, name: the key of the block.
        mode: ``"wb"``.
        receipt: of the block, after `close`; else None.
    """

    mode = "wb"
    _over = True  # until it holds memory

    def __init__(
        self, room: FileRoom, key: str, *, if_exists: IfExists, timeout: float | None
    ) -> None:
        super().__init__()
        self.key = self.name = key
        self.receipt: StagedReceipt | None = None
        self._room = room
        self._if_exists: IfExists = if_exists
        self._timeout = timeout
        self._at = 0
        self._pieces: list[_Piece] = []
        self._starts: list[int] = []
        self._staged_bytes = 0
        self._window = bytearray()
        self._spool: Spool | None = None
        self._spilled_bytes = 0
        self._error: BaseException | None = None
        if if_exists == "error":
            room.check_free(key, deadline_of(timeout))
        room.start()
        self._over = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "spilled" if self._spool is not None else "open"
        return f"<kvio.StagedFile {self.key!r} {self.nbytes} bytes {state}>"

    @property
    def nbytes(self) -> int:
        """The number of bytes so far."""
        return self._spilled_bytes + self._staged_bytes + len(self._window)

    @property
    def spilled(self) -> bool:
        """True if its bytes are in the spool, because the tier had no room for them."""
        return self._spool is not None

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next write."""
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position, as files do; it may be after the end."""
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        at = offset + (0, self._at, self.nbytes)[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    def write(self, data: Any, /) -> int:
        """Copy all of *data*, a contiguous buffer, and return its length.

        Raises:
            TypeError, BlockSizeError: *data* is not a contiguous buffer, or holds objects,
                pointers or numbers in the other byte order.
            StorageFullError: other files and failed blocks hold the memory, and there is no
                ``spool=``.
            StorageTimeoutError: there was no room before the deadline.
            StoreClosedError: the tier was closed.
        """
        self._check_open()
        view = view_bytes(data)
        if not len(view):
            return 0
        self._room.check_fork()
        self._check_sound()
        deadline = deadline_of(self._timeout)
        try:
            while self._at > self.nbytes:
                self._append(_ZEROS[: self._at - self.nbytes], deadline)
            old = min(len(view), self.nbytes - self._at)
            self._patch(self._at, view[:old])
            self._append(view[old:], deadline)
        except BaseException as exc:
            self._error = exc
            raise
        self._at += len(view)
        return len(view)

    def close(self) -> None:
        """Publish the block; `receipt` has its state from then on.

        A spilled file is written as any block: staged if it fits, else directly to the store.

        Raises:
            BlockExistsError: there is a block already and *if_exists* is ``"error"``.
            StorageError: a write had failed, a direct write to the store failed now, or there was
                no room before the deadline; nothing is published.
            StoreClosedError: the tier was closed.
        """
        if self._over:
            return
        try:
            self._room.check_fork()
            self._check_sound()
            self.receipt = self._publish(deadline_of(self._timeout))
        finally:
            self._end()

    def abort(self) -> None:
        """Publish nothing and free the memory; has no effect on a closed file."""
        if not self._over:
            self._end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        self.abort()
        if self._error is not None and self._error is not error and isinstance(error, Exception):
            raise self._error  # the error of torch.save does not say the reason

    def __del__(self) -> None:
        """Free the memory; `io.IOBase` would call `close`, which publishes."""
        if self._over:
            return
        self._over = True
        if self._spool is not None:
            self._spool.close()
        spans = [span for piece in self._pieces for span in piece.spans]
        if spans:
            self._room.later(partial(self._room.give, spans))
        warnings.warn(
            f"file {self.key!r} was dropped, not closed: nothing of it is published",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    # Where the bytes are

    def _append(self, view: memoryview, deadline: float | None) -> None:
        """Collect small writes in the window; put large ones into whole pages of memory."""
        while self._spool is None and len(self._window) + len(view) >= self._room.window_bytes:
            ready = (len(self._window) + len(view)) // PAGE_BYTES * PAGE_BYTES
            ready = min(ready, self._room.piece_bytes)
            head = ready - len(self._window)
            if self._stage([memoryview(self._window), view[:head]], ready, deadline):
                view = view[head:]
            else:
                self._spill()
        if self._spool is None:
            self._window += view
        else:
            self._spool.write([view], self._spilled_bytes)
            self._spilled_bytes += len(view)

    def _stage(self, parts: Sequence[memoryview], nbytes: int, deadline: float | None) -> bool:
        """Put the window and more bytes into staging memory; False: there is no room."""
        room = self._room
        spans = room.writes.take_for_file(nbytes, deadline)
        if spans is None:
            return False
        try:
            filled = room.memory.fill(spans, parts, checksum=room.checksum)
        except BaseException:
            room.give(spans)
            raise
        self._pieces.append(_Piece(self._staged_bytes, nbytes, spans, filled.crc32c))
        self._starts.append(self._staged_bytes)
        self._staged_bytes += nbytes
        self._window = bytearray()
        return True

    def _spill(self) -> None:
        """Move all bytes to the spool, so that files never hold memory that writers wait for."""
        memory = self._room.memory
        spool = self._room.open_spool(self.key)
        try:
            for piece in self._pieces:
                with memory.lend(piece.spans) as parts:
                    spool.write(parts, piece.start)
            spool.write([memoryview(self._window)], self._staged_bytes)
        except BaseException:
            spool.close()
            raise
        self._spool, self._spilled_bytes = spool, self.nbytes
        self._give_room()

    def _patch(self, at: int, view: memoryview) -> None:
        """Overwrite existing bytes."""
        if self._spool is not None:
            self._spool.write([view], at)
            return
        while len(view) and at < self._staged_bytes:
            piece = self._pieces[bisect_right(self._starts, at) - 1]
            n = min(len(view), piece.start + piece.nbytes - at)
            self._patch_piece(piece, at - piece.start, view[:n])
            at, view = at + n, view[n:]
        start = at - self._staged_bytes
        self._window[start : start + len(view)] = view

    def _patch_piece(self, piece: _Piece, at: int, view: memoryview) -> None:
        memory, piece.crc32c = self._room.memory, None
        if memory.kind in ("host", "pinned"):
            memory.fill(cut_spans(piece.spans, at, len(view)), [view], checksum=False)
            return
        whole = bytearray(piece.nbytes)  # a device's fences are for whole spans
        memory.fetch(piece.spans, [memoryview(whole)])
        whole[at : at + len(view)] = view
        piece.crc32c = memory.fill(
            piece.spans, [memoryview(whole)], checksum=self._room.checksum
        ).crc32c

    # The end

    def _publish(self, deadline: float | None) -> StagedReceipt:
        if self._pieces and self._window and not self._stage_last(deadline):
            self._spill()
        if self._spool is not None:
            with self._spool.view() as view:
                return self._write(view, deadline)
        if not self._pieces:
            return self._write(memoryview(self._window), deadline)
        if self._if_exists == "error":
            self._room.check_free(self.key, deadline)
        checksum = self._checksum()
        spans = [span for piece in self._pieces for span in piece.spans]
        self._pieces = []  # from here on the memory belongs to the published block
        return self._room.publish(
            self.key,
            spans,
            nbytes=self._staged_bytes,
            checksum=checksum,
            if_exists=self._if_exists,
        )

    def _stage_last(self, deadline: float | None) -> bool:
        window = memoryview(self._window)
        return self._stage([window], len(window), deadline)

    def _write(self, view: memoryview, deadline: float | None) -> StagedReceipt:
        return self._room.writes.write(
            self.key, view, if_exists=self._if_exists, timeout=left(deadline)
        )

    def _checksum(self) -> int | None:
        """Combine the checksums of all pieces, again for changed ones; None: not wanted."""
        if not self._room.checksum:
            return None
        sums = []
        for piece in self._pieces:
            if piece.crc32c is None:
                with self._room.memory.lend(piece.spans) as parts:
                    piece.crc32c = crc32c_of(parts)
            sums.append((piece.crc32c, piece.nbytes))
        return _native.crc32c_combine(sums)

    def _give_room(self) -> None:
        spans = [span for piece in self._pieces for span in piece.spans]
        self._pieces, self._starts, self._staged_bytes = [], [], 0
        self._window = bytearray()
        if spans:
            self._room.give(spans)

    def _end(self) -> None:
        self._over = True
        final = self.nbytes
        try:
            self._give_room()
        finally:
            if self._spool is not None:
                self._spool.close()
            self._spilled_bytes = final
            super().close()

    def _check_open(self) -> None:
        if self._over:
            raise ValueError("I/O operation on closed file")

    def _check_sound(self) -> None:
        if self._error is not None:
            text = f"a write of file {self.key!r} failed, nothing is published: {self._error}"
            raise StorageError(text, key=self.key) from self._error
