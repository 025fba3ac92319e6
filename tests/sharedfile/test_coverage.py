"""Coverage against a set of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvio.sharedfile.writing import Coverage

RANGES = st.tuples(st.integers(0, 60), st.integers(1, 12))


@given(st.lists(RANGES, max_size=40))
def test_a_range_is_added_unless_a_byte_of_it_stands(ranges: list[tuple[int, int]]) -> None:
    """`add` agrees with a set of bytes, and names a standing range where it refuses."""
    coverage, written = Coverage(), set[int]()
    for start, nbytes in ranges:
        wanted = set(range(start, start + nbytes))
        standing = coverage.add(start, start + nbytes)
        if standing is None:
            assert not wanted & written
            written |= wanted
        else:
            named = set(range(*standing))
            assert named & wanted
            assert named <= written


@given(st.permutations(range(30)), st.integers(1, 9))
def test_pieces_that_meet_are_one(order: list[int], nbytes: int) -> None:
    """In whatever order the pieces of a range come, in the end one range stands."""
    coverage = Coverage()
    for number in order:
        assert coverage.add(number * nbytes, (number + 1) * nbytes) is None

    assert coverage.add(0, 1) == (0, 30 * nbytes)
    assert coverage.add(30 * nbytes - 1, 30 * nbytes) == (0, 30 * nbytes)


def test_what_is_refused_adds_nothing() -> None:
    """A range that overlaps leaves the bytes beside the overlap free."""
    coverage = Coverage()
    coverage.add(10, 20)

    assert coverage.add(5, 11) == (10, 20)
    assert coverage.add(19, 25) == (10, 20)
    assert coverage.add(5, 10) is None
    assert coverage.add(20, 25) is None
