"""The state of a tier: staged blocks and receipts, changed under one lock and without I/O.

Methods called ``…_locked`` need the lock; the others take it. Nothing slow happens under it: bytes
are copied and the store is called outside, and `Ledger.deliver` resolves futures outside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvio.core import threads
from kvio.errors import (
    BlockError,
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    StorageTimeoutError,
    StoreClosedError,
)
from kvio.staging import receipts
from kvio.staging.allocator import Allocator, Extents, Span, whole_pages
from kvio.staging.pending import EVERYTHING, Entry, KeyQueue, KeyQueues, Progress, State, left
from kvio.staging.receipts import Ending, OpenReceipt, Resolving, StagedReceipt, TierState
from kvio.types import IfExists, Receipt


@dataclass(slots=True)
class Counts:
    """Counts since a tier was made; its lock guards them."""

    accepted: int = 0
    accepted_bytes: int = 0
    kept: int = 0
    absorbed: int = 0
    drained: int = 0
    drained_bytes: int = 0
    passed_through: int = 0
    retries: int = 0
    failed: int = 0


# --------------------------------------------------------------------------------------------------
# Work that follows a change of the ledger and must be done without its lock.


class Outbox:
    """Futures to resolve, and memory to return to the system.

    Attributes:
        endings: futures with their outcomes; changed under the tier's lock.
    """

    def __init__(
        self, lock: threading.RLock, allocator: Allocator, release: Callable[[list[Span]], None]
    ) -> None:
        self.endings: list[Ending] = []
        self._lock = lock
        self._allocator = allocator
        self._release = release
        self._releasing = 0
        self._released = threads.Condition(lock)
        self._resolving = Resolving(lock)

    def deliver(self) -> None:
        """Resolve futures and return memory; called without the lock after every change."""
        if not (self.endings or self._allocator.removed):
            return
        with self._lock:
            endings, self.endings = self.endings, []
            spans, self._allocator.removed = self._allocator.removed, []
            self._releasing += bool(spans)
            self._resolving.begin_locked()
        try:
            self._resolving.resolve(endings)
        finally:
            self._give_back(spans)

    def _give_back(self, spans: list[Span]) -> None:
        try:
            if spans:
                self._release(spans)
        finally:
            with self._lock:
                self._releasing -= bool(spans)
                self._released.notify_all()

    def wait_delivered(self, timeout: float | None) -> bool:
        """Wait until other threads have resolved their futures; False on a timeout."""
        return self._resolving.wait(timeout)

    def wait_released(self) -> None:
        """Wait, with the lock, until no pages are being returned."""
        threads.wait_for(
            self._released, lambda: not (self._allocator.removed or self._releasing), None
        )


#
# Methods called ``…_locked`` need the lock; the others take it. Nothing slow happens under it:
# bytes are copied and the store is called outside, and `Ledger.deliver` resolves futures outside.


_KEPT: Final = "a staged block of this length was kept"


def difference(entry: Entry, stored: Receipt) -> BlockError | None:
    """Return why a receipt of the store is not that of an entry's bytes; None: it is.

    A block that ``keep`` left where it was has a checksum of its own.
    """
    key, accepted = entry.key, entry.receipt.checksum
    if stored.key != key or stored.nbytes != entry.nbytes:
        found = f"block {stored.key!r} of {stored.nbytes} bytes"
        text = f"the store's receipt for block {key!r} of {entry.nbytes} bytes is for {found}"
        return BlockSizeError(text, key=key)
    if stored.existed:
        if entry.if_exists == "keep":
            return None
        text = f"the store kept another block {key!r}, and was asked to {entry.if_exists!r}"
        return CorruptBlockError(text, key=key)
    if accepted is None or stored.checksum in (None, accepted):
        return None
    entry.if_exists = "replace"  # the block that is there now is the wrong one that was written
    text = f"block {key!r} was stored with checksum {stored.checksum:08x}, not {accepted:08x}"
    return CorruptBlockError(text, key=key)


class Ledger:
    """The state of a tier.

    Attributes:
        tier_state, lock: the lock, shared with the receipts.
        work: drain threads wait here for blocks.
        key_queues, allocator, progress, counts: staged blocks by key, memory, progress, counters.
        failed: entries that failed for good, by the number of their write.
        lost: receipts of exclusive writes that failed because another block was there first; their
            bytes are dropped.
        reopened: failed writes follow a newer one since this was last set to False.
        filling: number of writes whose bytes are being copied.
        claiming: number of calls that wait until no drain works on a key.
        closing: no more writes are accepted.
        wanted: returns, with the lock, whether drains would begin now.
    """

    def __init__(
        self,
        tier_state: TierState,
        extents: Extents,
        *,
        retries: int,
        release: Callable[[list[Span]], None],
    ) -> None:
        self.tier_state = tier_state
        self.lock = tier_state.lock
        self.work = threads.Condition(self.lock)
        self.allocator = Allocator(extents, self.lock)
        self.key_queues = KeyQueues()
        self.progress = Progress(self.lock)
        self.counts = Counts()
        self.failed: dict[int, Entry] = {}
        self.lost: dict[int, OpenReceipt] = {}
        self.reopened = False
        self.filling = 0
        self.claiming = 0
        self.closing = False
        self.wanted: Callable[[], bool] = bool
        self._retries = retries
        self._freed = threads.Condition(self.lock)
        self._outbox = Outbox(self.lock, self.allocator, release)
        self.deliver = self._outbox.deliver
        self.wait_delivered = self._outbox.wait_delivered

    def check_open_locked(self) -> None:
        """Raise an error after close() or a fork."""
        self.tier_state.check_fork()
        if self.closing:
            raise StoreClosedError("the staging tier is closed")

    # Reading

    def pin_locked(self, key: str) -> Entry | None:
        """Pin the newest bytes of a key while a reader copies them."""
        entry = self.key_queues.newest(key)
        if entry is not None:
            entry.pins += 1
        return entry

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Unpin bytes."""
        with self.lock:
            for entry in entries:
                entry.pins -= 1
                if entry.state is State.GONE and not entry.pins:
                    self.allocator.release(entry.spans, quarantine=entry.timed_out)
        self.deliver()

    # Accepting

    def answer_locked(self, key: str, nbytes: int, if_exists: IfExists) -> OpenReceipt | None:
        """Return the receipt of a write for which a staged block is kept; None: stage it.

        Raises:
            BlockExistsError: the key is staged and *if_exists* is ``"error"``.
        """
        newest = self.key_queues.newest(key)
        if newest is None or if_exists == "replace":
            return None
        if if_exists == "error":
            raise BlockExistsError(f"block {key!r} exists: it is staged", key=key)
        if newest.state is State.FAILED or newest.nbytes != nbytes:
            return None
        receipt = self._open_locked(key, nbytes, newest.receipt.checksum)
        newest.kept.append(receipt)
        self.counts.kept += 1
        return receipt

    def commit(
        self,
        key: str,
        spans: Sequence[Span],
        *,
        nbytes: int,
        checksum: int | None,
        if_exists: IfExists,
    ) -> OpenReceipt:
        """Accept a write whose bytes are in *spans*.

        Raises:
            BlockExistsError: the key was staged meanwhile and *if_exists* is ``"error"``.
        """
        with self.lock:
            self.filling -= 1
            try:
                receipt = self.answer_locked(key, nbytes, if_exists)
            except BlockExistsError:
                self.allocator.release(spans)
                self.progress.wake(all_of_them=self.closing)
                raise
            if receipt is not None:
                self.allocator.release(spans)
                return receipt
            receipt = self._open_locked(key, nbytes, checksum)
            self._stage_locked(receipt, spans, if_exists)
            return receipt

    def accept_locked(
        self, key: str, spans: Sequence[Span], nbytes: int, checksum: int | None
    ) -> OpenReceipt:
        """Accept a write whose bytes are in *spans*, in the place of others of its key."""
        receipt = self._open_locked(key, nbytes, checksum)
        key_queues = self.key_queues
        if key_queues.find(key) is None:
            key_queues.add(Entry(receipt, spans, "replace"))
            if self.wanted():
                self.work.notify()
        else:
            self._stage_locked(receipt, spans, "replace")
        return receipt

    def cancel_fill(self, spans: Sequence[Span]) -> None:
        """Take back room whose bytes never came."""
        with self.lock:
            self.filling -= 1
            self.allocator.release(spans)
            self.progress.wake(all_of_them=self.closing)
        self.deliver()

    def _stage_locked(
        self, receipt: OpenReceipt, spans: Sequence[Span], if_exists: IfExists
    ) -> None:
        key_queue = self.key_queues.make(receipt.key)
        newest = key_queue.newest
        if newest is not None and newest.state is not State.FAILED:
            if_exists = "replace"  # what `keep` comes to once the other length is in the store
        entry = Entry(receipt, spans, if_exists)
        self._absorb_locked(key_queue, entry)
        key_queue.entries.append(entry)
        self._schedule_locked(key_queue)

    def _open_locked(self, key: str, nbytes: int, checksum: int | None) -> OpenReceipt:
        self.counts.accepted += 1
        self.counts.accepted_bytes += nbytes
        return OpenReceipt(self.tier_state, key, nbytes, checksum, self.progress.begin())

    def _absorb_locked(
        self, key_queue: KeyQueue, absorber: Entry, before: int | None = None
    ) -> None:
        """Let a newer entry take the place of what has not begun, and of what failed.

        What failed is open again: who waits for it waits for the newer entry. But an exclusive
        write never ends as stored by another one.
        """
        for old in key_queue.up_to(before):
            if old.state is State.FAILED:
                self._forget_failure_locked(old)
                self._reopen_locked(old)
                self.reopened = True
                if old.if_exists == "error":
                    text = f"block {old.key!r} was not stored ({old.receipt.error}); a newer one is"
                    self._lose_locked(key_queue, old, BlockExistsError(text, key=old.key))
                    continue
            elif not old.absorbable:
                continue
            self._follow_locked(old, absorber)
            self._drop_locked(key_queue, old)

    def _follow_locked(self, old: Entry, absorber: Entry) -> None:
        absorber.absorb(old)
        self.counts.absorbed += 1

    # Draining

    def drained(self, batch: Sequence[Entry], outcomes: Sequence[Receipt | BaseException]) -> None:
        """Note how the drains of some entries ended."""
        with self.lock:
            for entry, outcome in zip(batch, outcomes, strict=True):
                if not isinstance(outcome, Receipt):
                    self._not_stored_locked(entry, outcome)
                elif (wrong := difference(entry, outcome)) is not None:
                    self._not_stored_locked(entry, wrong)
                else:
                    self._stored_locked(entry, outcome)
            self.progress.wake()

    def _stored_locked(self, entry: Entry, receipt: Receipt) -> None:
        """Note that the store has an entry's bytes."""
        key_queue = self._free_locked(entry.key)
        self.key_queues.running -= 1
        self._drop_locked(key_queue, entry)
        self.counts.drained += 1
        self.counts.drained_bytes += entry.nbytes
        self._end_locked(entry, receipt, None)
        self._schedule_locked(key_queue)

    def _not_stored_locked(self, entry: Entry, error: BaseException) -> None:
        """Note that a drain failed: try again, let a newer write absorb it, or keep it as failed.

        A write that lost its race is over: there is nothing to retry, and reads must see the
        other's block.
        """
        key_queue = self._free_locked(entry.key)
        self.key_queues.running -= 1
        entry.attempts += 1
        entry.timed_out |= isinstance(error, StorageTimeoutError)
        newer = key_queue.newest if key_queue.newest is not entry else None
        if isinstance(error, BlockExistsError):
            self.counts.failed += 1
            self._lose_locked(key_queue, entry, error)
        elif newer is not None and entry.if_exists != "error":
            self._follow_locked(entry, newer)
            self._drop_locked(key_queue, entry)
        elif receipts.is_retryable(error) and entry.attempts <= self._retries:
            self.counts.retries += 1
            entry.state = State.WAITING
            entry.due = time.monotonic() + receipts.delay_s(entry.attempts)
        else:
            self._fail_locked(entry, error)
            if newer is not None:
                self._absorb_locked(key_queue, newer, entry.receipt.sequence)
        self._schedule_locked(key_queue)

    def _free_locked(self, key: str) -> KeyQueue:
        key_queue = self.key_queues.make(key)
        key_queue.busy = False
        if key_queue.claims:
            self._freed.notify_all()
        return key_queue

    def _fail_locked(self, entry: Entry, error: BaseException) -> None:
        entry.state = State.FAILED
        self.counts.failed += 1
        self.failed[entry.receipt.sequence] = entry
        self.allocator.stuck_bytes += whole_pages(entry.nbytes)
        for receipt in entry.receipts:
            self._outbox.endings += receipt.settle(None, error)
            self.progress.fail(receipt.sequence)
        self.allocator.admit()

    def _lose_locked(self, key_queue: KeyQueue, entry: Entry, error: BlockExistsError) -> None:
        """End an exclusive write that another block was faster than."""
        self._drop_locked(key_queue, entry)
        self.lost |= {receipt.sequence: receipt for receipt in entry.receipts}
        self._end_locked(entry, None, error)

    def _reopen_locked(self, entry: Entry) -> None:
        for receipt in entry.receipts:
            receipt.reopen()
            self.progress.begin_again(receipt.sequence)

    def _forget_failure_locked(self, entry: Entry) -> None:
        del self.failed[entry.receipt.sequence]
        self.allocator.stuck_bytes -= whole_pages(entry.nbytes)

    def _end_locked(
        self, entry: Entry, receipt: Receipt | None, error: BaseException | None
    ) -> None:
        """End all receipts of an entry that is stored or dropped."""
        for one in (entry.receipt, *entry.absorbed):
            self._outbox.endings += one.settle(receipt, error)
            self.progress.end(one.sequence)
        if entry.kept:
            kept = receipt and receipt._replace(existed=True, reason=_KEPT)
            for one in entry.kept:
                self._outbox.endings += one.settle(kept, error)
                self.progress.end(one.sequence)

    def _drop_locked(self, key_queue: KeyQueue, entry: Entry) -> None:
        """Free an entry's bytes, now or when the last reader has unpinned them."""
        key_queue.entries.remove(entry)
        entry.state = State.GONE
        if not entry.pins:
            self.allocator.release(entry.spans, quarantine=entry.timed_out)

    def _schedule_locked(self, key_queue: KeyQueue) -> None:
        if self.key_queues.schedule(key_queue) and self.wanted():
            self.work.notify()

    # Deciding about failures

    def failures_locked(self, goal: int = EVERYTHING) -> list[OpenReceipt]:
        """Return the receipts of the writes up to a number that are failed now, one per block."""
        failed = [
            entry.receipt
            for entry in self.failed.values()
            if any(receipt.sequence <= goal for receipt in entry.receipts)
        ]
        failed += [receipt for number, receipt in self.lost.items() if number <= goal]
        return sorted(failed, key=lambda receipt: receipt.sequence)

    def retry_failed(self, only: Collection[StagedReceipt] | None = None) -> list[StagedReceipt]:
        """Retry failed entries, all or those of some receipts, and return their receipts."""
        with self.lock:
            entries = list(self.failed.values())
            if only is not None:
                wanted = set(only)
                entries = [e for e in entries if not wanted.isdisjoint(e.receipts)]
            for entry in entries:
                self._forget_failure_locked(entry)
                entry.state, entry.attempts = State.WAITING, 0
                self._reopen_locked(entry)
                self._schedule_locked(self.key_queues.make(entry.key))
            return [entry.receipt for entry in entries]

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed entry and its bytes; False if there is no such failure."""
        with self.lock:
            if self.lost.get(receipt.sequence) is receipt:
                del self.lost[receipt.sequence]
                return True
            found = [e for e in self.failed.values() if receipt in e.receipts]
            for entry in found:
                key_queue = self.key_queues.make(entry.key)
                self._remove_failed_locked(key_queue, entry)
                self._schedule_locked(key_queue)
            self.progress.wake()
        self.deliver()
        return bool(found)

    def _remove_failed_locked(self, key_queue: KeyQueue, entry: Entry) -> None:
        self._forget_failure_locked(entry)
        self._drop_locked(key_queue, entry)
        for receipt in entry.receipts:
            self.progress.end(receipt.sequence)

    # Writing and deleting a key past the drains

    def claim(self, key: str, deadline: float | None, *, after_races: bool) -> tuple[KeyQueue, int]:
        """Wait until no drain works on a key, and block new ones.

        *after_races*: entries that no newer write may absorb are drained first. The number of the
        last write so far is returned too: later writes are newer than the caller's operation.

        Raises:
            StorageTimeoutError: a drain was still running at *deadline*.
        """
        with self.lock:
            key_queue = self.key_queues.make(key)
            key_queue.claims += 1
            self.claiming += 1
            self.work.notify_all()
            free = threads.wait_for(
                self._freed,
                lambda: not (key_queue.busy or (after_races and key_queue.races)),
                left(deadline),
            )
            key_queue.claims -= 1
            self.claiming -= 1
            if not free:
                self._schedule_locked(key_queue)
                text = f"a drain of block {key!r} did not end before the deadline"
                raise StorageTimeoutError(text, key=key)
            key_queue.busy = True
            return key_queue, self.progress.sequence

    def unclaim(self, key_queue: KeyQueue) -> None:
        """Allow drains of a key again."""
        with self.lock:
            self._schedule_locked(self._free_locked(key_queue.key))
        self.deliver()

    def wrote_through(self, key_queue: KeyQueue, receipt: Receipt, before: int) -> OpenReceipt:
        """Record a direct write to the store, which absorbs older staged entries."""
        with self.lock:
            one = self._open_locked(receipt.key, receipt.nbytes, receipt.checksum)
            through = Entry(one, (), "replace")
            self._absorb_locked(key_queue, through, before)
            self.counts.passed_through += 1
            self._end_locked(through, receipt, None)
            self.progress.wake()
            return one

    def deleted(self, key_queue: KeyQueue, before: int) -> bool:
        """Record a deletion, drop older staged entries, and return whether there were any."""
        with self.lock:
            gone = key_queue.up_to(before)
            for entry in gone:
                if entry.state is State.FAILED:
                    self._remove_failed_locked(key_queue, entry)
                    continue
                self._drop_locked(key_queue, entry)
                self.counts.absorbed += 1
                for receipt in entry.receipts:
                    receipt.note_absorbed()
                text = f"block {entry.key!r} was deleted before it was stored"
                self._end_locked(entry, None, BlockNotFoundError(text, key=entry.key))
            self.progress.wake()
            return bool(gone)

    # The size of the tier

    def shrink(self, nbytes: int) -> int:
        """Reduce the capacity, for memory in use later; return the bytes removed at once."""
        with self.lock:
            self.allocator.excess_bytes += min(nbytes, self.allocator.capacity_bytes)
            before = self.allocator.excess_bytes
            self.allocator.serve()
            removed = before - self.allocator.excess_bytes
        self.deliver()
        return removed

    def grow(self, nbytes: int) -> int:
        """Increase the capacity again, and return by how many bytes."""
        with self.lock:
            self._outbox.wait_released()
            return self.allocator.grow(nbytes)
