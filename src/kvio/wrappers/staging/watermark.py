"""The lowest open number of a set, which only grows while numbers are closed."""

from __future__ import annotations

import heapq


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
