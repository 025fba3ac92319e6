"""Pages of a staging memory are handed out once, all of them, and come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvio import ConfigError
from kvio.staging.allocator import Extents, Span, _Runs

PAGE = 4096
PAGES = 48

Spans = tuple[Span, ...]


def pages_in(spans: Sequence[Span]) -> list[int]:
    """Name every page that spans touch."""
    pages: list[int] = []
    for span in spans:
        assert span.offset % PAGE == 0
        pages += range(span.offset // PAGE, -(-(span.offset + span.nbytes) // PAGE))
    return pages


class ExtentsMachine(RuleBasedStateMachine):
    """Extents against a list that says of every page who has it."""

    taken = Bundle("taken")

    @initialize()
    def begin(self) -> None:
        self.extents = Extents(PAGES * PAGE + 17)
        self.owner = ["free"] * PAGES

    def move(self, spans: Sequence[Span], came_from: str, to: str) -> None:
        for page in pages_in(spans):
            assert self.owner[page] == came_from
            self.owner[page] = to

    def count(self, owner: str) -> int:
        return self.owner.count(owner) * PAGE

    def longest_free(self) -> int:
        runs = "".join("x" if owner == "free" else " " for owner in self.owner).split()
        return max(map(len, runs), default=0)

    @rule(target=taken, nbytes=st.integers(1, 20 * PAGE))
    def take(self, nbytes: int) -> object:
        """None only when too few pages are free; one span wherever one fits."""
        wanted = -(-nbytes // PAGE)
        spans = self.extents.take(nbytes)
        if wanted * PAGE > self.count("free"):
            assert spans is None
            return multiple()
        assert spans is not None
        assert sum(span.nbytes for span in spans) == nbytes
        assert len(pages_in(spans)) == wanted
        assert all(span.nbytes % PAGE == 0 for span in spans[:-1])
        assert (len(spans) == 1) == (wanted <= self.longest_free())
        self.move(spans, "free", "used")
        return spans

    @rule(spans=consumes(taken))
    def give(self, spans: Spans) -> None:
        """What comes back is free."""
        self.extents.give(spans)
        self.move(spans, "used", "free")

    @rule(spans=consumes(taken))
    def give_twice(self, spans: Spans) -> None:
        """What was given back cannot be given again, and nothing of it is lost."""
        self.give(spans)
        with pytest.raises(ValueError, match="not in use"):
            self.extents.give(spans)

    @rule(nbytes=st.integers(0, 60 * PAGE))
    def shrink(self, nbytes: int) -> None:
        """Free pages go out of use, as many as were asked for or as there are."""
        free = self.count("free")
        spans = self.extents.shrink(nbytes)
        assert sum(span.nbytes for span in spans) == min(free, -(-nbytes // PAGE) * PAGE)
        self.move(spans, "free", "out")
        untouched = [page for page in range(PAGES) if self.owner[page] == "free"]
        assert not spans or max(untouched, default=-1) < min(pages_in(spans))

    @rule(nbytes=st.integers(0, 60 * PAGE))
    def grow(self, nbytes: int) -> None:
        """As many bytes come back to use as were asked for or had gone."""
        out = self.count("out")
        grown = self.extents.grow(nbytes)
        assert grown == min(out, -(-nbytes // PAGE) * PAGE)
        gone = [page for page in range(PAGES) if self.owner[page] == "out"]
        for page in gone[: grown // PAGE]:
            self.owner[page] = "free"

    @invariant()
    def counts_are_right(self) -> None:
        """Used, free and capacity are what the list says."""
        if hasattr(self, "extents"):
            assert self.extents.used_bytes == self.count("used")
            assert self.extents.free_bytes == self.count("free")
            assert self.extents.capacity_bytes == self.count("used") + self.count("free")

    def teardown(self) -> None:
        """Every page that should be free can be taken at once, whatever happened before."""
        if hasattr(self, "extents") and self.extents.free_bytes:
            spans = self.extents.take(self.extents.free_bytes)
            assert spans is not None
            self.move(spans, "free", "used")


TestExtents = ExtentsMachine.TestCase


@given(st.lists(st.integers(0, 3 * PAGE), max_size=40))
def test_everything_given_back_is_one_piece_again(sizes: list[int]) -> None:
    """After any takes and gives the whole capacity can be taken as a single span."""
    extents = Extents(PAGES * PAGE)
    held = [spans for size in sizes if (spans := extents.take(size)) is not None]

    for spans in held[::2] + held[1::2]:
        extents.give(spans)

    assert extents.take(PAGES * PAGE) == (Span(0, PAGES * PAGE),)


def test_fragmentation_never_refuses() -> None:
    """With every second page free, half of the capacity is given in as many spans."""
    extents = Extents(PAGES * PAGE)
    pages = [extents.take(1) for _ in range(PAGES)]
    for spans in pages[::2]:
        assert spans is not None
        extents.give(spans)

    spans = extents.take(PAGES // 2 * PAGE)

    assert spans is not None
    assert sorted(pages_in(spans)) == list(range(0, PAGES, 2))
    assert extents.take(1) is None


def test_few_spans_are_made_of_many_holes() -> None:
    """What must be cut is cut from the largest free pieces."""
    extents = Extents(16 * PAGE)
    for nbytes in (PAGE, PAGE, 6 * PAGE, PAGE, 7 * PAGE):
        assert extents.take(nbytes) is not None
    extents.give([Span(0, PAGE)])
    extents.give([Span(2 * PAGE, 6 * PAGE)])
    extents.give([Span(9 * PAGE, 7 * PAGE)])

    spans = extents.take(13 * PAGE)

    assert spans == (Span(9 * PAGE, 7 * PAGE), Span(2 * PAGE, 6 * PAGE))


def test_the_lowest_memory_is_used_again() -> None:
    """What was given back is taken before what was never touched."""
    extents = Extents(PAGES * PAGE)
    low, between = extents.take(3 * PAGE), extents.take(1)
    assert low is not None
    assert between is not None
    extents.give(low)

    assert extents.take(2 * PAGE) == (Span(0, 2 * PAGE),)


def test_nothing_needs_no_page() -> None:
    """An empty block takes no span, even where no page is free, and may be given back."""
    extents = Extents(PAGE)
    assert extents.take(PAGE) is not None

    assert extents.take(0) == ()
    extents.give(())


@pytest.mark.parametrize(
    "span", [Span(0, 2 * PAGE), Span(1, PAGE), Span(PAGE, PAGE), Span(0, 3 * PAGE + 1)]
)
def test_only_what_was_taken_can_be_given(span: Span) -> None:
    """A span that was never handed out is refused, and nothing changes."""
    extents = Extents(8 * PAGE)
    assert extents.take(3 * PAGE) == (Span(0, 3 * PAGE),)

    with pytest.raises(ValueError, match="not in use"):
        extents.give([span])
    assert extents.used_bytes == 3 * PAGE


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, -PAGE])
def test_less_than_a_page_is_no_memory(nbytes: int) -> None:
    """A capacity without a whole page is refused."""
    with pytest.raises(ConfigError, match="at least 4096"):
        Extents(nbytes)


def test_runs_are_cut_no_further_than_was_asked() -> None:
    """From either end, whole runs first and then a part of one."""
    runs = _Runs()
    for start in (0, 8, 16):
        runs.add(start, 4)

    assert runs.cut_lowest(4) == [(0, 4)]
    assert runs.cut_highest(4) == [(16, 4)]
    assert runs.cut_lowest(3) == [(8, 3)]
    assert runs.cut_highest(1) == [(11, 1)]
    assert runs.pages == 0
