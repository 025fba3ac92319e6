"""Memory in large pieces: which of them are there follows from which pages are in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvio.staging.allocator import Segments, Span

PAGE = 4096
SEGMENT = 4 * PAGE
CAPACITY = 3 * SEGMENT + 2 * PAGE  # the last is a short one
PAGES = CAPACITY // PAGE

_SPANS = st.builds(
    lambda start, end: Span(min(start, end), abs(end - start)),
    st.integers(0, CAPACITY),
    st.integers(0, CAPACITY),
)


@given(st.lists(st.tuples(st.booleans(), _SPANS), max_size=12))
def test_a_segment_is_there_while_one_of_its_pages_is_in_use(
    steps: list[tuple[bool, Span]],
) -> None:
    """Whatever spans are used and released, also such as begin and end inside of pages.

    A used span needs every page that it touches. A released one frees those that begin in it:
    the one that it begins in may hold what lies before.
    """
    there: set[int] = set()
    segments = Segments(CAPACITY, SEGMENT, acquire=there.add, drop=there.remove)
    segments.acquire_all()
    used = set(range(PAGES))
    for use, span in steps:
        end = span.offset + span.nbytes
        if not span.nbytes:
            (segments.use if use else segments.release)([span])
        elif use:
            segments.use([span])
            used |= {p for p in range(PAGES) if p * PAGE < end and (p + 1) * PAGE > span.offset}
        else:
            segments.release([span])
            used -= {p for p in range(PAGES) if span.offset <= p * PAGE < end}

        assert there == {page * PAGE // SEGMENT for page in used}


def test_the_end_of_a_span_that_begins_inside_a_page_is_in_use() -> None:
    """Its last page too, where its length alone would make one page less."""
    there: set[int] = set()
    segments = Segments(CAPACITY, SEGMENT, acquire=there.add, drop=there.remove)
    segments.acquire_all()
    segments.release([Span(0, SEGMENT)])
    segments.use([Span(PAGE - 1, PAGE)])

    segments.release([Span(0, 2 * PAGE - PAGE)])
    assert 0 in there, "page 1 has bytes of the span"
    segments.release([Span(PAGE, PAGE)])
    assert 0 not in there
