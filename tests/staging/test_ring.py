"""A buffer that is lent out: bounded, in order, and never under a call that may still read it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvio
from kvio.staging.device import Ring
from kvio.staging.host import HostMemory
from kvio.types import Parts
from tests.inside import wait_until_inside

from .controlled import LONG_S
from .test_pages import address_of

PAGE = 4096
PAGES = 8


def ring(*, patience_s: float = LONG_S) -> Ring:
    """Make a ring of 8 pages."""
    return Ring(HostMemory(PAGES * PAGE), patience_s=patience_s)


def leave_quarantined(ring: Ring, nbytes: int, hanging: list[int]) -> Parts:
    """Lend to a call that is abandoned and hangs as long as the list has something."""
    with ring.lend(nbytes, timeout=0) as parts:
        ring.quarantine(parts, lambda: bool(hanging))
    return parts


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGES * PAGE - 1, PAGES * PAGE, 20 * PAGE + 1])
def test_what_is_lent_has_the_length_that_was_asked_for(nbytes: int) -> None:
    """In whole pages, longer than the ring too, and it comes back."""
    lender = ring()
    for _ in range(3):
        with lender.lend(nbytes, timeout=0) as parts:
            assert sum(map(len, parts)) == nbytes
            assert all(address_of(part) % PAGE == 0 for part in parts if len(part))
            assert lender.lent_bytes <= PAGES * PAGE
        assert lender.lent_bytes == 0


def test_it_is_bounded() -> None:
    """What others have is waited for, and no longer than one likes."""
    lender = ring()
    with (
        lender.lend(6 * PAGE),
        pytest.raises(kvio.StorageTimeoutError, match=f"no room for {3 * PAGE} bytes") as late,
        lender.lend(3 * PAGE, timeout=0),
    ):
        pytest.fail("lent twice")

    assert "hang" not in str(late.value)


def test_bytes_under_a_call_that_hangs_stay() -> None:
    """Its pages are not lent again before it has ended; then they are."""
    lender, hanging = ring(), [1]
    kept = leave_quarantined(lender, 4 * PAGE, hanging)
    places = {address_of(part) for part in kept}
    with lender.lend(4 * PAGE, timeout=0) as parts, lender.lend(4 * PAGE, timeout=0) as more:
        assert places.isdisjoint(map(address_of, [*parts, *more]))
        assert lender.lent_bytes == 12 * PAGE
    hanging.clear()

    with lender.lend(PAGES * PAGE, timeout=0) as parts:
        assert lender.lent_bytes == PAGES * PAGE
        assert places == {address_of(part) for part in parts}


def test_calls_that_hang_never_have_more_than_two_rings() -> None:
    """Others go on with as much as is quarantined; then an error says why there is no room."""
    lender, hanging = ring(), [1]
    for _ in range(4):
        leave_quarantined(lender, 4 * PAGE, hanging)
    assert lender.lent_bytes == 16 * PAGE
    with (
        pytest.raises(kvio.StorageTimeoutError, match=f"{16 * PAGE} bytes are kept"),
        lender.lend(1, timeout=0),
    ):
        pytest.fail("lent beyond the bound")
    hanging.clear()

    with lender.lend(1, timeout=0):
        assert lender.lent_bytes == PAGE


def test_who_has_no_limit_is_refused_when_all_is_quarantined() -> None:
    """Such calls may hang for ever, and a wait for them ends."""
    lender, hanging = ring(patience_s=0.01), [1]
    for _ in range(2):
        leave_quarantined(lender, PAGES * PAGE, hanging)
    with (
        pytest.raises(kvio.StorageTimeoutError, match="still hang"),
        lender.lend(20 * PAGE),
    ):
        pytest.fail("lent beyond the bound")


def test_who_waits_goes_on_when_nothing_hangs_any_more() -> None:
    """The ring is not notified: it polls."""
    lender, hanging = ring(), [1]
    for _ in range(2):
        leave_quarantined(lender, PAGES * PAGE, hanging)
    got: list[int] = []

    def take() -> None:
        with lender.lend(PAGE) as parts:
            got.append(len(parts[0]))

    thread = threading.Thread(target=take)
    thread.start()
    hanging.clear()
    thread.join(LONG_S)

    assert got == [PAGE]


def test_a_wait_for_a_call_that_does_not_hang_has_no_limit() -> None:
    """Memory that will be given back is waited for, however much of the ring is quarantined."""
    lender, hanging = ring(patience_s=0.0), [1]
    leave_quarantined(lender, 6 * PAGE, hanging)
    got: list[int] = []

    def take() -> None:
        with lender.lend(3 * PAGE) as parts:
            got.extend(map(len, parts))

    thread = threading.Thread(target=take)
    with lender.lend(6 * PAGE, timeout=0):
        thread.start()
        wait_until_inside(thread, "wait")
    thread.join(LONG_S)
    hanging.clear()

    assert got == [3 * PAGE]


class Borrowers(RuleBasedStateMachine):
    """Each writes a byte of its own over all it was lent; some are abandoned, and hang a while."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = ring()
        self.loans: list[tuple[ExitStack, Parts, int]] = []
        self.hung: list[tuple[list[int], Parts, int]] = []
        self.mark = 0

    @rule(nbytes=st.integers(0, 10 * PAGE))
    def borrow(self, nbytes: int) -> None:
        stack = ExitStack()
        try:
            parts = stack.enter_context(self.ring.lend(nbytes, timeout=0))
        except kvio.StorageTimeoutError:
            return
        self.mark = self.mark % 250 + 1
        for part in parts:
            part[:] = bytes([self.mark]) * len(part)
        self.loans.append((stack, parts, self.mark))

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 99), quarantined=st.booleans())
    def end(self, which: int, quarantined: bool) -> None:  # noqa: FBT001
        stack, parts, mark = self.loans.pop(which % len(self.loans))
        hanging = [1]
        if quarantined:
            self.ring.quarantine(parts, lambda: bool(hanging))
            self.hung.append((hanging, parts, mark))
        stack.close()

    @precondition(lambda self: self.hung)
    @rule(which=st.integers(0, 99))
    def stop_hanging(self, which: int) -> None:
        hanging, _, _ = self.hung.pop(which % len(self.hung))
        hanging.clear()

    @invariant()
    def everybody_sees_their_own_bytes(self) -> None:
        for _, parts, mark in [*self.loans, *self.hung]:
            assert all(part == bytes([mark]) * len(part) for part in parts)

    @invariant()
    def it_is_bounded(self) -> None:
        assert self.ring.lent_bytes <= 2 * PAGES * PAGE

    def teardown(self) -> None:
        for stack, _, _ in self.loans:
            stack.close()
        for hanging, _, _ in self.hung:
            hanging.clear()
        with self.ring.lend(PAGES * PAGE, timeout=0):
            assert self.ring.lent_bytes == PAGES * PAGE, "something was never given back"


TestBorrowers = Borrowers.TestCase
TestBorrowers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_is_quarantined_counts_against_who_wants_more_than_the_rest() -> None:
    """Three pages of four, of which two may be looked at: only the end of those calls helps."""
    lender, hanging = Ring(HostMemory(4 * PAGE), patience_s=0.01), [1]
    leave_quarantined(lender, 2 * PAGE, hanging)
    with (
        pytest.raises(kvio.StorageTimeoutError, match="still hang"),
        lender.lend(3 * PAGE),
    ):
        pytest.fail("lent what a call that hangs may look at")
    hanging.clear()

    with lender.lend(3 * PAGE, timeout=0):
        assert lender.lent_bytes == 3 * PAGE
