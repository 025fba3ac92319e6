"""A full tier: bounds that hold, an order that is fair, and no state that nothing can leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvio
from kvio.staging.daemon.client import RemoteEngine
from kvio.testing.fakes import WrappedStore
from kvio.types import MiB
from tests.limited import run_limited
from tests.staging.controlled import (
    LONG_S,
    SOON_S,
    ControlledBackend,
    disk_error,
    open_controlled,
    staged,
)

PAGE = 4096


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """A store whose writes can be held."""
    with open_controlled() as store:
        yield store


class Writer(threading.Thread):
    """A write on a thread of its own, and how it ended."""

    def __init__(self, tier: kvio.StagingTier, key: str, nbytes: int, **options: Any) -> None:
        super().__init__(daemon=True)
        self._write: Callable[[], kvio.StagedReceipt] = lambda: tier.write_block(
            key, bytes(nbytes), **options
        )
        self._waiting = tier.stats().waiting_writers
        self._tier = tier
        self.receipt: kvio.StagedReceipt | None = None
        self.error: kvio.KvioError | None = None

    def run(self) -> None:
        """Write."""
        try:
            self.receipt = self._write()
        except kvio.KvioError as exc:
            self.error = exc

    def start_and_wait(self) -> Writer:
        """Start, and return when the writer stands in the queue."""
        self.start()
        while self._tier.stats().waiting_writers == self._waiting:
            assert self.is_alive(), "the writer did not have to wait"
        return self

    def end(self) -> kvio.StagedReceipt:
        """Return the receipt."""
        self.join(LONG_S)
        assert self.receipt is not None, self.error
        return self.receipt


def test_bytes_in_staging_never_exceed_the_capacity(store: WrappedStore[ControlledBackend]) -> None:
    """Whole pages are counted, of many writers and blocks of all sizes."""
    with staged(store, 16 * PAGE) as tier:
        most = []

        def write(number: int) -> None:
            for n in range(40):
                tier.write_block(f"{number}/{n}", bytes((n * 977) % (6 * PAGE)))
                most.append(tier.stats().used_bytes)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        tier.barrier(timeout=LONG_S)

        assert len(most) == 160
        assert max(most) <= 16 * PAGE
        assert tier.stats().used_bytes == 0


def test_a_writer_waits_until_its_bytes_fit(store: WrappedStore[ControlledBackend]) -> None:
    """And not for a mark: as soon as a drain has made room."""
    with staged(store, 4 * PAGE) as tier:
        store.wrapper.hold("a", "b")
        for key in ("a", "b"):
            tier.write_block(key, bytes(2 * PAGE))
        writer = Writer(tier, "c", PAGE).start_and_wait()
        assert tier.stats().used_bytes == 4 * PAGE
        store.wrapper.let_go("a", "b")

        assert writer.end().wait(timeout=LONG_S).nbytes == PAGE


def test_writers_are_served_first_come_first_served(store: WrappedStore[ControlledBackend]) -> None:
    """A large one at the head is not overtaken by small ones that would fit."""
    with staged(store, 4 * PAGE, drain_threads=1) as tier:
        tier.pause()
        tier.write_block("a", bytes(2 * PAGE))
        tier.write_block("b", bytes(2 * PAGE))
        large = Writer(tier, "large", 4 * PAGE).start_and_wait()
        small = Writer(tier, "small", 1).start_and_wait()
        tier.delete_block("a")
        after_one = (large.receipt, small.receipt, tier.stats().waiting_writers)
        with pytest.raises(kvio.StorageTimeoutError):
            tier.write_block("barging", b"1", timeout=SOON_S)
        tier.delete_block("b")
        first = large.end()
        still = small.receipt
        tier.resume()

        assert after_one == (None, None, 2)
        assert still is None
        assert first.sequence < small.end().sequence


def test_a_writer_that_gives_up_lets_the_next_one_go(
    store: WrappedStore[ControlledBackend],
) -> None:
    """`StorageTimeoutError`, nothing staged, and whoever fits behind it is served."""
    with staged(store, 4 * PAGE) as tier:
        tier.pause()
        tier.write_block("a", bytes(2 * PAGE))
        large = Writer(tier, "large", 4 * PAGE, timeout=0.5).start_and_wait()
        small = Writer(tier, "small", PAGE)
        small.start()

        assert small.end().nbytes == PAGE
        large.join(LONG_S)
        assert isinstance(large.error, kvio.StorageTimeoutError)
        assert not tier.contains("large")
        assert tier.stats().used_bytes == 3 * PAGE


def test_when_full_raise_tells_the_writer(store: WrappedStore[ControlledBackend]) -> None:
    """`StorageFullError`, and what is staged stays."""
    with staged(store, 2 * PAGE, when_full="raise") as tier:
        tier.pause()
        tier.write_block("a", bytes(2 * PAGE))
        with pytest.raises(kvio.StorageFullError) as caught:
            tier.write_block("b", b"1")
        tier.resume()
        tier.barrier(timeout=LONG_S)

        assert caught.value.errno == 28
        assert tier.write_block("b", b"1").wait(timeout=LONG_S).nbytes == 1


def test_when_full_pass_through_goes_straight_to_the_store(
    store: WrappedStore[ControlledBackend],
) -> None:
    """On the caller's thread, paused or not, and its receipt is complete on return."""
    with staged(store, 2 * PAGE, when_full="pass_through") as tier:
        tier.pause()
        tier.write_block("a", bytes(2 * PAGE))
        receipt = tier.write_block("b", b"data")

        assert receipt.done
        assert store.wrapper.peek("b") == b"data"
        assert store.wrapper.peek("a") is None
        assert tier.stats().passed_through == 1
        assert tier.durable_sequence == 0


