"""How a store's calls run: on the caller's thread, or on an I/O thread with a deadline.

A call without a timeout runs on the caller's thread (`Calls.here`) and costs one entry of a set.
A call with a timeout, and a submitted one, is a `Pending`, whose future is the caller's, with a
`Job` in the queue of the `Executor`, whose future is the work's. Its states:

    queued --> running --> ended                     the job's future is done: `Pending.finish`
       |          |
       |          +------> expired, still running    the deadline passed: `Pending.expire`; the
       |                                             thread is quarantined until the call returns
       +-----------------> expired, never run        the job leaves the queue

Of `finish`, `expire` and `refuse` the first wins (`_win`, under the call's lock); the others do
nothing. Only the winner resolves the caller's future. Once `expire` has won, no result is
delivered, the caller's memory is not touched, and `cancel` asks the work to stop before it
publishes. A caller may cancel its future until `_claim`: before the result is set, or, where the
work fills the caller's memory, before the work begins. A thread that waits for a call expires
it itself (`Calls.wait`); submitted calls are expired by one thread, `Deadlines`, or when they are
cancelled.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

from kvio.abc import FastReads
from kvio.core import threads
from kvio.core.executor import Executor, Job
from kvio.core.threads import Condition, Future
from kvio.errors import ConfigError, StorageTimeoutError, StoreClosedError, out_of_memory
from kvio.types import Cancellation, GiB

if TYPE_CHECKING:
    from kvio.placement import Placement

P = ParamSpec("P")
T = TypeVar("T")

#: Called with the result of a call, or with the exception it raised.
Ended: TypeAlias = Callable[[Any, BaseException | None], None]

CLOSED: Final = "the store is closed"
#: Steps that are handed to an I/O thread together: the handover costs as much as they do.
_STEP: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a store itself; all others are its backend's.

    Attributes:
        io_threads: threads for batches, submitted work and calls with a timeout; None: as many
            as the backend has by default.
        max_queued_bytes: `submit` blocks while queued and running jobs hold more bytes.
        timeout: seconds for calls without a timeout of their own; None: no limit.
        placement: processors for the threads; None: the system decides.
    """

    io_threads: int | None = None
    max_queued_bytes: int = GiB
    timeout: float | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.io_threads is not None and self.io_threads < 1:
            raise ConfigError(f"io_threads must be at least 1, not {self.io_threads}")
        if self.max_queued_bytes < 1:
            raise ConfigError("max_queued_bytes must be at least 1")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, not {self.timeout}")


def _listed(items: Iterator[T], _: Cancellation | None) -> list[T]:
    return list(items)


