"""Cutting writes up: nothing is lost, and what goes straight may go straight."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvio.sharedfile.layout import Layout, Piece, Way, cut, slice_parts

from .strategies import layouts, odd_layouts


@st.composite
def writes(
    draw: st.DrawFn, kinds: st.SearchStrategy[Layout] | None = None
) -> tuple[Layout, int, int]:
    """Draw a layout and a range of its file; edges of blocks and domains are likely."""
    layout = draw(layouts() if kinds is None else kinds)
    edges = {
        0,
        layout.size,
        *(stripe.start for stripe in map(layout.stripe, range(layout.stripes))),
    }
    near = [at + by for at in edges for by in (-1, 0, 1) if 0 <= at + by <= layout.size]
    offsets = st.one_of(st.integers(0, layout.size), st.sampled_from(sorted(near)))
    start, end = sorted((draw(offsets), draw(offsets)))
    return layout, start, end


def pieces(write: tuple[Layout, int, int], *, direct: bool) -> list[Piece]:
    """Cut a write up."""
    layout, start, end = write
    return list(cut(layout, start, end, direct=direct))


@given(writes(), st.booleans())
def test_pieces_partition_the_write(write: tuple[Layout, int, int], direct: bool) -> None:  # noqa: FBT001
    """In file order the pieces cover the write, each byte once, and none is empty."""
    _, at, end = write
    for piece in pieces(write, direct=direct):
        assert piece.start == at < piece.end
        at = piece.end

    assert at == end


@given(writes(), st.booleans())
def test_a_piece_lies_in_one_stripe(write: tuple[Layout, int, int], direct: bool) -> None:  # noqa: FBT001
    """Every piece has one writer: the stripe it names holds all of it."""
    layout, _, _ = write
    for piece in pieces(write, direct=direct):
        assert piece.stripe.start <= piece.start < piece.end <= piece.stripe.end
        assert piece.stripe == layout.stripe_at(piece.start)


@given(writes(), st.booleans())
def test_only_shared_pieces_touch_shared_blocks(
    write: tuple[Layout, int, int],
    direct: bool,  # noqa: FBT001
) -> None:
    """What goes to the file itself never touches a block that another rank has bytes in."""
    layout, _, _ = write
    shared = set(layout.shared_blocks)
    for piece in pieces(write, direct=direct):
        blocks = range(piece.start // layout.align, -(-piece.end // layout.align))
        if piece.way is Way.SHARED:
            assert len(blocks) == 1
            assert blocks[0] in shared
        else:
            assert not shared.intersection(blocks)


@given(writes())
def test_direct_straight_pieces_are_aligned(write: tuple[Layout, int, int]) -> None:
    """Direct I/O writes whole blocks alone."""
    layout, _, _ = write
    for piece in pieces(write, direct=True):
        if piece.way is Way.STRAIGHT:
            assert piece.start % layout.align == piece.end % layout.align == 0


@given(writes())
def test_merged_pieces_are_parts_of_one_block(write: tuple[Layout, int, int]) -> None:
    """A piece that waits for its neighbours covers one block, and not all of it."""
    layout, _, _ = write
    for piece in pieces(write, direct=True):
        if piece.way is Way.MERGED:
            assert piece.start // layout.align == (piece.end - 1) // layout.align
            assert piece.end - piece.start < layout.align


@given(writes(odd_layouts()))
def test_buffered_writes_wait_for_nothing_of_their_own(write: tuple[Layout, int, int]) -> None:
    """Through the page cache only shared blocks are held back."""
    assert Way.MERGED not in {piece.way for piece in pieces(write, direct=False)}


@given(writes())
def test_a_write_is_cut_where_it_must_be(write: tuple[Layout, int, int]) -> None:
    """A stripe of a direct write has five pieces at most: whole blocks are never split."""
    found = pieces(write, direct=True)
    for a, b in pairwise(found):
        if a.way is b.way and a.stripe == b.stripe:
            assert a.way is not Way.STRAIGHT
    for stripe in {piece.stripe for piece in found}:
        assert sum(piece.stripe == stripe for piece in found) <= 5


@given(st.lists(st.binary(max_size=9), max_size=8), st.integers(0, 80), st.integers(0, 80))
def test_slices_of_a_gather_list_are_slices_of_the_whole(
    parts: list[bytes], start: int, end: int
) -> None:
    """Bytes of a list of views are those of the same range of all of them joined."""
    whole = b"".join(parts)
    start, end = sorted((min(start, len(whole)), min(end, len(whole))))

    found = slice_parts([memoryview(part) for part in parts], start, end)

    assert b"".join(found) == whole[start:end]
    assert all(len(view) for view in found)


def test_slices_are_views() -> None:
    """No byte is copied to cut a gather list."""
    memory = bytearray(8)
    (found,) = slice_parts([memoryview(memory)], 2, 6)
    memory[2:6] = b"abcd"

    assert bytes(found) == b"abcd"
