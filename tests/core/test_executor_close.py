"""What an executor waits for when it is closed or drained, and what it does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvio.core.executor import Executor
from kvio.errors import StoreClosedError
from tests.occupied import LONG_S, occupy, put, queue


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set when the test is over, whatever happened."""
    event = threading.Event()
    yield event
    event.set()


def test_close_finishes_what_is_queued(gate: threading.Event) -> None:
    """Closing waits for queued work, refuses new work, and leaves no thread."""
    executor = Executor(threads=2, max_queued_bytes=1000)
    occupy(executor, gate)
    order: list[str] = []
    jobs = [put(executor, order, str(n), read=False) for n in range(30)]
    gate.set()

    assert executor.close()
    assert len(order) == 30
    assert all(job.future.done() for job in jobs)
    with pytest.raises(StoreClosedError):
        queue(executor, lambda: None, nbytes=0, read=True)


def test_close_finishes_what_is_queued_behind_a_stuck_call(gate: threading.Event) -> None:
    """A thread that takes the place of a stuck one while close waits is waited for as well."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    stuck = occupy(executor, gate)
    second, entered = threading.Event(), threading.Event()

    def slow() -> str:
        entered.set()
        assert second.wait(LONG_S)
        return "slow"

    slower = queue(executor, slow, nbytes=0, read=False)
    last = queue(executor, lambda: "last", nbytes=0, read=False)
    ended: list[bool] = []
    closer = threading.Thread(target=lambda: ended.append(executor.close()))
    closer.start()
    while not executor._closed:
        pass
    executor.abandon(stuck)
    assert entered.wait(LONG_S)
    gate.set()
    assert stuck.future.result(LONG_S) == "late"
    closer.join(0.2)
    assert not ended, "it did not wait for the thread that took over"
    second.set()
    closer.join(LONG_S)

    assert ended == [True]
    assert (slower.future.result(0), last.future.result(0)) == ("slow", "last")


def test_close_does_not_wait_for_what_is_given_up_meanwhile(gate: threading.Event) -> None:
    """Without a timeout of its own it ends when the last call is abandoned, and says so."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    stuck = occupy(executor, gate)
    ended: list[bool] = []
    closer = threading.Thread(target=lambda: ended.append(executor.close()), daemon=True)
    closer.start()
    while not executor._closed:
        pass
    executor.abandon(stuck)
    closer.join(LONG_S)

    assert ended == [False]


def test_what_is_given_up_is_reported_before_drain_ends(gate: threading.Event) -> None:
    """`drain` and `close` wait for the callback that reports it, and not for the call itself."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    stuck, telling, reported = occupy(executor, gate), threading.Event(), threading.Event()

    def report() -> None:
        assert executor.drain(timeout=LONG_S), "it waited for itself"
        telling.set()
        assert reported.wait(LONG_S)

    teller = threading.Thread(target=lambda: executor.abandon(stuck, report))
    teller.start()
    assert telling.wait(LONG_S)
    assert not executor.drain(timeout=0.0)
    assert not executor.close(timeout=0.0)
    reported.set()
    teller.join(LONG_S)
    assert executor.drain(timeout=LONG_S)


def test_close_with_stuck_work_cancels_what_waits(gate: threading.Event) -> None:
    """When the time is over, queued futures are cancelled, and close says that it timed out."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    stuck = occupy(executor, gate)
    order: list[str] = []
    queued = put(executor, order, "never", read=False)

    assert not executor.close(timeout=0.0)
    assert queued.future.cancelled()
    gate.set()
    assert stuck.future.result(LONG_S) == "late"
    assert order == []
