"""The rules of a staging tier: what reads see, in which order keys are stored, what is absorbed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from kvio.types import BlockStatus
from tests.staging.medium import LONG_S, SOON_S, Medium, open_medium, staged

PAGE = 4096


@pytest.fixture
def store() -> WrappedStore[Medium]:
    """A store that claims to make blocks durable."""
    return open_medium(level="durable")


@pytest.fixture
def tier(store: WrappedStore[Medium]) -> Iterator[kvio.StagingTier]:
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
) -> None:
    """Nothing is copied, and the receipt ends with the staged block's."""
    tier.pause()
    first = tier.write_block("k", b"first")
    kept = tier.write_block("k", b"later", if_exists="keep")
    used = tier.stats().used_bytes
    tier.resume()

    assert used == PAGE
    assert bytes(tier.read_block("k")) == b"first"
    assert kept.wait(timeout=LONG_S) == first.wait(timeout=LONG_S)
    assert kept.checksum == first.checksum
    assert store.wrapper.order("begin") == ["k"]
    assert tier.stats().kept == 1


def test_keep_asks_the_store_when_it_is_drained(
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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


def test_error_that_loses_its_race_later_fails_on_the_receipt(
    tier: kvio.StagingTier, store: WrappedStore[Medium]
) -> None:
    """Reads see the winner's block again, no bytes stay, and the next barrier tells."""
    tier.pause()
    receipt = tier.write_block("k", b"ours", if_exists="error")
    store.write_block("k", b"theirs")
    seen = bytes(tier.read_block("k"))
    tier.resume()
    with pytest.raises(kvio.BlockExistsError):
        receipt.wait(timeout=LONG_S)

    assert seen == b"ours"
    assert bytes(tier.read_block("k")) == b"theirs"
    assert (tier.stats().used_bytes, tier.failed) == (0, [])
    with pytest.raises(kvio.BlockExistsError, match="'k'"):
        tier.barrier(timeout=LONG_S)
    tier.barrier(timeout=LONG_S)


def test_error_is_not_absorbed(tier: kvio.StagingTier, store: WrappedStore[Medium]) -> None:
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


# Deleting


def test_a_deleted_block_is_gone_from_the_tier_and_the_store(
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    """They say that the block was deleted; no barrier tells, and the sequence goes on."""
    tier.pause()
    receipt = tier.write_block("k", b"data")
    tier.delete_block("k")

    with pytest.raises(kvio.BlockNotFoundError, match="deleted before"):
        receipt.wait(timeout=LONG_S)
    assert (receipt.done, receipt.absorbed, receipt.level) == (True, True, "accepted")
    tier.barrier(timeout=LONG_S)
    assert tier.durable_sequence == 1


def test_a_deletion_waits_for_the_drain_of_its_key(
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
) -> None:
    """Good bytes pass; others, a block that is gone, and an absorbed write do not."""
    receipt = tier.write_block("k", payloads.payload(9_000, 1))
    tier.verify(receipt, timeout=LONG_S)
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
    with pytest.raises(kvio.UnsupportedError, match="took its place"):
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
    tier: kvio.StagingTier, store: WrappedStore[Medium]
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


def test_nothing_begins_while_paused(tier: kvio.StagingTier, store: WrappedStore[Medium]) -> None:
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
    store = open_medium()
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
    store = open_medium()
    with staged(store, "1MiB", drain_from="high_water") as tier:
        tier.write_block("a", b"1").wait(timeout=LONG_S)
        tier.write_block("b", b"2")
        tier.barrier(timeout=LONG_S)
        tier.write_block("c", b"3").as_future().result(LONG_S)
        tier.write_block("d", b"4")

    assert store.wrapper.order("stored") == ["a", "b", "c", "d"]


# Closing, forks


def test_closing_stores_everything_paused_or_not(store: WrappedStore[Medium]) -> None:
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


def test_close_store_closes_the_store_too(store: WrappedStore[Medium]) -> None:
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

    with tier._ledger.lock:  # held at the fork: the child must not wait for it
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
    with pytest.raises(kvio.UnsupportedError, match="another process"):
        pickle.dumps(tier)


@pytest.mark.parametrize(
    "options",
    [
        {"when_full": "drop"},
        {"drain_from": "never"},
        {"high_water": 0.5, "low_water": 0.6},
        {"high_water": 1.5},
        {"retries": -1},
        {"drain_threads": 0},
        {"timeout": 0.0},
        {"capacity": "lots"},
        {"capacity": 100},
    ],
)
def test_options_that_cannot_be_are_refused(
    store: WrappedStore[Medium], options: dict[str, object]
) -> None:
    """Before any memory is taken."""
    with pytest.raises(kvio.ConfigError):
        kvio.stage(store, **options)  # type: ignore[arg-type]
