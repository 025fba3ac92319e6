"""The verbs that a tier has in common with a store: submitted, awaited, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import kvio
from kvio.testing.fakes import WrappedStore
from kvio.types import BlockStatus as Status
from tests.staging.controlled import (
    LONG_S,
    SOON_S,
    ControlledBackend,
    begin,
    disk_error,
    open_controlled,
    staged,
)
from tests.staging.daemon.daemons import until

PAGE = 4096


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """A store that claims to make blocks durable."""
    with open_controlled(level="durable") as store:
        yield store


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A tier of 16 pages that does not retry."""
    with staged(store, 16 * PAGE, retries=0) as tier:
        yield tier


def _fill(tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]) -> None:
    """Leave no room in the tier."""
    store.wrapper.hold("full")
    tier.write_block("full", bytes(16 * PAGE))
    store.wrapper.wait_for("begin", "full")


# Submitted calls


def test_submitted_writes_are_accepted_and_then_stored(tier: kvio.StagingTier) -> None:
    """The future has the receipt that `write_block` would have returned."""
    futures = [tier.submit_write(f"k{n}", bytes([n]) * 1000) for n in range(40)]
    receipts = [future.result(LONG_S) for future in futures]

    assert [receipt.key for receipt in receipts] == [f"k{n}" for n in range(40)]
    assert [r.wait("durable", LONG_S).nbytes for r in receipts] == [1000] * 40
    assert bytes(tier.read_block("k7")) == bytes([7]) * 1000


def test_submitted_writes_overwrite_as_writes_do(tier: kvio.StagingTier) -> None:
    """The default is the tier's, and `if_exists` is taken."""
    tier.write_block("k", b"old")
    tier.submit_write("k", b"new").result(LONG_S)
    refused = tier.submit_write("k", b"newer", if_exists="error")

    assert isinstance(refused.exception(LONG_S), kvio.BlockExistsError)
    assert bytes(tier.read_block("k")) == b"new"


def test_submitted_reads_see_staged_bytes(tier: kvio.StagingTier) -> None:
    """Whole blocks and ranges, with a deadline and without; errors come through the future."""
    tier.pause()
    tier.write_block("k", b"staged bytes")
    whole, part, late = bytearray(12), bytearray(5), bytearray(12)
    reads = [
        tier.submit_read_into("k", whole),
        tier.submit_read_into("k", part, offset=7, nbytes=5),
        tier.submit_read_into("k", late, timeout=LONG_S),
    ]

    assert [future.result(LONG_S) for future in reads] == [12, 5, 12]
    assert [whole, part, late] == [b"staged bytes", b"bytes", b"staged bytes"]
    missing = tier.submit_read_into("missing", whole).exception(LONG_S)
    assert isinstance(missing, kvio.BlockNotFoundError)


def test_what_needs_no_waiting_is_refused_at_once(tier: kvio.StagingTier) -> None:
    """As by a store: bad keys, bad data, bad words."""
    wrong: Any = "overwrite"
    with pytest.raises(kvio.InvalidKeyError):
        tier.submit_write("../k", b"data")
    with pytest.raises(TypeError):
        tier.submit_write("k", "text")
    with pytest.raises(kvio.ConfigError):
        tier.submit_write("k", b"data", if_exists=wrong)
    with pytest.raises(kvio.BlockSizeError):
        tier.submit_read_into("k", b"read-only")


