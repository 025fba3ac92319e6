"""Descriptors that stay open between calls: all stores of the process share a part of its limit.

A store keeps its directories open, because opening one for every block would cost more than a
small block does. Together with the root of every store they take at most half of what
RLIMIT_NOFILE allows; what has not been used for longest makes room. Where the process runs out of
descriptors all the same, some are closed and the call is made once more.
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
#: After the process ran out, so many requests for room add one to what is kept at most.
_CAUTION: Final = 64
#: But as many as this may always be kept.
_LEAST: Final = 16
#: A thread that lacks a descriptor waits so long for others that do.
_TURN_S: Final = 5.0

T = TypeVar("T")


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if 0 <= soft < _UNLIMITED else _UNLIMITED


class Evictable(Protocol):
    """Something that keeps a descriptor open and can do without it."""

    def was_used(self) -> bool:
        """Return whether it was used since the last such question."""

    def evict(self) -> bool:
        """Close the descriptor; False: it is in use, and still open."""


class KeptDescriptors:
    """What is kept open, in the order in which it will be closed.

    Attributes:
        lock: held around `add`, `remove`, and every change of what they are told. A store that
            the garbage collector closes may take it once more in the middle of that.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self._alone = threading.RLock()  # taken again by the handler of a signal
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
        """Let threads that lack a descriptor go one at a time: they take none from each other.

        None waits for long: the thread before it may itself wait for the call that waits here.
        """
        first = self._alone.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if first:
                self._alone.release()

    def count_roots(self, change: int) -> None:
        """Count the descriptors that stores hold besides: they leave less room."""
        with self.lock:
            self._roots += change

    def add(self, one: Evictable) -> bool:
        """Keep a descriptor; False: there is no room, and none can be made."""
        room = self._room()
        while len(self._kept) >= room:
            if not self._evict_one():
                return False
        self._kept[one] = None
        return True

    def remove(self, one: Evictable) -> None:
        """Forget a descriptor that its owner closes."""
        self._kept.pop(one, None)

    def give_back(self) -> None:
        """Close half of what is kept and not in use: the process has run out of descriptors.

        From then on less is kept, and only slowly more again.
        """
        with self.lock:
            few = (len(self._kept) + 1) // 2
            self._most = max(_LEAST, len(self._kept) - few)
            for _ in range(few):
                if not self._evict_one():
                    break

    def for_files(self) -> int:
        """Return how many files calls may hold open besides: with what is kept three quarters."""
        return max(0, _limit() * 3 // 4 - self._roots - len(self._kept))

    def _room(self) -> int:
        share = _limit() // 2 - self._roots
        if len(self._kept) >= self._most:
            self._most += 1 / _CAUTION
        return min(share, int(self._most))

    def _evict_one(self) -> bool:
        """Close one: what was used since it was last passed over gets a second chance."""
        for _ in range(2 * len(self._kept)):
            if not self._kept:
                return True
            one = self._kept.popitem(last=False)[0]
            if not one.was_used() and one.evict():
                return True
            self._kept[one] = None
        return False


#: Of this process.
SHARED: Final = KeptDescriptors()
os.register_at_fork(after_in_child=SHARED.begin_in_child)


def retrying(call: Callable[[], T]) -> T:
    """Return what *call* does; where it lacks a descriptor, it is made once more with some free.

    Not where a sync failed: whatever its errno says, bytes may be lost.

    Raises:
        OSError: as *call* does.
    """
    try:
        return call()
    except OSError as exc:
        synced = isinstance(exc.__cause__ or exc, SyncFailedError)
        if exc.errno not in EXHAUSTED or synced:
            raise
    SHARED.give_back()
    return call()
