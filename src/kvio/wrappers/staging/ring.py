"""A bounded buffer in host memory whose pages are lent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from kvio.buffers import aligned
from kvio.errors import StorageTimeoutError
from kvio.threads import Condition
from kvio.types import Parts
from kvio.wrappers.staging.extents import Extents, Span
from kvio.wrappers.staging.host import HostMemory
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.room import whole_pages

#: How often to check whether abandoned calls still hang.
_ASK_S: Final = 0.05
#: How long whoever has no limit waits where nothing but the end of such calls can make room.
_PATIENCE_S: Final = 10.0


@dataclass(eq=False, slots=True)
class _Loan:
    """Pages of the ring, or as many bytes of other memory.

    Attributes:
        spare_bytes: how many, if it is other memory in the place of pages that are in doubt.
        hanging: given once it is in doubt.
    """

    spans: Sequence[Span] = ()
    spare_bytes: int = 0
    parts: Parts = field(default=())
    hanging: Callable[[], bool] | None = None

    @property
    def in_doubt(self) -> bool:
        return self.hanging is not None and self.hanging()


class Ring:
    """Lends the pages of *memory*, first come first served.

    A request longer than the ring gets new memory, when nothing else is lent.

    Pages that an abandoned call may still use are not lent again while any call hangs, because
    that call would write the bytes of another block. Meanwhile other requests get new memory, so
    that they can go on, but never more than the pages held back: two rings in total.

    Attributes:
        lent_bytes: in whole pages, with those held back.
    """

    def __init__(self, memory: HostMemory, *, patience_s: float = _PATIENCE_S) -> None:
        self._memory = memory
        self._patience_s = patience_s
        self._extents = Extents(memory.capacity_bytes)
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._queue: deque[object] = deque()
        self._loans: dict[int, _Loan] = {}  # by the identity of what is lent
        self._doubted: list[_Loan] = []
        self._spare_bytes = 0

    @property
    def lent_bytes(self) -> int:  # noqa: D102  # above
        return self._extents.used_bytes + self._spare_bytes

    @contextmanager
    def lend(self, nbytes: int, *, timeout: float | None = None) -> Iterator[Parts]:
        """Lend *nbytes* of page-aligned memory for as long as the context lasts.

        Raises:
            StorageTimeoutError: others kept it for *timeout* seconds; or, where there is no limit,
                calls that were given up kept all of it for ten.
        """
        loan = self._take(nbytes, timeout)
        try:
            own = loan.spare_bytes or nbytes > self._memory.capacity_bytes
            loan.parts = [aligned(nbytes)] if own else self._memory.views(loan.spans)
            self._loans[id(loan.parts)] = loan
            yield loan.parts
        finally:
            self._loans.pop(id(loan.parts), None)
            loan.parts = ()
            with self._lock:
                self._doubted.append(loan)
                self._settle()
                self._changed.notify_all()

    def doubt(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Keep what is lent as *parts* beyond its context, as long as *hanging*."""
        self._loans[id(parts)].hanging = hanging

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _take(self, nbytes: int, timeout: float | None) -> _Loan:
        """Wait in line for pages; what is too long for them takes all, and so is alone."""
        wanted = min(nbytes, self._memory.capacity_bytes)
        deadline, patience = deadline_of(timeout), None
        place = object()
        with self._lock:
            self._queue.append(place)
            try:
                while True:
                    self._settle()
                    loan = self._find(wanted) if self._queue[0] is place else None
                    if loan is not None:
                        return loan
                    if not self._stuck(wanted):
                        patience = None
                    elif patience is None:
                        patience = monotonic() + self._patience_s
                    self._wait(nbytes, patience if deadline is None else deadline)
            finally:
                self._queue.remove(place)
                self._changed.notify_all()

    def _find(self, wanted: int) -> _Loan | None:
        spans = self._extents.take(wanted)
        if spans is not None:
            return _Loan(spans)
        spare = whole_pages(wanted)
        if self._spare_bytes + spare > self._doubted_bytes()[0]:
            return None
        self._spare_bytes += spare
        return _Loan(spare_bytes=spare)

    def _stuck(self, wanted: int) -> bool:
        """Return whether only the end of abandoned calls can free pages."""
        pages, spare = self._doubted_bytes()
        return wanted > self._memory.capacity_bytes - pages and wanted > pages - spare

    def _wait(self, nbytes: int, deadline: float | None) -> None:
        rest = left(deadline)
        if rest == 0:
            text = f"no room for {nbytes} bytes on their way out"
            if self._doubted:
                kept = sum(self._doubted_bytes())
                text += f": {kept} bytes are kept for calls that were given up and still hang"
            raise StorageTimeoutError(text)
        if self._doubted:
            rest = _ASK_S if rest is None else min(rest, _ASK_S)
        self._changed.wait(rest)

    def _doubted_bytes(self) -> tuple[int, int]:
        """Count what is kept for calls that were given up: in whole pages, and in other memory."""
        pages = sum(whole_pages(span.nbytes) for loan in self._doubted for span in loan.spans)
        return pages, sum(loan.spare_bytes for loan in self._doubted)

    def _settle(self) -> None:
        """Take back what nobody can look at any more."""
        doubted, self._doubted = self._doubted, []
        for loan in doubted:
            if loan.in_doubt:
                self._doubted.append(loan)
            else:
                self._extents.give(loan.spans)
                self._spare_bytes -= loan.spare_bytes
