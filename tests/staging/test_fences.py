"""Fences by range: whoever reads waits for what was filled last, of every byte."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvio.staging.allocator import Span
from kvio.staging.device import Fences
from kvio.staging.host import Fence

BYTES = 16


class Marker:
    """A fence that differs from others in nothing else."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Wait for nothing."""


_SPANS = st.lists(
    st.builds(
        lambda start, end: Span(min(start, end), abs(end - start)),
        st.integers(0, BYTES),
        st.integers(0, BYTES),
    ),
    max_size=3,
)


@given(
    st.lists(st.tuples(st.sampled_from(["fill", "release", "drop"]), _SPANS), max_size=15), _SPANS
)
def test_every_byte_has_the_fence_of_its_last_fill(
    steps: list[tuple[str, list[Span]]], asked: list[Span]
) -> None:
    """As if each byte had a place of its own for one; each fence is given once."""
    fences = Fences()
    bytes_of: list[Marker | None] = [None] * BYTES
    for what, spans in steps:
        covered = {at for offset, nbytes in spans for at in range(offset, offset + nbytes)}
        if what == "drop":
            dropped = fences.over(spans)
            for fence in dropped:
                fences.drop(spans, fence)
            assert not fences.over(spans)
            _forget(fences, dropped, bytes_of)
            continue
        new = Marker() if what == "fill" else None
        fences.put(spans, new)
        for at in covered:
            bytes_of[at] = new

    found = fences.over(asked)

    wanted = {
        bytes_of[at]
        for offset, nbytes in asked
        for at in range(offset, offset + nbytes)
        if bytes_of[at] is not None
    }
    assert set(found) == wanted
    assert len(found) == len(wanted)
    for at, own in enumerate(bytes_of):
        one: list[Fence] = [] if own is None else [own]
        assert fences.over([Span(at, 1)]) == one


def _forget(fences: Fences, dropped: Sequence[object], bytes_of: list[Marker | None]) -> None:
    """A fence that was waited for may be forgotten beyond the span too, and no other."""
    for at, fence in enumerate(bytes_of):
        if fence in dropped and not fences.over([Span(at, 1)]):
            bytes_of[at] = None
