"""The I/O threads: reads go first, queued bytes are bounded, and stuck threads are replaced.

A thread is idle, at work on one job, or quarantined. `submit` queues a job and starts a thread if
none is idle and fewer than wanted exist; a thread takes the next job, runs it, sets its future and
is idle again; it ends when the executor is closed and the queues are empty.

A thread in a system call on a dead mount cannot be stopped. A caller whose deadline passes
`abandon`s its job: the thread that runs it is quarantined and a new one takes its place; if the
system call ever returns, the old thread ends. At most `MOST_STUCK` threads, or as many as the pool
has, can be quarantined, each with the block it holds; after that no new one is started, and calls
wait until their deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvio.core import lifetime, threads
from kvio.core.threads import Condition, Future
from kvio.errors import BlockError, StorageTimeoutError, StoreClosedError, TransientStorageError

#: After so many jobs a queued write goes first, so that reads cannot starve writes.
_WRITE_EVERY: Final = 8
#: Limit of threads, quarantined ones and those at work, which may be quarantined next.
MOST_STUCK: Final = 64
#: How long `Executor.close` without a timeout waits for quarantined threads: they may never end,
#: but those of calls that a signal interrupted end soon.
_STUCK_S: Final = 1.0


class Job:
    """One piece of work on the queue."""

    __slots__ = ("future", "helpers", "nbytes", "read", "run", "submitted", "thread")

    def __init__(self, run: Callable[[], Any], *, nbytes: int, read: bool) -> None:
        self.run = run
        self.submitted = False
        self.nbytes = nbytes
        self.read = read
        self.future: Future[Any] = Future()
        self.thread: threading.Thread | None = None
        self.helpers: list[Job] = []


class Executor:
    """A fixed number of threads over two queues.

    Args:
        threads: how many run at once.
        max_queued_bytes: `submit` blocks while queued and running jobs hold more than this; one
            job larger than that is admitted alone.
        on_start: called first by each thread, with its number.
        name: the owner of these threads, for messages.
    """

    def __init__(
        self,
        *,
        threads: int,
        max_queued_bytes: int,
        on_start: Callable[[int], None] | None = None,
        name: str = "an executor",
    ) -> None:
        self._name = name
        self._wanted = threads
        self._on_start = on_start
        self._started = 0
        self._max_bytes = max_queued_bytes
        self._lock = threading.RLock()
        self._work_ready = Condition(self._lock)
        self._room = Condition(self._lock)
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._quarantined: set[threading.Thread] = set()
        self._running: dict[threading.Thread, Job] = {}
        self._notifying: dict[object, threading.Thread] = {}
        self._leaving: list[threading.Thread] = []
        self._idle = 0
        self._turn = 0
        self._closed = False
        self._awaited: list[Job] = []
        self.queued_bytes = 0
        lifetime.watch(self)

    @property
    def quarantined(self) -> int:
        """The number of threads stuck in abandoned calls."""
        return len(self._quarantined)

    def submit(self, job: Job, *, deadline: float | None = None) -> None:
        """Queue work, waiting until its bytes fit.

        Raises:
            StorageTimeoutError: they did not fit before *deadline* (`time.monotonic`).
            StoreClosedError: the executor is closed.
            TransientStorageError: no thread can be started for it.
        """
        queue = self._reads if job.read else self._writes
        job.submitted = True
        with self._lock:
            self._wait_for_room(job.nbytes, deadline)
            try:
                self.queued_bytes += job.nbytes
                queue.append(job)
                self._start_threads()
                self._work_ready.notify()
            except BaseException:  # there is no thread, or the handler of a signal raised it
                queue.remove(job)
                self._release(job)
                raise

    def run_all(
        self,
        tasks: Sequence[Callable[[], Any]],
        *,
        read: bool = True,
        cancel: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run tasks on this thread and the I/O threads at once; return their results in order.

        The I/O threads take their part from the queue for reads or for writes. It is safe to call
        this from an I/O thread: the caller runs every task that no other thread takes.

        If the handler of a signal raises, tasks that have not begun never run, *cancel* is called
        to stop the others, and this call waits for them.

        Raises:
            Exception: the first that a task raised, after all have ended.
        """
        todo = deque(range(len(tasks)))
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def work() -> None:
            while todo:
                try:
                    number = todo.popleft()
                except IndexError:
                    return
                try:
                    results[number] = tasks[number]()
                except BaseException as exc:  # noqa: BLE001  # raised below
                    errors[number] = exc

        def stop() -> None:
            todo.clear()
            if cancel is not None:
                cancel()

        helpers = [Job(work, nbytes=0, read=read) for _ in tasks[: self._wanted][1:]]
        try:
            self._add_helpers(helpers)
            work()
        except BaseException:  # raised by the handler of a signal, between two tasks
            stop()
            raise
        finally:
            _wait_for_all(helpers, stop)
        try:
            if errors:
                raise errors[min(errors)]
        finally:
            errors.clear()  # a traceback has the frames that have these: a cycle
        return [results[number] for number in range(len(tasks))]

    def abandon(self, job: Job, notify: Callable[[], object] = lambda: None) -> None:
        """Stop waiting for a job and call *notify*; `drain` and `close` wait until it returns.

        A queued job is removed from the queue; a running one quarantines its thread.
        """
        me, notifying = threading.current_thread(), object()
        try:
            with self._lock:
                self._notifying[notifying] = me
                self._abandon(job)
                with suppress(TransientStorageError):  # the next call tries again
                    self._start_threads()
            notify()
        finally:
            with self._lock:
                self._notifying.pop(notifying, None)
                self._room.notify_all()

    def drain(self, *, timeout: float | None = None) -> bool:
        """Wait until no job is queued or running, except abandoned ones; False on a timeout."""

        def done() -> bool:
            busy = self._running.keys() - self._quarantined
            return not (self._reads or self._writes or busy or self._others_notify())

        with self._lock:
            return threads.wait_for(self._room, done, timeout)

    def finish(self, deadline: float) -> None:
        """Wait, at the end of the program, until all submitted jobs have ended."""
        with self._lock:
            running = [job for t, job in self._running.items() if t not in self._quarantined]
            jobs = (*self._reads, *self._writes, *running)
            self._awaited = [job for job in jobs if job.submitted and not job.read]
        self.drain(timeout=_left(deadline))

    def unfinished(self) -> str | None:
        """Describe the writes and deletions that `finish` waited for and that did not succeed."""
        lost = [job.future for job in self._awaited if _is_lost(job.future)]
        error = next((future.exception() for future in lost if future.done()), None)
        why = "" if error is None else f" (one failed: {error})"
        return f"{len(lost)} operations of {self._name}{why}" if lost else None

    @property
    def has_threads(self) -> bool:
        """True if a thread was started and has not ended."""
        return bool(self._threads or self._quarantined)

    def close(self, *, timeout: float | None = None) -> bool:
        """Finish the queued jobs, then end the threads.

        After *timeout* seconds the jobs still queued are cancelled instead. Return False if a
        thread has not ended: it is still busy, or was quarantined before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        me = threading.current_thread()
        with self._lock:
            self._closed = True
            self._work_ready.notify_all()
            self._room.notify_all()
            threads.wait_for(
                self._room,
                lambda: not (self._threads - {me} or self._others_notify()),
                _left(deadline),
            )
            stuck = tuple(self._quarantined)
        if deadline is None:
            deadline = time.monotonic() + _STUCK_S
        for thread in stuck:
            threads.join(thread, _left(deadline))
        with self._lock:
            queued = (*self._reads, *self._writes)
            self._reads.clear()
            self._writes.clear()
            ended = not (self._threads or self._quarantined)
            leaving, self._leaving = self._leaving, []
        _drop(deque(queued))
        for thread in leaving:
            threads.join(thread)
        return ended

    def _others_notify(self) -> bool:
        """Return whether another thread is in the *notify* of `abandon`."""
        me = threading.current_thread()
        return any(thread is not me for thread in self._notifying.values())

    def _abandon(self, job: Job) -> None:
        if job.future.done():
            return
        queue = self._reads if job.read else self._writes
        if job in queue:
            queue.remove(job)
            job.future.cancel()
            self._release(job)
        elif job.thread in self._threads:
            self._threads.discard(job.thread)
            self._quarantined.add(job.thread)
            self._release(job)
            for helper in job.helpers:
                self._abandon(helper)

    def _add_helpers(self, helpers: list[Job]) -> None:
        with self._lock:
            if self._closed:
                return
            parent = self._running.get(threading.current_thread())
            if parent is not None:
                parent.helpers = helpers
            for helper in helpers:
                (self._reads if helper.read else self._writes).append(helper)
            try:
                self._start_threads()
            except TransientStorageError:  # the caller runs all tasks
                for helper in helpers:
                    (self._reads if helper.read else self._writes).remove(helper)
            self._work_ready.notify(len(helpers))

    def _wait_for_room(self, nbytes: int, deadline: float | None) -> None:
        def fits() -> bool:
            room = self.queued_bytes + nbytes <= self._max_bytes
            return self._closed or room or self.queued_bytes == 0

        if not threads.wait_for(self._room, fits, _left(deadline)):
            raise StorageTimeoutError("the I/O queue stayed full until the deadline")
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _start_threads(self) -> None:
        """Start threads for queued jobs, up to the size of the pool.

        Raises:
            TransientStorageError: the system starts none, and there is no other.
        """
        waiting = len(self._reads) + len(self._writes)
        room = max(MOST_STUCK, self._wanted) - len(self._quarantined)
        wanted = min(self._wanted, room)
        while len(self._threads) < wanted and waiting > self._idle:
            number, self._started = self._started, self._started + 1
            thread = threading.Thread(
                target=self._work, args=(number,), name="kvio-io", daemon=True
            )
            try:
                self._threads.add(thread)
                threads.start(thread)
            except BaseException as exc:
                self._threads.discard(thread)  # `_work` adds it again if it runs nevertheless
                if isinstance(exc, TransientStorageError):
                    self._started = number
                    if self._threads:
                        return
                raise
            waiting -= 1

    def _work(self, number: int) -> None:
        me = threading.current_thread()
        with self._lock:
            self._threads.add(me)
        if self._on_start is not None:
            self._on_start(number)
        while True:
            with self._lock:
                job = self._next(me)
            if job is None:
                return
            _run(job)
            with self._lock:
                self._running.pop(me, None)
                self._room.notify_all()
                if me not in self._quarantined:
                    self._release(job)
                    continue
                self._quarantined.discard(me)
                try:
                    self._start_threads()
                except TransientStorageError:  # no thread can replace this one: it goes on
                    self._threads.add(me)
                else:
                    return

    def _next(self, me: threading.Thread) -> Job | None:
        self._idle += 1
        self._work_ready.wait_for(lambda: self._reads or self._writes or self._closed)
        self._idle -= 1
        if not self._reads and not self._writes:
            self._threads.discard(me)
            self._leaving.append(me)
            self._room.notify_all()
            return None
        self._turn += 1
        write = self._writes and (not self._reads or self._turn % _WRITE_EVERY == 0)
        job = (self._writes if write else self._reads).popleft()
        job.thread = me
        self._running[me] = job
        return job

    def _release(self, job: Job) -> None:
        self.queued_bytes -= job.nbytes
        self._room.notify_all()


def _drop(jobs: deque[Job]) -> None:
    """Cancel jobs that have not begun."""
    while jobs:
        try:
            job = jobs.popleft()
        except IndexError:
            return
        job.future.cancel()
        job.future.set_running_or_notify_cancel()


def _wait_for_all(helpers: Sequence[Job], stop: Callable[[], None]) -> None:
    """Cancel helpers that have not begun and wait for the others; call *stop* on a signal."""
    interrupted: BaseException | None = None
    while True:
        try:
            if interrupted is not None:
                stop()
            threads.wait([helper.future for helper in helpers if not helper.future.cancel()])
        except BaseException as exc:  # noqa: BLE001  # raised below
            interrupted = interrupted or exc
        else:
            break
    try:
        if interrupted is not None:
            raise interrupted
    finally:
        del interrupted  # its traceback has this frame: a cycle


def _is_lost(future: Future[Any]) -> bool:
    """Return whether a job did not succeed; a `BlockError` is an answer, not a loss."""
    if not future.done():
        return True
    return not future.cancelled() and not isinstance(future.exception(), BlockError | None)


def _run(job: Job) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    run, job.run = job.run, _nothing  # a future that is kept must not keep the block's bytes
    try:
        result = run()
    except BaseException as exc:  # noqa: BLE001  # raised to the caller that waits for the future
        job.future.set_exception(exc)
        del job  # the error's traceback has this frame: a cycle
    else:
        job.future.set_result(result)


def _nothing() -> None:
    pass


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
