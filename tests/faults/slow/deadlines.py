"""Measuring how late deadline errors are; told, and never judged beyond that they come at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

import kvio

#: A deadline error that comes so many seconds late has not come: machines may be busy.
NEVER_S: Final = 20.0


class Lateness:
    """How long calls took that had a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.took: list[float] = []

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Expect that what is done inside gives up at its deadline: not before, and in the end."""
        start = time.monotonic()
        with pytest.raises(kvio.StorageTimeoutError):
            yield
        self.note(time.monotonic() - start)

    def note(self, took: float) -> None:
        """Note a call that gave up."""
        assert took >= self.deadline_s, f"gave up after {took} s, before its {self.deadline_s} s"
        assert took < self.deadline_s + NEVER_S, f"gave up {took} s after it began"
        self.took.append(took)

    def __str__(self) -> str:
        late = sorted(took / self.deadline_s - 1 for took in self.took)
        share = sum(one <= 0.1 for one in late) / len(late)
        return (
            f"{len(late)} deadlines of {self.deadline_s} s: late by p50 "
            f"{statistics.median(late):.1%}, p99 {late[int(len(late) * 0.99)]:.1%}; "
            f"{share:.0%} within 10 %"
        )
