"""Starting threads where the system may have none left, and waiting for them.

The handler of a signal runs on the main thread and may raise between any two of its steps in
Python. `threading.Condition`, and the futures of `concurrent.futures` with it, take and release
their lock in such steps: a lock that stays locked then stops every thread that needs it, and one
that is released twice was another thread's. What is here takes its locks in one step.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from kvio.errors import TransientStorageError

#: The longest that the main thread sleeps in a lock. A signal ends that sleep only where the
#: system interrupts the main thread: not where it interrupts another thread of the process, and
#: not where it came just before. Python runs the handler when the main thread wakes.
_HANDLERS_S: Final = 0.1
#: The longest that another thread sleeps: the main thread may be interrupted before it notifies.
_LOST_S: Final = 1.0

T = TypeVar("T")
#: The system's own type, not the one in Python: ``with`` takes and releases it in one step.
_RLock: Final[type] = type(threading.RLock())


class Condition:
    """What threads that hold a lock wait for: `threading.Condition`, but for ``with lock:``.

    Whatever is raised in `wait`, the lock is held again when it ends, and no notification is lost
    to a thread that does not wait any more.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiters: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait to be notified, and take the lock; False: the time was over."""
        return _wait(self._lock, self._waiters, timeout)

    def wait_for(self, ready: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until *ready* returns true, and return what it returned last."""
        return _wait_for(self._lock, self._waiters, ready, timeout)

    def notify(self, count: int = 1) -> None:
        """Wake as many threads, with the lock held."""
        _notify(self._waiters, count)

    def notify_all(self) -> None:
        """Wake all threads, with the lock held."""
        _notify(self._waiters, len(self._waiters))


class _FutureCondition(_RLock):  # type: ignore[misc]  # mypy takes it for final
    """The condition of a `Future`, which also is its lock."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        return _wait(self, self._waiters, timeout)

    def wait_for(self, ready: Callable[[], T], timeout: float | None = None) -> T:
        return _wait_for(self, self._waiters, ready, timeout)

    def notify_all(self) -> None:
        _notify(self._waiters, len(self._waiters))


class Future(concurrent.futures.Future[T]):
    """A future that no handler of a signal can leave locked."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _FutureCondition()  # as its base class names it in every release

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; False: the time was over."""
        with self._condition:
            return self._condition.wait_for(self.done, timeout)


def _wait(lock: threading.RLock, waiters: deque[Any], timeout: float | None) -> bool:
    owned = lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001  # as the standard library
    waiter = threading.Lock()
    waiter.acquire()
    waiters.append(waiter)
    notified = False
    try:
        lock.release()
        if timeout is None:
            notified = waiter.acquire()
        elif timeout > 0:
            notified = waiter.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        else:
            notified = waiter.acquire(blocking=False)
    finally:
        try:
            if not owned():
                lock.acquire()
        finally:
            if not owned():  # the handler raised before it was taken
                lock.acquire()
            if not notified:
                _leave(waiter, waiters)
    return notified


def _leave(waiter: Any, waiters: deque[Any]) -> None:
    """Wait no more; another thread gets the notification that came since."""
    try:
        waiters.remove(waiter)
    except ValueError:
        _notify(waiters, 1)


def _wait_for(
    lock: threading.RLock,
    waiters: deque[Any],
    ready: Callable[[], T],
    timeout: float | None,
) -> T:
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not (found := ready()):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        _wait(lock, waiters, None if timeout is None else left)
    return found


def _notify(waiters: deque[Any], count: int) -> None:
    while waiters and count > 0:
        waiter = waiters[0]
        try:
            waiter.release()
        except RuntimeError:  # done before, by a call that was interrupted then
            pass
        else:
            count -= 1
        waiters.popleft()


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        TransientStorageError: a limit on memory or threads is reached; the thread never ran.
    """
    try:
        if _on_main():
            _start_elsewhere(thread)
        else:
            thread.start()
    except (RuntimeError, MemoryError) as exc:  # pthread_create(3) failed
        raise not_started(thread.name, exc) from exc


def _start_elsewhere(thread: threading.Thread) -> None:
    """Have another thread start this one, as no handler may interrupt `threading.Thread.start`."""
    failed: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            thread.start()
        except (RuntimeError, MemoryError) as exc:
            failed.append(exc)
        finally:
            ended.release()

    _thread.start_new_thread(run, ())
    ended.acquire()
    if failed:
        raise failed[0]


def _on_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def not_started(name: str, reason: BaseException) -> TransientStorageError:
    """Return the error of a thread that could not be started."""
    return TransientStorageError(
        f"thread {name!r} could not be started ({reason}): the process is at a limit of its memory "
        "or of its threads (ulimit -v, ulimit -u, the control group's memory.max or pids.max)",
        errno=errno.EAGAIN,
    )


def wait_for(condition: Condition, ready: Callable[[], object], timeout: float | None) -> bool:
    """Wait as `Condition.wait_for`; handlers of signals run meanwhile."""
    return _in_slices(lambda slice_s: bool(condition.wait_for(ready, slice_s)), timeout)


def wait(pending: Iterable[Future[Any]], timeout: float | None = None) -> bool:
    """Wait until all futures are done; handlers of signals run meanwhile.

    Not `Future.result`, as a handler may raise TimeoutError itself, nor `concurrent.futures.wait`,
    which one may interrupt while it holds the locks of all futures.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        return None if timeout is None else max(0.0, deadline - time.monotonic())

    return all(future.done() or _in_slices(future.wait, left()) for future in pending)


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait as `threading.Thread.join`; handlers of signals run meanwhile."""

    def ended(slice_s: float | None) -> bool:
        thread.join(slice_s)
        return not thread.is_alive()

    _in_slices(ended, timeout)


def _in_slices(wait_for: Callable[[float | None], bool], timeout: float | None) -> bool:
    """Wait; never longer than handlers, or what an interrupted thread did not say, may wait."""
    longest = _HANDLERS_S if _on_main() else _LOST_S
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not wait_for(min(longest, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True
