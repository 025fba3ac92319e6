"""The numbers of a tier's writes: which have ended, which are stored, and who waits for which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvio import threads
from kvio.wrappers.staging.watermark import Watermark

#: More than any sequence number: whoever waits for it waits for everything.
EVERYTHING: Final = 1 << 62


class Progress:
    """Sequence numbers, guarded by the tier's lock.

    A write is *settled* once it is stored, failed for good or was given up; a failed write is no
    longer open for those who wait, but holds `durable_sequence` back.

    Attributes:
        sequence: the last number given.
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
        """How many writes are open."""
        return len(self._unsettled)

    @property
    def goal(self) -> int:
        """The highest number that somebody waits for; 0 if nobody does."""
        return max(self._goals, default=0)

    def begin(self) -> int:
        """Give the next number."""
        self.sequence += 1
        self.begin_again(self.sequence)
        self._unstored.add(self.sequence)
        return self.sequence

    def begin_again(self, sequence: int) -> None:
        """Open a write that had failed."""
        self._unsettled.add(sequence)

    def fail(self, sequence: int) -> None:
        """Note that a write failed for good; `wake` goes after it."""
        self._unsettled.discard(sequence)

    def end(self, sequence: int) -> None:
        """Note that a write is stored, or was given up; `wake` goes after it."""
        self._unstored.discard(sequence)
        self._unsettled.discard(sequence)

    def passed(self, sequence: int) -> bool:
        """Tell whether all writes up to a number are settled."""
        return self._unsettled.passed(sequence)

    def wake(self, *, all_of_them: bool = False) -> None:
        """Let those look who wait for a number that has been passed, or all who wait."""
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
    """Give the `time.monotonic` at which so many seconds are over; None: never."""
    return None if timeout is None else time.monotonic() + timeout


def left(deadline: float | None) -> float | None:
    """Give the seconds until a deadline (`time.monotonic`); None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
