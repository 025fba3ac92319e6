"""The allocator of staging memory: requests in order, and pages to return to the system."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum

from kvio.buffers import PAGE_BYTES
from kvio.threads import Condition
from kvio.wrappers.staging.extents import Extents, Span


class Verdict(Enum):
    """Why a request that waited gets no memory."""

    TOO_LARGE = "larger than the tier"
    HELD = "open files are in the way"
    HOPELESS = "what is in the way will not go by itself"
    CLOSING = "the tier was being closed"


class Ticket:
    """A request in the queue."""

    __slots__ = ("answer", "nbytes", "turn")

    def __init__(self, nbytes: int, lock: threading.RLock) -> None:
        self.nbytes = nbytes
        self.turn = Condition(lock)
        self.answer: Sequence[Span] | Verdict | None = None


class Room:
    """Extents with a first-come-first-served queue of requests; the tier's lock guards it.

    Attributes:
        stuck_bytes: bytes of failed blocks, which stay until they are retried or discarded.
        open_bytes: bytes of open files and readers, which stay until these are closed.
        debt_bytes: bytes to remove from the capacity as soon as they are free.
        released: removed pages that have not been returned to the system yet.
    """

    def __init__(self, extents: Extents, lock: threading.RLock) -> None:
        self._extents = extents
        self._lock = lock
        self._queue: deque[Ticket] = deque()
        self._held: list[Sequence[Span]] = []
        self.stuck_bytes = 0
        self.open_bytes = 0
        self.debt_bytes = 0
        self.released: list[Span] = []

    @property
    def capacity_bytes(self) -> int:
        """The bytes in use or free, without those to be removed."""
        return self._extents.capacity_bytes - self.debt_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes in use, in whole pages."""
        return self._extents.used_bytes

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    @property
    def held(self) -> bool:
        """True if memory is held back for abandoned calls that still hang."""
        return bool(self._held)

    def take(self, nbytes: int) -> Sequence[Span] | None:
        """Allocate, unless requests wait or there is not enough."""
        if self._queue or self.debt_bytes:
            return () if nbytes == 0 else None
        return self._extents.take(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes fit into the tier at all."""
        return whole_pages(nbytes) <= self.capacity_bytes

    def hopeless(self, nbytes: int) -> bool:
        """Return whether so many bytes fit only after failed blocks are retried or discarded.

        What a call that hangs may still look at does not count: the call may end.
        """
        return whole_pages(nbytes) > self.capacity_bytes - self.stuck_bytes

    def crowded(self, nbytes: int) -> bool:
        """Return whether so many bytes fit only after an open file is closed.

        Whoever waits may be the one who should, so nobody waits for that.
        """
        return whole_pages(nbytes) > self.capacity_bytes - self.stuck_bytes - self.open_bytes

    def hold(self, nbytes: int) -> None:
        """Note that an open file holds bytes; those who wait for them are told."""
        self.open_bytes += whole_pages(nbytes)
        self.admit()

    def unhold(self, nbytes: int) -> None:
        """Record that an open file no longer holds bytes."""
        self.open_bytes -= whole_pages(nbytes)

    def queue(self, nbytes: int) -> Ticket:
        """Queue a request, which may be granted at once."""
        ticket = Ticket(nbytes, self._lock)
        self._queue.append(ticket)
        self.admit()
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Cancel a request, or free memory that was granted after the deadline."""
        if ticket in self._queue:
            self._queue.remove(ticket)
        elif ticket.answer is not None and not isinstance(ticket.answer, Verdict):
            self._extents.give(ticket.answer)
        self.pay()

    def refuse_all(self) -> None:
        """Refuse all waiting requests, because the tier is closing."""
        while self._queue:
            self._tell(Verdict.CLOSING)

    def give(self, spans: Sequence[Span], *, in_doubt: bool = False) -> None:
        """Free bytes; *in_doubt*: only when no abandoned call hangs any more."""
        if in_doubt and spans:
            self._held.append(spans)
        else:
            self._extents.give(spans)
        self.pay()

    def give_held(self) -> None:
        """Free the memory that was held back: no call hangs any more."""
        while self._held:
            self._extents.give(self._held.pop())
        self.pay()

    def pay(self) -> None:
        """Remove free pages as `debt_bytes` says, then serve the queue."""
        if self.debt_bytes:
            spans = self._extents.shrink(self.debt_bytes)
            self.debt_bytes = max(0, self.debt_bytes - sum(span.nbytes for span in spans))
            self.released += spans
        self.admit()

    def grow(self, nbytes: int) -> int:
        """Add removed pages again, or reduce `debt_bytes`; return the number of bytes."""
        forgiven = min(nbytes, self.debt_bytes)
        self.debt_bytes -= forgiven
        grown = self._extents.grow(nbytes - forgiven)
        self.admit()
        return forgiven + grown

    def admit(self) -> None:
        """Grant requests from the head of the queue while they fit."""
        while self._queue:
            ticket = self._queue[0]
            if not self.fits(ticket.nbytes):
                self._tell(Verdict.TOO_LARGE)
            elif self.debt_bytes == 0 and (spans := self._extents.take(ticket.nbytes)) is not None:
                self._tell(spans)
            elif self.hopeless(ticket.nbytes):
                self._tell(Verdict.HOPELESS)
            elif self.crowded(ticket.nbytes):
                self._tell(Verdict.HELD)
            else:
                return

    def _tell(self, answer: Sequence[Span] | Verdict) -> None:
        ticket = self._queue.popleft()
        ticket.answer = answer
        ticket.turn.notify()


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages, in bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
