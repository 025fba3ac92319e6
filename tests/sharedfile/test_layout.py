"""Layouts: every byte has one writer, one stripe, one cell; hostile numbers end at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvio import ConfigError
from kvio.sharedfile.layout import MAX_BYTES, MAX_WRITERS, Layout, even_sizes

from .strategies import dealt_layouts, even_layouts, layouts, odd_layouts


def owners(layout: Layout) -> list[int]:
    """Return the rank of every byte, and check that no byte has two."""
    found = [-1] * layout.size
    for rank in range(layout.writers):
        for offset, nbytes in layout.domain(rank):
            assert nbytes > 0
            assert found[offset : offset + nbytes] == [-1] * nbytes
            found[offset : offset + nbytes] = [rank] * nbytes
    return found


@given(layouts((1, 2, 8)))
def test_domains_partition_the_file(layout: Layout) -> None:
    """Every byte of the file lies in the domain of exactly one rank."""
    assert -1 not in owners(layout)


@given(layouts())
def test_extents_of_a_domain_are_in_file_order(layout: Layout) -> None:
    """The extents of a rank ascend and do not overlap."""
    for rank in range(layout.writers):
        extents = layout.domain(rank)

        assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(extents))


@given(st.one_of(even_layouts(), dealt_layouts()))
def test_extents_lie_on_blocks(layout: Layout) -> None:
    """Unless sizes were given, every extent begins on a block and ends on one or with the file."""
    for rank in range(layout.writers):
        for offset, nbytes in layout.domain(rank):
            end = offset + nbytes

            assert offset % layout.align == 0
            assert end % layout.align == 0 or end == layout.size
    assert layout.shared_blocks == ()


@given(even_layouts())
def test_even_domains_differ_by_one_block_at_most(layout: Layout) -> None:
    """Counted in blocks, no two ranks differ by more than one, and the first ones have more."""
    blocks = [-(-nbytes // layout.align) for nbytes in layout.sizes]

    assert max(blocks) - min(blocks) <= 1
    assert blocks == sorted(blocks, reverse=True)


@given(st.integers(0, MAX_BYTES), st.integers(1, 300), st.sampled_from([1, 512, 4096, 1 << 20]))
def test_even_sizes_add_up(size: int, writers: int, align: int) -> None:
    """The sizes of even domains add up to the file, however large, and none is negative."""
    sizes = even_sizes(size, writers, align)

    assert (len(sizes), sum(sizes)) == (writers, size)
    assert min(sizes) >= 0


@given(layouts((1, 2, 8)))
def test_stripe_at_agrees_with_the_domains(layout: Layout) -> None:
    """The stripe of a byte holds it and belongs to the rank whose domain it lies in."""
    for offset, rank in enumerate(owners(layout)):
        stripe = layout.stripe_at(offset)

        assert stripe.start <= offset < stripe.end
        assert stripe.rank == rank


@given(layouts())
def test_stripes_follow_each_other(layout: Layout) -> None:
    """The stripes that are not empty cover the file in order, each with its own number of cells."""
    at = cells = 0
    for number in range(layout.stripes):
        stripe = layout.stripe(number)
        own = list(layout.cells_of(stripe))
        if stripe.start < stripe.end:
            assert (stripe.start, stripe.first_cell) == (at, cells)
            assert stripe.origin == at // layout.align * layout.align
            at = stripe.end
        cells += len(own)

    assert (at, cells) == (layout.size, layout.cells)


@given(layouts())
def test_stripes_of_a_rank_are_those_of_its_domain(layout: Layout) -> None:
    """A rank's stripes are its own and hold exactly its domain."""
    for rank in range(layout.writers):
        stripes = list(layout.stripes_of(rank))

        assert {stripe.rank for stripe in stripes} <= {rank}
        assert [(s.start, s.end - s.start) for s in stripes] == list(layout.domain(rank))


@given(layouts())
@example(Layout(0, 3, 4096, 4096, 0, (0, 0, 0)))
@example(Layout(0, 3, 4096, 4096, 4096))
def test_cells_partition_the_file_and_are_numbered_without_gaps(layout: Layout) -> None:
    """In file order the cells are 0 to cells - 1, touch each other, and are none of them empty."""
    at = 0
    for expected, (rank, number, start, end) in enumerate(layout.all_cells()):
        assert (number, start) == (expected, at)
        assert start < end <= start + layout.cell_bytes
        assert layout.stripe_at(start).rank == layout.stripe_at(end - 1).rank == rank
        at = end

    assert at == layout.size
    assert layout.cells == len(list(layout.all_cells()))


