"""A bounded buffer in host memory that is lent out piece by piece."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from kvio.buffers import aligned
from kvio.errors import StorageTimeoutError
from kvio.types import Parts
from kvio.wrappers.staging.extents import Extents, Span
from kvio.wrappers.staging.host import HostMemory


class Ring:
    """Lends the pages of *memory*, first come first served.

    What is longer than the whole of it gets memory of its own, when nothing else is lent.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._extents = Extents(memory.capacity_bytes)
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.lent_bytes = 0

    @contextmanager
    def lend(self, nbytes: int, *, timeout: float | None = None) -> Iterator[Parts]:
        """Lend *nbytes* of page-aligned memory for as long as the context lasts.

        Raises:
            StorageTimeoutError: others kept it for *timeout* seconds.
        """
        spans = self._take(nbytes, timeout)
        try:
            larger = nbytes > self._memory.capacity_bytes
            yield [aligned(nbytes)] if larger else self._memory.views(spans)
        finally:
            with self._changed:
                self._extents.give(spans)
                self.lent_bytes = self._extents.used_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _take(self, nbytes: int, timeout: float | None) -> Sequence[Span]:
        """Wait in line for pages; what is too long for them takes all, and so is alone."""
        wanted = min(nbytes, self._memory.capacity_bytes)
        deadline = None if timeout is None else monotonic() + timeout
        place = object()
        with self._changed:
            self._queue.append(place)
            try:
                while True:
                    spans = self._extents.take(wanted) if self._queue[0] is place else None
                    if spans is not None:
                        return spans
                    left = None if deadline is None else deadline - monotonic()
                    if left is not None and left <= 0:
                        raise StorageTimeoutError(f"no room for {nbytes} bytes on their way out")
                    self._changed.wait(left)
            finally:
                self._queue.remove(place)
                self.lent_bytes = self._extents.used_bytes
                self._changed.notify_all()
