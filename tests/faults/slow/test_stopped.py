"""A mount whose server is stopped: every call on it hangs in the kernel until it goes on.

Needs FUSE: see `tests.faults.without.passthrough`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from tests.faults.sizes import FULL, seed, size
from tests.faults.slow.deadlines import NEVER_S, SOON_S, Lateness
from tests.faults.totals import Tally
from tests.faults.without import passthrough
from tests.faults.without.passthrough import Passthrough
from tests.posix import faultlab
from tests.posix.gate import wait_until_ended

LONG_S: Final = 60.0
CALLS: Final = size(12, 120)
IO_THREADS: Final = 2
#: So many threads may a store have for which nobody waits any more.
MOST_STUCK: Final = 64
DATA: Final = faultlab.pattern(seed(), 70_000)

pytestmark = [pytest.mark.slow, pytest.mark.root]
if FULL:  # 120 deadlines of a second in one test, and as many waits beside them
    pytestmark.append(pytest.mark.timeout(900))


@pytest.fixture
def mount(disk_path: Path) -> Iterator[Passthrough]:
    """Yield a FUSE mount with an empty store's root in it."""
    with passthrough.mounted(disk_path) as mount:
        (mount.below / "root").mkdir(mode=0o700)
        yield mount


@pytest.fixture
def store(mount: Passthrough) -> Iterator[kvio.Store]:
    """Yield a store on the mount, with a block in it."""
    store = kvio.open_store(
        "posix-tmpfile",
        root=mount.path / "root",
        io_threads=IO_THREADS,
        max_queued_bytes=10 * len(DATA),
    )
    store.write_block("before", DATA, timeout=LONG_S)
    yield store
    settle(store)
    store.close()


def settle(store: kvio.Store) -> None:
    """Wait until the calls that hung have ended, and their callers were notified."""
    executor = store._calls.executor
    wait_until_ended(list(executor._quarantined))
    assert executor.drain(timeout=LONG_S)
    assert store.stats().quarantined_threads == 0


def check_whole(mount: Passthrough, store: kvio.Store, given_up: set[str]) -> None:
    """Check that what was cancelled is absent or whole, and nothing else came or was left."""
    settle(store)
    below = mount.below / "root"
    for key in store.list_keys(timeout=LONG_S):
        assert key in given_up | {"before"}, f"{key} was never written"
        assert faultlab.peek(below, key) == DATA, f"{key} is torn"
    assert not faultlab.temporaries(below)
    assert bytes(store.read_block("before", timeout=LONG_S)) == DATA
    receipt = store.write_block("after", DATA, if_exists="replace", timeout=LONG_S)
    assert receipt.nbytes == len(DATA)
    assert store.delete_block("after", timeout=LONG_S)


def test_every_call_gives_up_at_its_deadline(
    mount: Passthrough, store: kvio.Store, tally: Tally
) -> None:
    """Not before it, and in the end; late answers touch nobody's memory and publish nothing."""
    late = Lateness()
    out = bytearray(b"\x55" * len(DATA))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: store.write_block("w", DATA, timeout=SOON_S),
        lambda: store.read_block_into("before", out, timeout=SOON_S),
        lambda: store.stat_block("before", timeout=SOON_S),
        lambda: store.delete_block("none", timeout=SOON_S),
        lambda: list(store.list_keys(timeout=SOON_S)),
        lambda: store.submit_write("s", DATA, timeout=SOON_S).result(LONG_S),
        lambda: store.submit_read_into("before", out, timeout=SOON_S).result(LONG_S),
        lambda: store.verify_block("before", timeout=SOON_S),
    )
    with mount.stopped():
        for number in range(CALLS):
            with late.expected():
                calls[number % len(calls)]()
        with late.measured():
            results = store.write_blocks([(f"b{i}", DATA) for i in range(9)], timeout=SOON_S)
        assert {result.status for result in results} == {"timeout"}
    tally.add(faults=CALLS + 1)
    late.count(tally)
    print(f"stopped FUSE server: {late}")

    check_whole(mount, store, {"w", "s", *(f"b{i}" for i in range(9))})
    assert out == b"\x55" * len(DATA), "a read that was given up was delivered"


def test_what_waits_for_a_stopped_server_is_bounded(
    mount: Passthrough, store: kvio.Store, tally: Tally
) -> None:
    """Neither bytes nor threads grow with the calls that hang, not even by those at once."""
    threads = threading.active_count()
    refused = 0
    owed: list[Future[kvio.Receipt]] = []
    with mount.stopped():
        for number in range(30):
            try:
                owed.append(store.submit_write(f"q{number}", DATA, timeout=0.02))
            except kvio.StorageTimeoutError:
                refused += 1
            assert store.stats().queued_bytes <= 10 * len(DATA)
        wait_for(owed, LONG_S)
        for number in range(size(80, 400)):
            if store.stats().quarantined_threads == MOST_STUCK - 1:  # two threads hang in it
                store.write_blocks([(f"b{i}", DATA) for i in range(9)], timeout=SOON_S)
            with pytest.raises(kvio.StorageTimeoutError):
                store.write_block(f"t{number}", DATA, timeout=0.01)
        grown = threading.active_count() - threads
        stuck = store.stats().quarantined_threads
    print(f"{len(owed)} submitted, {refused} refused; {grown} more threads, {stuck} stuck")
    tally.add(faults=size(110, 430))
    settle(store)

    assert all(isinstance(one.exception(0), kvio.StorageTimeoutError) for one in owed)
    assert stuck <= MOST_STUCK, "threads grow with the calls that hang"
    assert grown <= MOST_STUCK + 2 * IO_THREADS + 2


