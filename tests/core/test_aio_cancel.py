"""Tasks that are cancelled: nothing touches, or stores, what their caller then puts in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvio
from tests.posix.gate import LATE, GateBackend, backend_of, install, wait_until_ended

LONG_S = 60.0
OLD, NEW = b"\x55" * 64, b"\xaa" * 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvio.Store]:
    """A store with one I/O thread, whose calls on keys that begin with ``stuck`` wait at a gate."""
    install(tmp_path, monkeypatch)
    store = kvio.open_store("gate", io_threads=1, max_queued_bytes=100)
    yield store
    stuck = list(store._calls.executor._quarantined)
    backend_of(store).gate.set()
    wait_until_ended(stuck)
    store.close()


async def entered(backend: GateBackend) -> None:
    """Wait until a call stands at the gate."""
    assert await asyncio.to_thread(backend.entered.acquire, timeout=LONG_S)


def wait_for_one_without_room(store: kvio.Store) -> None:
    """Wait until somebody waits for room in the queue."""
    while not store._calls.executor._room._waiters:
        pass


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_write_that_waits_for_room_is_never_written(store: kvio.Store) -> None:
    """The queue is full, the caller is cancelled and reuses its memory, and then there is room."""
    memory = bytearray(OLD)

    async def work() -> None:
        waiting = kvio.AsyncStore(store)
        held = asyncio.create_task(waiting.write_block("stuck", OLD))
        await entered(backend_of(store))
        late = asyncio.create_task(waiting.write_block("late", memory))
        await asyncio.to_thread(wait_for_one_without_room, store)
        await cancelled(late)
        memory[:] = NEW
        backend_of(store).gate.set()
        await held

    asyncio.run(work())
    store.flush()
    assert not store.contains("late")
    assert backend_of(store).order[0] == "stuck"
    assert "late" not in backend_of(store).order[:-1]


def test_a_write_that_runs_is_not_published(store: kvio.Store) -> None:
    """Its task ends at once, and the thread is left behind."""

    async def work() -> None:
        task = asyncio.create_task(kvio.AsyncStore(store).write_block("stuck", bytearray(OLD)))
        await entered(backend_of(store))
        await cancelled(task)

    asyncio.run(work())
    stuck = list(store._calls.executor._quarantined)
    assert len(stuck) == 1
    backend_of(store).gate.set()
    wait_until_ended(stuck)
    assert not store.contains("stuck")


def test_a_read_with_a_timeout_leaves_the_memory_alone(store: kvio.Store) -> None:
    """It reads into memory of its own, so that its task ends at once."""
    out = bytearray(OLD)

    async def work() -> None:
        read = kvio.AsyncStore(store).read_block_into("stuck", out, timeout=LONG_S)
        task = asyncio.create_task(read)
        await entered(backend_of(store))
        await cancelled(task)

    asyncio.run(work())
    stuck = list(store._calls.executor._quarantined)
    backend_of(store).gate.set()
    wait_until_ended(stuck)
    assert out == OLD


@pytest.mark.parametrize(
    "call",
    [
        lambda store, out: store.read_block_into("stuck", out),
        lambda store, out: store.read_blocks_into([("stuck", out)]),
        lambda store, out: store.write_blocks([("stuck", out)]),
    ],
    ids=["read", "reads", "writes"],
)
def test_a_task_waits_for_what_uses_its_memory(
    store: kvio.Store, call: Callable[[kvio.AsyncStore, bytearray], Awaitable[object]]
) -> None:
    """However often it is cancelled; then its memory is its caller's again."""
    out = bytearray(OLD)

    async def work() -> None:
        async def run() -> None:
            await call(kvio.AsyncStore(store), out)

        task = asyncio.create_task(run())
        await entered(backend_of(store))
        for _ in range(3):
            task.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.wait([task])), 0.05)
            assert not task.done(), "somebody still uses its memory"
        backend_of(store).gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend_of(store).inside == 0

    asyncio.run(work())


@pytest.mark.parametrize("timeout", [None, LONG_S])
def test_a_cancelled_batch_begins_no_other_block(store: kvio.Store, timeout: float | None) -> None:
    """Its task ends with the block that is under way, and says what was done."""
    keys = ["stuck", *(f"k{n}" for n in range(200))]

    async def work() -> None:
        async def run() -> None:
            await kvio.AsyncStore(store).write_blocks([(key, OLD) for key in keys], timeout=timeout)

        task = asyncio.create_task(run())
        await entered(backend_of(store))
        task.cancel()
        await asyncio.sleep(0)  # the task takes note
        backend_of(store).gate.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        results = caught.value.kvio_results  # type: ignore[attr-defined]
        stored = [result.key for result in results if result.ok]
        assert [result.key for result in results] == keys
        assert stored == [key for key in keys if store.contains(key)]
        assert caught.value.__notes__[0].startswith(f"{len(stored)} of {len(keys)} blocks")

    asyncio.run(work())
    assert backend_of(store).order == ["stuck"]


def test_a_submitted_read_that_fills_its_memory_cannot_be_cancelled(store: kvio.Store) -> None:
    """`cancel` says so; one that is queued can."""
    out = bytearray(OLD)
    running = store.submit_read_into("stuck", out)
    assert backend_of(store).entered.acquire(timeout=LONG_S)
    queued = store.submit_read_into("stuck", bytearray(1))

    assert not running.cancel()
    assert running.running()
    assert queued.cancel()
    backend_of(store).gate.set()
    assert running.result(LONG_S) == len(out)
    assert out.startswith(LATE), "the call that was not cancelled did not end"


def test_no_task_waits_for_a_call_that_was_never_queued(
    store: kvio.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that gives no more threads, say: the task has the error."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(store._calls, "submit", fail)
    call = kvio.AsyncStore(store).write_block("k", OLD)
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(asyncio.wait_for(call, LONG_S))


def test_errors_of_queueing_arrive(store: kvio.Store) -> None:
    """A queue that stays full, and a closed store."""

    async def work() -> None:
        waiting = kvio.AsyncStore(store)
        held = asyncio.create_task(waiting.write_block("stuck", OLD))
        await entered(backend_of(store))
        with pytest.raises(kvio.StorageTimeoutError):
            await waiting.write_block("k", OLD, timeout=0.02)
        backend_of(store).gate.set()
        await held
        await waiting.close()
        with pytest.raises(kvio.StoreClosedError):
            await waiting.write_block("k", OLD)

    asyncio.run(work())
