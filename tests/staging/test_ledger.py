"""The ledger of a tier, without drains: what it does with failures of several owners."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import kvio
from kvio.staging.allocator import Extents
from kvio.staging.ledger import Ledger
from kvio.staging.pending import Entry
from kvio.staging.receipts import OpenReceipt, TierState
from kvio.types import Level
from tests.inside import wait_until_inside
from tests.staging.controlled import LONG_S, open_controlled, staged
from tests.staging.engines import local

PAGE = 4096


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger of 16 pages that does not retry; in the end it has them all."""
    ledger = Ledger(TierState(Level.DURABLE), Extents(16 * PAGE), retries=0, release=lambda _: None)
    yield ledger
    fail_all(ledger)
    for entry in list(ledger.failed.values()):
        ledger.discard(entry.receipt)
    assert ledger.allocator.used_bytes == 0


def _next(ledger: Ledger) -> Entry | None:
    return ledger.key_queues.start() if ledger.key_queues.peek() is not None else None


def stage(ledger: Ledger, key: str) -> OpenReceipt:
    """Accept a block of a page."""
    spans = ledger.allocator.reserve(PAGE)
    assert spans is not None
    ledger.filling += 1
    return ledger.commit(key, spans, nbytes=PAGE, checksum=None, if_exists="replace")


def fail_all(ledger: Ledger) -> None:
    """Let every drain fail for good."""
    while (entry := _next(ledger)) is not None:
        ledger.drained([entry], [kvio.StorageError("no", key=entry.key)])


def test_failures_of_some_are_driven_alone(ledger: Ledger) -> None:
    """The others stay as they are: failed, staged, and reported."""
    ours, theirs = stage(ledger, "ours"), stage(ledger, "theirs")
    fail_all(ledger)

    assert ledger.retry_failed([ours]) == [ours]

    assert (ours.done, theirs.done) == (False, True)
    assert isinstance(theirs.error, kvio.StorageError)
    assert [entry.receipt for entry in ledger.failed.values()] == [theirs]
    assert ledger.failures_locked() == [theirs]
    assert ledger.allocator.stuck_bytes == PAGE
    assert ledger.retry_failed([ours]) == []


def test_an_absorbed_write_drives_what_took_its_place(ledger: Ledger) -> None:
    """Its promise is that block's."""
    old = stage(ledger, "k")
    new = stage(ledger, "k")
    fail_all(ledger)
    assert old.absorbed

    assert ledger.retry_failed([old]) == [new]

    assert (old.done, new.done, ledger.failed) == (False, False, {})


def test_without_a_choice_all_are_driven(ledger: Ledger) -> None:
    """And with an empty one, none."""
    one, two = stage(ledger, "one"), stage(ledger, "two")
    fail_all(ledger)

    assert ledger.retry_failed([]) == []
    assert ledger.retry_failed() == [one, two]


@pytest.mark.parametrize(
    ("marks", "begin", "end"),
    [({}, 9, 7), ({"high_water": 0.8, "low_water": 0.4}, 8, 4), ({"low_water": 0.0}, 9, 0)],
    ids=["default", "given", "all"],
)
def test_drains_begin_at_the_high_mark_and_end_at_the_low_one(
    marks: dict[str, float], begin: int, end: int
) -> None:
    """Of ten pages: the marks themselves included, and not a block more."""
    with staged(open_controlled(), 10 * PAGE, drain_from="high_water", **marks) as tier:
        ledger = local(tier).ledger
        filled = []
        while ledger.allocator.used_bytes < begin * PAGE:
            filled.append(ledger.wanted())
            stage(ledger, f"k{len(filled)}")
        while ledger.wanted() and (entry := _next(ledger)) is not None:
            local(tier).drains._drain([entry])
        used_bytes = ledger.allocator.used_bytes
        local(tier).drains.start()  # closing the tier drains what is left

        assert not any(filled)
        assert used_bytes == end * PAGE


def test_pages_are_not_put_back_to_use_while_the_system_takes_them() -> None:
    """Growing waits until shrinking has given them back: else a new block's bytes would be lost."""
    events: list[str] = []

    def grow() -> None:
        ledger.grow(PAGE)
        events.append("grown")

    def release(_: object) -> None:
        thread.start()
        wait_until_inside(thread, "wait_released")
        events.append("released")

    thread = threading.Thread(target=grow)
    ledger = Ledger(TierState(Level.DURABLE), Extents(16 * PAGE), retries=0, release=release)
    ledger.shrink(PAGE)
    thread.join(LONG_S)

    assert events == ["released", "grown"]
    assert ledger.allocator.capacity_bytes == 16 * PAGE
