"""What open files hold of a tier: room for bytes that are written, bytes that are read."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from kvio import threads
from kvio.errors import KvioError, StorageFullError, StoreClosedError
from kvio.store import Store
from kvio.types import IfExists, MiB
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.ledger import Ledger
from kvio.wrappers.staging.options import TierOptions
from kvio.wrappers.staging.pending import Entry
from kvio.wrappers.staging.room import whole_pages
from kvio.wrappers.staging.spool import Spool
from kvio.wrappers.staging.writing import StagedWrites

if TYPE_CHECKING:
    from kvio.wrappers.staging.memory import StagingMemory
    from kvio.wrappers.staging.receipts import StagedReceipt

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
        self._ledger.gate.check_fork()

    def check_free(self, key: str, deadline: float | None) -> None:
        """Refuse a key that is staged or stored with `BlockExistsError`."""
        self.writes.look(key, deadline)

    def give(self, spans: Sequence[Span]) -> None:
        """Take back room of a file whose bytes nobody wants."""
        if self._ledger.gate.forked:
            return  # the room is the parent's
        with self._ledger.lock:
            self._unhold_locked(spans)
            self._ledger.room.give(spans)
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
        ledger.gate.check_fork()
        with ledger.lock:
            self._unhold_locked(spans)
            if ledger.closing:
                ledger.room.give(spans)
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
            self._ledger.room.unhold(span.nbytes)

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
                    ledger.room.hold(entry.nbytes)
        return entry

    def unpin(self, entry: Entry) -> None:
        """Let go of a block."""
        if self._ledger.gate.forked:
            return  # the pin is the parent's
        with self._ledger.lock:
            self._readers[entry] -= 1
            if not self._readers[entry]:
                del self._readers[entry]
                self._ledger.room.unhold(entry.nbytes)
        self._ledger.unpin((entry,))

    # Files that nobody closed

    def start(self) -> None:
        """See that `later` has a thread."""
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
