"""Drains that fail, hang or end out of order: nothing is lost silently, no receipt is early."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import kvio
from kvio.testing.fakes import WrappedStore
from kvio.types import BlockStatus, IfExists, Parts
from tests.inside import wait_until_inside
from tests.staging.controlled import (
    LONG_S,
    SOON_S,
    ControlledBackend,
    begin,
    disk_error,
    open_controlled,
    staged,
)

PAGE = 4096


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """A store that claims to make blocks durable."""
    with open_controlled(level="durable") as store:
        yield store


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A tier that does not retry."""
    with staged(store, retries=0) as tier:
        yield tier


def fail(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], key: str
) -> kvio.StagedReceipt:
    """Write a block that fails for good."""
    store.wrapper.fail(key, disk_error(key))
    receipt = tier.write_block(key, key.encode() * 100)
    with pytest.raises(kvio.StorageError):
        receipt.wait(timeout=LONG_S)
    return receipt


def test_no_receipt_is_stored_before_its_bytes_are(store: WrappedStore[ControlledBackend]) -> None:
    """In every order of events of many writes, the backend has a block before anybody is notified.

    The callbacks write into the backend's own list of events.
    """
    choose = random.Random(5)
    with staged(store, "256KiB", retries=1, drain_threads=4) as tier:
        events = store.wrapper.events
        for n in range(300):
            key = f"k{choose.randrange(20)}"
            if choose.random() < 0.2:
                store.wrapper.fail(key, disk_error(key))
            receipt = tier.write_block(key, n.to_bytes(4) * choose.randrange(1, 9000))
            receipt.add_done_callback(
                lambda r: events.append(
                    ("reported" if r.error is None else "reported failure", r.key)
                )
            )
        store.wrapper.forgive()
        with suppress(kvio.StorageError):  # of blocks that newer ones took the place of
            tier.barrier(timeout=LONG_S)
        tier.retry_failed()
        tier.barrier(timeout=LONG_S)

    stored = dict.fromkeys((f"k{n}" for n in range(20)), False)
    for event, key in events:
        stored[key] |= event == "stored"
        assert stored[key] or event != "reported", key
    assert store.wrapper.order("reported")


def test_a_receipt_looked_at_from_inside_the_store_is_not_done(
    store: WrappedStore[ControlledBackend],
) -> None:
    """While the backend still has the bytes in hand, and until it has returned."""
    with staged(store, drain_threads=1) as tier:
        store.wrapper.hold("k")
        old = tier.write_block("k", b"old")
        store.wrapper.wait_for("begin", "k")
        new = tier.write_block("k", b"new")
        inside = [(r.done, r.level) for r in (old, new)]
        store.wrapper.let_go()
        new.wait(timeout=LONG_S)

    assert inside == [(False, "accepted")] * 2


def _wrong(receipt: kvio.Receipt, **changes: Any) -> kvio.Receipt:
    if receipt.checksum is None:
        return receipt
    return receipt._replace(checksum=receipt.checksum ^ 1, **changes)


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_a_receipt_of_other_bytes_is_a_failure_of_the_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], if_exists: IfExists
) -> None:
    """Durable is what was accepted; until it is, nothing says so, and a retry writes it anew."""
    store.wrapper.answer = _wrong
    receipt = tier.write_block("k", b"accepted", if_exists=if_exists)
    with pytest.raises(kvio.CorruptBlockError, match="'k'"):
        receipt.wait("durable", timeout=LONG_S)
    with pytest.raises(kvio.CorruptBlockError):
        tier.barrier("durable", timeout=LONG_S)
    assert (tier.failed, tier.durable_sequence) == ([receipt], 0)
    store.write_block("k", b"wrong...", if_exists="replace")
    store.wrapper.answer = _right
    tier.retry_failed()

    stored = receipt.wait("durable", timeout=LONG_S)
    assert (stored.checksum, stored.existed) == (receipt.checksum, False)
    assert store.wrapper.peek("k") == b"accepted"


def _right(receipt: kvio.Receipt) -> kvio.Receipt:
    return receipt


@pytest.mark.parametrize("change", [{"nbytes": 7}, {"key": "other"}, {"existed": True}])
def test_a_receipt_of_another_block_is_a_failure_of_the_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], change: dict[str, Any]
) -> None:
    """Of another length or key, and one that was kept though it should have been replaced."""
    store.wrapper.answer = lambda receipt: receipt._replace(**change)
    receipt = tier.write_block("k", b"accepted")

    with pytest.raises(kvio.BlockError, match="'k'"):
        receipt.wait(timeout=LONG_S)
    assert tier.failed == [receipt]


