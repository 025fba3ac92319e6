"""Descriptors that stay open between calls, shared by all stores of the process.

A store keeps its directories open, because opening one for every block would cost more than
writing a small block. Together with the roots of all stores they take at most half of
RLIMIT_NOFILE; the least recently used are closed to make room. If the process runs out of
descriptors all the same, some are closed and the call is retried once.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from kvio._native import EXHAUSTED
from kvio._native.files import SyncFailedError

_UNLIMITED: Final = 1 << 20
#: After the process ran out, so many requests raise the limit of kept descriptors by one.
_CAUTION: Final = 64
#: The least value of that limit.
_LEAST: Final = 16
#: How long a thread that lacks a descriptor waits for other threads that do.
_TURN_S: Final = 5.0

T = TypeVar("T")


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if 0 <= soft < _UNLIMITED else _UNLIMITED


class Evictable(Protocol):
    """An object with a descriptor that can be closed and opened again."""

    def was_used(self) -> bool:
        """Return whether it was used since the last call of this method."""

    def evict(self) -> bool:
        """Close the descriptor; False: it is in use, and still open."""


class KeptDescriptors:
    """The kept descriptors, least recently used first.

    Attributes:
        lock: held around `add`, `remove`, and changes of the objects passed to them. It is
            reentrant, because the garbage collector may close a store meanwhile.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self._alone = threading.RLock()  # reentrant for the handlers of signals
        self._kept: OrderedDict[Evictable, None] = OrderedDict()
        self._roots = 0
        self._most: float = _UNLIMITED
        self._pid = os.getpid()

    def begin_in_child(self) -> None:
        """Forget the parent's descriptors and locks, once; each store closes its own."""
        if self._pid != os.getpid():
            self._begin()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run threads that lack descriptors one at a time, so that they take none from each other.

        The wait is short: the thread before may itself wait for the call that waits here.
        """
        first = self._alone.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if first:
                self._alone.release()

    def count_roots(self, change: int) -> None:
        """Count the descriptors of roots, which leave less room for others."""
        with self.lock:
            self._roots += change

    def add(self, one: Evictable) -> bool:
        """Keep a descriptor; False: the limit is reached, and all others are in use."""
        room = self._room()
        while len(self._kept) >= room:
            if not self._evict_one():
                return False
        self._kept[one] = None
        return True

    def remove(self, one: Evictable) -> None:
        """Remove a descriptor that its owner closes."""
        self._kept.pop(one, None)

    def give_back(self) -> None:
        """Close half of the kept descriptors, because the process has run out.

        From then on fewer are kept; the limit rises slowly again.
        """
        with self.lock:
            few = (len(self._kept) + 1) // 2
            self._most = max(_LEAST, len(self._kept) - few)
            for _ in range(few):
                if not self._evict_one():
                    break

    def for_files(self) -> int:
        """Return how many files calls may hold open: with all kept descriptors three quarters."""
        return max(0, _limit() * 3 // 4 - self._roots - len(self._kept))

    def _room(self) -> int:
        share = _limit() // 2 - self._roots
        if len(self._kept) >= self._most:
            self._most += 1 / _CAUTION
        return min(share, int(self._most))

    def _evict_one(self) -> bool:
        """Close one that was not used lately (the clock algorithm)."""
        for _ in range(2 * len(self._kept)):
            if not self._kept:
                return True
            one = self._kept.popitem(last=False)[0]
            if not one.was_used() and one.evict():
                return True
            self._kept[one] = None
        return False


#: The descriptors of this process.
SHARED: Final = KeptDescriptors()
os.register_at_fork(after_in_child=SHARED.begin_in_child)


def retrying(call: Callable[[], T]) -> T:
    """Call a function and return its result; if it lacks a descriptor, close some and retry once.

    A failed sync is never retried: whatever its errno, bytes may be lost.

    Raises:
        OSError: as *call* raises it.
    """
    try:
        return call()
    except OSError as exc:
        synced = isinstance(exc.__cause__ or exc, SyncFailedError)
        if exc.errno not in EXHAUSTED or synced:
            raise
    SHARED.give_back()
    return call()
