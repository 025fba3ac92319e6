"""Work that follows a change of the ledger and must be done without its lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvio import threads
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.receipts import Ending, Resolving
from kvio.wrappers.staging.room import Room


class Outbox:
    """Futures to resolve, and memory to return to the system.

    Attributes:
        endings: futures with their outcomes; changed under the tier's lock.
    """

    def __init__(
        self, lock: threading.RLock, room: Room, release: Callable[[list[Span]], None]
    ) -> None:
        self.endings: list[Ending] = []
        self._lock = lock
        self._room = room
        self._release = release
        self._releasing = 0
        self._released = threads.Condition(lock)
        self._resolving = Resolving(lock)

    def deliver(self) -> None:
        """Resolve futures and return memory; called without the lock after every change."""
        if not (self.endings or self._room.released):
            return
        with self._lock:
            endings, self.endings = self.endings, []
            spans, self._room.released = self._room.released, []
            self._releasing += bool(spans)
            self._resolving.begin_locked()
        try:
            self._resolving.resolve(endings)
        finally:
            self._give_back(spans)

    def _give_back(self, spans: list[Span]) -> None:
        try:
            if spans:
                self._release(spans)
        finally:
            with self._lock:
                self._releasing -= bool(spans)
                self._released.notify_all()

    def wait_delivered(self, timeout: float | None) -> bool:
        """Wait until other threads have resolved their futures; False on a timeout."""
        return self._resolving.wait(timeout)

    def wait_released(self) -> None:
        """Wait, with the lock, until no pages are being returned."""
        threads.wait_for(self._released, lambda: not (self._room.released or self._releasing), None)