def test_what_keep_left_has_its_own_checksum(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The receipt says that it existed, and `verify` finds what it says."""
    standing = store.write_block("k", b"stands").checksum
    receipt = tier.write_block("k", b"later!", if_exists="keep")

    stored = receipt.wait("durable", timeout=LONG_S)
    assert (stored.existed, stored.checksum) == (True, standing)
    assert standing != receipt.checksum
    tier.verify(receipt)
    tier.barrier("durable", timeout=LONG_S)


def test_a_failed_drain_is_made_again(store: WrappedStore[ControlledBackend]) -> None:
    """As often as asked, and the receipt knows nothing of it."""
    with staged(store, retries=3) as tier:
        store.wrapper.fail("k", disk_error(), times=3)
        receipt = tier.write_block("k", b"data")

        assert receipt.wait(timeout=LONG_S).level == "durable"
        assert tier.stats().retries == 3
        assert tier.stats().failures == 0
    assert store.wrapper.order("begin") == ["k"] * 4


def test_a_failure_is_final_after_the_retries(store: WrappedStore[ControlledBackend]) -> None:
    """Not before, and the block stays readable."""
    with staged(store, retries=2) as tier:
        store.wrapper.fail("k", disk_error(), times=3)
        receipt = tier.write_block("k", b"data")
        with pytest.raises(kvio.StorageError):
            receipt.wait(timeout=LONG_S)

        assert store.wrapper.order("begin") == ["k"] * 3
        assert bytes(tier.read_block("k")) == b"data"
        assert tier.contains("k")
        assert tier.failed == [receipt]
        assert (tier.stats().failed_blocks, tier.stats().failed_bytes) == (1, 4)
        assert tier.durable_sequence == 0


def test_an_error_that_will_not_pass_is_not_retried(store: WrappedStore[ControlledBackend]) -> None:
    """Only the backend's failures are worth another try."""
    with staged(store, retries=3) as tier:
        store.wrapper.fail("k", kvio.UnsupportedError("never"))
        with pytest.raises(kvio.UnsupportedError):
            tier.write_block("k", b"data").wait(timeout=LONG_S)

    assert store.wrapper.order("begin") == ["k"]


def test_failed_writes_can_be_retried(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Their receipts are open again and end well; no barrier reports what was fixed."""
    receipts = [fail(tier, store, key) for key in ("a", "b")]
    again = tier.retry_failed()
    tier.barrier("durable", timeout=LONG_S)

    assert again == receipts
    assert [r.level for r in receipts] == ["durable"] * 2
    assert [r.error for r in receipts] == [None, None]
    assert tier.failed == []
    assert tier.durable_sequence == 2
    assert store.wrapper.peek("a") == b"a" * 100


def test_a_barrier_tells_of_every_failure(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Of the first one's kind, naming every key, after all the others have ended."""
    store.wrapper.fail("bad1", kvio.StorageFullError("full", errno=28))
    store.wrapper.fail("bad2", disk_error("bad2"))
    first = tier.write_block("bad1", b"data")
    with pytest.raises(kvio.StorageFullError):
        tier.barrier(timeout=LONG_S)
    tier.write_block("bad2", b"data")
    fail(tier, store, "bad3")
    good = tier.write_block("good", b"data")
    with pytest.raises(kvio.StorageFullError, match="'bad1', 'bad2', 'bad3'"):
        tier.barrier(timeout=LONG_S)
    tier.discard(first)
    with pytest.raises(kvio.StorageError, match=r": 'bad2', 'bad3'") as caught:
        tier.barrier(timeout=LONG_S)

    assert good.level == "durable"
    assert "'bad1'" not in str(caught.value)
    assert caught.value.errno == 5


def test_a_failed_barrier_stays_failed_until_retried_or_discarded(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """However often one asks, and by whatever verb."""
    retried, discarded = fail(tier, store, "retried"), fail(tier, store, "discarded")
    for call in (tier.barrier, tier.flush, tier.barrier):
        with pytest.raises(kvio.StorageError, match="'retried', 'discarded'"):
            call(timeout=LONG_S)
    assert tier.discard(discarded)
    with pytest.raises(kvio.StorageError, match=": 'retried';"):
        tier.barrier(timeout=LONG_S)
    assert tier.retry_failed() == [retried]

    tier.barrier("durable", timeout=LONG_S)
    assert tier.durable_sequence == discarded.sequence


def test_a_retry_that_fails_fails_the_barrier_again(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Until one is stored."""
    fail(tier, store, "k")
    store.wrapper.fail("k", disk_error())
    tier.retry_failed()
    for _ in range(2):
        with pytest.raises(kvio.StorageError, match="'k'"):
            tier.barrier(timeout=LONG_S)
    tier.retry_failed()

    tier.barrier(timeout=LONG_S)


def test_every_thread_is_told_of_the_failures_it_waits_for(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Whose write failed hears of it though another thread's barrier came first."""
    fail(tier, store, "k")
    errors: list[str] = []

    def wait() -> None:
        try:
            tier.barrier(timeout=LONG_S)
        except kvio.StorageError as exc:
            errors.append(str(exc))

    for _ in range(2):
        begin(wait).join(LONG_S)
    wait()

    assert ["'k'" in error for error in errors] == [True] * 3


def test_a_barrier_is_not_told_of_later_failures(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It is about what was accepted before it."""
    errors: list[BaseException | None] = []

    def wait() -> None:
        try:
            tier.barrier(timeout=LONG_S)
        except kvio.KvioError as exc:
            errors.append(exc)
        else:
            errors.append(None)

    store.wrapper.hold("slow")
    tier.write_block("slow", b"data")
    store.wrapper.wait_for("begin", "slow")
    thread = begin(wait)
    wait_until_inside(thread, "wait_for")
    fail(tier, store, "later")
    store.wrapper.let_go()
    thread.join(LONG_S)

    assert errors == [None]


def test_a_barrier_waits_for_what_takes_the_place_of_a_failed_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A barrier that began before the newer write was accepted, too."""
    stored: list[bytes | None] = []

    def wait() -> None:
        tier.barrier(timeout=LONG_S)
        stored.append(store.wrapper.peek("k"))

    store.wrapper.hold("slow")
    slow = tier.write_block("slow", b"data")
    store.wrapper.wait_for("begin", "slow")
    fail(tier, store, "k")
    thread = begin(wait)
    wait_until_inside(thread, "wait_for")
    store.wrapper.hold("k")
    tier.write_block("k", b"newer")
    store.wrapper.let_go("slow")
    slow.wait(timeout=LONG_S)
    thread.join(SOON_S)
    waits = thread.is_alive()
    store.wrapper.let_go()
    thread.join(LONG_S)

    assert (waits, stored) == (True, [b"newer"])


def test_an_exclusive_write_that_failed_is_never_stored_by_a_newer_one(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Whether it was first was never judged: its receipt has an error, until it is discarded."""
    store.wrapper.fail("k", disk_error())
    raced = tier.write_block("k", b"raced", if_exists="error")
    with pytest.raises(kvio.StorageError):
        raced.wait(timeout=LONG_S)
    tier.write_block("k", b"newer!").wait(timeout=LONG_S)

    with pytest.raises(kvio.BlockExistsError, match=r"'k'.*Input/output error"):
        tier.barrier(timeout=LONG_S)
    assert isinstance(raced.error, kvio.BlockExistsError)
    assert (raced.absorbed, tier.failed, tier.stats().used_bytes) == (False, [raced], 0)
    tier.discard(raced)
    tier.barrier(timeout=LONG_S)


def test_discarding_gives_up_one_failed_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Its bytes go, the others stay; what has not failed cannot be discarded."""
    bad, worse = fail(tier, store, "bad"), fail(tier, store, "worse")
    good = tier.write_block("good", b"data")
    good.wait(timeout=LONG_S)

    assert tier.discard(bad)
    assert not tier.discard(bad)
    assert not tier.discard(good)
    assert tier.failed == [worse]
    assert not tier.contains("bad")
    assert tier.durable_sequence == 1
    with pytest.raises(kvio.StorageError, match=r"^1 staged.*'worse'"):
        tier.barrier(timeout=LONG_S)


def test_a_newer_write_takes_the_place_of_a_failed_one(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """It ends with the newer write; once that is durable, so is all before it."""
    old = fail(tier, store, "k")
    tier.pause()
    new = tier.write_block("k", b"newer")
    before = tier.durable_sequence
    tier.resume()
    stored = new.wait(timeout=LONG_S)

    assert (before, tier.durable_sequence) == (0, 2)
    assert (old.wait(timeout=LONG_S), old.absorbed, tier.failed) == (stored, True, [])
    assert tier.stats().used_bytes == 0
    tier.barrier(timeout=LONG_S)


def test_a_drain_that_fails_behind_a_newer_write_is_absorbed_by_it(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Instead of being made again: the newer one's end is its own."""
    with staged(store, retries=3) as tier:
        store.wrapper.hold("k")
        store.wrapper.fail("k", disk_error())
        old = tier.write_block("k", b"old")
        store.wrapper.wait_for("begin", "k")
        new = tier.write_block("k", b"newer")
        store.wrapper.let_go()

        assert new.wait(timeout=LONG_S) == old.wait(timeout=LONG_S)
        assert old.absorbed
    assert store.wrapper.order("begin") == ["k"] * 2


def test_absorbed_receipts_share_the_failure(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """And its mending."""
    tier.pause()
    old = tier.write_block("k", b"old")
    store.wrapper.fail("k", disk_error())
    new = tier.write_block("k", b"new")
    kept = tier.write_block("k", b"now", if_exists="keep")
    tier.resume()
    for receipt in (old, new, kept):
        with pytest.raises(kvio.StorageError):
            receipt.wait(timeout=LONG_S)
    tier.retry_failed()

    assert old.wait(timeout=LONG_S) == new.wait(timeout=LONG_S)
    assert kept.wait(timeout=LONG_S).existed
    assert tier.durable_sequence == 3


def test_one_block_of_a_group_fails_alone(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Small blocks go to the store together; each has its own end."""
    tier.pause()
    store.wrapper.fail("k3", disk_error("k3"))
    receipts = [tier.write_block(f"k{n}", bytes([n]) * (n * 777)) for n in range(9)]
    tier.resume()
    with pytest.raises(kvio.StorageError, match="'k3'"):
        tier.barrier(timeout=LONG_S)

    assert [r.key for r in receipts if r.error is not None] == ["k3"]
    for n in (*range(3), *range(4, 9)):
        assert store.wrapper.peek(f"k{n}") == bytes([n]) * (n * 777)


def test_drains_that_end_out_of_order_end_their_own_receipts(
    store: WrappedStore[ControlledBackend],
) -> None:
    """The number up to which all is durable waits for the slowest."""
    with staged(store, "8MiB", drain_threads=3) as tier:
        keys = ["a", "b", "c"]
        store.wrapper.hold(*keys)
        receipts = [tier.write_block(key, bytes(600 * 1024)) for key in keys]
        for key in keys:
            store.wrapper.wait_for("begin", key)
        seen = []
        for receipt in reversed(receipts):
            store.wrapper.let_go(receipt.key)
            receipt.wait(timeout=LONG_S)
            seen.append(([r.done for r in receipts], tier.durable_sequence))

    assert seen == [
        ([False, False, True], 0),
        ([False, True, True], 0),
        ([True, True, True], 3),
    ]


def test_closing_names_every_key_the_store_does_not_have(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Failed or late; the tier stays open, so that they can be retried."""
    with staged(store, retries=0) as tier:
        fail(tier, store, "failed")
        store.wrapper.hold("late")
        tier.write_block("late", b"data")
        store.wrapper.wait_for("begin", "late")
        tier.write_block("good", b"data").wait(timeout=LONG_S)
        with pytest.raises(kvio.TierNotDrainedError) as late:
            tier.close(timeout=0.1)
        store.wrapper.let_go("late")
        with pytest.raises(kvio.TierNotDrainedError) as failed:
            tier.close(timeout=LONG_S)

        assert sorted(late.value.keys) == ["failed", "late"]
        assert failed.value.keys == ("failed",)
        assert bytes(tier.read_block("failed")) == b"failed" * 100
        tier.retry_failed()
        tier.close(timeout=LONG_S)
        assert store.wrapper.peek("failed") == b"failed" * 100


def test_leaving_the_context_tells_of_failures(store: WrappedStore[ControlledBackend]) -> None:
    """A with block does not end as if all was well."""
    tier = kvio.stage(store, "1MiB", retries=0, drain_threads=1)
    store.wrapper.fail("k", disk_error())
    with pytest.raises(kvio.TierNotDrainedError), tier:
        tier.write_block("k", b"data")
    tier.discard(tier.failed[0])
    tier.close()


def test_closing_tells_of_a_lost_race(store: WrappedStore[ControlledBackend]) -> None:
    """Nothing of it is staged, but no callback has run yet."""
    tier = kvio.stage(store, "1MiB", drain_threads=1)
    tier.pause()
    tier.write_block("k", b"ours", if_exists="error")
    store.write_block("k", b"theirs")
    with pytest.raises(kvio.BlockExistsError, match="'k'"):
        tier.close(timeout=LONG_S)
    tier.close()


@pytest.mark.slow
def test_a_drain_that_hangs_is_given_up_and_made_again(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Its bytes stay reserved until the call that hangs has ended: it may still look at them."""
    with staged(store, 2 * PAGE, timeout=1.0, retries=3, drain_threads=1) as tier:
        store.wrapper.hold("k")
        receipt = tier.write_block("k", bytes(2 * PAGE))
        store.wrapper.wait_for("begin", "k", 2)
        stuck = store.stats().quarantined_threads
        store.wrapper.let_go()
        receipt.wait(timeout=LONG_S)

        assert stuck >= 1
        assert tier.write_block("next", bytes(2 * PAGE), timeout=LONG_S).wait(timeout=LONG_S)
        assert tier.stats().used_bytes in (0, 2 * PAGE)


@pytest.mark.slow
def test_bytes_of_a_call_that_still_hangs_are_not_given_to_others(
    store: WrappedStore[ControlledBackend],
) -> None:
    """The write went well the second time, and the first still holds a view of the memory."""
    hung: list[Parts] = []
    go = threading.Event()

    def hang_once(_: str, parts: Parts) -> None:
        hung.append(parts)
        if len(hung) == 1:
            assert go.wait(LONG_S)

    store.wrapper.on_begin = hang_once
    with staged(store, 2 * PAGE, timeout=1.0, when_full="raise", drain_threads=1) as tier:
        receipt = tier.write_block("k", b"\1" * (2 * PAGE))
        receipt.wait(timeout=LONG_S)
        with pytest.raises(kvio.StorageFullError):
            tier.write_block("other", b"\2" * (2 * PAGE))
        view = bytes(hung[0][0])
        go.set()

        assert view == b"\1" * (2 * PAGE)
        assert store.wrapper.peek("k") == b"\1" * (2 * PAGE)


def test_old_blocks_stay_when_their_successor_fails(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The future has the successor's error."""
    tier.write_block("old", b"data").wait(timeout=LONG_S)
    tier.pause()
    store.wrapper.fail("new", disk_error("new"))
    future = tier.replace_when_durable("old", tier.write_block("new", b"data"))
    tier.resume()

    assert isinstance(future.exception(LONG_S), kvio.StorageError)
    assert tier.contains("old")
    tier.pause()
    future = tier.replace_when_durable("old", tier.write_block("gone", b"data"))
    tier.delete_block("gone")
    assert isinstance(future.exception(LONG_S), kvio.BlockNotFoundError)
    assert tier.contains("old")


def test_a_bug_in_a_deletion_ends_its_future(
    tier: kvio.StagingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for what is no error of kvio."""

    def fail(*_: object, **__: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(tier._writes, "delete", fail)
    future = tier.replace_when_durable("old", tier.write_block("new", b"data"))

    assert isinstance(future.exception(LONG_S), ZeroDivisionError)


def test_a_batch_of_reads_passes_the_stores_failures_on(tier: kvio.StagingTier) -> None:
    """Staged blocks are read all the same."""
    tier.pause()
    tier.write_block("staged", b"data")
    out = [bytearray(4), bytearray(4)]
    results = tier.read_blocks_into([("missing", out[0]), ("staged", out[1])])

    assert [r.status for r in results] == [BlockStatus.MISSING, BlockStatus.OK]
    assert out[1] == b"data"


def test_what_the_store_is_writing_is_counted_while_it_does(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Nothing is running once everything is stored, retried or failed."""
    with staged(store, retries=1) as tier:
        store.wrapper.hold("held")
        tier.write_block("held", b"data")
        store.wrapper.wait_for("begin", "held")
        running = tier.stats().running_blocks
        store.wrapper.let_go()
        store.wrapper.fail("bad", disk_error("bad"), times=2)
        with pytest.raises(kvio.StorageError):
            tier.write_block("bad", b"data").wait(timeout=LONG_S)
        tier.write_block("good", b"data").wait(timeout=LONG_S)

        assert running == 1
        assert tier.stats().running_blocks == 0
