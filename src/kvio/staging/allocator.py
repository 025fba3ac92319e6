"""The allocator of staging memory: pages, segments of pages, and requests in order."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kvio.core.buffers import PAGE_BYTES
from kvio.core.threads import Condition
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
        start = self._free.cut_one(wanted) if wanted else None
        if start is not None:  # the most of them
            self._taken[start] = wanted
            self._taken_pages += wanted
            return (Span(start * PAGE_BYTES, nbytes),)
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

    def cut_one(self, wanted: int) -> int | None:
        """Remove *wanted* pages as one run, and return its start; None: there is none so long."""
        start = self._fitting(wanted)
        if start is not None:
            self._cut_front(start, wanted)
        return start

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

        Of the class that begins below *wanted* only the first is tried: the check is cheap.
        """
        size, best = wanted.bit_length(), None
        for bits, starts in self._classes.items():
            first = starts[0]
            if (best is None or first < best) and (
                bits > size or (bits == size and self._pages_at[first] >= wanted)
            ):
                best = first
        return best

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


# --------------------------------------------------------------------------------------------------
# Memory that is allocated and freed in large segments, with bookkeeping in pages.


class Piece(NamedTuple):
    """A part of a span within one segment."""

    segment: int
    start: int
    nbytes: int


class Segments:
    """Which segments of a range are there: all, but for those whose pages are all released.

    *acquire* and *drop* get the number of a segment, one at a time.
    """

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        acquire: Callable[[int], None],
        drop: Callable[[int], None],
    ) -> None:
        self.segment_bytes = segment_bytes
        self._capacity_bytes = capacity_bytes
        self._acquire = acquire
        self._drop = drop
        self._lock = threading.Lock()
        self._released = [0] * -(-capacity_bytes // segment_bytes)  # a bit for each page
        self._absent = set(range(len(self._released)))

    def __len__(self) -> int:
        return len(self._released)

    def nbytes_of(self, segment: int) -> int:
        """Return the length of a segment; the last one may be shorter."""
        return min(self.segment_bytes, self._capacity_bytes - segment * self.segment_bytes)

    def cut(self, spans: Sequence[Span]) -> list[Piece]:
        """Split spans at the boundaries of segments."""
        pieces = []
        for offset, nbytes in spans:
            at, end = offset, offset + nbytes
            while at < end:
                segment, start = divmod(at, self.segment_bytes)
                n = min(end - at, self.segment_bytes - start)
                pieces.append(Piece(segment, start, n))
                at += n
        return pieces

    def use(self, spans: Sequence[Span]) -> None:
        """Allocate the segments of spans before they are filled."""
        if not any(self._released):
            return
        with self._lock:
            for piece in self.cut(spans):
                if piece.segment in self._absent:
                    self._acquire(piece.segment)
                    self._absent.remove(piece.segment)
                self._released[piece.segment] &= ~_touched(piece)

    def release(self, spans: Sequence[Span]) -> None:
        """Note that pages are out of use; drop the segments of which none is in use.

        A page that a span only begins in may hold what lies before it, and stays in use; its last
        page is its own.
        """
        with self._lock:
            for piece in self.cut(spans):
                released = self._released[piece.segment] | _begun(piece)
                self._released[piece.segment] = released
                pages = pages_of(self.nbytes_of(piece.segment))
                if released.bit_count() == pages and piece.segment not in self._absent:
                    self._drop(piece.segment)
                    self._absent.add(piece.segment)

    def acquire_all(self) -> None:
        """Allocate every segment, or none."""
        try:
            for segment in sorted(self._absent):
                self._acquire(segment)
                self._absent.remove(segment)
        except BaseException:
            self.drop_all()
            raise

    def drop_all(self) -> None:
        """Free all segments."""
        with self._lock:
            for segment in set(range(len(self))) - self._absent:
                self._drop(segment)
                self._absent.add(segment)


def _touched(piece: Piece) -> int:
    """Return a bit for each page that has a byte of the piece."""
    return _bits(piece.start // PAGE_BYTES, pages_of(piece.start + piece.nbytes))


def _begun(piece: Piece) -> int:
    """Return a bit for each page whose first byte belongs to the piece."""
    return _bits(pages_of(piece.start), pages_of(piece.start + piece.nbytes))


def _bits(first: int, end: int) -> int:
    return ((1 << (end - first)) - 1) << first


# --------------------------------------------------------------------------------------------------
# The allocator of staging memory: requests in order, and pages to return to the system.


class Verdict(Enum):
    """Why a request that waited gets no memory."""

    TOO_LARGE = "larger than the tier"
    OPEN_FILES = "open files hold it until they are closed"
    FAILED_BLOCKS = "failed blocks hold it until they are retried or discarded"
    CLOSING = "the tier was being closed"


class Waiter:
    """A request in the queue."""

    __slots__ = ("answer", "nbytes", "ready")

    def __init__(self, nbytes: int, lock: threading.RLock) -> None:
        self.nbytes = nbytes
        self.ready = Condition(lock)
        self.answer: Sequence[Span] | Verdict | None = None


class Allocator:
    """Extents with a first-come-first-served queue of requests; the tier's lock guards it.

    Attributes:
        stuck_bytes: bytes of failed blocks, which stay until they are retried or discarded.
        open_bytes: bytes of open files and readers, which stay until these are closed.
        excess_bytes: bytes to remove from the capacity as soon as they are free.
        removed: removed pages that have not been returned to the system yet.
    """

    def __init__(self, extents: Extents, lock: threading.RLock) -> None:
        self._extents = extents
        self._lock = lock
        self._queue: deque[Waiter] = deque()
        self._quarantined: list[Sequence[Span]] = []
        self.stuck_bytes = 0
        self.open_bytes = 0
        self.excess_bytes = 0
        self.removed: list[Span] = []

    @property
    def capacity_bytes(self) -> int:
        """The bytes in use or free, without those to be removed."""
        return self._extents.capacity_bytes - self.excess_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes in use, in whole pages."""
        return self._extents.used_bytes

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    @property
    def has_quarantined(self) -> bool:
        """True if memory is held back for abandoned calls that still hang."""
        return bool(self._quarantined)

    def reserve(self, nbytes: int) -> Sequence[Span] | None:
        """Allocate, unless requests wait or there is not enough."""
        if self._queue or self.excess_bytes:
            return () if nbytes == 0 else None
        return self._extents.take(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes fit into the tier at all."""
        return whole_pages(nbytes) <= self.capacity_bytes

    def blocked_by_failed(self, nbytes: int) -> bool:
        """Return whether so many bytes fit only after failed blocks are retried or discarded.

        What a call that hangs may still look at does not count: the call may end.
        """
        return whole_pages(nbytes) > self.capacity_bytes - self.stuck_bytes

    def blocked_by_open(self, nbytes: int) -> bool:
        """Return whether so many bytes fit only after an open file is closed.

        The thread that would wait may be the one that should close it, so none waits for that.
        """
        return whole_pages(nbytes) > self.capacity_bytes - self.stuck_bytes - self.open_bytes

    def add_open(self, nbytes: int) -> None:
        """Record that an open file holds bytes, and answer requests that would wait for it."""
        self.open_bytes += whole_pages(nbytes)
        self.admit()

    def remove_open(self, nbytes: int) -> None:
        """Record that an open file no longer holds bytes."""
        self.open_bytes -= whole_pages(nbytes)

    def enqueue(self, nbytes: int) -> Waiter:
        """Queue a request, which may be granted at once."""
        waiter = Waiter(nbytes, self._lock)
        self._queue.append(waiter)
        self.admit()
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """Cancel a request, or free memory that was granted after the deadline."""
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.answer is not None and not isinstance(waiter.answer, Verdict):
            self._extents.give(waiter.answer)
        self.serve()

    def refuse_all(self) -> None:
        """Refuse all waiting requests, because the tier is closing."""
        while self._queue:
            self._answer(Verdict.CLOSING)

    def release(self, spans: Sequence[Span], *, quarantine: bool = False) -> None:
        """Free bytes; *quarantine*: only when no abandoned call hangs any more."""
        if quarantine and spans:
            self._quarantined.append(spans)
        else:
            self._extents.give(spans)
        self.serve()

    def release_quarantined(self) -> None:
        """Free the memory that was held back: no call hangs any more."""
        while self._quarantined:
            self._extents.give(self._quarantined.pop())
        self.serve()

    def serve(self) -> None:
        """Remove free pages as `excess_bytes` says, then serve the queue."""
        if self.excess_bytes:
            spans = self._extents.shrink(self.excess_bytes)
            self.excess_bytes = max(0, self.excess_bytes - sum(span.nbytes for span in spans))
            self.removed += spans
        self.admit()

    def grow(self, nbytes: int) -> int:
        """Add removed pages again, or reduce `excess_bytes`; return the number of bytes."""
        kept = min(nbytes, self.excess_bytes)
        self.excess_bytes -= kept
        grown = self._extents.grow(nbytes - kept)
        self.admit()
        return kept + grown

    def admit(self) -> None:
        """Grant requests from the head of the queue while they fit."""
        while self._queue:
            waiter = self._queue[0]
            if not self.fits(waiter.nbytes):
                self._answer(Verdict.TOO_LARGE)
            elif (
                self.excess_bytes == 0 and (spans := self._extents.take(waiter.nbytes)) is not None
            ):
                self._answer(spans)
            elif self.blocked_by_failed(waiter.nbytes):
                self._answer(Verdict.FAILED_BLOCKS)
            elif self.blocked_by_open(waiter.nbytes):
                self._answer(Verdict.OPEN_FILES)
            else:
                return

    def _answer(self, answer: Sequence[Span] | Verdict) -> None:
        waiter = self._queue.popleft()
        waiter.answer = answer
        waiter.ready.notify()


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages, in bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
