"""Retry requests after transient errors, count the retries, and raise typed errors."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvio.backends.s3.errors import (
    AMBIGUOUS,
    PASSING,
    RETRYABLE,
    ErrorKind,
    RequestFailed,
    error_of,
)
from kvio.types import Cancellation

T = TypeVar("T")

_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0


def run_sequentially(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other in the calling thread."""
    return [task() for task in tasks]


class RetryPolicy:
    """Retries transient errors until the options' limits, or until the call is cancelled.

    Args:
        backend: its name, for errors.
        retries: how often, whatever the time.
        retry_s: for so many seconds beyond that, after errors of a server that restarts.
    """

    def __init__(self, backend: str, retries: int, retry_s: float) -> None:
        self._backend = backend
        self._retries = retries
        self._retry_s = retry_s if retries else 0.0
        self._outage = False
        self._lock = threading.Lock()
        self.retries_made = 0

    def __call__(
        self,
        request: Callable[[], T],
        doing: str,
        *,
        key: str | None = None,
        cancel: Cancellation | None = None,
        once_only: bool = False,
        patient: bool = True,
    ) -> T:
        """Make a request, retry it after transient errors, and return its result.

        With *once_only*, a request that the server may have carried out is not retried. Without
        *patient*, only the number of retries counts; so after a request that has waited out
        ``retry_s`` in vain, until one succeeds: a batch does not wait for each of its blocks.

        Raises:
            KvioError: the typed error of the last attempt.
        """
        attempt = 0
        patient = patient and not self._outage
        until = time.monotonic() + self._retry_s if patient else 0.0
        while True:
            try:
                if cancel is None or not cancel.requested:
                    result = request()
                    self._outage = False
                    return result
                raise RequestFailed(ErrorKind.TIMEOUT, "the call was cancelled")
            except RequestFailed as failed:
                ambiguous = once_only and failed.kind in AMBIGUOUS
                if failed.kind not in PASSING and failed.kind is not ErrorKind.TIMEOUT:
                    self._outage = False  # the server is there
                passing = failed.kind in PASSING and time.monotonic() < until
                last = failed.kind not in RETRYABLE or (attempt >= self._retries and not passing)
                if last and patient and failed.kind in PASSING:
                    self._outage = True
                if last or ambiguous or _cancelled_within(cancel, _wait_s(attempt)):
                    if failed.kind is ErrorKind.DENIED:
                        # The server's text may contain the access key.
                        failed.__cause__ = failed.__context__ = None
                    raise error_of(failed, doing, key=key, backend=self._backend) from failed
            attempt += 1
            self._count()

    def allows_another(self) -> bool:
        """Count a request that is made again for another reason than an error, if any may be."""
        if self._retries:
            self._count()
        return self._retries > 0

    def _count(self) -> None:
        with self._lock:
            self.retries_made += 1


def _wait_s(attempt: int) -> float:
    """Return the randomized delay before the next attempt; it grows with *attempt*."""
    longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4.0 ** min(attempt, 9))
    return random.uniform(0.5, 1.0) * longest  # noqa: S311  # no secret


def _cancelled_within(cancel: Cancellation | None, wait_s: float) -> bool:
    """Sleep for *wait_s*; return True at once if the call is cancelled."""
    cancelled = threading.Event()
    if cancel is not None:
        cancel.on_request(cancelled.set)
    return cancelled.wait(wait_s)
