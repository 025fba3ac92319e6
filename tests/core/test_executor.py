"""I/O threads: reads first, bytes bounded, stuck threads replaced, no deadlock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial

import pytest

from kvio.core.executor import MOST_STUCK, Executor
from kvio.errors import StorageTimeoutError, StoreClosedError
from tests.occupied import LONG_S, occupy, put, queue


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set when the test is over, whatever happened."""
    event = threading.Event()
    yield event
    event.set()


def test_queued_reads_run_before_queued_writes(gate: threading.Event) -> None:
    """A read that comes after waiting writes goes first."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    occupy(executor, gate)
    order: list[str] = []
    for name in ("w1", "w2", "r1", "r2"):
        put(executor, order, name, read=name.startswith("r"))
    gate.set()

    assert executor.close(timeout=LONG_S)
    assert order == ["r1", "r2", "w1", "w2"]


def test_reads_cannot_starve_a_write(gate: threading.Event) -> None:
    """However many reads wait, a write gets its turn among the next ten."""
    executor = Executor(threads=1, max_queued_bytes=1000)
    occupy(executor, gate)
    order: list[str] = []
    put(executor, order, "write", read=False)
    for _ in range(100):
        put(executor, order, "read", read=True)
    gate.set()

    assert executor.close(timeout=LONG_S)
    assert order.index("write") < 10


def test_queued_bytes_are_bounded(gate: threading.Event) -> None:
    """Submitting waits until the bytes fit, and never are more than the bound under way."""
    executor = Executor(threads=2, max_queued_bytes=100)
    first = occupy(executor, gate, nbytes=60)
    seen: list[int] = []
    done = threading.Event()

    def submit_many() -> None:
        for _ in range(20):
            queue(executor, lambda: seen.append(executor.queued_bytes), nbytes=50, read=True)
        done.set()

    submitter = threading.Thread(target=submit_many)
    submitter.start()
    with pytest.raises(StorageTimeoutError):
        queue(executor, lambda: None, nbytes=41, read=True, deadline=time.monotonic())
    assert not done.is_set()
    assert not seen
    gate.set()
    submitter.join(LONG_S)
    assert executor.close(timeout=LONG_S)

    assert first.future.result() == "late"
    assert len(seen) == 20
    assert max(seen) <= 100
    assert executor.queued_bytes == 0


def test_one_job_larger_than_the_bound_runs_alone(gate: threading.Event) -> None:
    """More bytes than the bound are admitted when nothing else is under way, and only then."""
    executor = Executor(threads=2, max_queued_bytes=100)

    assert queue(executor, lambda: "large", nbytes=5000, read=True).future.result(LONG_S) == "large"
    assert executor.drain(timeout=LONG_S)
    occupy(executor, gate, nbytes=1)
    with pytest.raises(StorageTimeoutError):
        queue(executor, lambda: None, nbytes=5000, read=True, deadline=time.monotonic())
    gate.set()
    assert executor.close(timeout=LONG_S)


def test_waiting_for_room_ends_when_the_executor_closes(gate: threading.Event) -> None:
    """A submitter that waits for room gets the error that the executor closed."""
    executor = Executor(threads=1, max_queued_bytes=10)
    occupy(executor, gate, nbytes=10)
    errors: list[BaseException] = []
    waiting = threading.Event()

    def submit() -> None:
        waiting.set()
        try:
            queue(executor, lambda: None, nbytes=10, read=True)
        except StoreClosedError as exc:
            errors.append(exc)

    submitter = threading.Thread(target=submit)
    submitter.start()
    assert waiting.wait(LONG_S)
    assert not executor.close(timeout=0.0)
    submitter.join(LONG_S)
    gate.set()

    assert len(errors) == 1


def test_run_all_keeps_order_and_takes_part() -> None:
    """Results come in order, and an executor whose threads are all taken still gets done."""
    executor = Executor(threads=3, max_queued_bytes=100)
    tasks: list[Callable[[], int]] = [partial(pow, 2, n) for n in range(50)]

    assert executor.run_all(tasks) == [2**n for n in range(50)]
    assert executor.run_all([]) == []
    assert executor.close(timeout=LONG_S)


def test_run_all_raises_the_first_error_after_all_have_ended() -> None:
    """One task that fails stops no other."""
    executor = Executor(threads=3, max_queued_bytes=100)
    done: list[int] = []

    def task(number: int) -> None:
        done.append(number)
        if number in (3, 7):
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="3"):
        executor.run_all([partial(task, n) for n in range(10)])

    assert sorted(done) == list(range(10))
    assert executor.close(timeout=LONG_S)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_run_all_on_every_io_thread_at_once_ends(threads: int) -> None:
    """Jobs that run tasks side by side, nested twice, never wait for a thread they hold."""
    executor = Executor(threads=threads, max_queued_bytes=1000)

    def inner(n: int) -> int:
        return sum(executor.run_all([partial(int, n)] * 5))

    def outer(n: int) -> int:
        return sum(executor.run_all([partial(inner, n + i) for i in range(5)]))

    jobs = [queue(executor, partial(outer, n), nbytes=1, read=n % 2 == 0) for n in range(40)]

    assert [job.future.result(LONG_S) for job in jobs] == [25 * n + 50 for n in range(40)]
    assert executor.close(timeout=LONG_S)


@pytest.fixture
def no_more_threads() -> Iterator[Callable[[], None]]:
    """What makes the system refuse every further thread until the test is over."""
    yield lambda: (threading.stack_size(1 << 40), None)[1]
    threading.stack_size(0)


def test_an_executor_goes_on_with_the_threads_that_it_has(
    no_more_threads: Callable[[], None],
) -> None:
    """Where the system gives no more of them, as at the end of a program since Python 3.12."""
    executor = Executor(threads=4, max_queued_bytes=100)
    assert queue(executor, lambda: "first", nbytes=1, read=True).future.result(LONG_S) == "first"
    no_more_threads()
    jobs = [queue(executor, partial(int, n), nbytes=1, read=False) for n in range(40)]

    assert [job.future.result(LONG_S) for job in jobs] == list(range(40))
    assert executor.run_all([partial(int, n) for n in range(9)]) == list(range(9))
    assert executor.close(timeout=LONG_S)


def test_a_stuck_thread_is_quarantined_and_replaced(gate: threading.Event) -> None:
    """An abandoned call keeps its thread, not its place in the pool or its bytes."""
    executor = Executor(threads=1, max_queued_bytes=100)
    stuck = occupy(executor, gate, nbytes=100)
    thread = stuck.thread
    assert thread is not None
    executor.abandon(stuck)

    assert executor.quarantined == 1
    assert executor.queued_bytes == 0
    assert queue(executor, lambda: "next", nbytes=100, read=True).future.result(LONG_S) == "next"
    assert executor.drain(timeout=0.0) in (True, False)
    gate.set()
    thread.join(LONG_S)
    assert executor.drain(timeout=LONG_S)
    assert executor.quarantined == 0
    assert executor.queued_bytes == 0
    assert queue(executor, lambda: "last", nbytes=1, read=True).future.result(LONG_S) == "last"
    assert executor.close(timeout=LONG_S)


def test_many_stuck_threads_do_not_eat_the_pool(gate: threading.Event) -> None:
    """After twenty abandoned calls there are as many working threads as before."""
    executor = Executor(threads=2, max_queued_bytes=100)
    threads = []
    for _ in range(20):
        stuck = occupy(executor, gate)
        executor.abandon(stuck)
        threads.append(stuck.thread)
    both = threading.Barrier(2)

    assert executor.quarantined == 20
    jobs = [queue(executor, lambda: both.wait(LONG_S), nbytes=0, read=True) for _ in range(2)]
    assert sorted(job.future.result(LONG_S) for job in jobs) == [0, 1]
    gate.set()
    for thread in threads:
        assert thread is not None
        thread.join(LONG_S)
    assert executor.quarantined == 0
    assert executor.close(timeout=LONG_S)


def test_an_abandoned_job_in_the_queue_never_runs(gate: threading.Event) -> None:
    """What has not begun is taken off the queue and its bytes are free at once."""
    executor = Executor(threads=1, max_queued_bytes=100)
    occupy(executor, gate)
    order: list[str] = []
    job = put(executor, order, "never", read=False, nbytes=90)
    executor.abandon(job)

    assert executor.queued_bytes == 0
    with pytest.raises(CancelledError):
        job.future.result(LONG_S)
    gate.set()
    assert executor.close(timeout=LONG_S)
    assert order == []


def test_abandoning_what_has_ended_changes_nothing() -> None:
    """A job that ended just before is not held against its thread."""
    executor = Executor(threads=1, max_queued_bytes=100)
    job = queue(executor, lambda: "done", nbytes=10, read=True)
    assert job.future.result(LONG_S) == "done"
    assert executor.drain(timeout=LONG_S)
    executor.abandon(job)

    assert executor.quarantined == 0
    assert executor.queued_bytes == 0
    assert executor.close(timeout=LONG_S)


def test_abandoning_a_call_frees_the_threads_that_help_it(gate: threading.Event) -> None:
    """The helpers of an abandoned call that are stuck as well are replaced too."""
    executor = Executor(threads=2, max_queued_bytes=100)
    inside = threading.Semaphore(0)

    def wait() -> None:
        inside.release()
        assert gate.wait(LONG_S)

    job = queue(executor, lambda: executor.run_all([wait, wait]), nbytes=1, read=True)
    for _ in range(2):
        assert inside.acquire(timeout=LONG_S)
    executor.abandon(job)
    stuck = list(executor._quarantined)
    both = threading.Barrier(2)

    assert executor.quarantined == 2
    jobs = [queue(executor, lambda: both.wait(LONG_S), nbytes=0, read=True) for _ in range(2)]
    assert sorted(job.future.result(LONG_S) for job in jobs) == [0, 1]
    gate.set()
    for thread in stuck:
        thread.join(LONG_S)
    assert executor.close(timeout=LONG_S)


def test_an_exception_of_a_job_is_its_futures() -> None:
    """Whatever a job raises reaches its future, and the thread goes on."""
    executor = Executor(threads=1, max_queued_bytes=100)

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("a"), SystemExit(3), KeyboardInterrupt(), MemoryError()):
        job = queue(executor, partial(fail, error), nbytes=1, read=True)
        assert job.future.exception(LONG_S) is error
    assert executor.queued_bytes in (0, 1)
    assert queue(executor, lambda: "on", nbytes=1, read=True).future.result(LONG_S) == "on"
    assert executor.close(timeout=LONG_S)
    assert executor.queued_bytes == 0


def test_threads_that_are_stuck_have_a_bound(gate: threading.Event) -> None:
    """After `MOST_STUCK` of them calls wait in the queue; the first to come back lets them run."""
    executor = Executor(threads=1, max_queued_bytes=100)
    for _ in range(MOST_STUCK):
        executor.abandon(occupy(executor, gate))
    before = set(threading.enumerate())

    waiting = queue(executor, lambda: "at last", nbytes=1, read=True)
    assert executor.quarantined == MOST_STUCK
    assert not set(threading.enumerate()) - before
    assert not waiting.future.done()
    gate.set()
    assert waiting.future.result(LONG_S) == "at last"
    assert executor.close(timeout=LONG_S)


def test_threads_at_work_count_as_they_may_be_stuck_next(gate: threading.Event) -> None:
    """All of them may be abandoned at once, and even then no more are stuck than the bound."""
    executor = Executor(threads=3, max_queued_bytes=100)
    at_work = [occupy(executor, gate) for _ in range(2)]
    for _ in range(MOST_STUCK - 2):
        executor.abandon(occupy(executor, gate))
    waiting = queue(executor, lambda: "done", nbytes=0, read=True)
    threads = len(executor._threads) + executor.quarantined
    for job in at_work:
        executor.abandon(job)

    assert threads == MOST_STUCK
    assert executor.quarantined == MOST_STUCK
    assert not waiting.future.done()
    gate.set()
    assert waiting.future.result(LONG_S) == "done"
    assert executor.close(timeout=LONG_S)
