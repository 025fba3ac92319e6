"""Blocks as file objects: one is written piece by piece, of any length, and one is read so.

A writer collects up to `HELD_BYTES` in memory, and a block of that length is written at once. What
is longer is written by a thread of the writer's own while it is produced: `BlockWriter.write` hands
its bytes to that thread and waits until they are taken. So nothing is queued, and the caller's
memory is free when the call returns.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvio.abc import Source
from kvio.core import threads
from kvio.core.buffers import aligned, view_bytes
from kvio.core.streams import HELD_BYTES
from kvio.core.threads import Condition, Future
from kvio.errors import BlockSizeError, StorageError, StoreClosedError, UnsupportedError
from kvio.types import Cancellation, MiB, Receipt

if TYPE_CHECKING:
    from types import TracebackType

#: Store the bytes held, then those of the source, if there are more.
Store: TypeAlias = Callable[[memoryview, Source | None, Cancellation | None], Receipt]

#: Smaller pieces are collected before they are handed to the thread.
_PIECE_BYTES: Final = MiB
_NOTHING: Final = memoryview(b"")


class BlockWriter(io.RawIOBase):
    """Writes one block of any length; made by `Store.open_writer`.

    Readers see nothing of it until `close`, which stores it as `Store.write_block` does. An
    exception in the ``with``, `abort`, or dropping the file stores nothing. So does `close` after a
    write that failed. Not seekable, and for one thread at a time.

    Attributes:
        key, name: the key of the block.
        mode: ``"wb"``.
        nbytes: the number of bytes so far.
        receipt: of the block, after `close`; else None.
    """

    mode = "wb"
    _over = True  # until it may hold memory

    def __init__(self, key: str, store: Store, *, nbytes: int | None) -> None:
        super().__init__()
        self.key = self.name = key
        self.nbytes = 0
        self.receipt: Receipt | None = None
        self._store = store
        self._wanted = nbytes
        self._room = _NOTHING
        self._filled = 0
        self._flow: _Flow | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._over = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append all of *data*, a contiguous buffer, and return its length.

        Raises:
            TypeError: *data* is no such buffer, or holds objects or pointers.
            BlockSizeError: there are more bytes than were announced.
            KvioError: the block cannot be stored.
        """
        self._check_open()
        piece = view_bytes(data)
        try:
            if self._wanted is not None and self.nbytes + len(piece) > self._wanted:
                raise self._wrong_length(self.nbytes + len(piece))
            self._append(piece)
        except BaseException as exc:
            self.abort(exc)
            raise
        self.nbytes += len(piece)
        return len(piece)

    def close(self) -> None:
        """Store the block; `receipt` is set from then on.

        Raises:
            BlockSizeError: fewer bytes were written than announced.
            StorageError: a write had failed; nothing is stored.
            KvioError: it was not stored, or whether it was is unknown, as by `Store.write_block`.
        """
        if self._over:
            if self._error is not None:
                text = f"a write of block {self.key!r} failed, nothing is stored: {self._error}"
                raise StorageError(text, key=self.key) from self._error
            return
        self._check_open()
        try:
            if self._wanted is not None and self.nbytes < self._wanted:
                raise self._wrong_length(self.nbytes)
            last = self._room[: self._filled]
            if self._flow is None:
                self.receipt = self._store(last, None, None)
            else:
                self.receipt = self._flow.end(last)
        finally:
            self.abort()

    def abort(self, because: BaseException | None = None) -> None:
        """Store nothing and free the memory; no effect on a closed file.

        With a reason, `close` raises it afterwards.
        """
        if because is not None and not self._over:
            self._error = because
        flow, self._flow = self._flow, None
        self._over = True
        self._room = _NOTHING
        super().close()
        if flow is not None and self._pid == os.getpid():
            flow.stop()

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
        """Free the memory; `io.IOBase` would call `close`, which stores the block."""
        if self._over:
            return
        self.abort()
        warnings.warn(
            f"the writer of block {self.key!r} was dropped, not closed: nothing is stored",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _append(self, piece: memoryview) -> None:
        if self._flow is None:
            self._grow(self._filled + len(piece))
            piece = self._fill(piece)
            if not piece:
                return
            self._flow = _Flow(self._store, self._room)
            self._room, self._filled = aligned(_PIECE_BYTES), 0
        # The last byte so far always stays here: who has all may store the block before `close`.
        if len(piece) >= _PIECE_BYTES:
            self._flow.hand(self._room[: self._filled])
            self._flow.hand(piece[:-1])
            self._filled, piece = 0, piece[-1:]
        while piece := self._fill(piece):
            self._flow.hand(self._room[: self._filled])
            self._filled = 0

    def _grow(self, wanted: int) -> None:
        """Have memory for so many bytes, or for `HELD_BYTES`."""
        if wanted <= len(self._room) or len(self._room) == HELD_BYTES:
            return
        known = 0 if self._wanted is None else self._wanted
        room = aligned(min(HELD_BYTES, max(wanted, known, 2 * len(self._room), _PIECE_BYTES)))
        room[: self._filled] = self._room[: self._filled]
        self._room = room

    def _fill(self, piece: memoryview) -> memoryview:
        """Copy as much as fits to the memory of the writer; return the rest."""
        room = self._room
        count = min(len(piece), len(room) - self._filled)
        room[self._filled : self._filled + count] = piece[:count]
        self._filled += count
        return piece[count:]

    def _wrong_length(self, nbytes: int) -> BlockSizeError:
        text = f"block {self.key!r}: {nbytes} bytes were written, {self._wanted} were announced"
        return BlockSizeError(text, key=self.key)

    def _check_open(self) -> None:
        if self._over:
            raise ValueError("I/O operation on closed file")
        if self._pid != os.getpid():
            raise UnsupportedError(f"the writer of block {self.key!r} belongs to a parent process")


class _Flow:
    """The thread that stores a long block, and the bytes that it takes from the writer."""

    def __init__(self, store: Store, held: memoryview) -> None:
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._piece = _NOTHING
        self._ended = False
        self._cancel = Cancellation()
        self._receipt: Future[Receipt] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(store, held), name="kvio-writer", daemon=True
        )
        threads.start(self._thread)

    def hand(self, piece: memoryview) -> None:
        """Hand over bytes and wait until they are taken.

        Raises:
            KvioError: they are not, because the block cannot be stored.
        """
        with self._lock:
            self._piece = piece
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._piece or self._receipt.done())
            self._piece = _NOTHING
        if self._receipt.done():
            self._receipt.result()  # else an existing block was kept, whatever comes

    def end(self, piece: memoryview) -> Receipt:
        """Hand over the last bytes, and return the receipt of the block."""
        with self._lock:
            self._piece, self._ended = piece, True
            self._changed.notify_all()
        self._receipt.wait()
        return self._receipt.result()

    def stop(self) -> None:
        """Let nothing more be stored, and wait until the thread has ended."""
        self._cancel.request()
        with self._lock:
            self._ended = True
            self._changed.notify_all()
        threads.join(self._thread)

    def _work(self, store: Store, held: memoryview) -> None:
        try:
            self._receipt.set_result(store(held, self._take, self._cancel))
        except BaseException as exc:  # noqa: BLE001  # raised by `hand` or `end`
            self._receipt.set_exception(exc)
        with self._lock:
            self._changed.notify_all()

    def _take(self, room: memoryview) -> int:
        """Copy the next bytes to *room*; return 0 at the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._piece or self._ended)
            if self._cancel.requested:
                raise StoreClosedError("the writer was closed before the end of the block")
            count = min(len(room), len(self._piece))
            room[:count] = self._piece[:count]
            self._piece = self._piece[count:]
            if not self._piece:
                self._changed.notify_all()
            return count


class BlockReader(io.RawIOBase):
    """Reads one block from its beginning to its end; made by `Store.open_reader`.

    Each read returns as many bytes as were asked for, until the end. A whole block is verified as
    it is read: its last bytes, up to 16 MiB, are returned only if the checksum of all is right. So
    who closes it before the end, or reads a range, has verified nothing. Not seekable, and for one
    thread.

    Attributes:
        key, name: the key of the block.
        mode: ``"rb"``.
        nbytes: the number of bytes read so far.
    """

    mode = "rb"

    def __init__(self, key: str, pieces: Iterator[memoryview]) -> None:
        super().__init__()
        self.key = self.name = key
        self.nbytes = 0
        self._pieces = pieces
        self._piece = _NOTHING
        self._error: BaseException | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, out: Any, /) -> int:
        """Fill *out* and return the number of bytes, less than its length only at the end.

        Raises:
            CorruptBlockError: the bytes are not those written; so does every later call.
            TransientStorageError: the block was replaced meanwhile.
            KvioError: as `Store.read_block`.
        """
        room = view_bytes(out)
        got = 0
        while got < len(room) and self._next():
            count = min(len(room) - got, len(self._piece))
            room[got : got + count] = self._piece[:count]
            self._piece = self._piece[count:]
            got += count
        self.nbytes += got
        return got

    def readall(self) -> bytes:
        """Return the rest of the block."""
        found = []
        while self._next():
            found.append(bytes(self._piece))
            self._piece = _NOTHING
        self.nbytes += sum(map(len, found))
        return b"".join(found)

    def _next(self) -> bool:
        """Have bytes at hand; return False at the end."""
        if self.closed:
            raise ValueError(f"the reader of block {self.key!r} is closed")
        if self._error is not None:
            raise self._error
        try:
            while not self._piece:
                piece = next(self._pieces, None)
                if piece is None:
                    return False
                self._piece = piece
        except BaseException as exc:
            self._error = exc
            raise
        return True

    def close(self) -> None:
        """Free the memory."""
        self._piece = _NOTHING
        self._pieces = iter(())
        super().close()
