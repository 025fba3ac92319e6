"""Calls that nothing can interrupt, made on a thread that may be left behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from kvio import exits, threads
from kvio.s3.conditions import Condition, Refused
from kvio.types import Cancellation

T = TypeVar("T")

#: What the threads are called.
THREAD_NAME: Final = "kvio-io"
#: Native code that comes back while Python is being taken down ends the process by SIGABRT (before
#: CPython 3.14), so calls that were given up may end for so long before.
_LAST_WAIT_S: Final = 2.0
_left_behind: Final[set[threading.Thread]] = set()


class _Companion:
    """A thread that makes one caller's call at a time; a lock tells that it has been made."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._made = threading.Lock()
        self._made.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        threads.start(self._thread)

    def make(self, call: Callable[[], Any], timeout_s: float) -> bool:
        """Have a call made; False: it was not in time, and this thread is to be left alone."""
        self._calls.put(call)
        return self._made.acquire(timeout=timeout_s)

    def answer(self) -> Any:
        """Return or raise what the call did."""
        result, error = self._result, self._error
        self._result = self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        return result

    def end(self) -> None:
        """Let the thread end, after the call that it is in."""
        self._calls.put(None)

    def leave(self) -> None:
        """Give up the call that the thread is in, and the thread with it."""
        _left_behind.add(self._thread)
        self.end()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._result = call()
            except BaseException as exc:  # noqa: BLE001  # it belongs to whoever waits
                self._error = exc
            del call  # it holds the caller's memory
            self._made.release()
        _left_behind.discard(self._thread)


class Companions:
    """Makes calls for any number of threads, each on a thread beside the caller's.

    That takes two switches of threads and nothing else. A call that does not end in time is given
    up together with its thread, which ends when the call does. A waiting caller hears Ctrl-C.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: deque[_Companion] = deque()
        self._closed = False

    def make(self, call: Callable[[], T], cancel: Cancellation | None = None) -> T:
        """Make a call and return its result; one that is given up is told by *cancel* before.

        Raises:
            Refused: it did not end in time.
        """
        try:
            companion = self._idle.pop()
        except IndexError:
            companion = _Companion()
        in_time = False
        try:
            in_time = companion.make(call, self._timeout_s)
        finally:
            if not in_time:
                if cancel is not None:
                    cancel.request()
                companion.leave()
        if not in_time:
            raise Refused(Condition.TIMEOUT, f"no end after {self._timeout_s:g} s")
        try:
            answer: T = companion.answer()
        finally:
            self._idle.append(companion)
            if self._closed:
                self.close()
        return answer

    def close(self) -> None:
        """End the threads; one that is in a call ends after it."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().end()
            except IndexError:
                return


def _wait_for_those_left() -> None:
    deadline = time.monotonic() + _LAST_WAIT_S
    for thread in tuple(_left_behind):
        thread.join(max(0.0, deadline - time.monotonic()))


exits.last(_wait_for_those_left)
