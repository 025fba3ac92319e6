"""A failed write that is retried is open for its client, by any process and however late."""

from __future__ import annotations

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.pending_writes import PendingWrites
from kvio.staging.daemon.protocol import failure_of
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.receipts import OpenReceipt, StagedReceipt, TierState
from kvio.testing.fakes import WrappedStore
from kvio.types import Level
from tests.staging.controlled import LONG_S, SOON_S, ControlledBackend, Held, disk_error
from tests.staging.daemon.daemons import until
from tests.staging.engines import remote


def _write_twice(first: StagingTier, second: StagingTier) -> list[StagedReceipt]:
    """Write one block by two calls that one drain will answer, once somebody resumes."""
    first.pause()
    return [first.write_block("k", b"data"), second.write_block("k", b"data", if_exists="keep")]


def _fail(receipt: StagedReceipt) -> None:
    with pytest.raises(kvio.StorageError):
        receipt.wait(timeout=LONG_S)


def test_a_client_waits_for_what_another_drives_again(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It is notified; and until then it does not take the write for one that is made good."""
    mine, theirs = _write_twice(tier, other)
    store.wrapper.fail("k", disk_error())
    tier.resume()
    for receipt in (mine, theirs):
        _fail(receipt)
    store.wrapper.hold("k")
    assert other.retry_failed() == [theirs]
    assert tier.failed in ([], [mine])
    until(lambda: not mine.done)

    assert tier.failed == []
    with pytest.raises(kvio.StorageTimeoutError):
        tier.barrier(timeout=SOON_S)
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)
    assert mine.receipt is not None
    assert mine.error is None


def test_a_client_waits_for_what_takes_the_place_of_its_failed_write(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Also if another client wrote it: the failed write ends with it, and a barrier with both."""
    store.wrapper.fail("k", disk_error())
    mine = tier.write_block("k", b"mine")
    _fail(mine)
    store.wrapper.hold("k")
    theirs = other.write_block("k", b"theirs")

    until(lambda: not mine.done)
    with pytest.raises(kvio.StorageTimeoutError):
        tier.barrier(timeout=SOON_S)
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)
    assert mine.wait(timeout=LONG_S) == theirs.wait(timeout=LONG_S)
    assert mine.absorbed


