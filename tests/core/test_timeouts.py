"""Deadlines: a typed error in time, and nothing that happens behind the caller's back later."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.types import Blocks, Cancellation
from tests.posix import faultlab, mounts
from tests.posix.gate import (
    LATE,
    GateBackend,
    SlowFile,
    backend_of,
    install,
    wait_until_ended,
)

SOON_S = 0.02
LONG_S = 60.0
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW


def test_a_listing_with_a_timeout_is_whole() -> None:
    """Its pages join up, whatever their number, and the consumer's time does not count."""
    with kvio.open_store("memory") as store:
        keys = {f"k/{number:04d}" for number in range(600)}
        store.write_blocks([(key, b"") for key in keys])

        listing = store.list_keys("k/", timeout=LONG_S)

        assert next(listing) in keys
        assert len(set(listing)) == 599
        assert list(store.list_keys("none", timeout=LONG_S)) == []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvio.Store]:
    """A store with one I/O thread whose calls can be held at a gate, opened at the end."""
    install(tmp_path, monkeypatch)
    store = kvio.open_store("gate", io_threads=1, max_queued_bytes=1000)
    yield store
    open_gate(store)
    store.close()


def stick(store: kvio.Store, key: str = "stuck") -> None:
    """Time out a write that waits at the gate: its thread is abandoned."""
    future = store.submit_write(key, b"data")
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    assert future.cancel()


def open_gate(store: kvio.Store) -> None:
    """Let everybody through, and wait until the threads that were stuck are gone."""
    backend: GateBackend = backend_of(store)
    stuck = list(store._calls.executor._quarantined)
    backend.gate.set()
    wait_until_ended(stuck)
    assert store.stats().quarantined_threads == 0


def test_a_write_that_timed_out_is_not_published_later(store: kvio.Store) -> None:
    """A StorageTimeoutError; when the storage wakes up, the block stays unwritten."""
    with pytest.raises(kvio.StorageTimeoutError) as caught:
        store.write_block("stuck", b"data", timeout=SOON_S)

    assert caught.value.errno == errno.ETIMEDOUT
    open_gate(store)
    assert not store.contains("stuck")
    assert store.stats().timeouts == 1


def test_a_read_that_timed_out_never_touches_the_callers_memory(store: kvio.Store) -> None:
    """Bytes that arrive late go nowhere: single, by parts, submitted and in a batch."""
    outs = [bytearray(b"\x55" * 64) for _ in range(5)]
    with pytest.raises(kvio.StorageTimeoutError):
        store.read_block_into("stuck1", outs[0], timeout=SOON_S)
    with pytest.raises(kvio.StorageTimeoutError):
        store.read_block_into("stuck2", [outs[1], outs[2]], offset=1, timeout=SOON_S)
    (result,) = store.read_blocks_into([("stuck3", outs[3])], timeout=SOON_S)
    future = store.submit_read_into("stuck4", outs[4], timeout=SOON_S)
    with pytest.raises(kvio.StorageTimeoutError):
        future.result(LONG_S)

    assert result.status == "timeout"
    assert isinstance(result.error, kvio.StorageTimeoutError)
    open_gate(store)
    assert outs == [b"\x55" * 64] * 5


def test_a_read_in_time_is_delivered(store: kvio.Store) -> None:
    """The gate's own bytes do arrive when no call timed out: the test above can fail."""
    out = bytearray(64)
    backend_of(store).gate.set()

    assert store.read_block_into("stuck", out, timeout=LONG_S) == 64
    assert out.startswith(LATE)


def test_the_pool_goes_on_after_a_stuck_call(store: kvio.Store) -> None:
    """With the only thread stuck, the next calls run on its replacement."""
    for number in range(3):
        stick(store, f"stuck{number}")
        assert store.write_block(f"k{number}", b"data", timeout=LONG_S).nbytes == 4
        assert bytes(store.read_block(f"k{number}", timeout=LONG_S)) == b"data"

    assert store.stats().quarantined_threads == 3
    assert store.stats().queued_bytes == 0


def test_every_call_takes_a_timeout(store: kvio.Store) -> None:
    """Whatever waits behind a stuck call times out at its own deadline."""
    held = store.submit_write("stuck", b"data")
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    late = kvio.StorageTimeoutError
    for call in (
        lambda: store.read_block("k", timeout=SOON_S),
        lambda: store.read_block_into("k", bytearray(9), timeout=SOON_S),
        lambda: store.stat_block("k", timeout=SOON_S),
        lambda: store.contains("k", timeout=SOON_S),
        lambda: store.count_leading(["k"], timeout=SOON_S),
        lambda: store.delete_block("k", timeout=SOON_S),
        lambda: store.verify_block("k", timeout=SOON_S),
        lambda: list(store.list_keys(timeout=SOON_S)),
        lambda: store.flush(timeout=SOON_S),
    ):
        with pytest.raises(late):
            call()
    assert [r.status for r in store.delete_blocks(["a", "b"], timeout=SOON_S)] == ["timeout"] * 2
    assert [r.status for r in store.write_blocks([("a", b"")], timeout=SOON_S)] == ["timeout"]
    assert store.stats().quarantined_threads == 0, "only queued calls timed out"
    backend_of(store).gate.set()
    assert held.result(LONG_S).nbytes == 4


