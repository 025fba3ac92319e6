"""The ledger of a tier, without drains: what it does with failures of several owners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvio
from kvio.types import Level
from kvio.wrappers.staging.extents import Extents
from kvio.wrappers.staging.ledger import Ledger
from kvio.wrappers.staging.pending import Entry
from kvio.wrappers.staging.receipts import Gate, OpenReceipt

PAGE = 4096


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger of 16 pages that gives up at the first failure; in the end it has them all."""
    ledger = Ledger(Gate(Level.DURABLE), Extents(16 * PAGE), retries=0, release=lambda _: None)
    yield ledger
    fail_all(ledger)
    for entry in list(ledger.failed.values()):
        ledger.discard(entry.receipt)
    assert ledger.room.used_bytes == 0


def _next(ledger: Ledger) -> Entry | None:
    return ledger.lanes.start() if ledger.lanes.peek() is not None else None


def stage(ledger: Ledger, key: str) -> OpenReceipt:
    """Accept a block of a page."""
    spans = ledger.room.take(PAGE)
    assert spans is not None
    ledger.filling += 1
    return ledger.commit(key, spans, nbytes=PAGE, checksum=None, if_exists="replace")


def fail_all(ledger: Ledger) -> None:
    """Let every drain fail for good."""
    while (entry := _next(ledger)) is not None:
        ledger.drained([entry], [kvio.StorageError("no", key=entry.key)])


def test_failures_of_some_are_driven_alone(ledger: Ledger) -> None:
    """The others stay as they are: failed, staged, and told of."""
    ours, theirs = stage(ledger, "ours"), stage(ledger, "theirs")
    fail_all(ledger)

    assert ledger.retry_failed([ours]) == [ours]

    assert (ours.done, theirs.done) == (False, True)
    assert isinstance(theirs.error, kvio.StorageError)
    assert [entry.receipt for entry in ledger.failed.values()] == [theirs]
    assert ledger.unreported == [theirs]
    assert ledger.room.stuck_bytes == PAGE
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
