"""Layouts for Hypothesis: contiguous, round-robin and of given sizes, small enough to enumerate."""

from __future__ import annotations

from hypothesis import strategies as st

from kvio.sharedfile.layout import Layout, even_sizes

ALIGNMENTS = (1, 2, 8, 512, 4096)


@st.composite
def even_layouts(draw: st.DrawFn, alignments: tuple[int, ...] = ALIGNMENTS) -> Layout:
    """Draw a file whose domains follow each other in whole blocks."""
    align = draw(st.sampled_from(alignments))
    size = draw(st.integers(0, 40 * align))
    writers = draw(st.integers(1, 9))
    cell_bytes = align * draw(st.integers(1, 6))
    return Layout(size, writers, align, cell_bytes, 0, even_sizes(size, writers, align))


@st.composite
def dealt_layouts(draw: st.DrawFn, alignments: tuple[int, ...] = ALIGNMENTS) -> Layout:
    """Draw a file whose stripes are dealt out in turn."""
    align = draw(st.sampled_from(alignments))
    size = draw(st.integers(0, 40 * align))
    stripe_bytes = align * draw(st.integers(1, 7))
    return Layout(
        size, draw(st.integers(1, 9)), align, align * draw(st.integers(1, 6)), stripe_bytes
    )


@st.composite
def odd_layouts(draw: st.DrawFn, alignments: tuple[int, ...] = ALIGNMENTS) -> Layout:
    """Draw a file with domains of any sizes, empty ones and ones inside one block included."""
    align = draw(st.sampled_from(alignments))
    sizes = tuple(draw(st.lists(st.integers(0, 7 * align), min_size=1, max_size=9)))
    return Layout(sum(sizes), len(sizes), align, align * draw(st.integers(1, 6)), 0, sizes)


def layouts(alignments: tuple[int, ...] = ALIGNMENTS) -> st.SearchStrategy[Layout]:
    """Draw a layout of any kind."""
    return st.one_of(even_layouts(alignments), dealt_layouts(alignments), odd_layouts(alignments))
