"""How a store's calls run: inline, or on the I/O threads with a deadline.

Without a timeout a call runs where it was made, at no cost but a counter. With one it runs on an
I/O thread, and whoever comes first decides: the work, which then delivers its result, or the
deadline, after which nothing is delivered and the caller's memory is not touched.
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

from kvio import threads
from kvio.errors import ConfigError, StorageTimeoutError, StoreClosedError, out_of_memory
from kvio.executor import Executor, Job
from kvio.threads import Condition, Future
from kvio.types import Cancellation, GiB

if TYPE_CHECKING:
    from kvio.placement import Placement

P = ParamSpec("P")
T = TypeVar("T")

#: Is told what a call returned, or else what it raised.
Ended: TypeAlias = Callable[[Any, BaseException | None], None]

CLOSED: Final = "the store is closed"
#: Steps that go to an I/O thread together: there and back costs as much as they do.
_STEP: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a store itself can be told; the rest goes to its backend.

    Attributes:
        io_threads: threads for batches, submitted work and calls with a timeout.
        max_queued_bytes: submitting blocks while work under way holds more.
        timeout: seconds for every call that gives none of its own; None waits for ever.
        placement: where the threads run; None: wherever the system puts them.
    """

    io_threads: int
    max_queued_bytes: int = GiB
    timeout: float | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.io_threads < 1:
            raise ConfigError(f"io_threads must be at least 1, not {self.io_threads}")
        if self.max_queued_bytes < 1:
            raise ConfigError("max_queued_bytes must be at least 1")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, not {self.timeout}")


def _listed(items: Iterator[T], _: Cancellation | None) -> list[T]:
    return list(items)


class Pending:
    """One call on the I/O threads, and the race between its work and its deadline.

    Attributes:
        before_deadline: the work ended first; its future is done, or about to be.

    Args:
        work: what is done, unless it is given up before.
        nbytes: what it holds of the queue.
        read: it goes before writes.
        describe: what an error calls it.
        key: the block that it is about, if it is one.
        deliver: turns its result into the future's, if it is in time.
        ended: is told how it ended before anybody who waits, unless the future was cancelled.
        holding: the work fills its caller's memory: once begun it cannot be cancelled.
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
        """Do the work, unless it was given up before."""
        work, self._work = self._work, None  # a future that is kept must not keep the bytes
        if work is None or self._over or (self._holding and not self._claim()):
            return None
        cancel = self.cancel
        del self  # the traceback of an error has this frame: a cycle
        return work(cancel)

    def _claim(self) -> bool:
        """Let nobody cancel the future any more; False if somebody has."""
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
        """Hand on what the work returned or raised, unless the deadline was first."""
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
        """Give up, unless the work was first."""
        if not self._win():
            return False
        self._deliver = self._work = None
        self.cancel.request()
        executor.abandon(self.job, self._tell_late)
        return True

    def refuse(self, error: BaseException) -> None:
        """End it before it was queued."""
        if self._win() and self._claim():
            self._fail(error)

    def _tell_late(self) -> None:
        if self._claim():
            said = f"{self._describe} did not end in time"
            self._fail(StorageTimeoutError(said, errno=errno.ETIMEDOUT))


def _placer(settings: Settings) -> Callable[[int], None] | None:
    if settings.placement is None:
        return None
    from kvio.placement import thread_placer  # late: few ask for it

    return thread_placer(settings.placement, settings.io_threads)


class Calls:
    """Knows the calls of a store that are under way, and runs those with a deadline.

    Attributes:
        closed: no call may begin.
        inside: one object a call under way; a set changes in one step, and needs no lock.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.threads = settings.io_threads
        self.executor = Executor(
            threads=settings.io_threads,
            max_queued_bytes=settings.max_queued_bytes,
            on_start=_placer(settings),
            name=name,
        )
        self._timeout = settings.timeout
        self.closed = self._closing = False
        self._lock = threading.RLock()
        self._idle = Condition(self._lock)
        self.inside: set[object] = set()
        self._deadlines = Deadlines(self.executor)

    def here(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run *work* on this thread, as a call that `close` waits for.

        Raises:
            StoreClosedError: the store is closed.
        """
        call = object()
        try:  # no context manager in Python: the handler of a signal may raise in its first step
            self.inside.add(call)  # before the look: close() looks in the other order
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
        """Give the seconds a call may take: its own timeout, else the store's, else None."""
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
        """Run *work* here, or on an I/O thread where there is a limit.

        Raises:
            StorageTimeoutError: it did not end in time.
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
        """Yield from an iterator whose steps are calls; their time, not the consumer's, is limited.

        Raises:
            StorageTimeoutError: they took longer, all in all.
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
        """Queue a call, waiting for room.

        Raises:
            StorageTimeoutError: there was none in time.
            StoreClosedError: the store is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.here(self.executor.submit, pending.job, deadline=deadline)
        return pending

    def wait(self, pending: Pending, deadline: float | None) -> Any:
        """Wait for a pending call; it is given up at the deadline, or where that is interrupted."""
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
        """Queue a call and return its future, which a watchdog ends at the deadline.

        Raises:
            TransientStorageError: there is no thread for it, and none can be started.
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
        """Refuse new calls; False if another call of close() came before."""
        with self._lock:
            first, self._closing, self.closed = not self._closing, True, True
            return first

    def close(self, timeout: float | None) -> bool:
        """Wait for calls under way, after `refuse`; False if they did not end in time."""
        try:
            ended = self.executor.close(timeout=timeout)
            with self._lock:
                ended = threads.wait_for(self._idle, lambda: not self.inside, timeout) and ended
        except BaseException:  # the handler of a signal raised it: close() may be called again
            self._closing = False
            raise
        self._deadlines.close()
        return ended


class Deadlines:
    """A thread, started when first needed, that expires pending calls when their time has come."""

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
            TransientStorageError: the system has none.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvio-clock", daemon=True)
                threads.start(thread)
                self._thread = thread

    def watch(self, pending: Pending, deadline: float) -> None:
        """Expire *pending* at *deadline* (`time.monotonic`) unless it ends before."""
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
