"""The promises of a staging tier: deletions, barriers and numbers, when drains begin, closing."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.placement import Placement
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import (
    LONG_S,
    SOON_S,
    ControlledBackend,
    Held,
    begin,
    open_controlled,
    staged,
)
from tests.staging.engines import local

PAGE = 4096


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """A store that claims to make blocks durable."""
    with open_controlled(level="durable") as store:
        yield store


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A tier before it."""
    with staged(store) as tier:
        yield tier


# Deleting


def test_a_deleted_block_is_gone_from_the_tier_and_the_store(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Whichever had it; True if either did."""
    tier.write_block("stored", b"data").wait(timeout=LONG_S)
    tier.pause()
    tier.write_block("staged", b"data")

    assert [tier.delete_block(key) for key in ("stored", "staged", "neither")] == [
        *(True, True),
        False,
    ]
    assert list(tier.list_keys()) == []
    assert tier.stats().used_bytes == 0
    tier.resume()
    tier.barrier(timeout=LONG_S)
    assert store.wrapper.order("begin") == ["stored"]


def test_receipts_of_deleted_writes_end_and_do_not_lie(tier: kvio.StagingTier) -> None:
    """They say that the block was deleted; no barrier reports it, and the sequence goes on."""
    tier.pause()
    receipt = tier.write_block("k", b"data")
    tier.delete_block("k")

    with pytest.raises(kvio.BlockNotFoundError, match="deleted before"):
        receipt.wait(timeout=LONG_S)
    assert (receipt.done, receipt.absorbed, receipt.level) == (True, True, "accepted")
    tier.barrier(timeout=LONG_S)
    assert tier.durable_sequence == 1


def test_a_deletion_waits_for_the_drain_of_its_key(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Else the block would come back."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    store.wrapper.wait_for("begin", "k")
    with pytest.raises(kvio.StorageTimeoutError):
        tier.delete_block("k", timeout=SOON_S)
    thread = threading.Thread(target=tier.delete_block, args=("k",))
    thread.start()
    store.wrapper.let_go()
    thread.join(LONG_S)

    assert store.wrapper.events[-2:] == [("stored", "k"), ("deleted", "k")]
    assert receipt.level == "durable"
    assert not tier.contains("k")


def test_a_write_after_a_deletion_is_stored_after_it(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Per key, order holds over deletions too."""
    tier.pause()
    tier.write_block("k", b"old")
    tier.delete_block("k")
    tier.write_block("k", b"new")
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert store.wrapper.events == [("deleted", "k"), ("begin", "k"), ("stored", "k")]
    assert store.wrapper.peek("k") == b"new"


# Barriers and numbers


def test_a_barrier_covers_all_that_was_accepted_before_it(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """And no more: what is written later may hang."""
    early = [tier.write_block(f"k{n}", b"data") for n in range(30)]
    store.wrapper.hold("late")
    tier.barrier("durable", timeout=LONG_S)
    late = tier.write_block("late", b"data")

    assert all(receipt.level == "durable" for receipt in early)
    assert tier.durable_sequence == 30
    with pytest.raises(kvio.StorageTimeoutError):
        tier.flush(timeout=SOON_S)
    tier.barrier("accepted")
    assert not late.done


def test_the_durable_sequence_never_falls_and_stops_at_the_first_gap(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A later write that is stored does not lift it over an earlier one that is not."""
    store.wrapper.hold("first")
    tier.write_block("first", bytes(600 * 1024))
    store.wrapper.wait_for("begin", "first")
    seen = [tier.durable_sequence]
    for n in range(5):
        tier.write_block(f"k{n}", b"data").wait(timeout=LONG_S)
        seen.append(tier.durable_sequence)
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)

    assert seen == [0] * 6
    assert tier.durable_sequence == 6


def test_verify_compares_the_store_with_what_was_accepted(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Good bytes pass; others, a block that is gone, and an absorbed write do not."""
    receipt = tier.write_block("k", payloads.payload(9_000, 1))
    tier.verify(receipt=receipt, timeout=LONG_S)
    store.write_block("k", payloads.payload(9_000, 2), if_exists="replace")
    with pytest.raises(kvio.CorruptBlockError) as caught:
        tier.verify(receipt)
    store.delete_block("k")
    with pytest.raises(kvio.CorruptBlockError):
        tier.verify(receipt)
    tier.pause()
    absorbed = tier.write_block("a", b"old")
    tier.write_block("a", b"new")
    tier.resume()
    with pytest.raises(kvio.UnsupportedError, match="a newer write absorbed it"):
        tier.verify(absorbed, timeout=LONG_S)

    assert caught.value.key == "k"


def test_verify_finds_bytes_that_changed_on_the_disk(tmp_path: Path) -> None:
    """One byte of a file, behind the tier's back."""
    store = kvio.open_store(f"posix-tmpfile://{tmp_path}/root?create=true", layout="plain")
    with kvio.stage(store, "1MiB", drain_threads=1, close_store=True) as tier:
        receipt = tier.write_block("k", payloads.payload(70_000, 1))
        tier.verify(receipt, timeout=LONG_S)
        path = tmp_path / "root" / "k"
        stored = bytearray(path.read_bytes())
        stored[12_345] ^= 1
        path.write_bytes(stored)

        with pytest.raises(kvio.CorruptBlockError):
            tier.verify(receipt)


def test_the_old_block_is_deleted_only_after_the_new_one_is_durable(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The last checkpoint stands until the next one does."""
    tier.write_block("step-1", b"old").wait(timeout=LONG_S)
    store.wrapper.hold("step-2")
    new = tier.write_block("step-2", b"new")
    future = tier.replace_when_durable("step-1", new)
    store.wrapper.wait_for("begin", "step-2")
    before = (future.done(), tier.contains("step-1"))
    store.wrapper.let_go()

    assert before == (False, True)
    assert future.result(LONG_S) is True
    assert store.wrapper.events[-2:] == [("stored", "step-2"), ("deleted", "step-1")]
    with pytest.raises(kvio.ConfigError):
        tier.replace_when_durable("step-2", new)


# When drains begin


def test_nothing_begins_while_paused(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Writes are taken all the same, and all is drained later."""
    tier.pause()
    for n in range(10):
        tier.write_block(f"k{n}", b"data")
    paused = (tier.stats().paused, list(store.wrapper.events))
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert paused == (True, [])
    assert sorted(store.wrapper.order("stored")) == sorted(f"k{n}" for n in range(10))


def test_drains_from_the_high_mark_go_down_to_the_low_one() -> None:
    """Below the mark overwrites absorb each other; over it the oldest go, and not all."""
    store = open_controlled()
    marks = {"drain_from": "high_water", "high_water": 0.8, "low_water": 0.4}
    with staged(store, 10 * PAGE, drain_threads=1, **marks) as tier:
        for n in range(7):
            tier.write_block(f"k{n}", bytes(PAGE))
        below = list(store.wrapper.events)
        tier.write_block("k7", bytes(PAGE))
        for n in range(4):
            store.wrapper.wait_for("stored", f"k{n}")
        assert below == []
        assert tier.write_block("k7", bytes(PAGE)).wait(timeout=LONG_S)


def test_who_waits_for_a_write_has_it_drained_below_the_mark() -> None:
    """Waiting, a barrier, a future and closing all see to it."""
    store = open_controlled()
    with staged(store, "1MiB", drain_from="high_water") as tier:
        tier.write_block("a", b"1").wait(timeout=LONG_S)
        tier.write_block("b", b"2")
        tier.barrier(timeout=LONG_S)
        tier.write_block("c", b"3").as_future().result(LONG_S)
        tier.write_block("d", b"4")

    assert store.wrapper.order("stored") == ["a", "b", "c", "d"]


# Closing, forks


def test_closing_stores_everything_paused_or_not(store: WrappedStore[ControlledBackend]) -> None:
    """And leaves the store open."""
    tier = kvio.stage(store, "1MiB", drain_threads=2)
    tier.pause()
    for n in range(10):
        tier.write_block(f"k{n}", b"data")
    tier.close()
    tier.close()

    assert sorted(store.list_keys()) == sorted(f"k{n}" for n in range(10))
    for call in (
        lambda: tier.write_block("k", b""),
        lambda: tier.read_block("k"),
        lambda: tier.delete_block("k"),
        lambda: tier.contains("k"),
    ):
        with pytest.raises(kvio.StoreClosedError):
            call()
    store.close()


def test_close_store_closes_the_store_too(store: WrappedStore[ControlledBackend]) -> None:
    """For who opened it only for the tier."""
    with kvio.stage(store, "1MiB", close_store=True) as tier:
        tier.write_block("k", b"data")

    with pytest.raises(kvio.StoreClosedError):
        store.contains("k")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_tier_refuses_in_a_forked_child(tier: kvio.StagingTier) -> None:
    """Its memory and threads are the parent's; the parent goes on, the child's close is nothing."""
    tier.pause()
    receipt = tier.write_block("k", b"data")

    def child() -> None:
        for call in (
            lambda: tier.write_block("k", b""),
            lambda: tier.read_block("k"),
            lambda: receipt.wait(),
            lambda: tier.barrier(),
            lambda: tier.stats(),
        ):
            with pytest.raises(kvio.UnsupportedError, match="fork"):
                call()
        tier.close()

    with local(tier).ledger.lock:  # held at the fork: the child must not wait for it
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(LONG_S))  # a child that waits must not stay
            code = 1
            try:
                child()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    tier.resume()
    assert receipt.wait(timeout=LONG_S).nbytes == 4


def test_a_tier_does_not_pickle(tier: kvio.StagingTier) -> None:
    """It says why."""
    with pytest.raises(kvio.UnsupportedError, match="cannot be pickled"):
        pickle.dumps(tier)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"when_full": "drop"}, "when_full"),
        ({"drain_from": "never"}, "drain_from"),
        ({"high_water": 0.5, "low_water": 0.6}, "high_water"),
        ({"high_water": 1.5}, "high_water"),
        ({"retries": -1}, "retries"),
        ({"drain_threads": 0}, "drain_threads"),
        ({"drain_threads": 0, "placement": Placement()}, "drain_threads"),
        ({"timeout": 0.0}, "timeout"),
        ({"capacity": "lots"}, "size in bytes"),
        ({"capacity": 100}, "at least 4096"),
    ],
)
def test_options_that_cannot_be_are_refused(
    store: WrappedStore[ControlledBackend], options: dict[str, object], says: str
) -> None:
    """Before any memory is taken; the error says which."""
    with pytest.raises(kvio.ConfigError, match=says):
        kvio.stage(store, **options)  # type: ignore[arg-type]