class Pending:
    """One call on the I/O threads, and the race between its end and its deadline.

    Attributes:
        before_deadline: the work ended before the deadline; its future is done, or about to be.

    Args:
        work: the function to run, unless the call is cancelled or times out before.
        nbytes: counted against ``max_queued_bytes``.
        read: it goes before queued writes.
        describe: its name in error messages.
        key: the key of the block, if it is about one.
        deliver: turns the result of *work* into that of the future, before the deadline only.
        ended: called with the outcome before the future is done, unless that was cancelled.
        holding: the work fills the caller's memory: once begun it cannot be cancelled.
    """

    def __init__(
        self,
        work: Callable[[Cancellation | None], Any],
        *,
        nbytes: int = 0,
        read: bool = True,
        describe: str = "the call",
        key: str | None = None,
        deliver: Callable[[Any], Any] | None = None,
        ended: Ended | None = None,
        holding: bool = False,
    ) -> None:
        self.future: Future[Any] = Future()
        self.cancel = Cancellation()
        self.nbytes = nbytes
        self.job = Job(self.run, nbytes=nbytes, read=read)
        self.job.future.add_done_callback(self.finish)
        self._work: Callable[[Cancellation | None], Any] | None = work
        self._describe = describe
        self._key = key
        self._deliver = deliver
        self._ended = ended
        self._holding = holding
        self._lock = threading.Lock()
        self._over = False
        self._claimed: bool | None = None
        self.before_deadline = False

    def run(self) -> Any:
        """Do the work, unless the call was cancelled or timed out before."""
        work, self._work = self._work, None  # a future that is kept must not keep the bytes
        if work is None or self._over or (self._holding and not self._claim()):
            return None
        cancel = self.cancel
        del self  # the traceback of an error has this frame: a cycle
        return work(cancel)

    def _claim(self) -> bool:
        """Make the future uncancellable; False if it was cancelled before."""
        with self._lock:
            if self._claimed is None:
                self._claimed = self.future.set_running_or_notify_cancel()
            return self._claimed

    def _win(self, *, before_deadline: bool = False) -> bool:
        with self._lock:
            won, self._over = not self._over, True
            self.before_deadline |= won and before_deadline
            return won

    def finish(self, inner: futures.Future[Any]) -> None:
        """Deliver the result or exception of the work, unless the deadline passed before."""
        if not self._win(before_deadline=True):
            return
        deliver, self._deliver = self._deliver, None
        if inner.cancelled():
            self.future.cancel()
            self._claim()
        elif self._claim():
            error = inner.exception()
            if error is not None:
                self._fail(error)
            else:
                self._hand_over(inner.result(), deliver)

    def _hand_over(self, result: Any, deliver: Callable[[Any], Any] | None) -> None:
        try:
            given = deliver(result) if deliver else result
        except (ValueError, TypeError, BufferError) as exc:  # the caller released its memory
            self._fail(exc)
            return
        except MemoryError as exc:
            self._fail(exc)
            return
        if self._ended is not None:
            self._ended(given, None)
        self.future.set_result(given)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, MemoryError) and self._key is not None:
            cause, error = error, out_of_memory(error, self._key, self.nbytes)
            error.__cause__ = cause
        if self._ended is not None:
            self._ended(None, error)
        self.future.set_exception(error)

    def expire(self, executor: Executor) -> bool:
        """Cancel the call, unless its work has ended."""
        if not self._win():
            return False
        self._deliver = self._work = None
        self.cancel.request()
        executor.abandon(self.job, self._fail_late)
        return True

    def refuse(self, error: BaseException) -> None:
        """Fail the call before it is queued."""
        if self._win() and self._claim():
            self._fail(error)

    def _fail_late(self) -> None:
        if self._claim():
            text = f"{self._describe} did not end before its deadline"
            self._fail(StorageTimeoutError(text, errno=errno.ETIMEDOUT))


def _placer(placement: Placement | None, io_threads: int) -> Callable[[int], None] | None:
    if placement is None:
        return None
    from kvio.placement import thread_placer  # imported late: few programs use it

    return thread_placer(placement, io_threads)


