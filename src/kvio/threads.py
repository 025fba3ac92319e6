"""Starting threads where the system may have none left, and waiting for them."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Final

from kvio.errors import TransientStorageError

#: The longest that the main thread sleeps in a lock. A signal ends that sleep only where the
#: system interrupts the main thread: not where it interrupts another thread of the process, and
#: not where it came just before. Python runs the handler when the main thread wakes.
_HANDLERS_S: Final = 0.1


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        TransientStorageError: a limit on memory or threads is reached; the thread never ran.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:  # pthread_create(3) failed
        raise not_started(thread.name, exc) from exc


def not_started(name: str, reason: BaseException) -> TransientStorageError:
    """Return the error of a thread that could not be started."""
    return TransientStorageError(
        f"thread {name!r} could not be started ({reason}): the process is at a limit of its memory "
        "or of its threads (ulimit -v, ulimit -u, the control group's memory.max or pids.max)",
        errno=errno.EAGAIN,
    )


def wait_for(
    condition: threading.Condition, ready: Callable[[], object], timeout: float | None
) -> bool:
    """Wait as `threading.Condition.wait_for`; handlers of signals run meanwhile."""
    return _in_slices(lambda slice_s: bool(condition.wait_for(ready, slice_s)), timeout)


def wait(pending: Collection[Future[Any]], timeout: float | None = None) -> bool:
    """Wait until all futures have ended; handlers of signals run meanwhile.

    Not `Future.result`: a handler may raise TimeoutError itself.
    """
    return _in_slices(lambda slice_s: not futures.wait(pending, slice_s).not_done, timeout)


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait as `threading.Thread.join`; handlers of signals run meanwhile."""

    def ended(slice_s: float | None) -> bool:
        thread.join(slice_s)
        return not thread.is_alive()

    _in_slices(ended, timeout)


def _in_slices(wait_for: Callable[[float | None], bool], timeout: float | None) -> bool:
    """Wait; on the main thread never longer than handlers may wait."""
    if threading.current_thread() is not threading.main_thread():
        return wait_for(timeout)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not wait_for(min(_HANDLERS_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True