def test_the_stores_own_timeout_holds_for_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``open_store(timeout=)`` bounds calls that give none, submitted ones too."""
    install(tmp_path, monkeypatch)
    store = kvio.open_store("gate", io_threads=2, timeout=SOON_S)

    with pytest.raises(kvio.StorageTimeoutError):
        store.write_block("stuck", b"data")
    with pytest.raises(kvio.StorageTimeoutError):
        store.submit_write("stuck2", b"data").result(LONG_S)
    assert [r.status for r in store.write_blocks([("stuck3", b"data")])] == ["timeout"]
    open_gate(store)
    store.close()


def test_only_the_stuck_group_of_a_batch_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that ended in time keep their results; those that did not are timeouts, in order."""
    install(tmp_path, monkeypatch)
    store = kvio.open_store("gate", io_threads=4)
    items = [(f"k{i}", bytes(300_000)) for i in range(6)]
    items[2:2] = [("stuck", bytes(300_000))]
    results = store.write_blocks(items, timeout=1.0)

    assert [r.key for r in results] == [key for key, _ in items]
    assert results[2].status == "timeout"
    assert any(r.ok for r in results)
    assert {r.status for r in results} == {"ok", "timeout"}
    for result in results:
        assert store.contains(result.key) == result.ok
    open_gate(store)
    assert not store.contains("stuck")
    store.close()


def test_submitting_is_bounded_in_bytes(store: kvio.Store) -> None:
    """A queue that stays full past the deadline refuses, and takes nothing of the refused."""
    held = store.submit_write("stuck", bytes(700))
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    queued = store.submit_write("k1", bytes(300))
    with pytest.raises(kvio.StorageTimeoutError):
        store.submit_write("k2", bytes(1), timeout=SOON_S)
    assert store.stats().queued_bytes == 1000
    backend_of(store).gate.set()

    assert held.result(LONG_S).nbytes == 700
    assert queued.result(LONG_S).nbytes == 300
    store.flush(timeout=LONG_S)
    assert store.stats().queued_bytes == 0
    assert not store.contains("k2")


def test_a_cancelled_future_never_runs(store: kvio.Store) -> None:
    """Cancelling what is queued takes it off the queue, its bytes too."""
    held = store.submit_write("stuck", bytes(100))
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    queued = store.submit_write("k", bytes(900))
    assert queued.cancel()

    assert store.stats().queued_bytes == 100
    with pytest.raises(CancelledError):
        queued.result(LONG_S)
    backend_of(store).gate.set()
    assert held.result(LONG_S).nbytes == 100
    store.flush(timeout=LONG_S)
    assert backend_of(store).order == ["stuck"]


def test_a_cancelled_write_that_runs_is_not_published(store: kvio.Store) -> None:
    """Cancelling what is under way quarantines its thread and publishes nothing."""
    stick(store)

    assert store.stats().quarantined_threads == 1
    assert store.write_block("k", b"data", timeout=LONG_S).nbytes == 4
    open_gate(store)
    assert not store.contains("stuck")


