"""Who waits for a write is notified before the tier, the daemon or its client is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

import kvio
from kvio import KiB, MiB
from kvio.staging.daemon.pending_writes import PendingWrites
from kvio.staging.daemon.protocol import Driven, Failed, Stored
from kvio.staging.daemon.server import Session
from kvio.staging.daemon.sockets import Peer
from kvio.staging.receipts import OpenReceipt, TierState, resolve
from kvio.types import IOMode, Level
from tests.staging.controlled import LONG_S, Held, begin, disk_error, open_controlled, staged
from tests.staging.engines import local
from tests.staging.test_tier_full import Writer

STORED = kvio.Receipt("k", 4, None, Level.DURABLE, IOMode.MEMORY, "", False)


def test_close_waits_for_the_one_who_carries_an_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer or a reader may carry off what a drain has left to be reported."""
    store, held = open_controlled(), Held()
    with staged(store) as tier:
        monkeypatch.setattr(local(tier).drains, "_deliver", lambda: None)
        store.wrapper.hold("k")
        receipt = tier.write_block("k", b"data")
        receipt.add_done_callback(held)
        store.wrapper.let_go()
        while not receipt.done:
            pass
        carrier = begin(local(tier).ledger.deliver)
        assert held.entered.wait(LONG_S)
        closer = begin(tier.close)
        closer.join(0.2)
        assert closer.is_alive(), "closed while a callback was under way"
        held.let_go()
        closer.join(LONG_S)
        carrier.join(LONG_S)

        assert not closer.is_alive()


def test_a_callback_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for itself, on whatever thread it runs."""
    store = open_controlled()
    with staged(store) as tier:
        monkeypatch.setattr(local(tier).drains, "_deliver", lambda: None)
        store.wrapper.hold("k")
        receipt = tier.write_block("k", b"data")
        receipt.add_done_callback(lambda _: tier.close(timeout=LONG_S))
        store.wrapper.let_go()
        while not receipt.done:
            pass
        carrier = begin(local(tier).ledger.deliver)
        carrier.join(LONG_S)

        assert not carrier.is_alive()
        with pytest.raises(kvio.StoreClosedError):
            tier.write_block("k", b"data")


def test_a_writer_is_reported_that_the_tier_was_closing() -> None:
    """Though it stays open, as it could not be drained in time: no block has failed."""
    store = open_controlled()
    with staged(store, MiB, drain_threads=1) as tier:
        store.wrapper.hold("a")
        tier.write_block("a", bytes(MiB))
        writer = Writer(tier, "b", 1).start_and_wait()
        with pytest.raises(kvio.TierNotDrainedError):
            tier.close(timeout=0.0)
        writer.join(LONG_S)

        assert isinstance(writer.error, kvio.StoreClosedError)


def test_room_of_a_write_that_lost_its_race_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it raises: `grow` waits for pages that are on their way."""
    store = open_controlled()
    with staged(store, MiB) as tier:
        store.wrapper.hold("k")
        fill = local(tier).memory.fill

        def overtaken(*args: object, **options: object) -> object:
            monkeypatch.setattr(local(tier).memory, "fill", fill)
            tier.write_block("k", b"first")
            tier.shrink(MiB)
            return fill(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(local(tier).memory, "fill", overtaken)
        with pytest.raises(kvio.BlockExistsError):
            tier.write_block("k", bytes(64 * KiB), if_exists="error")
        grower = begin(lambda: tier.grow(64 * KiB))
        grower.join(LONG_S)

        assert not grower.is_alive()


@pytest.fixture
def session() -> Iterator[Session]:
    """A session that sends nothing."""
    ours, theirs = socket.socketpair()
    yield Session(ours, Peer(os.getpid(), os.getuid()))
    ours.close()
    theirs.close()


@pytest.fixture
def receipt() -> OpenReceipt:
    """A write's."""
    return OpenReceipt(TierState(Level.DURABLE), "k", nbytes=4, checksum=None, sequence=1)


def test_a_client_is_not_reported_of_a_failure_that_is_history(
    session: Session, receipt: OpenReceipt
) -> None:
    """Its callback comes late: the write is open again by then, and is watched."""
    session.watch(receipt)
    failed = receipt.settle(None, disk_error())
    receipt.reopen()
    resolve(failed)
    resolve(receipt.settle(STORED, None))

    assert [type(event) for event in session._events] == [Stored]
    assert session.failed([1]) == {}


def test_a_client_is_reported_that_a_write_is_retried(
    session: Session, receipt: OpenReceipt
) -> None:
    """Once for each time, and before the notification how it ended, for the same error too."""
    error = disk_error()
    session.watch(receipt)
    resolve(receipt.settle(None, error))
    session.watch_again()
    receipt.reopen()
    resolve(receipt.settle(None, error))
    session.watch_again()
    session.watch_again()

    assert [type(event) for event in session._events] == [Failed, Driven, Failed]
    assert session.events_sent == 3
    assert session.failed([1]) == {receipt: 1}
    assert session.failed([2]) == {}


def test_a_client_that_closes_has_reported_everybody() -> None:
    """What follows the last write's end may still ask the daemon for something."""
    held = Held()
    pending_writes = PendingWrites(TierState(Level.DURABLE), "/daemon")
    receipt = pending_writes.accept("k", 4, checksum=None, sequence=1)
    receipt.add_done_callback(held)
    event = Stored(1, False, 4, None, Level.DURABLE, IOMode.MEMORY, False, "")
    teller = begin(lambda: pending_writes.hear(event))
    assert held.entered.wait(LONG_S)
    assert pending_writes.wait(1, LONG_S)
    assert not pending_writes.wait_reported(0.0)
    held.let_go()
    teller.join(LONG_S)

    assert pending_writes.wait_reported(LONG_S)


def test_what_is_held_back_meanwhile_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a call hangs is asked with the lock, so that no drain adds its memory in between."""
    locked = []
    with staged(open_controlled()) as tier:
        lock = local(tier).ledger.lock

        def hanging() -> bool:
            locked.append(lock._is_owned())  # type: ignore[attr-defined]
            return True

        monkeypatch.setattr(local(tier).ledger.allocator, "_quarantined", [()])
        monkeypatch.setattr(local(tier).drains, "hanging", hanging)
        local(tier).drains._look_at_held()
        monkeypatch.undo()

    assert locked == [True]
