"""The sequence numbers of a tier's writes: which have ended, which are stored, and waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvio import threads
from kvio.wrappers.staging.watermark import Watermark

#: Larger than any sequence number: waiting for it is waiting for all writes.
EVERYTHING: Final = 1 << 62


class Progress:
    """Sequence numbers, guarded by the tier's lock.

    A write is *settled* once it is stored, failed for good or was given up; a failed write is no
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
        """The number up to which every write is stored, covered by one that is, or given up."""
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
        self.sequence += 1
        self.begin_again(self.sequence)
        self._unstored.add(self.sequence)
        return self.sequence

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

        False if it was not in time.
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