class Calls:
    """The calls of a store that are in progress; runs those with a deadline.

    Attributes:
        closed: no call may begin.
        inside: one object per call in progress; a set changes in one step, so it needs no lock.
        fast_reads: of the backend, which counts its own calls in progress.
    """

    def __init__(self, settings: Settings, name: str, *, threads: int) -> None:
        self.threads = threads
        self.executor = Executor(
            threads=threads,
            max_queued_bytes=settings.max_queued_bytes,
            on_start=_placer(settings.placement, threads),
            name=name,
        )
        self._timeout = settings.timeout
        self.closed = self._closing = False
        self._lock = threading.RLock()
        self._idle = Condition(self._lock)
        self.inside: set[object] = set()
        self.fast_reads: FastReads | None = None
        self._deadlines = Deadlines(self.executor)

    def here(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run *work* on this thread, as a call that `close` waits for.

        Raises:
            StoreClosedError: the store is closed.
        """
        call = object()
        try:  # no context manager in Python: the handler of a signal may raise in its first step
            self.inside.add(call)  # before the check: close() does both in the other order
            if self.closed:
                raise StoreClosedError(CLOSED)
            return work(*args, **kwargs)
        finally:
            self.inside.discard(call)
            if self.closed:
                self.left()

    def left(self) -> None:
        """Notify `close` that a call has ended."""
        with self._lock:
            self._idle.notify_all()

    def limit(self, timeout: float | None) -> float | None:
        """Return the timeout of a call in seconds: its own, else the store's, else None."""
        return self._timeout if timeout is None else timeout

    def run(
        self,
        work: Callable[[Cancellation | None], T],
        *,
        nbytes: int = 0,
        read: bool = True,
        timeout: float | None = None,
        describe: str = "the call",
        deliver: Callable[[T], T] | None = None,
    ) -> T:
        """Run *work* on this thread, or on an I/O thread if it has a timeout.

        Raises:
            StorageTimeoutError: it did not end before its deadline.
        """
        limit = self.limit(timeout)
        if limit is None:
            return self.here(work, None)
        deadline = time.monotonic() + limit
        result: T = self.wait(
            self.start(
                Pending(work, nbytes=nbytes, read=read, describe=describe, deliver=deliver), limit
            ),
            deadline,
        )
        return result

    def each(self, items: Iterator[T], *, timeout: float | None, describe: str) -> Iterator[T]:
        """Yield from an iterator whose steps are calls; the timeout counts their time alone.

        Raises:
            StorageTimeoutError: the steps took longer in total.
        """
        left = self.limit(timeout)
        while True:
            begun = time.monotonic()
            step = _STEP if left is not None else 1
            page = islice(items, step)
            some: list[T] = self.run(partial(_listed, page), timeout=left, describe=describe)
            if left is not None:
                left = max(0.0, left - (time.monotonic() - begun))
            yield from some
            if len(some) < step:
                return

    def start(self, pending: Pending, timeout: float | None) -> Pending:
        """Queue a call, waiting until the queue has room for it.

        Raises:
            StorageTimeoutError: it had none before the deadline.
            StoreClosedError: the store is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.here(self.executor.submit, pending.job, deadline=deadline)
        return pending

    def wait(self, pending: Pending, deadline: float | None) -> Any:
        """Wait for a call; it is cancelled at its deadline, or if waiting is interrupted."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            threads.wait([pending.future], left)
        finally:
            pending.expire(self.executor)
        try:
            return pending.future.result()
        finally:
            del pending  # the traceback of its error has this frame: a cycle

    def submit(self, pending: Pending, timeout: float | None) -> Future[Any]:
        """Queue a call and return its future, which times out at the deadline.

        Raises:
            TransientStorageError: no thread can be started for it.
        """
        limit = self.limit(timeout)
        if limit is not None:
            self._deadlines.start()
        pending.future.add_done_callback(lambda future: self._cancelled(future, pending))
        self.start(pending, limit)
        if limit is not None:
            self._deadlines.watch(pending, time.monotonic() + limit)
        return pending.future

    def _cancelled(self, future: futures.Future[Any], pending: Pending) -> None:
        if future.cancelled():
            pending.expire(self.executor)

    def refuse(self) -> bool:
        """Refuse new calls; False if close() was called before."""
        with self._lock:
            first, self._closing, self.closed = not self._closing, True, True
            if self.fast_reads is not None:
                self.fast_reads.refuse()
            return first

    def _is_idle(self) -> bool:
        return not self.inside and (self.fast_reads is None or not self.fast_reads.busy)

    def close(self, timeout: float | None) -> bool:
        """Wait for calls in progress, after `refuse`; False if they go on after *timeout*."""
        try:
            ended = self.executor.close(timeout=timeout)
            with self._lock:
                ended = threads.wait_for(self._idle, self._is_idle, timeout) and ended
        except BaseException:  # the handler of a signal raised it: close() may be called again
            self._closing = False
            raise
        self._deadlines.close()
        return ended


class Deadlines:
    """A thread, started when first needed, that cancels calls at their deadlines."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._heap: list[tuple[float, int, Pending]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread, once.

        Raises:
            TransientStorageError: the system cannot start it.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvio-clock", daemon=True)
                threads.start(thread)
                self._thread = thread

    def watch(self, pending: Pending, deadline: float) -> None:
        """Cancel *pending* at *deadline* (`time.monotonic`) unless it ends before."""
        with self._lock:
            heapq.heappush(self._heap, (deadline, next(self._order), pending))
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self._due():
                    self._changed.wait(self._next_wait())
                if self._closed:
                    return
                pending = heapq.heappop(self._heap)[2]
            pending.expire(self._executor)

    def _due(self) -> bool:
        while self._heap and self._heap[0][2].future.done():
            heapq.heappop(self._heap)
        return bool(self._heap) and self._heap[0][0] <= time.monotonic()

    def _next_wait(self) -> float | None:
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None