def test_flushing_waits_for_submitted_writes_too(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """They are stored, not only accepted."""
    _fill(tier, store)
    future = tier.submit_write("k", b"data")
    with pytest.raises(kvio.StorageTimeoutError):
        tier.flush(timeout=SOON_S)
    store.wrapper.let_go()
    tier.flush(timeout=LONG_S)

    assert future.result(0).level == "durable"


def test_closing_accepts_what_was_submitted(store: WrappedStore[ControlledBackend]) -> None:
    """And stores it, though drains were paused and the tier full."""
    with staged(store, 2 * PAGE) as tier:
        tier.pause()
        futures = [tier.submit_write(f"k{n}", bytes(PAGE)) for n in range(8)]
        tier.close(timeout=LONG_S)

        assert [future.result(0).level for future in futures] == ["durable"] * 8
        with pytest.raises(kvio.StoreClosedError):
            tier.submit_write("k", b"data")


def test_a_submitted_write_that_timed_out_is_never_accepted(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It waited for room, which others get."""
    _fill(tier, store)
    late = tier.submit_write("late", b"data", timeout=SOON_S)
    assert isinstance(late.exception(LONG_S), kvio.StorageTimeoutError)
    store.wrapper.let_go()
    tier.flush(timeout=LONG_S)

    assert not tier.contains("late")
    # A daemon learns only by its answer that a client stopped waiting: it takes the room back then.
    until(lambda: tier.stats().used_bytes == 0)


# Awaited calls


def test_every_awaited_call_does_what_the_call_does(tier: kvio.StagingTier) -> None:
    """Of `AsyncStore` over a tier; receipts can be awaited in turn."""
    data, out, part = bytes(range(200)), bytearray(200), bytearray(10)

    async def work() -> None:
        waiting = kvio.AsyncStore(tier)
        receipt = await waiting.write_block("a", data)
        assert (await receipt).level == "durable"
        assert (await (await waiting.write_block("a", data, if_exists="keep"))).existed
        assert await waiting.read_block_into("a", out) == 200
        assert await waiting.read_block_into("a", part, offset=7) == 10
        assert await waiting.read_block("a") == data
        results = await waiting.write_blocks([("a", data), ("b", b"bytes")])
        assert [r.status for r in results] == ["ok", "ok"]
        found = await waiting.read_blocks_into([("b", bytearray(5)), ("c", bytearray(5))])
        assert [r.status for r in found] == ["ok", "missing"]
        await waiting.flush()
        assert await waiting.stat_block("a") == tier.stat_block("a")
        assert await waiting.contains("a")
        assert await waiting.count_leading(["a", "b", "c"]) == 2
        assert (await waiting.verify_block("a")).ok
        assert sorted([key async for key in waiting.list_keys()]) == ["a", "b"]
        assert await waiting.delete_block("a")
        assert [r.status for r in await waiting.delete_blocks(["a", "b"])] == ["missing", "ok"]
        assert waiting.capabilities == tier.capabilities
        assert waiting.stats() == tier.stats()

    asyncio.run(work())
    assert [out, part] == [data, data[7:17]]


def test_leaving_an_awaited_tier_closes_it(store: WrappedStore[ControlledBackend]) -> None:
    """And stores what was accepted."""

    async def work(tier: kvio.StagingTier) -> None:
        async with kvio.AsyncStore(tier) as waiting:
            await waiting.write_block("k", b"data")

    with staged(store) as tier:
        asyncio.run(work(tier))

        assert store.wrapper.peek("k") == b"data"
        with pytest.raises(kvio.StoreClosedError):
            tier.contains("k")


@pytest.mark.parametrize("nbytes", [4, 17 * PAGE], ids=["staged", "past the tier"])
def test_a_cancelled_write_is_never_accepted(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], nbytes: int
) -> None:
    """The task waited for room, or for the store; its memory is its own again."""
    _fill(tier, store)
    store.wrapper.hold("late")

    async def work() -> None:
        waiting = kvio.AsyncStore(tier)
        write = asyncio.ensure_future(waiting.write_block("late", bytes(nbytes)))
        await asyncio.sleep(SOON_S)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write

    asyncio.run(work())
    store.wrapper.let_go()
    tier.flush(timeout=LONG_S)

    assert not tier.contains("late")
    # A daemon learns only by its answer that a client stopped waiting: it takes the room back then.
    until(lambda: tier.stats().used_bytes == 0)


# Batches


def test_a_bad_block_stops_a_batch_before_it_begins(tier: kvio.StagingTier) -> None:
    """Whatever is bad, and wherever it is."""
    gaps: Any = memoryview(bytearray(8))[::2]
    for key, data, error in (
        ("../key", b"data", kvio.InvalidKeyError),
        ("key", gaps, kvio.BlockSizeError),
        ("key", "text", TypeError),
    ):
        with pytest.raises(error):
            tier.write_blocks([("first", b"bytes"), (key, data)])
    with pytest.raises(kvio.InvalidKeyError):
        tier.delete_blocks(["first", ""])

    assert tier.stats().sequence == 0


def test_blocks_are_deleted_wherever_they_are(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Staged or stored, each once; those that are nowhere are missing."""
    tier.write_blocks([(f"stored{n}", b"data") for n in range(3)])
    tier.flush(timeout=LONG_S)
    tier.pause()
    receipt = tier.write_block("staged", b"data")
    tier.write_block("stored1", b"newer")
    keys = ["stored0", "staged", "missing", "stored1", "staged"]

    results = tier.delete_blocks(keys)

    assert [(r.key, r.status) for r in results] == [
        *(("stored0", Status.OK), ("staged", Status.OK), ("missing", Status.MISSING)),
        *(("stored1", Status.OK), ("staged", Status.MISSING)),
    ]
    assert list(tier.list_keys()) == ["stored2"]
    assert isinstance(receipt.error, kvio.BlockNotFoundError)
    tier.resume()
    tier.barrier(timeout=LONG_S)
    assert [store.wrapper.peek(key) for key in keys] == [None] * 5


def test_a_batch_of_deletions_waits_for_running_drains(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Else the block would be there again; with a deadline, the others are deleted."""
    store.wrapper.hold("k")
    tier.write_block("k", b"data")
    store.wrapper.wait_for("begin", "k")
    store.write_block("other", b"data")

    results = tier.delete_blocks(["k", "other"], timeout=SOON_S)
    assert results[0].status is Status.TIMEOUT
    deletion = begin(lambda: tier.delete_blocks(["k", "other"]))
    deletion.join(SOON_S)
    waits = deletion.is_alive()
    store.wrapper.let_go()
    deletion.join(LONG_S)

    assert waits
    assert [store.wrapper.peek(key) for key in ("k", "other")] == [None, None]


def test_a_failed_write_is_over_when_its_block_is_deleted(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """No barrier reports it: nothing is left of it."""
    store.wrapper.fail("k", disk_error())
    with pytest.raises(kvio.StorageError):
        tier.write_block("k", b"data").wait(timeout=LONG_S)

    assert [r.status for r in tier.delete_blocks(["k"])] == [Status.OK]
    tier.barrier(timeout=LONG_S)
    assert tier.failed == []


def test_a_closed_tier_refuses_every_call(store: WrappedStore[ControlledBackend]) -> None:
    """After `close` every verb raises StoreClosedError."""
    with staged(store) as tier:
        tier.close()

        for call in (
            lambda: tier.write_block("block", b"bytes"),
            lambda: tier.read_block("block"),
            lambda: tier.read_block_into("block", bytearray(5)),
            lambda: tier.write_blocks([("block", b"bytes")]),
            lambda: tier.read_blocks_into([("block", bytearray(5))]),
            lambda: tier.delete_blocks(["block"]),
            lambda: tier.delete_block("block"),
            lambda: tier.stat_block("block"),
            lambda: tier.contains("block"),
            lambda: tier.verify_block("block"),
            lambda: tier.count_leading(["block"]),
            lambda: list(tier.list_keys()),
            lambda: tier.submit_write("block", b"bytes"),
            lambda: tier.submit_read_into("block", bytearray(5)),
            lambda: tier.flush(),
        ):
            with pytest.raises(kvio.StoreClosedError):
                call()


# Capabilities


def test_a_tier_promises_what_holds_for_it(tier: kvio.StagingTier) -> None:
    """What its store promises, but for what only a store can do."""
    can, has = tier.capabilities, tier.store.capabilities

    assert (can.shared, can.raw_blocks, can.usable_after_fork, can.native_batch) == (False,) * 4
    for name in ("atomic_write", "exclusive_create", "durable_write", "checksum", "writable"):
        assert getattr(can, name) == getattr(has, name)
    assert set(has.notes) < set(can.notes)
