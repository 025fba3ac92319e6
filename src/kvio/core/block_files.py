"""Blocks as file objects: one is written piece by piece, of any length, and one is read so.

A writer collects up to `HELD_BYTES` in memory, and a block of that length is written at once. What
is longer is written by a thread of the writer's own while it is produced: `BlockWriter.write` hands
its bytes to that thread and waits until they are taken. So nothing is queued, and the caller's
memory is free when the call returns. A destructor, or a store that closes, never waits for that
thread: it is notified to stop, or checks that the store is closed.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvio.abc import Source
from kvio.core import threads
from kvio.core.buffers import aligned, view_bytes
from kvio.core.streams import HELD_BYTES
from kvio.core.threads import Condition, Future
from kvio.errors import (
    BlockSizeError,
    KvioError,
    StorageError,
    StoreClosedError,
    UnsupportedError,
)
from kvio.types import Cancellation, MiB, Receipt

if TYPE_CHECKING:
    from types import TracebackType

#: Store the bytes held, then those of the source, if there are more.
StoreBytes: TypeAlias = Callable[[memoryview, Source | None, Cancellation | None], Receipt]

#: Smaller pieces are collected before they are handed to the thread.
_PIECE_BYTES: Final = MiB
#: How long a thread without bytes waits before it looks whether the store is closed.
_LOOK_S: Final = 0.1
_NOTHING: Final = memoryview(b"")


class BlockWriter(io.RawIOBase):
    """Writes one block of any length; made by `Store.open_writer`.

    Readers see nothing of it until `close`, which stores it as `Store.write_block` does; in a
    ``with``, that is at the end of the ``with``. An exception in it, `abort`, or dropping the file
    stores nothing. So does `close` after a write that failed. Not seekable, and for one thread at a
    time.

    Attributes:
        key, name: the key of the block.
        mode: ``"wb"``.
        nbytes: the number of bytes so far.
        receipt: of the block, once it is stored; else None.
    """

    mode = "wb"
    _over = True  # until it may hold memory

    def __init__(
        self,
        key: str,
        store: StoreBytes,
        *,
        store_is_closed: Callable[[], bool],
        nbytes: int | None,
    ) -> None:
        super().__init__()
        self.key = self.name = key
        self.nbytes = 0
        self.receipt: Receipt | None = None
        self._store = store
        self._wanted = nbytes
        self._room = _NOTHING
        self._filled = 0
        self._flow = _Flow(store_is_closed)
        self._error = ""
        self._reason: KvioError | None = None
        self._reported = self._aborted = self._closing = False
        self._in_with = False
        self._pid = os.getpid()
        self._over = False

    @property
    def closed(self) -> bool:
        """True if it takes nothing more, and what failed has been reported."""
        return self._over and (not self._error or self._reported)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append all of *data*, a contiguous buffer, and return its length.

        Raises:
            TypeError: *data* is no such buffer, or holds objects or pointers.
            BlockSizeError: there are more bytes than were announced.
            KvioError: the block cannot be stored, or a write before has failed.
        """
        try:
            self._check_open()
            piece = view_bytes(data)
            total = self.nbytes + len(piece)
            if self._wanted is not None and total > self._wanted:
                raise self._wrong_length(total)
            if piece:
                self._append(piece)
            self.nbytes = total
            return len(piece)
        except BaseException as exc:
            self._fail(exc)
            raise

    def close(self) -> None:
        """Store the block; `receipt` is set from then on. In a ``with``, its end does it.

        Raises:
            BlockSizeError: fewer bytes were written than announced.
            StorageError: a write had failed; nothing is stored.
            KvioError: it was not stored, or whether it was is unknown, as by `Store.write_block`.
        """
        if self._error and not self._aborted:
            self._reported = True
            raise self._failed() from self._reason
        if self._over or self._in_with:
            return
        try:
            self._check_open()
            if self._wanted is not None and self.nbytes < self._wanted:
                raise self._wrong_length(self.nbytes)
            last = self._room[: self._filled]
            if self._flow.thread is None:
                self.receipt = self._store(last, None, None)
            else:
                self.receipt = self._flow.end(last)
        except BaseException as exc:
            self._fail(exc)
            self._reported = self._closing = True
            raise
        self._end()

    def abort(self) -> None:
        """Store nothing and free the memory; no effect on a closed file."""
        self._aborted = self._reported = True
        if not self._over:
            self._end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in_with = False
        if kind is None:
            self.close()
            return
        self.abort()
        hides = isinstance(error, Exception) and not isinstance(error, KvioError)
        if self._reason is not None and hides:
            raise self._reason  # the error of torch.save does not say it

    def __enter__(self) -> BlockWriter:
        """Return itself."""
        if self._over and not self._error:
            raise ValueError("I/O operation on closed file")
        self._in_with = True
        return self

    def __del__(self) -> None:
        """Free the memory; `io.IOBase` would call `close`, which stores the block."""
        if self._over or self._pid != os.getpid():  # a child: another thread may have the lock
            return
        self._over = True
        self._flow.stop()
        warnings.warn(
            f"the writer of block {self.key!r} was dropped, not closed: nothing is stored",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _append(self, piece: memoryview) -> None:
        flow = self._flow
        if flow.thread is None:
            self._grow(self._filled + len(piece))
            piece = self._fill(piece)
            if not piece:
                return
            room = aligned(_PIECE_BYTES)
            flow.start(self._store, self._room)
            self._room, self._filled = room, 0
        # The last byte so far stays here: with all bytes a backend may store the block at once.
        if len(piece) >= _PIECE_BYTES:
            flow.hand(self._room[: self._filled])
            flow.hand(piece[:-1])
            self._filled, piece = 0, piece[-1:]
        while piece := self._fill(piece):
            flow.hand(self._room[: self._filled])
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

    def _fail(self, error: BaseException) -> None:
        """Note the first error, without the frames that have the caller's memory; store nothing."""
        if self._over:
            return
        self._error = f"{type(error).__name__}: {error}"
        if isinstance(error, KvioError):
            self._reason = copy.copy(error)
        self._end()

    def _failed(self) -> StorageError:
        text = f"a write of block {self.key!r} failed, nothing is stored: {self._error}"
        if self._closing:  # interrupted, it may be stored
            text = f"storing block {self.key!r} failed: {self._error}"
        return StorageError(text, key=self.key)

    def _end(self) -> None:
        self._over = True
        self._room, self._filled = _NOTHING, 0
        if self._pid == os.getpid():  # else another thread may have had the lock at the fork
            self._flow.stop()
            self._flow.join()

    def _wrong_length(self, nbytes: int) -> BlockSizeError:
        text = f"block {self.key!r}: {nbytes} bytes were written, {self._wanted} were announced"
        return BlockSizeError(text, key=self.key)

    def _check_open(self) -> None:
        if self._error:
            raise self._failed()
        if self._over:
            raise ValueError("I/O operation on closed file")
        if self._pid != os.getpid():
            raise UnsupportedError(f"the writer of block {self.key!r} belongs to a parent process")


class _Flow:
    """The thread that stores a long block, and the bytes that it takes from the writer.

    Attributes:
        thread: it, once there is one.
    """

    def __init__(self, store_is_closed: Callable[[], bool]) -> None:
        self.thread: threading.Thread | None = None
        self._store_is_closed = store_is_closed
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._piece = _NOTHING
        self._ended = False
        self._cancel = Cancellation()
        self._outcome: Future[Receipt] = Future()

    def start(self, store: StoreBytes, held: memoryview) -> None:
        """Start to store the bytes that are held, and what `hand` brings."""
        self.thread = threading.Thread(
            target=self._work, args=(store, held), name="kvio-writer", daemon=True
        )
        threads.start(self.thread)

    def hand(self, piece: memoryview) -> None:
        """Hand over bytes and wait until they are taken.

        Raises:
            KvioError: they are not, because the block cannot be stored.
        """
        with self._lock:
            self._piece = piece
            self._changed.notify_all()
            threads.wait_for(self._changed, lambda: not self._piece or self._outcome.done(), None)
            self._piece = _NOTHING
        if self._outcome.done():
            self._result()  # else an existing block was kept, whatever comes

    def end(self, piece: memoryview) -> Receipt:
        """Hand over the last bytes, and return the receipt of the block."""
        with self._lock:
            self._piece, self._ended = piece, True
            self._changed.notify_all()
        threads.wait([self._outcome])
        return self._result()

    def _result(self) -> Receipt:
        """Return the receipt, or raise a copy of the error: its traceback would keep memory."""
        error = self._outcome.exception()
        if isinstance(error, KvioError):
            raise copy.copy(error) from None
        return self._outcome.result()

    def stop(self) -> None:
        """Let nothing more be stored, without waiting."""
        self._cancel.request()
        with self._lock:
            self._piece, self._ended = _NOTHING, True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended, if it has begun."""
        thread = self.thread
        if thread is not None and thread.is_alive() and not sys.is_finalizing():
            threads.join(thread)

    def _work(self, store: StoreBytes, held: memoryview) -> None:
        try:
            if self._cancel.requested:  # while the thread was starting
                raise StoreClosedError("the writer was closed before the end of the block")
            receipt = store(held, self._take, self._cancel)
        except BaseException as exc:  # noqa: BLE001  # raised by `hand` or `end`
            traceback.clear_frames(exc.__traceback__)  # they have the bytes
            self._outcome.set_exception(exc)
        else:
            self._outcome.set_result(receipt)
        finally:
            del store, held
        with self._lock:
            self._changed.notify_all()

    def _take(self, room: memoryview) -> int:
        """Copy the next bytes to *room*; return 0 at the end."""
        with self._lock:
            while not (self._piece or self._ended):
                if self._store_is_closed():
                    raise StoreClosedError("the store is closed")
                self._changed.wait(_LOOK_S)
            if self._cancel.requested:
                raise StoreClosedError("the writer was closed before the end of the block")
            count = min(len(room), len(self._piece))
            room[:count] = self._piece[:count]
            self._piece = self._piece[count:]
            if not self._piece:
                self._piece = _NOTHING  # an empty view still holds the caller's memory
                self._changed.notify_all()
            return count


class BlockReader(io.RawIOBase):
    """Reads one block from its beginning to its end; made by `Store.open_reader`.

    Each read returns as many bytes as were asked for, until the end. A whole block is verified as
    it is read: its last bytes, up to 16 MiB, are returned only if the checksum of all is right. So
    closing it before the end, or reading a range, verifies nothing. Not seekable, and for one
    thread at a time.

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
        self._error: KvioError | None = None

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
        self._check()
        room = view_bytes(out)
        got = 0
        try:
            while got < len(room) and self._next():
                count = min(len(room) - got, len(self._piece))
                room[got : got + count] = self._piece[:count]
                self._piece = self._piece[count:]
                got += count
            self.nbytes += got
        except BaseException as exc:
            self._fail(exc)
            raise
        return got

    def readall(self) -> bytes:
        """Return the rest of the block."""
        self._check()
        found = []
        try:
            while self._next():
                found.append(bytes(self._piece))
                self._piece = _NOTHING
            self.nbytes += sum(map(len, found))
        except BaseException as exc:
            self._fail(exc)
            raise
        return b"".join(found)

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._error is not None:
            raise copy.copy(self._error)

    def _next(self) -> bool:
        """Have bytes at hand; return False at the end."""
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._piece = piece
        return True

    def _fail(self, error: BaseException) -> None:
        """Note an error: what was read before it may be lost, so nothing more is returned."""
        if isinstance(error, KvioError):
            self._error = copy.copy(error)
        else:
            text = f"reading block {self.key!r} was interrupted by {type(error).__name__}"
            self._error = StorageError(text, key=self.key)

    def close(self) -> None:
        """Free the memory."""
        self._piece = _NOTHING
        self._pieces = iter(())
        super().close()
