"""The receipts of a client: open ones, their outcomes, and the loss of the daemon."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvio.core import threads
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    StoreClosedError,
    TierNotDrainedError,
)
from kvio.staging import receipts
from kvio.staging.daemon.protocol import Driven, Failed, Stored, error_of
from kvio.staging.pending import Watermark
from kvio.staging.receipts import Ending, OpenReceipt, Resolving, StagedReceipt, TierState, resolve
from kvio.types import Receipt

#: An event is never so much later than an answer, unless a newer write took the old one along.
_HEAR_S: Final = 1.0


class PendingWrites:
    """The receipts of one client, by the numbers of their writes.

    Attributes:
        tier_state: shared with the receipts; its lock guards all of this.
        last: the highest number so far.
        lost: why no more events will come, or None.
        hearing: the thread that calls `hear` and `lose`.
    """

    def __init__(self, tier_state: TierState, path: str) -> None:
        self.tier_state = tier_state
        self.last = 0
        self.lost: TierNotDrainedError | None = None
        self.hearing: threading.Thread | None = None
        self._path = path
        self._writers = 0
        self._refusing = False
        self._heard = 0
        self._due = 0
        self._moved = threads.Condition(tier_state.lock)
        self._resolving = Resolving(tier_state.lock)
        self._open: dict[int, OpenReceipt] = {}
        self._numbers = Watermark()
        self._failed: dict[int, OpenReceipt] = {}
        self._lost: dict[int, OpenReceipt] = {}
        self._early: dict[int, Stored | Failed] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Note a write until it is accepted or has failed: `refuse` waits for it.

        Raises:
            StoreClosedError: no more are taken.
        """
        with self.tier_state.lock:
            if self._refusing:
                raise StoreClosedError("the staging tier is closed")
            self._writers += 1
        try:
            yield
        finally:
            with self.tier_state.lock:
                self._writers -= 1
                self._moved.notify_all()

    def refuse(self, timeout: float | None) -> bool:
        """Accept no more writes and wait for those that have begun; False on a timeout."""
        with self.tier_state.lock:
            self._refusing = True
            return threads.wait_for(self._moved, lambda: not self._writers, timeout)

    def take_again(self) -> None:
        """Accept writes again: the tier stays open."""
        with self.tier_state.lock:
            self._refusing = False

    def finish(self, deadline: float) -> None:
        """Wait for nothing at the end of the program: the daemon stores accepted writes."""

    def unfinished(self) -> str | None:
        """Describe the writes that may be lost with a daemon that was killed."""
        with self.tier_state.lock:
            count = 0 if self.lost is None else len(self._lost)
        return f"{count} writes of the drain daemon at {self._path}" if count else None

    def accept(self, key: str, nbytes: int, *, checksum: int | None, sequence: int) -> OpenReceipt:
        """Record a write that the daemon accepted; its outcome may be known already."""
        receipt = OpenReceipt(
            self.tier_state, key, nbytes=nbytes, checksum=checksum, sequence=sequence
        )
        with self.tier_state.lock:
            self.last = max(self.last, sequence)
            early = self._early.pop(sequence, None)
            endings: list[Ending] = []
            if early is not None:
                endings = self._end_locked(receipt, early)
            elif self.lost is not None:
                self._lost[sequence] = receipt
                endings = receipt.settle(None, self.lost)
            else:
                self._open[sequence] = receipt
                self._numbers.add(sequence)
        resolve(endings)
        return receipt

    def wrote_through(self, stored: Receipt, sequence: int) -> OpenReceipt:
        """Record a complete write directly to the store."""
        receipt = OpenReceipt(
            self.tier_state,
            stored.key,
            nbytes=stored.nbytes,
            checksum=stored.checksum,
            sequence=sequence,
        )
        with self.tier_state.lock:
            self.last = max(self.last, sequence)
            receipt.settle(stored, None)
        return receipt

    def hear(self, event: Stored | Failed | Driven) -> None:
        """Record an event of the daemon, in its order: an outcome, or that a write is retried."""
        with self.tier_state.lock:
            self._heard += 1
            self._moved.notify_all()
            number = event.sequence
            if isinstance(event, Driven):
                self._early.pop(number, None)
                self._reopen_locked(number)
                return
            receipt = self._open.pop(number, None) or self._failed.pop(number, None)
            if receipt is None:
                self._early[number] = event  # it arrived before the answer to the write
                return
            self._numbers.discard(number)
            endings = self._end_locked(receipt, event)
            self._resolving.begin_locked()
        self._resolving.resolve(endings)

    def wait_reported(self, timeout: float | None) -> bool:
        """Wait until the futures of ended writes are resolved; False on a timeout."""
        return self._resolving.wait(timeout)

    def _end_locked(self, receipt: OpenReceipt, event: Stored | Failed) -> list[Ending]:
        if event.absorbed:
            receipt.note_absorbed()
        if isinstance(event, Stored):
            stored = Receipt(
                receipt.key,
                event.nbytes,
                event.checksum,
                event.level,
                event.mode,
                event.reason,
                event.existed,
            )
            return receipt.settle(stored, None)
        error = error_of(event.failure)
        if isinstance(error, BlockNotFoundError):  # it was deleted: not a failure
            return receipt.settle(None, error)
        over = isinstance(error, BlockExistsError)  # another writer was faster
        (self._lost if over else self._failed)[receipt.sequence] = receipt
        return receipt.settle(None, error)

    def reopen(self, failed: Mapping[OpenReceipt, int], events: int) -> None:
        """Record that failed writes are retried, and how often each had been before.

        So many *events* had been sent by then: until they have arrived, one may still report an
        older failure, which is ignored.
        """
        with self.tier_state.lock:
            self._due = max(self._due, events)
            for receipt, retried in failed.items():
                if receipt.retried == retried:  # else an event has said so already
                    self._reopen_locked(receipt.sequence)

    def _reopen_locked(self, number: int) -> None:
        receipt = self._failed.pop(number, None)
        if receipt is not None:
            receipt.reopen()
            self._open[number] = receipt
            self._numbers.add(number)

    def forget(self, numbers: Collection[int], events: int = 0) -> None:
        """Record that failed writes are no longer staged: they were deleted or discarded.

        So many *events* had been sent by then; `wait` waits for them.
        """
        with self.tier_state.lock:
            self._due = max(self._due, events)
            for number in numbers:
                self._failed.pop(number, None)

    def forget_lost(self, receipt: StagedReceipt) -> bool:
        """Forget a failed write whose bytes are not staged any more; False if it is none."""
        with self.tier_state.lock:
            found = self._lost.get(receipt.sequence) is receipt
            if found:
                del self._lost[receipt.sequence]
            return found

    def failed(self) -> dict[OpenReceipt, int]:
        """Return the failed writes known so far, and how often each was retried."""
        with self.tier_state.lock:
            return {receipt: receipt.retried for receipt in self._failed.values()}

    def lose(self) -> None:
        """Record that the daemon is gone: all open writes have failed with one error."""
        with self.tier_state.lock:
            keys = list(dict.fromkeys(receipt.key for receipt in self._open.values()))
            named = f": {receipts.name_keys(keys)}" if keys else ""
            text = f"the drain daemon at {self._path} is gone; what may not be stored{named}"
            self.lost = TierNotDrainedError(
                text if keys else f"the drain daemon at {self._path} is gone", keys=tuple(keys)
            )
            endings = []
            for number, receipt in self._open.items():
                endings += receipt.settle(None, self.lost)
                self._numbers.discard(number)
            self._lost |= self._open | self._failed
            self._open.clear()
            self._failed.clear()
            self._moved.notify_all()
        resolve(endings)

    def wait(self, goal: int, timeout: float | None) -> bool:
        """Wait until no write up to a number is open; False on a timeout."""
        with self.tier_state.lock:
            return threads.wait_for(self._moved, lambda: self._passed_locked(goal), timeout)

    def _passed_locked(self, goal: int) -> bool:
        heard = self._heard >= self._due or self.lost is not None
        return heard and self._numbers.passed(goal)

    def open_numbers(self, key: str) -> set[int]:
        """Return the numbers of the open writes of a key."""
        with self.tier_state.lock:
            return {n for n, receipt in self._open.items() if receipt.key == key}

    def wait_ended(self, numbers: Collection[int]) -> None:
        """Wait for the events of writes that have ended: events come later than answers.

        Has no effect on the thread that hears, where a callback may delete: it would wait for
        itself.
        """
        if threading.current_thread() is self.hearing:
            return
        with self.tier_state.lock:
            self._moved.wait_for(lambda: not any(n in self._open for n in numbers), _HEAR_S)

    def failures(self, goal: int) -> list[OpenReceipt]:
        """Return the writes up to a number that are failed, as far as is known."""
        with self.tier_state.lock:
            failed = self._failed | self._lost
            return [failed[number] for number in sorted(failed) if number <= goal]

    def lost_writes(self) -> list[StagedReceipt]:
        """Return the failed writes whose bytes are not staged any more."""
        with self.tier_state.lock:
            return [*self._lost.values()]

    def unstored_keys(self) -> list[str]:
        """Return the keys that the store lacks: those of open and failed writes."""
        with self.tier_state.lock:
            left = [*self._open.values(), *self._failed.values()]
            return list(dict.fromkeys(receipt.key for receipt in left))
