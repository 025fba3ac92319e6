"""The rules of a staging tier: what reads see, in which order keys are stored, what is absorbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kvio
from kvio.staging.pending import Progress
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from kvio.types import BlockStatus, IfExists
from tests.staging.controlled import LONG_S, ControlledBackend, open_controlled, staged

PAGE = 4096


@pytest.fixture
def store() -> WrappedStore[ControlledBackend]:
    """A store that claims to make blocks durable."""
    return open_controlled(level="durable")


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A tier before it."""
    with staged(store) as tier:
        yield tier


# Reads see what was written


def test_the_source_may_be_reused_when_a_write_returns(tier: kvio.StagingTier) -> None:
    """What is stored later is what the buffer held then."""
    tier.pause()
    source = bytearray(b"first" * 2000)
    receipt = tier.write_block("k", source)
    source[:] = bytes(len(source))
    tier.resume()
    receipt.wait(timeout=LONG_S)

    assert bytes(tier.read_block("k", consistency="backend")) == b"first" * 2000


def test_reads_see_staged_bytes_at_once(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Every verb does, while the store has never heard of the key."""
    tier.pause()
    data = payloads.payload(10_000, 3)
    receipt = tier.write_block("dir/k", data)
    out, short, small = bytearray(10_000), bytearray(12_000), bytearray(9_999)

    assert bytes(tier.read_block("dir/k")) == data
    assert bytes(tier.read_block("dir/k", offset=9_000, nbytes=4_000)) == data[9_000:]
    assert tier.read_block_into("dir/k", [memoryview(out)[:7], memoryview(out)[7:]]) == 10_000
    assert out == data
    assert tier.read_block_into("dir/k", short, offset=5) == 9_995
    assert tier.stat_block("dir/k").nbytes == 10_000
    assert tier.stat_block("dir/k").checksum == receipt.checksum
    assert tier.contains("dir/k")
    assert tier.verify_block("dir/k").ok
    assert list(tier.list_keys("dir/")) == ["dir/k"]
    assert tier.count_leading(["dir/k", "dir/k", "other"]) == 2
    results = tier.read_blocks_into(
        [("dir/k", out), ("dir/k", short), ("dir/k", small), ("other", out)]
    )
    assert [r.status for r in results] == ["ok", "short", "failed", "missing"]
    assert isinstance(results[2].error, kvio.BlockSizeError)
    assert not store.contains("dir/k")


def test_reads_of_staged_blocks_refuse_what_a_store_refuses(tier: kvio.StagingTier) -> None:
    """Buffers that are too small, offsets beyond the end, keys that break the rules."""
    tier.pause()
    tier.write_block("k", b"12345")

    with pytest.raises(kvio.BlockSizeError):
        tier.read_block_into("k", bytearray(4))
    with pytest.raises(kvio.BlockSizeError):
        tier.read_block("k", offset=6)
    with pytest.raises(kvio.BlockSizeError):
        tier.read_block_into("k", bytearray(9), nbytes=10)
    with pytest.raises(kvio.BlockSizeError):
        tier.read_block_into("k", bytes(5))
    with pytest.raises(kvio.InvalidKeyError):
        tier.read_block("../k")
    with pytest.raises(kvio.ConfigError):
        tier.read_block("k", consistency="strong")  # type: ignore[arg-type]
    assert bytes(tier.read_block("k", offset=5)) == b""


def test_consistency_backend_sees_only_the_store(tier: kvio.StagingTier) -> None:
    """A reader that opts out sees what others see."""
    tier.write_block("k", b"stored").wait(timeout=LONG_S)
    tier.pause()
    tier.write_block("k", b"newer!!")
    tier.write_block("new", b"staged")

    assert bytes(tier.read_block("k", consistency="backend")) == b"stored"
    assert tier.stat_block("k", consistency="backend").nbytes == 6
    assert tier.read_block_into("k", bytearray(9), consistency="backend") == 6
    assert not tier.contains("new", consistency="backend")
    assert not tier.verify_block("new", consistency="backend").ok
    assert list(tier.list_keys(consistency="backend")) == ["k"]
    assert sorted(tier.list_keys()) == ["k", "new"]


def test_leading_keys_are_counted_over_both(tier: kvio.StagingTier) -> None:
    """Staged and stored keys mix in any order, and the first that is in neither ends it."""
    for key in ("s1", "s2"):
        tier.write_block(key, b"stored").wait(timeout=LONG_S)
    tier.pause()
    for key in ("t1", "t2"):
        tier.write_block(key, b"staged")

    assert tier.count_leading(["t1", "s1", "t2", "s2"]) == 4
    assert tier.count_leading(["t1", "s1", "no", "t2"]) == 2
    assert tier.count_leading(["no", "t1"]) == 0
    assert tier.count_leading([]) == 0


def test_a_batch_is_staged_block_by_block(tier: kvio.StagingTier) -> None:
    """A result each with its receipt; what cannot be taken stops nothing."""
    tier.pause()
    tier.write_block("taken", b"data")
    results = tier.write_blocks(
        [("a", b"one"), ("taken", b"x"), ("b", [b"tw", b"o"])], if_exists="error"
    )
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert [r.status for r in results] == [BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.OK]
    assert [r.ok for r in results] == [True, False, True]
    assert [bytes(tier.store.read_block(r.key)) for r in results] == [b"one", b"data", b"two"]
    assert results[0].receipt is not None
    assert results[0].receipt.level == "durable"
    with pytest.raises(kvio.InvalidKeyError):
        tier.write_blocks([("fine", b""), ("../no", b"")])
    assert not tier.contains("fine")


# Order, and what absorbs what


def test_one_key_is_never_drained_twice_at_a_time(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """A newer write waits for the older one's drain, whatever threads are free; the newer wins."""
    store.wrapper.hold("k")
    first = tier.write_block("k", b"first")
    store.wrapper.wait_for("begin", "k")
    second = tier.write_block("k", b"second")
    other = tier.write_block("other", b"data")
    other.wait(timeout=LONG_S)
    store.wrapper.let_go()
    second.wait(timeout=LONG_S)

    assert store.wrapper.widest == 1
    assert first.receipt is not None
    assert (first.receipt.nbytes, first.absorbed) == (5, False)
    assert store.wrapper.peek("k") == b"second"


def test_an_entry_that_has_not_begun_is_absorbed_by_a_newer_write(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Its bytes leave the tier at once, and only the newest goes to the store."""
    tier.pause()
    receipts = [tier.write_block("k", bytes([n]) * PAGE) for n in range(5)]
    used = tier.stats().used_bytes
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert used == PAGE
    assert store.wrapper.order("begin") == ["k"]
    assert store.wrapper.peek("k") == bytes([4]) * PAGE
    assert [r.absorbed for r in receipts] == [True] * 4 + [False]
    assert {r.receipt for r in receipts} == {receipts[4].receipt}
    assert tier.stats().absorbed == 4


def test_an_absorbed_receipt_ends_with_the_absorber_and_never_before(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """While the absorber hangs in the store, nothing has ended."""
    tier.pause()
    store.wrapper.hold("k")
    old = tier.write_block("k", b"old")
    new = tier.write_block("k", b"newer")
    tier.resume()
    store.wrapper.wait_for("begin", "k")
    before = (old.done, new.done, tier.durable_sequence)
    store.wrapper.let_go()

    assert before == (False, False, 0)
    assert old.wait(timeout=LONG_S) == new.wait(timeout=LONG_S)
    assert tier.durable_sequence == 2


def test_different_keys_are_drained_side_by_side(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """One that hangs does not keep the others."""
    store.wrapper.hold("stuck")
    stuck = tier.write_block("stuck", bytes(600 * 1024))
    store.wrapper.wait_for("begin", "stuck")
    for n in range(20):
        tier.write_block(f"k{n}", b"data").wait(timeout=LONG_S)

    assert not stuck.done
    assert tier.durable_sequence == 0


# if_exists


def test_keep_is_answered_by_a_staged_block_of_its_length(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Nothing is copied, and the receipt ends with the staged block's, which it kept."""
    tier.pause()
    first = tier.write_block("k", b"first")
    kept = tier.write_block("k", b"later", if_exists="keep")
    used = tier.stats().used_bytes
    tier.resume()

    assert used == PAGE
    assert bytes(tier.read_block("k")) == b"first"
    ours, stored = kept.wait(timeout=LONG_S), first.wait(timeout=LONG_S)
    assert (ours.existed, stored.existed) == (True, False)
    assert ours == stored._replace(existed=True, reason=ours.reason)
    assert kept.checksum == first.checksum
    assert store.wrapper.order("begin") == ["k"]
    assert tier.stats().kept == 1


def test_keep_asks_the_store_when_it_is_drained(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Reads see the staged bytes until then, and the receipt says that a block stood there."""
    store.write_block("k", b"stood")
    tier.pause()
    receipt = tier.write_block("k", b"late!", if_exists="keep")
    seen = bytes(tier.read_block("k"))
    tier.resume()

    assert seen == b"late!"
    assert receipt.wait(timeout=LONG_S).existed
    assert bytes(tier.read_block("k")) == b"stood"


def test_keep_of_another_length_replaces_what_is_staged(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """As it would in the store, even where an older block there has the new one's length."""
    store.write_block("k", b"12345")
    tier.pause()
    tier.write_block("k", b"staged")
    receipt = tier.write_block("k", b"abcde", if_exists="keep")
    tier.resume()

    assert not receipt.wait(timeout=LONG_S).existed
    assert store.wrapper.peek("k") == b"abcde"


def test_error_refuses_a_key_that_is_staged_or_stored(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """At once, and nothing is staged."""
    store.write_block("stored", b"data")
    tier.pause()
    tier.write_block("staged", b"data")
    for key in ("stored", "staged"):
        with pytest.raises(kvio.BlockExistsError) as caught:
            tier.write_block(key, b"other", if_exists="error")
        assert caught.value.key == key

    assert tier.stats().staged_blocks == 1


def test_error_refuses_a_block_that_is_drained_while_one_looks(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a check at the store and one at the tier a block may have gone from here to there."""
    tier.pause()
    tier.write_block("k", b"first")
    look = store.stat_block

    def slow(key: str, *, timeout: float | None = None) -> kvio.BlockStat:
        try:
            return look(key, timeout=timeout)
        finally:
            tier.resume()
            tier.barrier(timeout=LONG_S)

    monkeypatch.setattr(store, "stat_block", slow)
    with pytest.raises(kvio.BlockExistsError):
        tier.write_block("k", b"second", if_exists="error")


def test_error_that_loses_its_race_later_fails_on_the_receipt(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Reads see the winner's block again, no bytes stay, and it is reported until discarded."""
    tier.pause()
    receipt = tier.write_block("k", b"ours", if_exists="error")
    store.write_block("k", b"theirs")
    seen = bytes(tier.read_block("k"))
    tier.resume()
    with pytest.raises(kvio.BlockExistsError):
        receipt.wait(timeout=LONG_S)

    assert seen == b"ours"
    assert bytes(tier.read_block("k")) == b"theirs"
    assert (tier.stats().used_bytes, tier.failed) == (0, [receipt])
    assert tier.retry_failed() == []
    for _ in range(2):
        with pytest.raises(kvio.BlockExistsError, match="'k'"):
            tier.barrier(timeout=LONG_S)
    assert (tier.discard(receipt), tier.discard(receipt)) == (True, False)
    tier.barrier(timeout=LONG_S)


def test_error_is_not_absorbed(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Who asked for a race gets its outcome: it is stored on its own, then the newer block."""
    tier.pause()
    raced = tier.write_block("k", b"raced", if_exists="error")
    newer = tier.write_block("k", b"newer!")
    tier.resume()
    newer.wait(timeout=LONG_S)

    assert raced.receipt is not None
    assert raced.receipt.nbytes == 5
    assert store.wrapper.order("stored") == ["k", "k"]
    assert store.wrapper.peek("k") == b"newer!"


def test_of_racing_writers_with_error_one_succeeds(tier: kvio.StagingTier) -> None:
    """Threads that stage the same key at once: one is accepted."""
    tier.pause()
    start = threading.Barrier(8)
    taken: list[int] = []

    def race(number: int) -> None:
        start.wait()
        try:
            tier.write_block("k", bytes([number]) * 9000, if_exists="error")
        except kvio.BlockExistsError:
            return
        taken.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)

    assert len(taken) == 1
    assert bytes(tier.read_block("k")) == bytes(taken) * 9000


@pytest.mark.parametrize("first", ["keep", "replace"])
def test_blocks_that_are_drained_together_keep_their_own_if_exists(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], first: str
) -> None:
    """A small block that may stay and one that is replaced follow each other in the queue."""
    rules: list[IfExists] = ["keep", "replace"]
    for key in rules:
        store.write_block(key, b"old")
    tier.pause()
    for key in sorted(rules, key=lambda key: key != first):
        tier.write_block(key, b"new", if_exists=key)
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert bytes(store.read_block("keep")) == b"old"
    assert bytes(store.read_block("replace")) == b"new"


def test_limits_are_given_by_name(tier: Any) -> None:
    """A number alone says nothing to who reads the call."""
    with pytest.raises(TypeError):
        tier.barrier("visible", 1.0)
    with pytest.raises(TypeError):
        tier.write_blocks([("k", b"data")], 1.0)
    with pytest.raises(TypeError):
        tier.read_blocks_into([("k", bytearray(4))], 1.0)


def test_of_a_batch_what_is_not_staged_has_no_bytes(tier: kvio.StagingTier) -> None:
    """The result of each says how many of its bytes were taken."""
    tier.write_block("taken", b"data")
    results = tier.write_blocks([("a", b"data"), ("taken", b"data")], if_exists="error")

    assert [(result.ok, result.nbytes) for result in results] == [(True, 4), (False, 0)]


def test_a_wait_leaves_nothing_behind() -> None:
    """A tier may live as long as a server: what it waits for is forgotten."""
    lock = threading.RLock()
    progress = Progress(lock)
    with lock:
        for _ in range(3):
            assert not progress.wait(progress.begin(), lambda: False, 0.0)

    assert progress._goals == []