@pytest.mark.parametrize("timeout", [None, SOON_S])
def test_what_a_future_tells_is_counted_by_then(
    store: kvio.Store, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """Whoever has a result finds it in `stats`, though callbacks may still be to come."""
    looked = threading.Event()
    future = store.submit_write("stuck", b"data", timeout=timeout)
    monkeypatch.setattr(future, "_invoke_callbacks", lambda: looked.wait(LONG_S))
    if timeout is None:
        backend_of(store).gate.set()

    failed = future.exception(LONG_S) is not None
    stats = store.stats()
    looked.set()
    assert (stats.writes, stats.timeouts) == (1, int(failed))
    assert failed is (timeout is not None)


def test_close_finishes_what_was_submitted(store: kvio.Store) -> None:
    """Every future is done when close returns."""
    held = store.submit_write("stuck", b"data")
    futures = [store.submit_write(f"k{i}", b"data") for i in range(20)]
    backend_of(store).gate.set()
    store.close()

    assert held.result(0).nbytes == 4
    assert [future.result(0).nbytes for future in futures] == [4] * 20
    assert backend_of(store).busy_at_close == 0


def test_close_gives_up_on_stuck_work(store: kvio.Store) -> None:
    """After its timeout close raises, cancels what waits, and leaves the stuck call alone."""
    held = store.submit_write("stuck", b"data")
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    queued = store.submit_write("k", b"data")
    with pytest.raises(kvio.StorageTimeoutError):
        store.close(timeout=SOON_S)

    assert queued.cancelled()
    assert backend_of(store).busy_at_close is None
    for call in (
        lambda: store.write_block("k", b""),
        lambda: store.read_block("k"),
        lambda: store.submit_write("k", b""),
        lambda: store.write_blocks([("k", b"")]),
        lambda: next(store.list_keys()),
        lambda: store.flush(),
    ):
        with pytest.raises(kvio.StoreClosedError):
            call()
    backend_of(store).gate.set()
    assert held.result(LONG_S).nbytes == 4


def test_the_backend_is_not_closed_under_a_quarantined_call(store: kvio.Store) -> None:
    """A call that was cancelled may still be inside: its descriptors must not be reused."""
    stick(store)
    with suppress(kvio.StorageTimeoutError):
        store.close(timeout=SOON_S)

    assert backend_of(store).busy_at_close is None


# Real media


@pytest.mark.root
def test_a_stuck_read_of_a_real_file_times_out(real_disk: Path) -> None:
    """A read that hangs in the kernel: an error in time, the buffer untouched, others go on."""
    root = real_disk / "root"
    root.mkdir(mode=0o700)
    data = faultlab.pattern(1, 200_000)
    outs = [bytearray(len(data)), bytearray(len(data))]
    with kvio.open_store("posix-tmpfile", root=root, io_threads=1) as store:
        store.write_blocks([("slow", data), ("fast", data)])
        with SlowFile(faultlab.file_of(root, "slow")) as slow:
            future = store.submit_read_into("slow", outs[0], timeout=LONG_S)
            slow.wait_for_reader()
            assert future.cancel()
            with pytest.raises(kvio.StorageTimeoutError):
                store.read_block("slow", timeout=SOON_S)
            assert store.stats().quarantined_threads >= 1
            assert store.read_block_into("fast", outs[1], timeout=LONG_S) == len(data)
            stuck = list(store._calls.executor._quarantined)
        wait_until_ended(stuck)
        assert outs[0] == bytes(len(data))
        assert outs[1] == data
        assert bytes(store.read_block("slow", timeout=LONG_S)) == data


def cancelled_while_it_syncs(store: kvio.Store, blocks: Blocks) -> list[str]:
    """Write a batch and cancel it once it waits for the disk; how each block ended."""
    cancel = Cancellation()
    with faults.inject("read", nth=1 << 30) as fault, ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            faultlab.posix_backend(store).write_blocks, blocks, if_exists="keep", cancel=cancel
        )
        while not (fault.seen[faults.sites()["fdatasync"]] or future.done()):
            pass
        cancel.request()
        results = future.result(LONG_S)
    assert results is not None
    return [str(result.status) for result in results]


@pytest.mark.parametrize("publish", ["auto", "rename"])
def test_a_write_cancelled_before_its_name_appears_gets_none(real_disk: Path, publish: str) -> None:
    """Cancelled while it waits for the disk with all bytes written, a block is not published."""
    root = real_disk / "root"
    root.mkdir(mode=0o700)
    options = {"publish": publish}
    try:
        store = kvio.open_store(
            "posix-tmpfile", root=root, durability="durable", layout="plain", options=options
        )
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system is not durable: {exc}")
    keys = [f"k{i}" for i in range(64)]
    blocks = Blocks(keys, [[memoryview(b"data")]] * len(keys), [4] * len(keys))
    with store:
        for _ in range(50):  # on a busy machine the disk may be faster than who cancels
            ended = cancelled_while_it_syncs(store, blocks)
            if set(ended) == {"cancelled"}:
                break
            deleted = [store.delete_block(key) for key in keys]
            assert deleted == [status == "ok" for status in ended]

    assert set(ended) == {"cancelled"}
    assert list(root.iterdir()) == []


@contextmanager
def frozen(mountpoint: Path) -> Iterator[None]:
    """Freeze a file system: writers hang in the kernel until it thaws (fsfreeze(8))."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, _THAW, 0)
    finally:
        os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("publish", ["auto", "rename"])
def test_a_write_to_a_frozen_file_system_is_not_published_when_it_thaws(
    disk_path: Path, publish: str
) -> None:
    """Writes that hang in the kernel time out, and leave neither block nor temporary afterwards."""
    with mounts.loop_filesystem("ext4", disk_path) as root:
        options = {"publish": publish}
        with kvio.open_store("posix-tmpfile", root=root, io_threads=2, options=options) as store:
            store.write_block("before", b"data")
            with frozen(root.parent):
                future = store.submit_write("k", faultlab.pattern(1, 500_000))
                while not store._calls.executor._running:
                    assert not future.done()
                assert future.cancel()
                with pytest.raises(kvio.StorageTimeoutError):
                    store.write_block("k", faultlab.pattern(1, 500_000), timeout=SOON_S)
                results = store.write_blocks([(f"b{i}", b"data") for i in range(4)], timeout=SOON_S)
                assert [result.status for result in results] == ["timeout"] * 4
                assert bytes(store.read_block("before", timeout=LONG_S)) == b"data"
                stuck = list(store._calls.executor._quarantined)
                assert stuck
            wait_until_ended(stuck)
            assert sorted(store.list_keys()) == ["before"]
            assert not faultlab.temporaries(root)
            assert store.write_block("k", b"data", timeout=LONG_S).nbytes == 4
