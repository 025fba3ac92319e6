"""Run uninterruptible calls in threads that can be abandoned after a timeout."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from kvio import exits, threads
from kvio.s3.conditions import ErrorKind, RequestFailed
from kvio.types import Cancellation

T = TypeVar("T")

THREAD_NAME: Final = "kvio-io"
#: Before CPython 3.14, native code that returns during interpreter shutdown aborts the process
#: (SIGABRT). At exit, abandoned calls therefore get this long to finish.
_EXIT_WAIT_S: Final = 2.0
_abandoned: Final[set[threading.Thread]] = set()


class _DetachableThread:
    """A thread that runs one call at a time; releasing ``_done`` signals that it has ended."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._done = threading.Lock()
        self._done.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        threads.start(self._thread)

    def run(self, call: Callable[[], Any], timeout_s: float) -> bool:
        """Run a call; return False after *timeout_s*: then the thread must not be used again."""
        self._calls.put(call)
        return self._done.acquire(timeout=timeout_s)

    def result(self) -> Any:
        """Return the call's result, or raise its exception."""
        result, error = self._result, self._error
        self._result = self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: avoid the reference cycle
        return result

    def end(self) -> None:
        """Let the thread end after its current call."""
        self._calls.put(None)

    def abandon(self) -> None:
        """Abandon the current call and its thread."""
        _abandoned.add(self._thread)
        self.end()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._result = call()
            except BaseException as exc:  # noqa: BLE001  # raised in the waiting thread
                self._error = exc
            del call  # it refers to the caller's buffers
            self._done.release()
        _abandoned.discard(self._thread)


class DetachableThreads:
    """Runs each call in another thread and waits for it, for any number of calling threads.

    This costs two thread switches. A call that exceeds the timeout is abandoned with its thread,
    which ends when the call returns. Ctrl-C interrupts a waiting caller.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: deque[_DetachableThread] = deque()
        self._closed = False

    def run(self, call: Callable[[], T], cancel: Cancellation | None = None) -> T:
        """Run a call and return its result; request *cancel* before abandoning the call.

        Raises:
            RequestFailed: the call exceeded the timeout.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _DetachableThread()
        finished = False
        try:
            finished = worker.run(call, self._timeout_s)
        finally:
            if not finished:
                if cancel is not None:
                    cancel.request()
                worker.abandon()
        if not finished:
            raise RequestFailed(ErrorKind.TIMEOUT, f"no end after {self._timeout_s:g} s")
        try:
            result: T = worker.result()
        finally:
            self._idle.append(worker)
            if self._closed:
                self.close()
        return result

    def close(self) -> None:
        """End the idle threads; a busy thread ends after its call."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().end()
            except IndexError:
                return


def _join_abandoned() -> None:
    deadline = time.monotonic() + _EXIT_WAIT_S
    for thread in tuple(_abandoned):
        thread.join(max(0.0, deadline - time.monotonic()))


exits.last(_join_abandoned)
