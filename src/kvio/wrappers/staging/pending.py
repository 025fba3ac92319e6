"""The staged entries of each key, in order, and the queue of those to drain."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

from kvio.types import IfExists
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.receipts import OpenReceipt


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
        covers: numbers of failed writes that count as settled when this entry is stored.
        attempts: number of failed drains.
        due: when the next drain may begin (`time.monotonic`).
        pins: number of readers that are copying the bytes.
        timed_out: a drain timed out, and its thread may still use the bytes.
        written_ns: when it was accepted, in nanoseconds since 1970.
    """

    __slots__ = (
        *("key", "nbytes", "spans", "if_exists", "receipt", "kept", "absorbed"),
        *("covers", "state", "attempts", "due", "pins", "timed_out", "written_ns"),
    )

    def __init__(self, receipt: OpenReceipt, spans: Sequence[Span], *, if_exists: IfExists) -> None:
        self.key = receipt.key
        self.nbytes = receipt.nbytes
        self.spans = spans
        self.if_exists: IfExists = if_exists
        self.receipt = receipt
        self.kept: list[OpenReceipt] = []
        self.absorbed: list[OpenReceipt] = []
        self.covers: list[int] = []
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
        self.covers += old.covers

    @property
    def absorbable(self) -> bool:
        """True if a newer write may replace it: no drain has begun, and it is not exclusive."""
        return self.state is State.WAITING and self.if_exists != "error"


class Lane:
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


class Lanes:
    """All keys with staged entries, and the queue of those that can be drained.

    Attributes:
        running: number of entries being drained.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._later: list[tuple[float, int, Lane]] = []
        self._number = itertools.count()
        self.running = 0

    def find(self, key: str) -> Lane | None:
        """Return the entries of a key, if it has any."""
        return self._lanes.get(key)

    def newest(self, key: str) -> Entry | None:
        """Return the entry that reads of a key see; None: ask the store."""
        lane = self._lanes.get(key)
        return None if lane is None else lane.newest

    def make(self, key: str) -> Lane:
        """Return the entries of a key, made if there are none."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        return lane

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with staged entries."""
        return [k for k, lane in self._lanes.items() if lane.entries and k.startswith(prefix)]

    def entries(self) -> Iterator[Entry]:
        """Yield all staged entries."""
        for lane in self._lanes.values():
            yield from lane.entries

    def schedule(self, lane: Lane) -> bool:
        """Queue a key if it can be drained, or remove it if it is empty; True if newly queued."""
        if not (lane.entries or lane.busy or lane.claims):
            if self._lanes.get(lane.key) is lane:  # not a newer one of its key
                del self._lanes[lane.key]
            return False
        entry = lane.startable()
        if entry is None or lane.queued:
            return False
        if entry.due:
            heapq.heappush(self._later, (entry.due, next(self._number), lane))
            return True
        lane.queued = True
        self._ready.append(lane)
        return True

    def next_due_s(self) -> float | None:
        """Queue the keys whose delay is over; return the seconds until the next one."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, lane = heapq.heappop(self._later)
            entry = lane.startable()
            if entry is not None and entry.due <= now:
                entry.due = 0.0
                self.schedule(lane)
        return self._later[0][0] - now if self._later else None

    def peek(self) -> Entry | None:
        """Return the entry to drain next, and skip keys that cannot be drained any more."""
        while self._ready:
            lane = self._ready[0]
            entry = lane.startable()
            if entry is not None and not entry.due:
                return entry
            self._ready.popleft()
            lane.queued = False
            self.schedule(lane)
        return None

    def start(self) -> Entry:
        """Remove the entry of `peek` from the queue and mark it as running."""
        lane = self._ready.popleft()
        lane.queued = False
        entry = lane.startable()
        assert entry is not None, "start() goes after peek()"
        lane.busy = True
        self.running += 1
        entry.state = State.RUNNING
        return entry
