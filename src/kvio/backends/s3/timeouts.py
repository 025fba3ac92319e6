"""Add request timeouts to libraries that lack them.

`TimeLimited` runs a library's calls in other threads, and abandons the thread of a call that takes
too long. `Watchdog` cuts the connection of a response that takes too long, for libraries that only
limit each read of it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from kvio.abc import RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.client import GetResult, Head, Objects, Traits
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.core import lifetime, threads
from kvio.types import Cancellation, Parts

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


lifetime.last(_join_abandoned)

#: Names per listing request: the page size of S3.
_PAGE: Final = 1000


class BlockingObjects(Objects, Protocol):
    """A library without timeouts that returns its own buffers and sends a body in pieces.

    An abandoned call therefore never writes to the caller's memory.
    """

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        if_none_match: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,
    ) -> None:
        """Store the joined parts; store nothing if cancelled before the last piece is sent."""

    def fetch(
        self, name: str, start: int, stop: int | None, room: int
    ) -> tuple[Sequence[Any], int, str | None]:
        """Return the buffers with an object's bytes, its length, and its ETag if known.

        If *stop* is None and more than *room* bytes follow *start*, return no buffers.
        """


class TimeLimited:
    """Runs a library's calls in other threads and abandons a call after the request timeout.

    With ``request_timeout_s=inf`` calls run in the caller's thread, and so do writes where the
    library limits them itself (`Traits.timeouts`).
    """

    def __init__(self, inner: BlockingObjects, options: S3Options) -> None:
        self._inner = inner
        self._threads = DetachableThreads(options.request_timeout_s)
        self._limited = math.isfinite(options.request_timeout_s)

    @property
    def traits(self) -> Traits:
        """Return what the library supports."""
        return self._inner.traits

    def check_bucket(self, name: str) -> None:
        """Fail unless the bucket exists and is accessible."""
        self._run(partial(self._inner.check_bucket, name))

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, if_none_match: bool, run_all: RunAll
    ) -> None:
        """Store the joined parts; store nothing if the timeout passes before all are sent."""
        cancel = Cancellation()
        put = partial(
            self._inner.put,
            name,
            parts,
            crc32c=crc32c,
            if_none_match=if_none_match,
            run_all=run_all,
            cancel=cancel,
        )
        if self.traits.timeouts == "abandon reads":
            put()
        else:
            self._run(put, cancel)

    def get_into(
        self,
        name: str,
        parts: Parts,
        start: int,
        stop: int | None,
        *,
        with_metadata: bool = True,  # part of the protocol
    ) -> GetResult:
        """Read an object into the parts."""
        room = body.total_bytes(parts)
        pieces, total, etag = self._run(lambda: self._inner.fetch(name, start, stop, room))
        return GetResult(body.scatter(pieces, parts), total, etag)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last bytes of an object."""
        return self._run(lambda: self._inner.get_tail(name, nbytes))

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        return self._run(lambda: self._inner.head(name))

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._run(lambda: self._inner.delete(name))

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete objects; each has the time of one request."""
        for name in names:
            self.delete(name)

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names; each page has the time of one request."""
        names = self._inner.list_names(prefix)
        while page := self._run(lambda: list(islice(names, _PAGE))):
            yield from page

    def close(self) -> None:
        """End the idle threads and close the connections."""
        self._threads.close()
        self._inner.close()

    def _run(self, call: Callable[[], T], cancel: Cancellation | None = None) -> T:
        return self._threads.run(call, cancel) if self._limited else call()


#: The watchdog checks this many times per timeout.
_CHECKS_PER_TIMEOUT: Final = 8


@dataclass(slots=True, eq=False)
class _Response:
    abort: Callable[[], None]
    deadline: float
    late: bool = False


class Watchdog:
    """Aborts responses that last longer than the request timeout, even while bytes arrive.

    For libraries that only have a timeout per read. One thread, started with the first response,
    checks all responses periodically; registering one costs two dict operations.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._responses: dict[_Response, None] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, abort: Callable[[], None] | None) -> Iterator[None]:
        """Call *abort* from the watchdog thread if the with-block exceeds the timeout.

        If *abort* is None or the timeout is infinite, do nothing.

        Raises:
            RequestFailed: *abort* was called.
        """
        if abort is None or not math.isfinite(self._limit_s):
            yield
            return
        if self._thread is None:
            self._start()
        response = _Response(abort, time.monotonic() + self._limit_s)
        self._responses[response] = None
        try:
            yield
        finally:
            del self._responses[response]
            if response.late:
                raise RequestFailed(ErrorKind.TIMEOUT, f"no end after {self._limit_s:g} s")

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._check, name="kvio-limit", daemon=True)
                threads.start(thread)
                self._thread = thread

    def _check(self) -> None:
        while not self._closed.wait(self._limit_s / _CHECKS_PER_TIMEOUT):
            now = time.monotonic()
            for response in tuple(self._responses):
                if response.deadline < now and not response.late:
                    response.late = True
                    # The response may have ended meanwhile.
                    with contextlib.suppress(OSError, RuntimeError, ValueError):
                        response.abort()