class HeldFill:
    """A tier whose copies into staging memory begin and go on when they are let."""

    def __init__(self, tier: kvio.StagingTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tier, self.held = tier, Held()
        fill = tier._engine.memory.fill

        def held(*args: Any, **options: Any) -> Any:
            self.held(None)
            return fill(*args, **options)

        monkeypatch.setattr(type(tier._engine.memory), "fill", staticmethod(held))

    def write(self) -> threading.Thread:
        """Begin a write, up to its copy."""
        writer = begin(lambda: self.tier.write_block("k", [b"da", b"ta"]))
        assert self.held.entered.wait(LONG_S)
        return writer


def test_closing_waits_for_a_write_that_is_being_copied(
    store: WrappedStore[ControlledBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was accepted before close() is stored by it."""
    tier = kvio.stage(store, "1MiB")
    fill = HeldFill(tier, monkeypatch)
    writer = fill.write()
    ledger, ended = local(tier).ledger, []

    def close() -> None:
        try:
            tier.close(timeout=LONG_S)
            ended.append("closed")
        except kvio.KvioError as exc:
            ended.append(repr(exc))
        with ledger.lock:
            ledger.work.notify_all()

    closer = begin(close)
    with ledger.lock:
        assert ledger.work.wait_for(lambda: ledger.closing or ended, LONG_S)
    early = list(ended)
    fill.held.let_go()
    for thread in (writer, closer):
        thread.join(LONG_S)

    assert early == []
    assert ended == ["closed"]
    assert store.wrapper.peek("k") == b"data"
    store.close()


def test_closing_does_not_end_well_over_a_write_that_is_being_copied(
    store: WrappedStore[ControlledBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its time is up the tier stays open, and the write is stored later."""
    with staged(store) as tier:
        fill = HeldFill(tier, monkeypatch)
        writer = fill.write()
        with pytest.raises(kvio.TierNotDrainedError):
            tier.close(timeout=SOON_S)
        fill.held.let_go()
        writer.join(LONG_S)
        tier.flush(timeout=LONG_S)

        assert store.wrapper.peek("k") == b"data"


def test_a_tier_shows_what_it_is(store: WrappedStore[ControlledBackend]) -> None:
    """Its memory, its size, its store and whether it is open."""
    tier = kvio.stage(store, "1MiB")
    shown = f"<kvio.StagingTier host 1048576 bytes, {store!r}"
    assert repr(tier) == f"{shown} open>"
    receipt = tier.write_block("k", b"data")
    receipt.wait(timeout=LONG_S)
    assert repr(receipt) == "<StagedReceipt 'k' #1 4 bytes durable>"
    tier.close()
    assert repr(tier) == f"{shown} closed>"
    store.close()
