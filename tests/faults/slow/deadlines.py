"""How late deadline errors are, beyond what the machine is late by at the same moment.

A slice counts and reports. All of the campaign fails where more than one in a hundred is late by a
tenth of its deadline, besides as many as bare waits were late themselves.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

import kvio
from tests.faults.sizes import FULL
from tests.faults.totals import Tally

#: A deadline error that comes so many seconds late has not come: machines may be busy.
NEVER_S: Final = 20.0
#: What calls that hang are given: of the longer a tenth is more than a busy machine takes away.
SOON_S: Final = 1.0 if FULL else 0.1
#: Part of a deadline by which a call may be late.
_LATE: Final = 0.1
#: So many more than are allowed are late before a test ends early.
_MANY: Final = 4


class Lateness:
    """How late calls were that had a deadline.

    Attributes:
        over: seconds by which each call was later than a control just before it: a bare wait of
            the same length, or the same done to a plain file.
        uneasy: how many controls were late themselves, by half of what a call may be.
    """

    def __init__(self, deadline_s: float = SOON_S) -> None:
        self.deadline_s = deadline_s
        self.over: list[float] = []
        self.uneasy = 0

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Expect that what is done inside gives up at its deadline: not before, and in the end."""
        with self.measured(), pytest.raises(kvio.StorageTimeoutError):
            yield

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what is done inside, which ends at its deadline."""
        start = time.monotonic()
        threading.Event().wait(self.deadline_s)
        begun = time.monotonic()
        yield
        took, control = time.monotonic() - begun, begun - start
        assert took >= self.deadline_s, f"gave up after {took} s, before its {self.deadline_s} s"
        assert took < self.deadline_s + NEVER_S, f"gave up {took} s after it began"
        self.note(took - self.deadline_s, control - self.deadline_s)

    def note(self, late: float, control: float) -> None:
        """Note by how much a call was late, and its control."""
        self.over.append(late - control)
        self.uneasy += control > _LATE / 2 * self.deadline_s
        self._judge(_MANY)

    def _judge(self, more: int = 0) -> None:
        late = len(self.over) - self.on_time
        if FULL:
            allowed = max(1, len(self.over) // 100) + self.uneasy + more
            assert late <= allowed, f"{late} of many are late: {self}"

    @property
    def on_time(self) -> int:
        """How many were not late by more than a tenth of the deadline."""
        return sum(over <= _LATE * self.deadline_s for over in self.over)

    def count(self, tally: Tally) -> None:
        """Count them; in all of the campaign, judge them."""
        tally.add(deadlines=len(self.over), on_time=self.on_time)
        self._judge()

    def __str__(self) -> str:
        late = sorted(over / self.deadline_s for over in self.over)
        return (
            f"{len(late)} deadlines of {self.deadline_s} s, later than a wait beside them by p50 "
            f"{statistics.median(late):.2%}, p99 {late[int(len(late) * 0.99)]:.2%} of it, "
            f"the worst {late[-1]:.2%}; {self.on_time} within 10 %; {self.uneasy} waits were late"
        )
