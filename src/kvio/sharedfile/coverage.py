"""The bytes that a handle has been asked to write: each once."""

from __future__ import annotations

from bisect import bisect_right


class Coverage:
    """Disjoint half-open ranges, merged where they touch; not thread-safe."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> tuple[int, int] | None:
        """Add a non-empty range; or return the range it overlaps, and add nothing."""
        i = bisect_right(self._starts, start)
        if i and self._ends[i - 1] > start:
            return self._starts[i - 1], self._ends[i - 1]
        if i < len(self._starts) and self._starts[i] < end:
            return self._starts[i], self._ends[i]
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        return None