def test_what_is_larger_than_the_tier_passes_through(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Even where a full tier blocks, and in pieces as it was given."""
    with staged(store, 2 * PAGE) as tier:
        data = bytes(range(256)) * 100
        receipt = tier.write_block("k", [data[:1000], bytearray(data[1000:])])

        assert receipt.wait(timeout=0).nbytes == len(data)
        assert store.wrapper.peek("k") == data
        assert bytes(tier.read_block("k")) == data


def test_a_large_write_comes_after_older_ones_of_its_key(
    store: WrappedStore[ControlledBackend],
) -> None:
    """It waits for one that is under way and absorbs one that has not begun."""
    with staged(store, 2 * PAGE) as tier:
        store.wrapper.hold("k")
        running = tier.write_block("k", b"running")
        store.wrapper.wait_for("begin", "k")
        waiting = tier.write_block("k", b"waiting")
        writer = Writer(tier, "k", 3 * PAGE)
        writer.start()
        with pytest.raises(kvio.StorageTimeoutError):
            tier.write_block("k", bytes(5 * PAGE), timeout=SOON_S)
        store.wrapper.let_go()
        through = writer.end()

        assert through.done
        assert running.wait(timeout=LONG_S).nbytes == 7
        assert waiting.wait(timeout=LONG_S).nbytes in (7, 3 * PAGE)
        assert store.wrapper.widest == 1
        assert store.wrapper.peek("k") == bytes(3 * PAGE)
        assert tier.stats().used_bytes == 0


def test_a_large_write_that_fails_leaves_what_was_staged(
    store: WrappedStore[ControlledBackend],
) -> None:
    """The caller has the error, and the older block is still there and drained later."""
    with staged(store, 2 * PAGE) as tier:
        tier.pause()
        older = tier.write_block("k", b"older")
        store.wrapper.fail("k", disk_error())
        with pytest.raises(kvio.StorageError):
            tier.write_block("k", bytes(3 * PAGE))
        seen = bytes(tier.read_block("k"))
        tier.resume()

        assert seen == b"older"
        assert older.wait(timeout=LONG_S).nbytes == 5
        tier.barrier(timeout=LONG_S)


def test_large_writes_obey_if_exists(store: WrappedStore[ControlledBackend]) -> None:
    """Past the tier as in it: staged blocks count."""
    with staged(store, 2 * PAGE) as tier:
        tier.pause()
        tier.write_block("k", b"staged")
        with pytest.raises(kvio.BlockExistsError):
            tier.write_block("k", bytes(3 * PAGE), if_exists="error")
        store.write_block("other", bytes(3 * PAGE))
        kept = tier.write_block("other", b"\1" * 3 * PAGE, if_exists="keep")
        replaced = tier.write_block("k", bytes(3 * PAGE), if_exists="keep")

        assert kept.wait(timeout=0).existed
        assert not replaced.wait(timeout=0).existed
        assert store.wrapper.peek("k") == bytes(3 * PAGE)


def test_a_tier_full_of_failed_blocks_says_so(store: WrappedStore[ControlledBackend]) -> None:
    """A writer that could wait for ever gets `StorageFullError` naming them, before or while."""
    with staged(store, 2 * PAGE, retries=0) as tier:
        tier.pause()
        store.wrapper.fail("bad", disk_error("bad"))
        bad = tier.write_block("bad", bytes(2 * PAGE))
        waiting = Writer(tier, "a", PAGE).start_and_wait()
        tier.resume()
        waiting.join(LONG_S)
        with pytest.raises(kvio.StorageFullError, match="'bad'"):
            tier.write_block("b", b"1")

        assert isinstance(waiting.error, kvio.StorageFullError)
        assert "'bad'" in str(waiting.error)
        with pytest.raises(kvio.StorageError):
            bad.wait(timeout=LONG_S)  # a daemon's client hears of it a little later
        assert tier.failed == [bad]
        tier.discard(bad)
        assert tier.write_block("b", b"1").wait(timeout=LONG_S).nbytes == 1


def test_readers_keep_the_bytes_they_read(store: WrappedStore[ControlledBackend]) -> None:
    """What is drained meanwhile is not given to others before the reader is done."""
    with staged(store, 2 * PAGE) as tier:
        tier.pause()
        tier.write_block("k", bytes(2 * PAGE))
        with tier._reads._pinned("k", "tier") as entry:
            assert entry is not None
            tier.resume()
            tier.barrier(timeout=LONG_S)
            pinned = tier.stats().used_bytes
            with pytest.raises(kvio.StorageTimeoutError):
                tier.write_block("other", b"1", timeout=SOON_S)

        assert pinned == 2 * PAGE
        assert tier.stats().used_bytes == 0


def test_closing_sends_waiting_writers_away(store: WrappedStore[ControlledBackend]) -> None:
    """They get `StoreClosedError`; what was staged is stored."""
    tier = kvio.stage(store, 2 * PAGE, drain_threads=1)
    store.wrapper.hold("a")
    tier.write_block("a", bytes(2 * PAGE))
    writer = Writer(tier, "b", PAGE).start_and_wait()
    closer = threading.Thread(target=tier.close)
    closer.start()
    writer.join(LONG_S)
    waits = writer.is_alive()
    store.wrapper.let_go()
    closer.join(LONG_S)

    assert not waits
    assert isinstance(writer.error, kvio.StoreClosedError)
    assert list(store.list_keys()) == ["a"]


def test_a_large_write_has_a_race_before_it_run_below_the_mark(
    store: WrappedStore[ControlledBackend],
) -> None:
    """What no newer write may absorb is drained for it, though the tier is nearly empty."""
    with staged(store, 8 * PAGE, drain_from="high_water") as tier:
        raced = tier.write_block("k", b"raced", if_exists="error")
        through = tier.write_block("k", bytes(9 * PAGE), timeout=LONG_S)

        assert through.done
        assert raced.wait(timeout=LONG_S).nbytes == 5
        assert store.wrapper.order("stored") == ["k", "k"]


# Shrinking and growing


def test_shrinking_gives_free_memory_back_at_once(store: WrappedStore[ControlledBackend]) -> None:
    """And the tier holds that much less."""
    with staged(store, MiB) as tier:
        tier.pause()
        tier.write_block("k", bytes(256 * 1024))

        assert tier.shrink(MiB // 2) == MiB // 2
        assert tier.stats().capacity_bytes == MiB // 2
        assert bytes(tier.read_block("k")) == bytes(256 * 1024)


def test_shrinking_takes_what_is_in_use_as_it_is_drained(
    store: WrappedStore[ControlledBackend],
) -> None:
    """The capacity is smaller at once; no new write gets what is owed."""
    with staged(store, 4 * PAGE) as tier:
        tier.pause()
        tier.write_block("k", b"\1" * 4 * PAGE)
        at_once = tier.shrink(3 * PAGE)
        seen = bytes(tier.read_block("k"))
        tier.resume()
        tier.barrier(timeout=LONG_S)
        stats = tier.stats()

        assert (at_once, seen) == (0, b"\1" * 4 * PAGE)
        assert (stats.capacity_bytes, stats.used_bytes) == (PAGE, 0)
        assert tier.write_block("fits", bytes(PAGE)).wait(timeout=LONG_S).nbytes == PAGE
        assert tier.write_block("through", bytes(2 * PAGE)).done


def test_a_writer_for_whom_the_tier_became_too_small_passes_through(
    store: WrappedStore[ControlledBackend],
) -> None:
    """It does not wait for ever."""
    with staged(store, 4 * PAGE) as tier:
        tier.pause()
        tier.write_block("k", bytes(2 * PAGE))
        writer = Writer(tier, "large", 3 * PAGE).start_and_wait()
        tier.shrink(2 * PAGE)

        assert writer.end().done
        assert store.wrapper.peek("large") == bytes(3 * PAGE)


def test_a_tier_of_nothing_passes_everything_through(
    store: WrappedStore[ControlledBackend],
) -> None:
    """And grows again."""
    with staged(store, 4 * PAGE) as tier:
        assert tier.shrink(100 * PAGE) == 4 * PAGE
        assert tier.write_block("a", b"1").done
        assert tier.grow(100 * PAGE) == 4 * PAGE
        tier.pause()
        assert not tier.write_block("b", b"2").done
        assert bytes(tier.read_block("b")) == b"2"


def test_growing_serves_who_waits(store: WrappedStore[ControlledBackend]) -> None:
    """At once."""
    with staged(store, 4 * PAGE) as tier:
        tier.shrink(2 * PAGE)
        tier.pause()
        tier.write_block("a", bytes(2 * PAGE))
        writer = Writer(tier, "b", PAGE).start_and_wait()
        tier.grow(2 * PAGE)

        assert not writer.end().done


def test_memory_that_was_given_back_is_not_resident(store: WrappedStore[ControlledBackend]) -> None:
    """The process has it no more (RSS), though the tier is open."""

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE

    with staged(store, 64 * MiB, populate=True) as tier:
        engine = tier._engine
        if isinstance(engine, RemoteEngine):
            mapping = engine.mapping
            assert mapping is not None
            mapping.wait(LONG_S)
        before = resident()
        tier.shrink(48 * MiB)

        assert before - resident() > 40 * MiB


def test_a_staged_block_without_memory_is_named_with_its_size() -> None:
    """The copy that a read makes finds none; the block is read as soon as there is some."""
    run_limited(
        """
        size = 64 * MiB  # above what malloc keeps: it is mapped anew
        with kvio.open_store("memory://") as store, kvio.stage(store, 2 * size) as tier:
            tier.pause()
            tier.write_block("k", bytes(size))
            with at_most(8 * MiB):
                error = error_of(lambda: tier.read_block("k", nbytes=size - 1))
            again = len(tier.read_block("k"))
            tier.resume()

        assert isinstance(error, kvio.OutOfMemoryError), repr(error)
        assert (error.key, error.nbytes) == ("k", size - 1)
        assert "'k'" in str(error)
        assert again == size
        """
    )
