"""The writes of a tier that have not ended: by key and in order, counted and waited for."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final

from kvio.core import threads
from kvio.staging.allocator import Span
from kvio.staging.receipts import OpenReceipt
from kvio.types import IfExists


class Watermark:
    """A set of numbers that knows its lowest."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int) -> None:
        """Open a number; one that was closed may be opened again."""
        if number not in self._open:
            self._open.add(number)
            heapq.heappush(self._heap, number)

    def add_highest(self, number: int) -> None:
        """Open a number above all that ever were open."""
        self._open.add(number)
        self._heap.append(number)  # which keeps it a heap

    def discard(self, number: int) -> None:
        """Close a number."""
        self._open.discard(number)

    def lowest(self) -> int | None:
        """Return the lowest open number, or None."""
        heap = self._heap
        while heap and heap[0] not in self._open:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def passed(self, number: int) -> bool:
        """Return whether neither *number* nor any below it is open."""
        lowest = self.lowest()
        return lowest is None or lowest > number


# --------------------------------------------------------------------------------------------------
# The sequence numbers of a tier's writes: which have ended, which are stored, and waiting.


#: Larger than any sequence number: waiting for it is waiting for all writes.
EVERYTHING: Final = 1 << 62


class Progress:
    """Sequence numbers, guarded by the tier's lock.

    A write is *settled* once it is stored, failed for good or was discarded; a failed write is no
    longer open for those who wait, but holds `durable_sequence` back.

    Attributes:
        sequence: the last number assigned.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.sequence = 0
        self._unsettled = Watermark()
        self._unstored = Watermark()
        self._moved = threads.Condition(lock)
        self._goals: list[int] = []

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write is stored, covered by one that is, or discarded."""
        lowest = self._unstored.lowest()
        return self.sequence if lowest is None else lowest - 1

    @property
    def unsettled(self) -> int:
        """The number of open writes."""
        return len(self._unsettled)

    @property
    def goal(self) -> int:
        """The highest number that a caller waits for, or 0."""
        return max(self._goals, default=0)

    def begin(self) -> int:
        """Return the next number."""
        self.sequence = number = self.sequence + 1
        self._unsettled.add_highest(number)
        self._unstored.add_highest(number)
        return number

    def begin_again(self, sequence: int) -> None:
        """Open a write again that had failed."""
        self._unsettled.add(sequence)

    def fail(self, sequence: int) -> None:
        """Record that a write failed for good; `wake` must follow."""
        self._unsettled.discard(sequence)

    def end(self, sequence: int) -> None:
        """Record that a write is stored or was dropped; `wake` must follow."""
        self._unstored.discard(sequence)
        self._unsettled.discard(sequence)

    def passed(self, sequence: int) -> bool:
        """Return whether all writes up to a number are settled."""
        return self._unsettled.passed(sequence)

    def wake(self, *, all_of_them: bool = False) -> None:
        """Wake the callers whose number has been passed, or all callers."""
        if all_of_them or (self._goals and self.passed(min(self._goals))):
            self._moved.notify_all()

    def wait(self, goal: int, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until *ready*; looked at whenever all writes up to *goal* have ended, or on `wake`.

        False if the deadline passed before.
        """
        self._goals.append(goal)
        try:
            return threads.wait_for(self._moved, ready, timeout)
        finally:
            self._goals.remove(goal)


def deadline_of(timeout: float | None) -> float | None:
    """Return the deadline of a timeout, by `time.monotonic`; None: there is none."""
    return None if timeout is None else time.monotonic() + timeout


def left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline (`time.monotonic`); None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


# --------------------------------------------------------------------------------------------------
# The staged entries of each key, in order, and the queue of those to drain.


class State(Enum):
    """The state of an entry."""

    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    GONE = "gone"


class Entry:
    """The bytes of one block in staging memory, and the receipts that end with it.

    Attributes:
        if_exists: passed to the store; older entries of the tier are taken into account.
        kept: receipts of writes for which this entry was kept.
        absorbed: receipts of writes that this entry replaced.
        attempts: number of failed drains.
        due: when the next drain may begin (`time.monotonic`).
        pins: number of readers that are copying the bytes.
        timed_out: a drain timed out, and its thread may still use the bytes.
        written_ns: when it was accepted, in nanoseconds since 1970.
    """

    __slots__ = (
        *("key", "nbytes", "spans", "if_exists", "receipt", "kept", "absorbed"),
        *("state", "attempts", "due", "pins", "timed_out", "written_ns"),
    )

    def __init__(self, receipt: OpenReceipt, spans: Sequence[Span], if_exists: IfExists) -> None:
        self.key = receipt.key
        self.nbytes = receipt.nbytes
        self.spans = spans
        self.if_exists: IfExists = if_exists
        self.receipt = receipt
        self.kept: list[OpenReceipt] = []
        self.absorbed: list[OpenReceipt] = []
        self.state = State.WAITING
        self.attempts = 0
        self.due = 0.0
        self.pins = 0
        self.timed_out = False
        self.written_ns = time.time_ns()

    @property
    def receipts(self) -> list[OpenReceipt]:
        """All receipts that end with this entry, its own first."""
        return [self.receipt, *self.kept, *self.absorbed]

    def absorb(self, old: Entry) -> None:
        """Take over all receipts of an older entry, without copying a long list."""
        for receipt in (old.receipt, *old.kept):
            receipt.note_absorbed()
        receipts = old.absorbed
        receipts += (old.receipt, *old.kept, *self.absorbed)
        self.absorbed = receipts

    @property
    def absorbable(self) -> bool:
        """True if a newer write may replace it: no drain has begun, and it is not exclusive."""
        return self.state is State.WAITING and self.if_exists != "error"


class KeyQueue:
    """The entries of one key, oldest first, of which one at a time is drained.

    Attributes:
        busy: the store is writing or deleting the key for this tier.
        claims: calls that wait to write or delete it themselves, before more drains begin.
        queued: it is in the queue of keys to drain.
    """

    __slots__ = ("busy", "claims", "entries", "key", "queued")

    def __init__(self, key: str) -> None:
        self.key = key
        self.entries: list[Entry] = []
        self.busy = False
        self.claims = 0
        self.queued = False

    @property
    def newest(self) -> Entry | None:
        """The entry that reads see, or None."""
        return self.entries[-1] if self.entries else None

    @property
    def races(self) -> bool:
        """True if an entry waits that no newer write may replace."""
        return any(e.state is State.WAITING and e.if_exists == "error" for e in self.entries)

    def up_to(self, sequence: int | None) -> list[Entry]:
        """Return the entries whose write has at most this number; None: all."""
        return [e for e in self.entries if sequence is None or e.receipt.sequence <= sequence]

    def startable(self) -> Entry | None:
        """Return the entry that may be drained now, or None."""
        if self.busy:
            return None
        for entry in self.entries:
            if entry.state is State.WAITING:
                return None if self.claims and entry.if_exists != "error" else entry
        return None


class KeyQueues:
    """All keys with staged entries, and the queue of those that can be drained.

    Attributes:
        running: number of entries being drained.
    """

    def __init__(self) -> None:
        self._key_queues: dict[str, KeyQueue] = {}
        self._ready: deque[KeyQueue] = deque()
        self._later: list[tuple[float, int, KeyQueue]] = []
        self._number = itertools.count()
        self.running = 0

    def find(self, key: str) -> KeyQueue | None:
        """Return the entries of a key, if it has any."""
        return self._key_queues.get(key)

    def newest(self, key: str) -> Entry | None:
        """Return the entry that reads of a key see; None: ask the store."""
        key_queue = self._key_queues.get(key)
        return None if key_queue is None else key_queue.newest

    def make(self, key: str) -> KeyQueue:
        """Return the entries of a key, made if there are none."""
        key_queue = self._key_queues.get(key)
        if key_queue is None:
            key_queue = self._key_queues[key] = KeyQueue(key)
        return key_queue

    def add(self, entry: Entry) -> None:
        """Queue the first entry of a key that has none."""
        key_queue = KeyQueue(entry.key)
        key_queue.entries.append(entry)
        key_queue.queued = True
        self._key_queues[entry.key] = key_queue
        self._ready.append(key_queue)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with staged entries."""
        return [
            k
            for k, key_queue in self._key_queues.items()
            if key_queue.entries and k.startswith(prefix)
        ]

    def entries(self) -> Iterator[Entry]:
        """Yield all staged entries."""
        for key_queue in self._key_queues.values():
            yield from key_queue.entries

    def schedule(self, key_queue: KeyQueue) -> bool:
        """Queue a key if it can be drained, or remove it if it is empty; True if newly queued."""
        if not (key_queue.entries or key_queue.busy or key_queue.claims):
            if self._key_queues.get(key_queue.key) is key_queue:  # not a newer one of its key
                del self._key_queues[key_queue.key]
            return False
        entry = key_queue.startable()
        if entry is None or key_queue.queued:
            return False
        if entry.due:
            heapq.heappush(self._later, (entry.due, next(self._number), key_queue))
            return True
        key_queue.queued = True
        self._ready.append(key_queue)
        return True

    def next_due_s(self) -> float | None:
        """Queue the keys whose delay is over; return the seconds until the next one."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, key_queue = heapq.heappop(self._later)
            entry = key_queue.startable()
            if entry is not None and entry.due <= now:
                entry.due = 0.0
                self.schedule(key_queue)
        return self._later[0][0] - now if self._later else None

    def peek(self) -> Entry | None:
        """Return the entry to drain next, and skip keys that cannot be drained any more."""
        while self._ready:
            key_queue = self._ready[0]
            entry = key_queue.startable()
            if entry is not None and not entry.due:
                return entry
            self._ready.popleft()
            key_queue.queued = False
            self.schedule(key_queue)
        return None

    def start(self) -> Entry:
        """Remove the entry of `peek` from the queue and mark it as running."""
        key_queue = self._ready.popleft()
        key_queue.queued = False
        entry = key_queue.startable()
        assert entry is not None, "start() goes after peek()"
        key_queue.busy = True
        self.running += 1
        entry.state = State.RUNNING
        return entry
