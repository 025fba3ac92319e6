"""Requests made again when they failed in passing, counted, and turned into typed errors."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvio.s3.conditions import PASSING, UNDECIDED, Condition, Refused, error_of
from kvio.types import Cancellation

T = TypeVar("T")

_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0


def run_in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other, where there are no threads for them."""
    return [task() for task in tasks]


class Asking:
    """Makes requests: as often as the options say, and no more once nobody waits for them."""

    def __init__(self, backend: str, retries: int) -> None:
        self._backend = backend
        self._retries = retries
        self._lock = threading.Lock()
        self.made_again = 0

    def __call__(
        self,
        request: Callable[[], T],
        doing: str,
        *,
        key: str | None = None,
        cancel: Cancellation | None = None,
        once_only: bool = False,
    ) -> T:
        """Make a request and return its answer.

        *once_only*: it must not be made again if it may have been carried out.

        Raises:
            KvioError: the typed error of its last failure.
        """
        attempt = 0
        while True:
            try:
                if cancel is None or not cancel.requested:
                    return request()
                raise Refused(Condition.TIMEOUT, "the caller waits no more")
            except Refused as refused:
                undecided = once_only and refused.condition in UNDECIDED
                last = attempt == self._retries or refused.condition not in PASSING
                if last or undecided or _gave_up(cancel, _wait_s(attempt)):
                    if refused.condition is Condition.DENIED:
                        # What a server says then may name the access key.
                        refused.__cause__ = refused.__context__ = None
                    raise error_of(refused, doing, key=key, backend=self._backend) from refused
            attempt += 1
            with self._lock:
                self.made_again += 1


def _wait_s(attempt: int) -> float:
    """Give a random time to wait, longer after each attempt."""
    longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4.0**attempt)
    return random.uniform(0.5, 1.0) * longest  # noqa: S311  # no secret


def _gave_up(cancel: Cancellation | None, wait_s: float) -> bool:
    """Wait, but no longer than the caller does."""
    over = threading.Event()
    if cancel is not None:
        cancel.on_request(over.set)
    return over.wait(wait_s)
