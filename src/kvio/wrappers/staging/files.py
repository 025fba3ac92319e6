"""Blocks that are written as binary files: directly into staging memory, published at close.

Every byte is copied once, when it is written: large writes from the caller's memory, small ones
from a window that collects them. The bytes can be changed until the file is closed, so a writer
may seek back and write a header.
"""

from __future__ import annotations

import io
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvio import _native
from kvio.buffers import PAGE_BYTES, view_bytes
from kvio.errors import StorageError
from kvio.types import IfExists, MiB
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.file_room import FileRoom
from kvio.wrappers.staging.host import crc32c_of
from kvio.wrappers.staging.pieces import cut_spans
from kvio.wrappers.staging.progress import deadline_of, left

if TYPE_CHECKING:
    from kvio.wrappers.staging.receipts import StagedReceipt
    from kvio.wrappers.staging.spool import Spool

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
