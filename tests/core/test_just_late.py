"""Calls whose work ends just when nobody waits any more, and waits that are broken off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import kvio
from tests.posix.gate import backend_of, install, wait_until_ended
from tests.staging.controlled import open_controlled, staged

LONG_S = 60.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvio.Store]:
    """A store whose calls on keys that begin with ``stuck`` wait at a gate."""
    install(tmp_path, monkeypatch)
    with kvio.open_store("gate", io_threads=2) as store:
        yield store


@pytest.fixture
def just_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every wait with a limit end just before what it waits for, and report just after."""
    original = Future.result

    def result(future: Future[Any], timeout: float | None = None) -> Any:
        outcome = original(future, LONG_S)
        if timeout is not None:
            raise TimeoutError
        return outcome

    monkeypatch.setattr(Future, "result", result)


@pytest.mark.usefixtures("just_late")
def test_what_ended_just_then_counts_as_ended(store: kvio.Store) -> None:
    """The work was first: its result is the call's, single and in batches, and no bare error."""
    assert store.write_block("k", b"data", timeout=LONG_S).nbytes == 4
    assert bytes(store.read_block("k", timeout=LONG_S)) == b"data"
    results = store.write_blocks([(f"b{i}", b"data") for i in range(9)], timeout=LONG_S)

    assert {result.status for result in results} == {"ok"}
    assert store.stats().writes == 10
    with pytest.raises(kvio.BlockNotFoundError):
        store.read_block("none", timeout=LONG_S)


@pytest.mark.usefixtures("just_late")
def test_a_receipt_that_came_just_then_is_given() -> None:
    """As for a store's own calls."""
    store = open_controlled()
    with staged(store) as tier:
        assert tier.write_block("k", b"data").wait(timeout=LONG_S).nbytes == 4


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.write_block("stuck", b"data", timeout=LONG_S),
        lambda store: store.write_blocks([("stuck", b"data")], timeout=LONG_S),
    ],
    ids=["single", "batch"],
)
def test_a_write_that_is_interrupted_is_given_up(
    store: kvio.Store, monkeypatch: pytest.MonkeyPatch, write: Callable[[kvio.Store], object]
) -> None:
    """Ctrl-C while it waits: the caller's memory is its own again, and nothing is published."""
    backend = backend_of(store)

    def interrupted(_: Future[Any], __: float | None = None) -> None:
        assert backend.entered.acquire(timeout=LONG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(store)
    monkeypatch.undo()
    stuck = list(store._calls.executor._quarantined)
    backend.gate.set()
    wait_until_ended(stuck)

    assert len(stuck) == 1
    assert not store.contains("stuck")


def test_a_batch_that_cannot_go_on_gives_up_what_it_began(
    store: kvio.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is closed under it, say: what is queued already is not written later."""
    started: list[object] = []
    start = store._calls.start

    def refusing(*args: Any, **options: Any) -> object:
        if started:
            raise kvio.StoreClosedError("the store is closed")
        started.append(start(*args, **options))
        assert backend_of(store).entered.acquire(timeout=LONG_S)
        return started[0]

    monkeypatch.setattr(store._calls, "start", refusing)
    items = [(f"stuck{number}", bytes(1 << 20)) for number in range(8)]
    with pytest.raises(kvio.StoreClosedError):
        store.write_blocks(items, timeout=LONG_S)
    stuck = list(store._calls.executor._quarantined)
    backend_of(store).gate.set()
    wait_until_ended(stuck)

    assert len(stuck) == 1
    assert not list(store.list_keys())


def test_many_who_close_close_once(store: kvio.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's descriptors are given back a single time."""
    closed: list[None] = []
    monkeypatch.setattr(backend_of(store), "close", lambda: closed.append(None))
    together = threading.Barrier(8)

    def close() -> None:
        together.wait(LONG_S)
        store.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)

    assert len(closed) == 1
