"""Receipts: a write's level now, ways to wait for it, and what failure looks like."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Iterator

import pytest

import kvio
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import (
    LONG_S,
    SOON_S,
    ControlledBackend,
    disk_error,
    open_controlled,
    staged,
)


@pytest.fixture
def store() -> WrappedStore[ControlledBackend]:
    """A store that claims to make blocks durable."""
    return open_controlled(level="durable")


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A tier before it."""
    with staged(store, retries=0) as tier:
        yield tier


def test_a_receipt_tells_key_length_checksum_and_number(tier: kvio.StagingTier) -> None:
    """They are known when the write returns, and the checksum is that of the bytes."""
    data = payloads.payload(5000, 1)
    first = tier.write_block("a", [data[:3], data[3:]])
    second = tier.write_block("b", b"")

    assert (first.key, first.nbytes, first.sequence) == ("a", 5000, 1)
    assert first.checksum == payloads.crc32c(data)
    assert (second.nbytes, second.checksum, second.sequence) == (0, 0, 2)


def test_a_level_is_reached_when_the_store_says_so(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Accepted until the store has the block, then what the store's receipt says."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    before = (receipt.level, receipt.done, receipt.receipt)
    assert receipt.wait("accepted").level == "accepted"
    store.wrapper.let_go()
    stored = receipt.wait("durable", timeout=LONG_S)

    assert before == (kvio.Level.ACCEPTED, False, None)
    assert stored.level is kvio.Level.DURABLE
    assert (receipt.level, receipt.done, receipt.receipt) == ("durable", True, stored)
    assert receipt.error is None


def test_waiting_gives_up_in_time_and_the_write_goes_on(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """`StorageTimeoutError`, and the block is stored later nevertheless."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    with pytest.raises(kvio.StorageTimeoutError) as caught:
        receipt.wait(timeout=SOON_S)
    store.wrapper.let_go()

    assert caught.value.key == "k"
    assert receipt.wait(timeout=LONG_S).nbytes == 4


def test_a_level_the_store_does_not_give_is_refused_at_once() -> None:
    """On a store of visible blocks nobody waits for durable ones, paused or not."""
    with staged(open_controlled(level="visible")) as tier:
        tier.pause()
        receipt = tier.write_block("k", b"data")
        for wait in (receipt.wait, tier.barrier):
            with pytest.raises(kvio.UnsupportedError, match="durability='durable'"):
                wait("durable")
            with pytest.raises(kvio.ConfigError, match="level must be"):
                wait("eternal")
        with pytest.raises(kvio.UnsupportedError):
            tier.replace_when_durable("old", receipt)


def test_a_store_that_gives_less_than_it_promised_is_found_out(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A receipt's level is the store's own; waiting for more is an error, not a lie."""
    store.wrapper.level = kvio.Level.VISIBLE
    receipt = tier.write_block("k", b"data")

    with pytest.raises(kvio.UnsupportedError, match="reached 'visible'"):
        receipt.wait("durable", timeout=LONG_S)
    assert receipt.wait("visible", timeout=LONG_S).level == "visible"


def test_dropping_a_receipt_cancels_nothing(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The block is stored though nobody holds its receipt or a future of it."""
    store.wrapper.hold("k")
    tier.write_block("k", b"data").as_future()
    gc.collect()
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)

    assert store.wrapper.peek("k") == b"data"


def test_a_receipt_is_awaited(tier: kvio.StagingTier) -> None:
    """Without a thread of the event loop's waiting."""

    async def write() -> kvio.Receipt:
        return await tier.write_block("k", b"data")

    assert asyncio.run(write()).level == "durable"


def test_cancelling_a_task_that_awaits_cancels_no_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The task ends, the block is stored."""
    store.wrapper.hold("k")

    async def write() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(tier.write_block("k", b"data")), SOON_S)

    asyncio.run(write())
    store.wrapper.let_go()
    tier.barrier(timeout=LONG_S)
    assert store.wrapper.peek("k") == b"data"


async def _awaited(receipt: kvio.StagedReceipt) -> kvio.Receipt:
    return await receipt


def test_a_future_cannot_be_cancelled_and_has_the_stores_receipt(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Every future of one receipt ends with it."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    futures = [receipt.as_future(), receipt.as_future()]
    assert not any(future.cancel() for future in futures)
    store.wrapper.let_go()
    stored = receipt.wait(timeout=LONG_S)

    assert [future.result(LONG_S) for future in futures] == [stored, stored]
    assert receipt.as_future().result(0) == stored


def test_callbacks_are_called_once_with_the_receipt(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """When it is done, or at once where it is."""
    seen: list[kvio.StagedReceipt] = []
    called = threading.Event()
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    receipt.add_done_callback(seen.append)
    receipt.add_done_callback(lambda _: called.set())
    before = list(seen)
    store.wrapper.let_go()
    assert called.wait(LONG_S)
    receipt.add_done_callback(seen.append)

    assert before == []
    assert seen == [receipt, receipt]


@pytest.mark.torch
def test_a_torch_future_ends_with_the_receipt(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """`wait` and `value` give the store's receipt, or raise what the write failed with."""
    pytest.importorskip("torch", reason="torch is not installed")
    good = tier.write_block("good", b"data").as_torch_future()
    store.wrapper.fail("bad", disk_error("bad"))
    bad = tier.write_block("bad", b"data").as_torch_future()

    assert good.wait().key == good.value().key == "good"
    with pytest.raises(kvio.StorageError):
        bad.wait()


def test_a_failed_write_has_its_error_on_the_receipt(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Raised by `wait`, and there for whoever looks; the level stays accepted."""
    error = disk_error()
    store.wrapper.fail("k", error)
    receipt = tier.write_block("k", b"data")

    with pytest.raises(kvio.StorageError) as caught:
        receipt.wait(timeout=LONG_S)
    assert caught.value is error
    assert (receipt.done, receipt.error, receipt.level) == (True, error, "accepted")
    assert receipt.receipt is None


def test_a_failure_that_is_retried_never_looks_stored(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A callback may look at the receipt after others drive it again: it has its error still."""
    error = disk_error()
    reported, again, looked = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def look(receipt: kvio.StagedReceipt) -> None:
        reported.set()
        again.wait(LONG_S)
        seen.append((receipt.done, receipt.error, receipt.receipt))
        looked.set()

    store.wrapper.fail("k", error)
    receipt = tier.write_block("k", b"data")
    receipt.add_done_callback(look)
    assert reported.wait(LONG_S)
    store.wrapper.hold("k")
    assert tier.retry_failed() == [receipt]
    again.set()
    assert looked.wait(LONG_S)
    store.wrapper.let_go()

    assert receipt.wait(timeout=LONG_S).nbytes == 4
    assert seen == [(False, error, None)]
    assert (receipt.done, receipt.error) == (True, None)


def test_what_is_no_error_of_kvio_fails_the_receipt_too(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A bug in a backend ends one write, and no thread."""
    store.wrapper.fail("k", ZeroDivisionError("a bug"))
    receipt = tier.write_block("k", b"data")
    with pytest.raises(ZeroDivisionError):
        receipt.wait(timeout=LONG_S)

    assert tier.write_block("other", b"data").wait(timeout=LONG_S).nbytes == 4
    with pytest.raises(kvio.StorageError, match="'k'"):
        tier.barrier()


def test_the_error_of_a_tier_that_is_not_drained_crosses_processes() -> None:
    """It pickles with its keys."""
    error = pickle.loads(pickle.dumps(kvio.TierNotDrainedError("left", keys=("a", "b"))))

    assert (str(error), error.keys, error.key) == ("left", ("a", "b"), "a")
