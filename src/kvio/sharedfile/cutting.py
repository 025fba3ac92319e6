"""Split a write by stripes and by file blocks that it covers in part; pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from kvio.sharedfile.layout import Layout, Stripe


class Way(Enum):
    """The way of a piece to the file."""

    STRAIGHT = "as it is"
    MERGED = "a file block that this handle has in part: direct I/O writes whole ones"
    SHARED = "a file block that several writers have bytes in: whoever seals writes it"


class Piece(NamedTuple):
    """A part of a write, inside one stripe, and its way to the file."""

    way: Way
    stripe: Stripe
    start: int
    end: int


def cut(layout: Layout, start: int, end: int, *, direct: bool) -> Iterator[Piece]:
    """Split a write of bytes *start* to *end* into pieces, in file order."""
    while start < end:
        stripe = layout.stripe_at(start)
        stop = min(end, stripe.end)
        yield from _cut_stripe(layout, stripe, start, stop, direct)
        start = stop


def _cut_stripe(
    layout: Layout,
    stripe: Stripe,
    start: int,
    end: int,
    direct: bool,  # noqa: FBT001
) -> Iterator[Piece]:
    for way, a, b in _without_shared(layout, start, end):
        if way is Way.SHARED or not direct:
            yield Piece(way, stripe, a, b)
        else:
            yield from (Piece(*piece) for piece in _edges(layout.align, stripe, a, b))


def _without_shared(layout: Layout, start: int, end: int) -> Iterator[tuple[Way, int, int]]:
    """Split off the blocks with bytes of other writers: at most the first and the last."""
    align, blocks = layout.align, layout.shared_blocks
    first = bisect_left(blocks, start // align)
    while start < end and first < len(blocks) and blocks[first] * align < end:
        block = blocks[first] * align
        if start < block:
            yield Way.STRAIGHT, start, block
        stop = min(block + align, end)
        yield Way.SHARED, max(start, block), stop
        start, first = stop, first + 1
    if start < end:
        yield Way.STRAIGHT, start, end


def _edges(
    align: int, stripe: Stripe, start: int, end: int
) -> Iterator[tuple[Way, Stripe, int, int]]:
    """Split off blocks that are covered in part."""
    head = min(-(-start // align) * align, end)
    tail = max(end // align * align, head)
    if start < head:
        yield Way.MERGED, stripe, start, head
    if head < tail:
        yield Way.STRAIGHT, stripe, head, tail
    if tail < end:
        yield Way.MERGED, stripe, tail, end


def slice_parts(parts: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return views of bytes *start* to *end* of a gather list."""
    found = []
    for part in parts:
        a, b = max(start, 0), min(end, len(part))
        if a < b:
            found.append(part[a:b])
        start, end = start - len(part), end - len(part)
        if end <= 0:
            break
    return found
