"""The daemon's end of one connection: requests, answers, and cleanup at its end."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvio.errors import BlockNotFoundError, CorruptBlockError, KvioError, StorageError
from kvio.types import IfExists, IOMode, Receipt
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.custody import Custody
from kvio.wrappers.staging.daemon.faults import failure_of
from kvio.wrappers.staging.daemon.fields import ProtocolError
from kvio.wrappers.staging.daemon.sessions import Session
from kvio.wrappers.staging.daemon.sockets import receive, send
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.pending import Entry, Lane, State
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.receipts import OpenReceipt

_PASSED_THROUGH: Final = "written past the tier"


class Clients(Protocol):
    """The methods of the daemon that a connection calls."""

    def pause(self, session: Session) -> None:
        """Begin no more drains until this client resumes them, or ends."""

    def resume(self, session: Session) -> None:
        """Begin drains again, unless another client has paused them too."""

    def retry_failed(self, only: Collection[OpenReceipt]) -> None:
        """Retry failed writes; every client has got the events on return."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that a client copies bytes to."""

    ticket: int
    key: str
    nbytes: int
    if_exists: IfExists
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """An entry whose bytes a client copies."""

    ticket: int
    entry: Entry
    lasting: bool


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A key that a client writes directly to the store."""

    ticket: int
    key: str
    nbytes: int
    lane: Lane
    before: int
    deadline: float | None


class Connection:
    """One connection of a client: it holds one thing at a time, which goes back with it.

    A write is accepted by the one change that makes it the ledger's; before that its room belongs
    to the connection, and after it nothing that happens to the client matters to it.
    """

    def __init__(
        self, clients: Clients, custody: Custody, sock: socket.socket, session: Session
    ) -> None:
        self._clients = clients
        self._custody = custody
        self._ledger = custody.ledger
        self._sock = sock
        self._session = session
        self._tickets = itertools.count(1)
        self._held: _Room | _Pinned | _Fenced | None = None
        self._answers: dict[type[Any], Callable[[Any], Sequence[say.Message]]] = {
            say.Reserve: self._reserve,
            say.Commit: self._commit,
            say.Release: self._release,
            say.Pin: self._pin,
            say.Fence: self._fence,
            say.Wrote: self._wrote,
            say.Delete: self._delete,
            say.Present: self._present,
            say.List: self._list,
            say.Ask: self._ask,
            say.Hold: self._hold,
            say.Resize: self._resize,
            say.Retry: self._retry,
            say.Discard: self._discard,
            say.Over: self._over,
            say.Stats: self._stats,
        }

    @property
    def holds_room(self) -> bool:
        """True if a client is copying bytes, or should be."""
        return isinstance(self._held, _Room)

    def serve(self) -> None:
        """Answer requests until the client disconnects.

        Raises:
            ProtocolError: it sent a malformed message.
            OSError: the connection broke.
        """
        try:
            while (question := receive(self._sock)) is not None:
                for answer in self._answer(question):
                    send(self._sock, answer)
        finally:
            self._give_back()

    def _answer(self, question: say.Message) -> Sequence[say.Message]:
        answering = self._answers.get(type(question))
        if answering is None:
            raise ProtocolError(f"{type(question).__name__} is no question")
        try:
            return answering(question)
        except ProtocolError:
            raise
        except KvioError as exc:
            return [failure_of(exc)]

    # What is held

    def _check_nothing_held(self) -> None:
        if self._held is not None:
            raise ProtocolError("a connection holds one thing at a time")

    def _next_ticket(self) -> int:
        self._check_nothing_held()
        return next(self._tickets)

    def _redeem(self, ticket: int, kind: type[Any]) -> Any:
        held = self._held
        if not isinstance(held, kind) or held is None or held.ticket != ticket:
            raise ProtocolError(f"there is no ticket {ticket} for that")
        self._held = None
        return held

    def _give_back(self) -> None:
        held, self._held = self._held, None
        match held:
            case _Room():
                self._ledger.cancel_fill(held.spans)
            case _Pinned(lasting=True):
                self._custody.files.unpin(held.entry)
            case _Pinned():
                self._ledger.unpin((held.entry,))
            case _Fenced():
                self._ledger.unclaim(held.lane)

    def _release(self, question: say.Release) -> Sequence[say.Message]:
        if self._held is None or self._held.ticket != question.ticket:
            raise ProtocolError(f"there is no ticket {question.ticket}")
        self._give_back()
        return []

    # Writing

    def _reserve(self, question: say.Reserve) -> Sequence[say.Message]:
        ticket = self._next_ticket()
        key, nbytes, if_exists = question.key, question.nbytes, question.if_exists
        self._custody.drains.start()
        answer = self._custody.room(question.when_full).reserve(
            key, nbytes, if_exists=if_exists, deadline=_deadline(question.timeout_us)
        )
        if answer is None:
            return [say.Through()]
        if isinstance(answer, OpenReceipt):
            return [self._accepted(answer)]
        self._held = _Room(ticket, key, nbytes, if_exists, answer)
        return _grants(ticket, answer)

    def _commit(self, question: say.Commit) -> Sequence[say.Message]:
        room: _Room = self._redeem(question.ticket, _Room)
        try:
            receipt = self._ledger.commit(
                room.key,
                room.spans,
                nbytes=room.nbytes,
                checksum=question.checksum,
                if_exists=room.if_exists,
            )
        finally:
            self._ledger.deliver()
        return [self._accepted(receipt)]

    def _accepted(self, receipt: OpenReceipt) -> say.Accepted:
        self._session.watch(receipt)
        if self._ledger.unreported:  # each client keeps its own account of failures
            with self._ledger.lock:
                self._ledger.unreported.clear()
        return say.Accepted(receipt.sequence, receipt.checksum)

    # Past the tier

    def _fence(self, question: say.Fence) -> Sequence[say.Message]:
        ticket, ledger = self._next_ticket(), self._ledger
        deadline = _deadline(question.timeout_us)
        self._custody.drains.start()
        with ledger.lock:
            ledger.check_open_locked()
        lane, before = ledger.claim(question.key, deadline, after_races=True)
        try:
            with ledger.lock:
                answer = ledger.answer_locked(question.key, question.nbytes, question.if_exists)
                newest = lane.newest
        except BaseException:
            ledger.unclaim(lane)
            raise
        if answer is not None:
            ledger.unclaim(lane)
            return [self._accepted(answer)]
        self._held = _Fenced(ticket, question.key, question.nbytes, lane, before, deadline)
        return [say.Fenced(ticket, newest is not None and newest.state is not State.FAILED)]

    def _wrote(self, question: say.Wrote) -> Sequence[say.Message]:
        fence: _Fenced = self._redeem(question.ticket, _Fenced)
        try:
            if fence.lane.entries:
                self._check_stored(fence, question.checksum)
            receipt = self._ledger.wrote_through(
                fence.lane,
                Receipt(
                    fence.key,
                    fence.nbytes,
                    question.checksum,
                    question.level,
                    IOMode.MEMORY,
                    _PASSED_THROUGH,
                    existed=False,
                ),
                fence.before,
            )
        finally:
            self._ledger.unclaim(fence.lane)
        return [say.Accepted(receipt.sequence, receipt.checksum)]

    def _check_stored(self, fence: _Fenced, checksum: int | None) -> None:
        """Check the store before staged bytes are dropped because a client says so."""
        try:
            found = self._custody.store.stat_block(fence.key, timeout=left(fence.deadline))
            good = found.nbytes == fence.nbytes and (
                checksum is None or found.checksum in (None, checksum)
            )
        except (BlockNotFoundError, CorruptBlockError):
            good = False
        if not good:
            text = f"block {fence.key!r} is not in the store as it was said to be"
            raise StorageError(text, key=fence.key)

    def _delete(self, question: say.Delete) -> Sequence[say.Message]:
        self._check_nothing_held()  # it would wait for its own fence
        with self._ledger.lock:
            self._ledger.check_open_locked()
        self._custody.drains.start()
        deadline = _deadline(question.timeout_us)
        there = self._custody.room("block").delete(question.key, timeout=left(deadline))
        return [say.Done(int(there))]

    # Reading

    def _pin(self, question: say.Pin) -> Sequence[say.Message]:
        ticket, ledger = self._next_ticket(), self._ledger
        if question.lasting:
            entry = self._custody.files.pin(question.key)
        else:
            with ledger.lock:
                ledger.check_open_locked()
                entry = ledger.pin_locked(question.key)
        if entry is None:
            return [say.Absent()]
        self._held = _Pinned(ticket, entry, question.lasting)
        one = entry.receipt
        grants = _grants(ticket, entry.spans)
        head = say.Pinned(
            *(ticket, one.nbytes, one.checksum, one.sequence, entry.written_ns),
            more=grants[0].more,
            spans=grants[0].spans,
        )
        return [head, *grants[1:]]

    def _present(self, question: say.Present) -> Sequence[say.Message]:
        with self._ledger.lock:
            self._ledger.check_open_locked()
            newest = self._ledger.lanes.newest
            staged = tuple(key for key in question.keys if newest(key) is not None)
        return [say.Keys(more=False, keys=staged)]

    def _list(self, question: say.List) -> Sequence[say.Message]:
        with self._ledger.lock:
            self._ledger.check_open_locked()
            keys = self._ledger.lanes.keys(question.prefix)
        after = sorted(key for key in keys if key > question.after)
        return [say.Keys(len(after) > say.MAX_KEYS, tuple(after[: say.MAX_KEYS]))]

    # The tier

    def _ask(self, question: say.Ask) -> Sequence[say.Message]:
        with self._ledger.lock:
            last = self._ledger.progress.sequence
        self._custody.drains.ask(min(question.sequence, last))
        return []

    def _hold(self, question: say.Hold) -> Sequence[say.Message]:
        if question.on:
            self._clients.pause(self._session)
        else:
            self._clients.resume(self._session)
        return [say.Done(0)]

    def _resize(self, question: say.Resize) -> Sequence[say.Message]:
        nbytes = question.nbytes
        with self._ledger.lock:
            self._ledger.check_open_locked()
        changed = self._ledger.grow(nbytes) if nbytes > 0 else self._ledger.shrink(-nbytes)
        return [say.Done(changed)]

    def _retry(self, question: say.Retry) -> Sequence[say.Message]:
        failed = self._session.failed(question.sequences)
        self._clients.retry_failed(failed.keys())
        driven = sorted(one.sequence for one, retried in failed.items() if one.retried != retried)
        return [say.Sequences(self._session.told, tuple(driven))]

    def _discard(self, question: say.Discard) -> Sequence[say.Message]:
        receipts = self._session.failed([question.sequence])
        gone = any(self._ledger.discard(one) for one in receipts)
        if gone:
            self._session.forget(receipts)
        return [say.Done(int(gone))]

    def _over(self, question: say.Over) -> Sequence[say.Message]:
        failed = self._session.failed(question.sequences)
        with self._ledger.lock:
            staged = {one for entry in self._ledger.failed.values() for one in entry.receipts}
            over = [one for one, n in failed.items() if one.retried == n and one not in staged]
        self._session.forget(over)
        return [say.Sequences(self._session.told, tuple(sorted(one.sequence for one in over)))]

    def _stats(self, _: say.Stats) -> Sequence[say.Message]:
        return [say.StatsAre(self._custody.stats())]


def _grants(ticket: int, spans: Sequence[Span]) -> list[say.Grant]:
    """Yield spans in as many packets as they need."""
    most = say.MAX_SPANS
    pages = [tuple(spans[at : at + most]) for at in range(0, len(spans), most)] or [()]
    return [say.Grant(ticket, page is not pages[-1], page) for page in pages]


def _deadline(timeout_us: int | None) -> float | None:
    """Return the deadline of a timeout; at most a century, which a lock can wait for."""
    return deadline_of(None if timeout_us is None else min(timeout_us, say.CENTURY_US) / 1e6)