def test_a_barrier_asks_what_became_of_a_failed_write(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Another client deleted the key: nothing is left to retry or to discard."""
    store.wrapper.fail("k", disk_error())
    _fail(tier.write_block("k", b"mine"))
    other.delete_block("k")

    tier.barrier(timeout=LONG_S)


def test_a_failure_that_is_heard_late_ends_no_barrier(
    tier: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """One drain failed for two calls, and was retried when but one had been reported."""
    reported = Held()
    first, second = _write_twice(tier, tier)
    first.add_done_callback(reported)  # and with it waits whatever else is heard
    store.wrapper.fail("k", disk_error())
    tier.resume()
    assert reported.entered.wait(LONG_S)
    store.wrapper.hold("k")
    assert tier.retry_failed() == [first]
    reported.let_go()

    with pytest.raises(kvio.StorageTimeoutError):
        tier.barrier(timeout=SOON_S)
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)
    assert [first.error, second.error] == [None, None]


def test_what_is_retried_is_not_over(
    tier: StagingTier, daemon: StageDaemon, store: WrappedStore[ControlledBackend]
) -> None:
    """A client that asks before the daemon has reported it hears that the write is open again."""
    store.wrapper.fail("k", disk_error())
    receipt = tier.write_block("k", b"data")
    _fail(receipt)
    store.wrapper.hold("k")
    daemon.core.ledger.retry_failed()

    assert tier.failed in ([], [receipt])
    until(lambda: not receipt.done)
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)
    assert receipt.error is None


def test_what_was_driven_before_it_could_be_given_up_is_reported_of(
    tier: StagingTier,
    daemon: StageDaemon,
    store: WrappedStore[ControlledBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`discard` comes after the deadline, says so, and the client hears how the write ends."""
    ledger = daemon.core.ledger

    def too_late(_: StagedReceipt) -> bool:
        ledger.retry_failed()
        return False

    monkeypatch.setattr(ledger, "discard", too_late)
    store.wrapper.fail("k", disk_error())
    receipt = tier.write_block("k", b"data")
    _fail(receipt)

    assert not tier.discard(receipt)
    daemon.retry_failed()
    until(lambda: receipt.receipt is not None)


def test_only_what_has_failed_here_can_be_given_up(
    tier: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Not a write of another tier that happens to have the same number."""
    store.wrapper.fail("k", disk_error())
    receipt = tier.write_block("k", b"data")
    _fail(receipt)
    namesake = OpenReceipt(
        TierState(Level.DURABLE), "k", nbytes=4, checksum=None, sequence=receipt.sequence
    )

    assert not tier.discard(namesake)
    assert tier.failed == [receipt]
    assert tier.discard(receipt)
    assert not tier.discard(receipt)


def test_a_failure_made_good_is_forgotten_on_both_sides(
    tier: StagingTier, daemon: StageDaemon, store: WrappedStore[ControlledBackend]
) -> None:
    """Else each would keep it as long as the client lives."""
    store.wrapper.fail("k", disk_error())
    _fail(tier.write_block("k", b"data"))
    tier.write_block("k", b"newer").wait(timeout=LONG_S)
    tier.barrier(timeout=LONG_S)

    assert tier.failed == []
    assert remote(tier).pending_writes.failed() == {}
    assert [session._failed for session in daemon._sessions.values()] == [{}]


FAILED = say.Failed(1, absorbed=False, failure=failure_of(disk_error()))


def _pending_writes() -> tuple[PendingWrites, OpenReceipt]:
    pending_writes = PendingWrites(TierState(Level.DURABLE), "/daemon")
    return pending_writes, pending_writes.accept("k", 4, checksum=None, sequence=1)


def test_nobody_who_waits_trusts_what_is_older_than_the_last_answer() -> None:
    """Three events had been reported when the write was retried; the last two are history."""
    pending_writes, receipt = _pending_writes()
    pending_writes.hear(FAILED)
    pending_writes.reopen(pending_writes.failed(), events=3)
    pending_writes.hear(FAILED)

    assert not pending_writes.wait(1, timeout=0.0)
    pending_writes.hear(say.Driven(1))
    assert not receipt.done
    assert not pending_writes.wait(1, timeout=0.0)
    pending_writes.hear(FAILED)
    assert pending_writes.wait(1, timeout=0.0)
    assert pending_writes.failures(1) == [receipt]


def test_an_answer_that_comes_late_opens_nothing_again() -> None:
    """The write was driven, and failed once more, before the answer was looked at."""
    pending_writes, receipt = _pending_writes()
    pending_writes.hear(FAILED)
    failed = pending_writes.failed()
    for event in (say.Driven(1), FAILED):
        pending_writes.hear(event)
    pending_writes.reopen(failed, events=3)

    assert receipt.done
    assert pending_writes.wait(1, timeout=0.0)


def test_a_daemon_may_tell_of_all_that_before_the_write_has_returned() -> None:
    """What it reported last counts."""
    pending_writes = PendingWrites(TierState(Level.DURABLE), "/daemon")
    for event in (FAILED, say.Driven(1)):
        pending_writes.hear(event)
    receipt = pending_writes.accept("k", 4, checksum=None, sequence=1)

    assert not receipt.done
    assert not pending_writes.wait(1, timeout=0.0)


def test_nobody_waits_for_events_of_a_daemon_that_is_gone() -> None:
    """Neither for writes nor for what it would have reported of them."""
    pending_writes, _ = _pending_writes()
    pending_writes.hear(FAILED)
    pending_writes.reopen(pending_writes.failed(), events=3)
    pending_writes.lose()

    assert pending_writes.wait(1, timeout=0.0)
