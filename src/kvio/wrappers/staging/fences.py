"""The fences to wait for before bytes of staging memory are read, by range."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.host import Fence


class _Range(NamedTuple):
    start: int
    end: int
    fence: Fence


class Fences:
    """Fences by ranges of a memory; bytes that are filled again have only the new fence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ranges: list[_Range] = []  # none overlaps another; in order

    def __len__(self) -> int:
        return len(self._ranges)

    def put(self, spans: Sequence[Span], fence: Fence | None) -> None:
        """Replace the fences of the bytes in spans by one, or by none."""
        with self._lock:
            for offset, nbytes in spans:
                new = [_Range(offset, offset + nbytes, fence)] if fence is not None else []
                self._replace(offset, offset + nbytes, new)

    def over(self, spans: Sequence[Span]) -> list[Fence]:
        """Return the fences of the bytes in spans, each once."""
        with self._lock:
            found = [r.fence for span in spans for r in self._touching(*_ends(span))]
        return list(dict.fromkeys(found))

    def drop(self, spans: Sequence[Span], fence: Fence) -> None:
        """Remove a fence of bytes in spans, unless they have another one by now."""
        with self._lock:
            for span in spans:
                for one in self._touching(*_ends(span)):
                    if one.fence is fence:
                        self._replace(one.start, one.end, [])

    def _touching(self, start: int, end: int) -> list[_Range]:
        first, last = self._slice(start, end)
        return self._ranges[first:last] if start < end else []

    def _slice(self, start: int, end: int) -> tuple[int, int]:
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._ranges) and self._ranges[first].end <= start:
            first += 1
        return first, max(first, bisect_left(self._starts, end))

    def _replace(self, start: int, end: int, new: list[_Range]) -> None:
        """Replace the ranges between two ends, and cut those that reach beyond them."""
        if start == end:
            return
        first, last = self._slice(start, end)
        old = self._ranges[first:last]
        before = [one._replace(end=start) for one in old[:1] if one.start < start]
        after = [one._replace(start=end) for one in old[-1:] if one.end > end]
        self._ranges[first:last] = [*before, *new, *after]
        self._starts[first:last] = [one.start for one in (*before, *new, *after)]


def _ends(span: Span) -> tuple[int, int]:
    return span.offset, span.offset + span.nbytes