@given(layouts())
def test_cells_begin_and_end_on_blocks_or_with_their_stripe(layout: Layout) -> None:
    """Only the edge of a domain cuts a block: what lies in one block of a rank is in one cell."""
    for number in range(layout.stripes):
        stripe = layout.stripe(number)
        for _, start, end in layout.cells_of(stripe):
            assert start % layout.align == 0 or start == stripe.start
            assert end % layout.align == 0 or end == stripe.end


@given(odd_layouts((2, 8, 512)))
def test_shared_blocks_are_those_with_several_writers(layout: Layout) -> None:
    """A block counts as shared exactly where the bytes in it have more than one rank."""
    ranks: dict[int, set[int]] = {}
    for rank in range(layout.writers):
        for offset, nbytes in layout.domain(rank):
            for block in range(offset // layout.align, -(-(offset + nbytes) // layout.align)):
                ranks.setdefault(block, set()).add(rank)

    assert layout.shared_blocks == tuple(sorted(b for b, who in ranks.items() if len(who) > 1))


@given(layouts(), st.integers())
def test_there_are_no_other_ranks(layout: Layout, rank: int) -> None:
    """A rank out of range has no domain: an error that says which ranks there are."""
    if 0 <= rank < layout.writers:
        rank += layout.writers
    with pytest.raises(ConfigError, match=f"0 to {layout.writers - 1}"):
        layout.domain(rank)


NUMBERS = st.one_of(
    st.integers(-3, 5), st.sampled_from([4096, 1 << 20, 1 << 31, 1 << 32, 1 << 60, 1 << 64])
)


@given(
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
    st.lists(NUMBERS, max_size=4).map(tuple),
)  # fmt: skip
def test_any_numbers_make_a_layout_or_a_config_error(
    size: int, writers: int, align: int, cell_bytes: int, stripe_bytes: int, sizes: tuple[int, ...]
) -> None:
    """Hostile numbers are refused at once, and what is not refused is counted at once."""
    try:
        layout = Layout(size, writers, align, cell_bytes, stripe_bytes, sizes)
    except ConfigError:
        return

    assert 0 <= layout.size <= MAX_BYTES
    assert 1 <= layout.writers <= MAX_WRITERS
    assert layout.cells * layout.cell_bytes >= layout.size
    assert layout.size == 0 or layout.stripe_at(layout.size - 1).end == layout.size


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((-1, 1, 1, 1, 1), "size must be"),
        ((MAX_BYTES + 1, 1, 1, 1, 1), "size must be"),
        ((8, 0, 1, 1, 1), "writers must be"),
        ((8, MAX_WRITERS + 1, 1, 1, 1), "writers must be"),
        ((8, 1, 0, 8, 8), "not 0$"),
        ((8, 1, 1 << 23, 1 << 23, 1 << 23), "not 8388608$"),
        ((8, 1, 4, 6, 4), "cells of 6 bytes are no multiple of blocks of 4"),
        ((8, 1, 8, 4, 8), "cells of 4 bytes"),
        ((8, 1, 1, 1 << 32, 8), "shorter than 4 GiB"),
        ((8, 1, 4, 4, 6), "stripes of 6 bytes are no multiple of blocks of 4"),
        ((8, 1, 4, 4, -4), "stripes of -4"),
        ((8, 2, 4, 4, 4, (4, 4)), "no stripe_bytes"),
        ((8, 2, 4, 4, 0, (4, 3)), "7 bytes in all"),
        ((8, 2, 4, 4, 0, (8,)), "sizes of 1 domains"),
        ((8, 2, 4, 4, 0, (9, -1)), "negative"),
        ((8, 2, 4, 4, 0), "sizes of 0 domains"),
    ],
)
def test_a_layout_that_cannot_be_says_why(numbers: tuple[Any, ...], says: str) -> None:
    """Each number that cannot be has its own message."""
    with pytest.raises(ConfigError, match=says):
        Layout(*numbers)
