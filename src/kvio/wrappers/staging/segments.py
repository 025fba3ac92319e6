"""Memory that is allocated and freed in large segments, with bookkeeping in pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvio.buffers import PAGE_BYTES
from kvio.wrappers.staging.extents import Span, pages_of


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
