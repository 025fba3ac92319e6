"""The free pages of a staging memory: pure bookkeeping, without memory and locks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from kvio.buffers import PAGE_BYTES
from kvio.errors import ConfigError


class Span(NamedTuple):
    """A piece of a staging memory; no other span shares its pages."""

    offset: int
    nbytes: int


class Extents:
    """Allocates whole pages of a range, contiguous if possible, lowest first.

    The lowest free pages are preferred: memory that was used lately is in caches, and memory that
    was never used has no pages yet.

    Raises:
        ConfigError: *capacity_bytes* is less than a page.
    """

    def __init__(self, capacity_bytes: int) -> None:
        pages = capacity_bytes // PAGE_BYTES
        if pages < 1:
            raise ConfigError(f"staging memory of {capacity_bytes} bytes: at least {PAGE_BYTES}")
        self._free = _Runs()
        self._out = _Runs()
        self._taken: dict[int, int] = {}
        self._taken_pages = 0
        self._free.add(0, pages)

    @property
    def capacity_bytes(self) -> int:
        """The bytes in use or free."""
        return self.used_bytes + self.free_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that `take` can allocate in total."""
        return self._free.pages * PAGE_BYTES

    @property
    def used_bytes(self) -> int:
        """The bytes in use, in whole pages."""
        return self._taken_pages * PAGE_BYTES

    def take(self, nbytes: int) -> tuple[Span, ...] | None:
        """Take pages for *nbytes*: one span where one is free, else several; None if too few are.

        The spans' lengths add up to *nbytes*, and all but the last are whole pages.
        """
        wanted = pages_of(nbytes)
        if wanted > self._free.pages:
            return None
        spans = []
        left = nbytes
        for start, pages in self._free.cut(wanted):
            self._taken[start] = pages
            spans.append(Span(start * PAGE_BYTES, min(left, pages * PAGE_BYTES)))
            left -= spans[-1].nbytes
        self._taken_pages += wanted
        return tuple(spans)

    def give(self, spans: Iterable[Span]) -> None:
        """Take back spans as `take` gave them.

        Raises:
            ValueError: a span is not in use, or has another length.
        """
        for span in spans:
            start, odd = divmod(span.offset, PAGE_BYTES)
            pages = pages_of(span.nbytes)
            if odd or self._taken.get(start) != pages:
                raise ValueError(f"{span} is not in use")
            del self._taken[start]
            self._taken_pages -= pages
            self._free.add(start, pages)

    def shrink(self, nbytes: int) -> list[Span]:
        """Take up to *nbytes* of free pages out of use, the highest first; say which.

        What is in use is left alone: ask again for the rest when it was given back.
        """
        taken = []
        for start, pages in self._free.cut_highest(min(pages_of(nbytes), self._free.pages)):
            self._out.add(start, pages)
            taken.append(Span(start * PAGE_BYTES, pages * PAGE_BYTES))
        return taken

    def grow(self, nbytes: int) -> int:
        """Put up to *nbytes* of what `shrink` took back to use, the lowest first; how many."""
        wanted = min(pages_of(nbytes), self._out.pages)
        for start, pages in self._out.cut_lowest(wanted):
            self._free.add(start, pages)
        return wanted * PAGE_BYTES


def pages_of(nbytes: int) -> int:
    """Return the number of pages that hold *nbytes*."""
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes")
    return -(-nbytes // PAGE_BYTES)


class _Runs:
    """A set of pages, as maximal runs: by start, by end, and by size class in order of address.

    Class *c* has the runs of 2^(c-1) up to 2^c - 1 pages.
    """

    __slots__ = ("_classes", "_pages_at", "_start_before", "pages")

    def __init__(self) -> None:
        self.pages = 0
        self._pages_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._classes: dict[int, list[int]] = {}

    def add(self, start: int, pages: int) -> None:
        """Add a run that is not in the set, and merge it with its neighbours."""
        before = self._start_before.get(start)
        if before is not None:
            pages += self._remove(before)
            start = before
        if start + pages in self._pages_at:
            pages += self._remove(start + pages)
        self._insert(start, pages)

    def cut(self, wanted: int) -> list[tuple[int, int]]:
        """Remove *wanted* pages as one run if there is one so long, else as the largest runs."""
        cuts = []
        while wanted:
            start = self._fitting(wanted)
            if start is None:
                start = self._largest()
            pages = min(wanted, self._pages_at[start])
            self._cut_front(start, pages)
            cuts.append((start, pages))
            wanted -= pages
        return cuts

    def cut_lowest(self, wanted: int) -> list[tuple[int, int]]:
        """Remove the *wanted* pages of the lowest addresses."""
        cuts = []
        for start in sorted(self._pages_at):
            pages = min(wanted, self._pages_at[start])
            if not pages:
                break
            self._cut_front(start, pages)
            cuts.append((start, pages))
            wanted -= pages
        return cuts

    def cut_highest(self, wanted: int) -> list[tuple[int, int]]:
        """Remove the *wanted* pages of the highest addresses."""
        cuts = []
        for start in sorted(self._pages_at, reverse=True):
            run = self._pages_at[start]
            pages = min(wanted, run)
            if not pages:
                break
            self._remove(start)
            if run > pages:
                self._insert(start, run - pages)
            cuts.append((start + run - pages, pages))
            wanted -= pages
        return cuts

    def _fitting(self, wanted: int) -> int | None:
        """Find a run of at least so many pages near the lowest; None: only the largest may be one.

        Of the class that begins below *wanted* only the first is tried: a look is cheap.
        """
        size = wanted.bit_length()
        found = [
            starts[0]
            for bits, starts in self._classes.items()
            if bits > size or (bits == size and self._pages_at[starts[0]] >= wanted)
        ]
        return min(found, default=None)

    def _largest(self) -> int:
        return max(self._classes[max(self._classes)], key=self._pages_at.__getitem__)

    def _cut_front(self, start: int, pages: int) -> None:
        run = self._pages_at[start]
        rest, same = run - pages, run.bit_length()
        if rest.bit_length() != same:
            self._remove(start)
            if rest:
                self._insert(start + pages, rest)
            return
        # The order of its class is kept: the next run lies above.
        del self._pages_at[start]
        self._pages_at[start + pages] = rest
        self._start_before[start + run] = start + pages
        starts = self._classes[same]
        starts[bisect_left(starts, start)] = start + pages
        self.pages -= pages

    def _insert(self, start: int, pages: int) -> None:
        self._pages_at[start] = pages
        self._start_before[start + pages] = start
        insort(self._classes.setdefault(pages.bit_length(), []), start)
        self.pages += pages

    def _remove(self, start: int) -> int:
        pages = self._pages_at.pop(start)
        del self._start_before[start + pages]
        starts = self._classes[pages.bit_length()]
        del starts[bisect_left(starts, start)]
        if not starts:
            del self._classes[pages.bit_length()]
        self.pages -= pages
        return pages