def test_other_mounts_go_on(
    mount: Passthrough, store: kvio.Store, tmp_path: Path, tally: Tally
) -> None:
    """A store on another mount works as before, in this process, with and without deadlines.

    A call with a deadline ends before it, and takes as long as a plain file takes, give or take.
    """
    root = tmp_path / "other"
    root.mkdir(mode=0o700)
    late = Lateness()
    with kvio.open_store("posix-tmpfile", root=root, io_threads=IO_THREADS) as other:
        with mount.stopped():
            hanging = [store.submit_write(f"h{i}", DATA, timeout=LONG_S) for i in range(6)]
            for number in range(size(20, 300)):
                begun = time.monotonic()
                (tmp_path / f"plain{number}").write_bytes(DATA)
                assert (tmp_path / f"plain{number}").read_bytes() == DATA
                start = time.monotonic()
                other.write_block(f"k{number}", DATA, timeout=NEVER_S)
                assert bytes(other.read_block(f"k{number}", timeout=NEVER_S)) == DATA
                late.note(time.monotonic() - start, start - begun)
            assert bytes(other.read_block("k0")) == DATA
            assert all(r.ok for r in other.write_blocks([(f"b{i}", DATA) for i in range(9)]))
            assert not any(one.done() for one in hanging)
        for one in hanging:
            assert one.result(LONG_S).nbytes == len(DATA)
    late.count(tally)
    print(f"other mount: {late}")

    for number in range(len(late.over)):
        assert faultlab.peek(root, f"k{number}") == DATA
    check_whole(mount, store, {f"h{i}" for i in range(6)})
    tally.add(receipts=len(late.over) + 6, lost=0, torn=0)


def test_what_ends_late_is_reported_once(
    mount: Passthrough, store: kvio.Store, tally: Tally
) -> None:
    """A future that gave up stays given up; one that did not gets its receipt, once."""
    reported: list[str] = []
    with mount.stopped():
        early = [store.submit_write(f"e{i}", DATA, timeout=SOON_S) for i in range(3)]
        wait_for(early, LONG_S)
        patient = [store.submit_write(f"p{i}", DATA, timeout=LONG_S) for i in range(3)]
        for name, futures in (("early", early), ("patient", patient)):
            for one in futures:
                one.add_done_callback(lambda _, name=name: reported.append(name))  # type: ignore[misc]
    receipts = [one.result(LONG_S) for one in patient]
    settle(store)

    assert [one.nbytes for one in receipts] == [len(DATA)] * 3
    assert all(isinstance(one.exception(0), kvio.StorageTimeoutError) for one in early)
    assert sorted(reported) == ["early"] * 3 + ["patient"] * 3
    for number in range(3):
        assert faultlab.peek(mount.below / "root", f"p{number}") == DATA
    check_whole(mount, store, {f"{name}{i}" for name in "ep" for i in range(3)})
    tally.add(receipts=len(receipts), lost=0, torn=0)


def test_a_store_on_a_stopped_mount_can_be_closed(mount: Passthrough, tally: Tally) -> None:
    """``close(timeout=)`` gives up at its deadline, cancels what waits, and may not hang."""
    late = Lateness()
    for number in range(size(1, 10)):
        store = kvio.open_store("posix-tmpfile", root=mount.path / "root", io_threads=1)
        store.write_block(f"before{number}", DATA, timeout=LONG_S)
        with mount.stopped():
            held = [store.submit_write(f"h{number}/{i}", DATA) for i in range(4)]
            while not store._calls.executor._running:
                assert not held[0].done()
            with late.expected():
                store.close(timeout=SOON_S)
            assert all(one.cancelled() for one in held[1:])
            with pytest.raises(kvio.StoreClosedError):
                store.write_block("late", DATA, timeout=SOON_S)
        held[0].exception(LONG_S)
        for i, stands in enumerate((DATA, None, None, None)):
            assert faultlab.peek(mount.below / "root", f"h{number}/{i}") == stands
    late.count(tally)
    tally.add(faults=len(late.over), torn=0)
    print(f"close: {late}")

    assert not faultlab.temporaries(mount.below / "root")


def test_a_tier_over_a_stopped_mount_keeps_what_it_accepted(
    mount: Passthrough, store: kvio.Store, tally: Tally
) -> None:
    """Writes are accepted until the memory is full; then each gives up in time; all is stored."""
    late = Lateness()
    accepted: list[kvio.StagedReceipt] = []
    patience_s = 10 * LONG_S  # a drain that takes longer is tried again, and given up one day
    with kvio.stage(store, capacity=8 * 81_920, timeout=patience_s, drain_threads=2) as tier:
        with mount.stopped():
            for number in range(20):
                try:
                    accepted.append(tier.write_block(f"t{number}", DATA, timeout=SOON_S))
                except kvio.StorageTimeoutError:
                    break
            assert 4 <= len(accepted) <= 8, "memory is not what bounds it"
            for _ in range(size(2, 120)):
                with late.expected():
                    tier.write_block("more", DATA, timeout=SOON_S)
            with late.expected():
                tier.barrier(timeout=SOON_S)
            for receipt in accepted:
                assert bytes(tier.read_block(receipt.key, timeout=NEVER_S)) == DATA
            assert tier.stats().used_bytes <= 8 * 81_920
        for receipt in accepted:
            receipt.wait(timeout=LONG_S)
        tier.barrier(timeout=LONG_S)
    late.count(tally)
    print(f"tier: {late}")

    for receipt in accepted:
        assert faultlab.peek(mount.below / "root", receipt.key) == DATA
    assert faultlab.peek(mount.below / "root", "more") is None
    tally.add(receipts=len(accepted), lost=0, torn=0)
