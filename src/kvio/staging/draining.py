"""Drain threads: they write staged blocks to the store and record the outcomes."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvio.core import threads
from kvio.core.store import Store
from kvio.errors import (
    KvioError,
    StorageError,
    StorageTimeoutError,
    TierNotDrainedError,
    TransientStorageError,
)
from kvio.staging import receipts
from kvio.staging.ledger import Ledger
from kvio.staging.pending import EVERYTHING, Entry, left
from kvio.types import BlockResult, KiB, MiB, Parts, Receipt

if TYPE_CHECKING:
    from kvio.staging.memory import StagingMemory

#: Smaller blocks are written in groups, because each costs more than its bytes.
SMALL_BYTES: Final = 512 * KiB
_GROUP_BYTES: Final = 8 * MiB
_GROUP_BLOCKS: Final = 256
_NICEST: Final = 19
#: How often to check whether abandoned calls still hang, while their memory is held back.
_HELD_S: Final = 0.05


class Drains:
    """Threads that write staged blocks to the store, oldest first.

    Args:
        eager: drain at once; else from the high mark down to the low one, and when a caller waits.
        high_water, low_water: the marks, as fractions of the capacity.
        timeout: seconds for one call of the store.
        nice: added to the nice value of the thread that starts them.

    Attributes:
        paused: no drain is begun, unless the tier is closing.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        memory: StagingMemory,
        *,
        threads: int,
        eager: bool,
        high_water: float,
        low_water: float,
        timeout: float | None,
        nice: int = 10,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self._nice, self._on_start = nice, on_start
        self.high_water, self.low_water = high_water, low_water
        self.paused = False
        self._store = store
        self._memory = memory
        self._wanted = threads
        self._eager = eager
        self._timeout = timeout
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._over_the_mark = False
        self._asked = 0
        self._ended = False
        ledger.wanted = self._wanted_locked

    def start(self) -> None:
        """Start the threads, once, as many as the system allows.

        Raises:
            TransientStorageError: it allows none.
        """
        if self._threads:
            return
        with self._starting:
            if not self._threads:
                self._threads = self._start_threads()

    def _start_threads(self) -> list[threading.Thread]:
        started: list[threading.Thread] = []
        for number in range(self._wanted):
            name = f"kvio-drain-{number}"
            thread = threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
            try:
                threads.start(thread)
            except TransientStorageError:
                if not started:
                    raise
                break
            started.append(thread)
        return started

    def ask(self, sequence: int) -> None:
        """Drain a write soon, because a caller waits for it."""
        if self._eager or sequence <= self._asked:
            return
        with self.ledger.lock:
            self._asked = max(self._asked, sequence)
            self.ledger.work.notify_all()

    def pause(self) -> None:
        """Begin no more drains."""
        with self.ledger.lock:
            self.paused = True

    def resume(self) -> None:
        """Begin drains again."""
        with self.ledger.lock:
            self.paused = False
            self.ledger.work.notify_all()

    def drain_all(self, deadline: float | None) -> None:
        """Refuse new writes and drain all blocks, also if paused.

        Raises:
            TierNotDrainedError: some failed or were not stored before the deadline; the tier
                accepts writes again.
        """
        ledger, progress = self.ledger, self.ledger.progress
        with ledger.lock:
            ledger.closing = True
            ledger.allocator.refuse_all()
            ledger.work.notify_all()
            try:
                progress.wait(
                    EVERYTHING, lambda: not (progress.unsettled or ledger.filling), left(deadline)
                )
            except BaseException:  # the handler of a signal raised it: the tier stays open
                ledger.closing = False
                raise
            keys = list(dict.fromkeys(entry.key for entry in ledger.key_queues.entries()))
            if keys or ledger.filling:
                ledger.closing = False
                why = "timed out" if progress.unsettled else "failed"
                raise receipts.not_drained(keys, why)

    def finish(self, deadline: float) -> None:
        """Store all accepted blocks at the end of the program."""
        with suppress(TierNotDrainedError):  # `unfinished` reports it
            self.drain_all(deadline)

    def unfinished(self) -> str | None:
        """Describe the staged blocks that the store lacks."""
        with self.ledger.lock:
            keys = {entry.key for entry in self.ledger.key_queues.entries()}
        return f"{len(keys)} staged writes of {self._store.url.place}" if keys else None

    def end(self, deadline: float | None) -> bool:
        """End the threads; False if one is still busy at *deadline*."""
        with self.ledger.lock:
            self._ended = True
            self.ledger.work.notify_all()
        others = [t for t in self._threads if t is not threading.current_thread()]
        for thread in others:
            threads.join(thread, left(deadline))
        return not any(thread.is_alive() for thread in others)

    def _work(self, number: int) -> None:
        _be_nice(self._nice)
        if self._on_start is not None:
            self._on_start(number)
        while True:
            self._look_at_held()
            batch = self._next_batch()
            if batch is None:
                return
            if batch:
                self._drain(batch)
                self._deliver()

    def _deliver(self) -> None:
        """Resolve futures and release memory; draining goes on if memory cannot be released."""
        try:
            self.ledger.deliver()
        except KvioError as exc:
            warnings.warn(f"staging memory was not released: {exc}", RuntimeWarning, stacklevel=1)

    def _look_at_held(self) -> None:
        allocator = self.ledger.allocator
        if allocator.has_quarantined:
            with self.ledger.lock:  # what another drain holds back meanwhile is not given
                if not self.hanging():
                    allocator.release_quarantined()
            self._deliver()

    def _next_batch(self) -> list[Entry] | None:
        """Wait for blocks to drain; None: end the thread; empty: check held memory first."""
        ledger = self.ledger
        with ledger.lock:
            while not self._ended:
                pause_s = ledger.key_queues.next_due_s()
                if ledger.key_queues.peek() is not None and self._wanted_locked():
                    return self._take_batch()
                if ledger.allocator.has_quarantined:
                    pause_s = min(pause_s or _HELD_S, _HELD_S)
                ledger.work.wait(pause_s)
                if ledger.allocator.has_quarantined:
                    return []
        return None

    def _wanted_locked(self) -> bool:
        ledger = self.ledger
        if self.paused or self._eager or ledger.closing:
            return ledger.closing or not self.paused
        used, capacity = ledger.allocator.used_bytes, ledger.allocator.capacity_bytes
        if used >= self.high_water * capacity:
            self._over_the_mark = True
        elif used <= self.low_water * capacity:
            self._over_the_mark = False
        if self._over_the_mark or ledger.allocator.waiting or ledger.claiming:
            return True
        return not ledger.progress.passed(max(self._asked, ledger.progress.goal))

    def _take_batch(self) -> list[Entry]:
        """Take the oldest entry, and if it is small, other small ones with the same options."""
        key_queues = self.ledger.key_queues
        batch = [key_queues.start()]
        first, nbytes = batch[0], batch[0].nbytes
        while first.nbytes < SMALL_BYTES and len(batch) < _GROUP_BLOCKS:
            entry = key_queues.peek()
            if entry is None or entry.nbytes >= SMALL_BYTES or entry.if_exists != first.if_exists:
                break
            nbytes += entry.nbytes
            if nbytes > _GROUP_BYTES:
                break
            batch.append(key_queues.start())
        return batch

    def _drain(self, batch: Sequence[Entry]) -> None:
        outcomes: Sequence[Receipt | BaseException]
        try:
            outcomes = self._write(batch)
        except Exception as exc:  # noqa: BLE001  # recorded in the receipts
            outcomes = [exc] * len(batch)
        self.ledger.drained(batch, outcomes)

    def _write(self, batch: Sequence[Entry]) -> Sequence[Receipt | BaseException]:
        spans = [span for entry in batch for span in entry.spans]
        with self._memory.lend(spans, timeout=self._timeout) as parts:
            try:
                outcomes = self._store_parts(batch, parts)
            except StorageTimeoutError:
                self._memory.quarantine(parts, self.hanging)
                raise
            if any(isinstance(outcome, StorageTimeoutError) for outcome in outcomes):
                self._memory.quarantine(parts, self.hanging)
            return outcomes

    def _store_parts(
        self, batch: Sequence[Entry], parts: Parts
    ) -> Sequence[Receipt | BaseException]:
        store, if_exists, limit = self._store, batch[0].if_exists, self._timeout
        if len(batch) == 1:
            key = batch[0].key
            return [store.write_block(key, parts, if_exists=if_exists, timeout=limit)]
        blocks = cut(parts, [entry.nbytes for entry in batch])
        items = [(entry.key, block) for entry, block in zip(batch, blocks, strict=True)]
        results = store.write_blocks(items, if_exists=if_exists, timeout=limit)
        return [_outcome(result) for result in results]

    def hanging(self) -> bool:
        """Return whether abandoned calls may still use their memory."""
        return self._store.stats().quarantined_threads > 0


def _be_nice(nice: int) -> None:
    """Lower this thread's priority, so that writers on a busy machine do not wait for it.

    p99 of accepting 1 MiB while drains run, as a multiple of memcpy's: 7.1 before, 1.4 after
    (eight writers, two cores).
    """
    thread = threading.get_native_id()  # setpriority(2): on Linux a thread has its own
    with suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, now + nice))


def cut(parts: Parts, sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """Split consecutive bytes in *parts* into pieces of the given lengths, which add up."""
    rest = iter(parts)
    part = memoryview(b"")
    for size in sizes:
        pieces = []
        while size:
            part = part if len(part) else next(rest)
            pieces.append(part[:size])
            part = part[size:]
            size -= len(pieces[-1])
        yield pieces


def _outcome(result: BlockResult) -> Receipt | BaseException:
    if result.receipt is not None:
        return result.receipt
    return result.error or StorageError(f"block {result.key!r}: {result.status}", key=result.key)
