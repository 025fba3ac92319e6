"""Deadlines for a library that has none: its calls are given up, or its answers cut off."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from kvio import threads
from kvio.abc import RunAll
from kvio.s3 import body
from kvio.s3.companions import Companions
from kvio.s3.conditions import Condition, Refused
from kvio.s3.objects import Got, Head, Objects, Traits
from kvio.s3.options import S3Options
from kvio.types import Cancellation, Parts

T = TypeVar("T")

#: Names that are asked for at once: as many as a server gives.
_PAGE: Final = 1000


class Fetching(Objects, Protocol):
    """A library that answers in memory of its own, and takes what it sends piece by piece."""

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        only_new: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,
    ) -> None:
        """Store the joined parts, unless cancelled before the last of them was taken."""

    def fetch(
        self, name: str, start: int, stop: int | None, room: int
    ) -> tuple[Sequence[Any], int, str | None]:
        """Get the buffers that hold an object's bytes, its length, and its ETag if known.

        None of them where the object from *start* on is longer than *room* and *stop* is None.
        """


class Bounded:
    """The same objects; every call ends in time, or is given up and never heard of again.

    A thread whose call was given up is left behind; since the library answers in memory of its
    own, it never writes where its caller has gone on. With no limit calls are made where they are.
    """

    def __init__(self, inner: Fetching, options: S3Options) -> None:
        self._inner = inner
        self._companions = Companions(options.request_timeout_s)
        self._limited = math.isfinite(options.request_timeout_s)

    @property
    def traits(self) -> Traits:
        """What the library can do."""
        return self._inner.traits

    def check_bucket(self) -> None:
        """Make one request that tells whether the bucket is there."""
        self._run(self._inner.check_bucket)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store the joined parts; nothing, if it is given up before all of them were taken."""
        cancel = Cancellation()
        self._run(
            lambda: self._inner.put(
                name, parts, crc32c=crc32c, only_new=only_new, run_all=run_all, cancel=cancel
            ),
            cancel,
        )

    def get_into(
        self,
        name: str,
        parts: Parts,
        start: int,
        stop: int | None,
        *,
        described: bool = True,  # noqa: ARG002  # it never is
    ) -> Got:
        """Fill the parts from an object."""
        room = body.total_bytes(parts)
        pieces, total, etag = self._run(lambda: self._inner.fetch(name, start, stop, room))
        return Got(body.scatter(pieces, parts), total, etag)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the last bytes of an object."""
        return self._run(lambda: self._inner.get_tail(name, nbytes))

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        return self._run(lambda: self._inner.head(name))

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._run(lambda: self._inner.delete(name))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, each within the time of a request."""
        names = self._inner.list_names(prefix)
        while page := self._run(lambda: list(islice(names, _PAGE))):
            yield from page

    def close(self) -> None:
        """Give back connections."""
        self._companions.close()
        self._inner.close()

    def _run(self, call: Callable[[], T], cancel: Cancellation | None = None) -> T:
        return self._companions.make(call, cancel) if self._limited else call()


#: How often in the time that an answer has one looks whether it is over.
_LOOKS: Final = 8


@dataclass(slots=True, eq=False)
class _Answer:
    cut_off: Callable[[], None]
    deadline: float
    late: bool = False


class Overseer:
    """Cuts answers off that come for too long, however often some byte of them comes.

    For libraries whose only timeout is that of a single read. One thread, begun with the first
    answer, looks now and then; watching costs two changes of a dict.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._answers: dict[_Answer, None] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, cut_off: Callable[[], None] | None) -> Iterator[None]:
        """Call *cut_off*, from another thread, if the block takes too long; None: it may.

        So may all where there is no limit.

        Raises:
            Refused: it was called.
        """
        if cut_off is None or not math.isfinite(self._limit_s):
            yield
            return
        if self._thread is None:
            self._start()
        answer = _Answer(cut_off, time.monotonic() + self._limit_s)
        self._answers[answer] = None
        try:
            yield
        finally:
            del self._answers[answer]
            if answer.late:
                raise Refused(Condition.TIMEOUT, f"no end after {self._limit_s:g} s")

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._look, name="kvio-limit", daemon=True)
                threads.start(thread)
                self._thread = thread

    def _look(self) -> None:
        while not self._closed.wait(self._limit_s / _LOOKS):
            now = time.monotonic()
            for answer in tuple(self._answers):
                if answer.deadline < now and not answer.late:
                    answer.late = True
                    # It has ended by itself meanwhile.
                    with contextlib.suppress(OSError, RuntimeError, ValueError):
                        answer.cut_off()
