"""What a staging tier works with; `kvio.staging.daemon.client` has one that is in a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvio.core.lifetime import Accepting
from kvio.core.store import Store
from kvio.staging import writing
from kvio.staging.allocator import Extents
from kvio.staging.draining import Drains
from kvio.staging.files import FileRoom
from kvio.staging.ledger import Ledger
from kvio.staging.options import TierOptions, TierStats, take_stock
from kvio.staging.pending import left
from kvio.staging.reading import StagedReads
from kvio.staging.receipts import StagedReceipt, TierState
from kvio.staging.writing import StagedWrites
from kvio.types import Level

if TYPE_CHECKING:
    from kvio.staging.memory import StagingMemory


class TierEngine(Protocol):
    """What `StagingTier` calls; the methods do what those of the same name promise there."""

    @property
    def tier_state(self) -> TierState:
        """The level of the store, and whether this is a forked child."""

    @property
    def memory(self) -> StagingMemory:
        """The staging memory."""

    @property
    def drains(self) -> Drains:
        """What stores the blocks."""

    @property
    def reads(self) -> StagedReads:
        """The reads of staged blocks."""

    @property
    def writes(self) -> StagedWrites:
        """The writes and deletions."""

    @property
    def files(self) -> FileRoom:
        """The open files."""

    @property
    def accepting(self) -> Accepting:
        """What a program waits for at its end."""

    def barrier(self, level: Level | str | None, *, timeout: float | None) -> None:
        """Wait until every write so far has reached a level."""

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write is stored."""

    @property
    def failed(self) -> list[StagedReceipt]:
        """The receipts of writes that failed for good."""

    def retry_failed(self) -> list[StagedReceipt]:
        """Retry every failed write."""

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed write."""

    def shrink(self, nbytes: int) -> int:
        """Return memory to the system."""

    def grow(self, nbytes: int) -> int:
        """Use such memory again."""

    def stats(self) -> TierStats:
        """Return the counts."""

    def check_open(self) -> None:
        """Raise StoreClosedError after `end`."""

    def drain(self, deadline: float | None) -> None:
        """Accept no more, and store all that was accepted.

        Raises:
            TierNotDrainedError: some failed, or were not stored before the deadline; writes are
                accepted again.
        """

    def end(self, deadline: float | None) -> None:
        """End all threads and release the memory."""

    @property
    def lost(self) -> list[StagedReceipt]:
        """The receipts of failed writes whose bytes are not staged any more."""

    def after_fork(self) -> None:
        """Mark this as the engine of a forked child, which cannot use it."""


class LocalEngine:
    """A ledger of staged blocks, their memory, and the threads that store them."""

    def __init__(
        self,
        store: Store,
        memory: StagingMemory,
        options: TierOptions,
        *,
        drains: type[Drains] = Drains,
    ) -> None:
        self.store = store
        self.memory = memory
        self.tier_state = TierState(Level(str(store.url.options.get("durability") or "visible")))
        self.ledger = Ledger(
            self.tier_state,
            Extents(memory.capacity_bytes),
            retries=options.retries,
            release=memory.release,
        )
        self.drains = self.accepting = drains(
            self.ledger,
            store,
            memory,
            threads=options.drain_threads,
            eager=options.drain_from == "accept",
            high_water=options.high_water,
            low_water=options.low_water,
            timeout=options.timeout,
            nice=options.drain_nice,
            on_start=options.on_start,
        )
        self.reads = StagedReads(self.ledger, memory, store)
        self.writes = StagedWrites(
            self.ledger, memory, store, when_full=options.when_full, checksum=options.checksum
        )
        self.files = FileRoom(self.ledger, memory, store, self.writes, options)

    def barrier(self, level: Level | str | None, *, timeout: float | None) -> None:
        """Wait until every write so far has reached a level."""
        writing.barrier(self.ledger, level, timeout=timeout)

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write is stored."""
        with self.ledger.lock:
            return self.ledger.progress.durable_sequence

    @property
    def failed(self) -> list[StagedReceipt]:
        """The receipts of writes that failed for good."""
        with self.ledger.lock:
            return [*self.ledger.failures_locked()]

    def retry_failed(self) -> list[StagedReceipt]:
        """Retry every failed write."""
        return self.ledger.retry_failed()

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed write."""
        return self.ledger.discard(receipt)

    def shrink(self, nbytes: int) -> int:
        """Return memory to the system."""
        return self.ledger.shrink(nbytes)

    def grow(self, nbytes: int) -> int:
        """Use such memory again."""
        return self.ledger.grow(nbytes)

    def stats(self) -> TierStats:
        """Return the counts."""
        drains = self.drains
        with self.ledger.lock:
            return take_stock(
                self.ledger,
                memory=self.memory.kind,
                marks=(drains.high_water, drains.low_water),
                paused=drains.paused,
            )

    def check_open(self) -> None:
        """Raise StoreClosedError after `end`."""
        self.ledger.check_open_locked()  # without the lock: close() waits for accepted writes

    def drain(self, deadline: float | None) -> None:
        """Accept no more, and store all that was accepted."""
        self.drains.drain_all(deadline)

    def end_drains(self, deadline: float | None) -> None:
        """End the drains, and the thread of dropped files; all futures are resolved then."""
        self.drains.end(deadline)
        self.files.end()
        self.ledger.deliver()
        self.ledger.wait_delivered(left(deadline))

    def end(self, deadline: float | None) -> None:
        """End the drains, resolve all futures, and release the memory."""
        self.end_drains(deadline)
        self.memory.close()

    @property
    def lost(self) -> list[StagedReceipt]:
        """The receipts of failed writes whose bytes are not staged any more."""
        with self.ledger.lock:
            return [*self.ledger.lost.values()]

    def after_fork(self) -> None:
        """Mark this as the engine of a forked child, which cannot use it."""
        self.tier_state.forked = True
