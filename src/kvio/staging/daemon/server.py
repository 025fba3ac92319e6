"""The daemon's end of one connection: requests, answers, and cleanup at its end."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self

from kvio.core.store import Store
from kvio.errors import (
    AccessDeniedError,
    BlockExistsError,
    BlockNotFoundError,
    ConfigError,
    CorruptBlockError,
    KvioError,
    StorageError,
    TierNotDrainedError,
    UnsupportedError,
)
from kvio.staging.allocator import Span
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.engine import DaemonTierCore
from kvio.staging.daemon.protocol import (
    SESSION_BYTES,
    Driven,
    Failed,
    Message,
    ProtocolError,
    Stored,
    failure_of,
)
from kvio.staging.daemon.sockets import Listener, Peer, name_of, peer_of, receive, send
from kvio.staging.host import HostMemory
from kvio.staging.options import TierOptions
from kvio.staging.pending import Entry, KeyQueue, State, deadline_of, left
from kvio.staging.receipts import OpenReceipt
from kvio.types import IfExists, IOMode, Receipt

#: A client with so many unread events gets no more.
MAX_EVENTS: Final = 200_000


class Session:
    """One client; its events are sent by a separate thread, so that no drain waits for it.

    Attributes:
        events_sent: number of events, sent or queued.
    """

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.id = os.urandom(SESSION_BYTES)
        self.peer = peer
        self.events_sent = 0
        self._sock = sock
        self._events: deque[Message | None] = deque()
        self._more = threading.Condition()
        self._failed: dict[OpenReceipt, int] = {}  # with the number of retries of each
        self._thread = threading.Thread(target=self._send_all, name="kvio-events", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def watch(self, receipt: OpenReceipt) -> None:
        """Send the outcome of a write to the client when it is known."""
        retried = receipt.retried  # the future may be of a later retry, then it is checked again
        receipt.as_future().add_done_callback(partial(self._ended, receipt, retried))

    def watch_again(self) -> None:
        """Check failed writes again, and send an event for each that is being retried."""
        with self._more:
            again = [one for one, retried in self._failed.items() if one.retried != retried]
            for receipt in again:
                del self._failed[receipt]
                self._put_locked(Driven(receipt.sequence))
        for receipt in again:
            self.watch(receipt)

    def failed(self, numbers: Collection[int]) -> dict[OpenReceipt, int]:
        """Return which of some writes failed, and how often each was retried."""
        wanted = set(numbers)
        with self._more:
            return {one: n for one, n in self._failed.items() if one.sequence in wanted}

    def forget(self, receipts: Collection[OpenReceipt]) -> None:
        """Record that there will be no more events for failed writes."""
        with self._more:
            for receipt in receipts:
                self._failed.pop(receipt, None)

    def end(self, timeout: float | None) -> None:
        """Send the queued events, then stop."""
        with self._more:
            self._put_locked(None)
        self._thread.join(timeout)

    def cut(self) -> None:
        """Disconnect a client that does not read its events."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it went first

    def _ended(self, receipt: OpenReceipt, retried: int, future: Future[Receipt]) -> None:
        """Send the outcome of a write, except a failure that is being retried."""
        error = future.exception()
        with self._more:
            if error is None:
                self._put_locked(_stored(receipt, future.result()))
                return
            if receipt.retried == retried:
                self._put_locked(Failed(receipt.sequence, receipt.absorbed, failure_of(error)))
                if not isinstance(error, BlockExistsError | BlockNotFoundError):  # these are over
                    self._failed[receipt] = retried
                return
        self.watch(receipt)

    def _put_locked(self, event: Message | None) -> None:
        self._events.append(event)
        self.events_sent += event is not None
        self._more.notify()
        if len(self._events) > MAX_EVENTS:
            self.cut()

    def _send_all(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._events)
                event = self._events.popleft()
            if event is None:
                return
            try:
                send(self._sock, event)
            except OSError:
                return  # it is gone; its writes go on


def _stored(receipt: OpenReceipt, stored: Receipt) -> Stored:
    return Stored(
        receipt.sequence,
        receipt.absorbed,
        stored.nbytes,
        stored.checksum,
        stored.level,
        stored.mode,
        stored.existed,
        stored.reason,
    )


_PASSED_THROUGH: Final = "written past the tier"


class Clients(Protocol):
    """The methods of the daemon that a connection calls."""

    def pause(self, session: Session) -> None:
        """Begin no more drains until this client resumes them, or ends."""

    def resume(self, session: Session) -> None:
        """Begin drains again, unless another client has paused them too."""

    def retry_failed(self, only: Collection[OpenReceipt]) -> None:
        """Retry failed writes; every client has got the events on return."""

    def watch_again(self) -> None:
        """Send every client events for its failed writes that are open again."""


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
    key_queue: KeyQueue
    before: int
    deadline: float | None


class Connection:
    """One connection of a client: it holds one thing at a time, which goes back with it.

    A write is accepted by the one change that makes it the ledger's; before that its room belongs
    to the connection, and after it nothing that happens to the client matters to it.
    """

    def __init__(
        self, clients: Clients, core: DaemonTierCore, sock: socket.socket, session: Session
    ) -> None:
        self._clients = clients
        self._core = core
        self._ledger = core.ledger
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
                self._core.files.unpin(held.entry)
            case _Pinned():
                self._ledger.unpin((held.entry,))
            case _Fenced():
                self._ledger.unclaim(held.key_queue)

    def _release(self, question: say.Release) -> Sequence[say.Message]:
        if self._held is None or self._held.ticket != question.ticket:
            raise ProtocolError(f"there is no ticket {question.ticket}")
        self._give_back()
        return []

    # Writing

    def _reserve(self, question: say.Reserve) -> Sequence[say.Message]:
        ticket = self._next_ticket()
        key, nbytes, if_exists = question.key, question.nbytes, question.if_exists
        self._core.drains.start()
        answer = self._core.room(question.when_full).reserve(
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
        self._after_a_write()
        return say.Accepted(receipt.sequence, receipt.checksum)

    def _after_a_write(self) -> None:
        ledger = self._ledger
        if ledger.lost:  # each client keeps its own account of failures
            with ledger.lock:
                ledger.lost.clear()
        if ledger.reopened:  # it has taken the place of failed writes, perhaps of other clients
            ledger.reopened = False
            self._clients.watch_again()

    # Past the tier

    def _fence(self, question: say.Fence) -> Sequence[say.Message]:
        ticket, ledger = self._next_ticket(), self._ledger
        deadline = _deadline(question.timeout_us)
        self._core.drains.start()
        with ledger.lock:
            ledger.check_open_locked()
        key_queue, before = ledger.claim(question.key, deadline, after_races=True)
        try:
            with ledger.lock:
                answer = ledger.answer_locked(question.key, question.nbytes, question.if_exists)
                newest = key_queue.newest
        except BaseException:
            ledger.unclaim(key_queue)
            raise
        if answer is not None:
            ledger.unclaim(key_queue)
            return [self._accepted(answer)]
        self._held = _Fenced(ticket, question.key, question.nbytes, key_queue, before, deadline)
        return [say.Fenced(ticket, newest is not None and newest.state is not State.FAILED)]

    def _wrote(self, question: say.Wrote) -> Sequence[say.Message]:
        fence: _Fenced = self._redeem(question.ticket, _Fenced)
        try:
            if fence.key_queue.entries:
                self._check_stored(fence, question.checksum)
            receipt = self._ledger.wrote_through(
                fence.key_queue,
                Receipt(
                    fence.key,
                    fence.nbytes,
                    question.checksum,
                    question.level,
                    IOMode.MEMORY,
                    _PASSED_THROUGH,
                    existed=question.existed,
                ),
                fence.before,
            )
        finally:
            self._ledger.unclaim(fence.key_queue)
        self._after_a_write()
        return [say.Accepted(receipt.sequence, receipt.checksum)]

    def _check_stored(self, fence: _Fenced, checksum: int | None) -> None:
        """Check the store before staged bytes are dropped because a client says so."""
        try:
            found = self._core.store.stat_block(fence.key, timeout=left(fence.deadline))
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
        self._core.drains.start()
        deadline = _deadline(question.timeout_us)
        there = self._core.room("block").delete(question.key, timeout=left(deadline))
        return [say.Done(int(there))]

    # Reading

    def _pin(self, question: say.Pin) -> Sequence[say.Message]:
        ticket, ledger = self._next_ticket(), self._ledger
        if question.lasting:
            entry = self._core.files.pin(question.key)
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
            newest = self._ledger.key_queues.newest
            staged = tuple(key for key in question.keys if newest(key) is not None)
        return [say.Keys(more=False, keys=staged)]

    def _list(self, question: say.List) -> Sequence[say.Message]:
        with self._ledger.lock:
            self._ledger.check_open_locked()
            keys = self._ledger.key_queues.keys(question.prefix)
        after = sorted(key for key in keys if key > question.after)
        return [say.Keys(len(after) > say.MAX_KEYS, tuple(after[: say.MAX_KEYS]))]

    # The tier

    def _ask(self, question: say.Ask) -> Sequence[say.Message]:
        with self._ledger.lock:
            last = self._ledger.progress.sequence
        self._core.drains.ask(min(question.sequence, last))
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
        return [say.Sequences(self._session.events_sent, tuple(driven))]

    def _discard(self, question: say.Discard) -> Sequence[say.Message]:
        receipts = self._session.failed([question.sequence])
        gone = any(self._ledger.discard(one) for one in receipts)
        if gone:
            self._session.forget(receipts)
        return [say.Done(int(gone))]

    def _over(self, question: say.Over) -> Sequence[say.Message]:
        self._session.watch_again()  # what is open again is so for this client from now on
        failed = self._session.failed(question.sequences)
        with self._ledger.lock:
            staged = {one for entry in self._ledger.failed.values() for one in entry.receipts}
            over = [one for one, n in failed.items() if one.retried == n and one not in staged]
        self._session.forget(over)
        return [
            say.Sequences(self._session.events_sent, tuple(sorted(one.sequence for one in over)))
        ]

    def _stats(self, _: say.Stats) -> Sequence[say.Message]:
        return [say.StatsAre(self._core.stats())]


def _grants(ticket: int, spans: Sequence[Span]) -> list[say.Grant]:
    """Yield spans in as many packets as they need."""
    most = say.MAX_SPANS
    pages = [tuple(spans[at : at + most]) for at in range(0, len(spans), most)] or [()]
    return [say.Grant(ticket, page is not pages[-1], page) for page in pages]


def _deadline(timeout_us: int | None) -> float | None:
    """Return the deadline of a timeout; at most a century, which a lock can wait for."""
    return deadline_of(None if timeout_us is None else min(timeout_us, say.CENTURY_US) / 1e6)


# --------------------------------------------------------------------------------------------------
# The drain daemon: a tier over shared memory, and a thread for each connection to it.


#: How long clients that were given room may take to copy their bytes once the daemon ends.
_GRACE_S: Final = 5.0
#: How long to wait before another connection is taken when descriptors have run out.
_CROWDED_S: Final = 0.1


class StageDaemon:
    """Takes writes of local processes into memory of its own, and stores them behind their backs.

    Listens at once, until `close`. A write that was accepted is the daemon's: what becomes of the
    client does not matter to it. Only processes of our own user are served: the kernel reports
    who connects, and root is not excepted. *log* is called with a line about each client that was
    turned away or cut off, from any thread.

    Raises:
        UnsupportedError: other processes do not see the store.
        ConfigError: an option cannot be as it is, another daemon listens at *path*, or its
            directory is open to others.
        StorageError: there is no such memory, or the socket cannot be made.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        capacity_bytes: int,
        options: TierOptions,
        numa_node: int | None = None,
        populate: bool = False,
        log: Callable[[str], object] = str,
    ) -> None:
        if not store.capabilities.shared:
            raise UnsupportedError(f"other processes do not see a {store.url.scheme} store")
        self._store_name = name_of(store.url)
        self._listener = Listener(path)
        try:
            memory = HostMemory(capacity_bytes, shared=True, numa_node=numa_node, populate=populate)
            self.core = DaemonTierCore(store, memory, options)
        except BaseException:
            self._listener.close()
            raise
        self._uid = os.geteuid()
        self._populated = populate
        self._log = log
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._pausing: set[Session] = set()
        self._connections: dict[socket.socket, Connection | None] = {}
        self._threads: set[threading.Thread] = set()
        self._close_lock = threading.Lock()
        self._ending = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="kvio-accept", daemon=True)
        self._accepting.start()

    @property
    def path(self) -> str:
        """The path of the socket."""
        return self._listener.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Ending

    def close(self, *, timeout: float | None = None) -> None:
        """Accept no more writes, store all blocks, and end, also if some could not be stored.

        Raises:
            TierNotDrainedError: blocks failed again, or were not stored before the deadline;
                ``.keys`` names them. They are lost with the daemon's memory.
        """
        deadline = deadline_of(timeout)
        with self._close_lock:
            if self._ending.is_set():
                return
            self._ending.set()
            self._listener.stop()
            self._accepting.join()
            try:
                self._drain(deadline)
            finally:
                self._end(deadline)

    def _drain(self, deadline: float | None) -> None:
        self.retry_failed()
        self.core.drains.start()
        with self._lock:
            self._pausing.clear()
        rest = left(deadline)
        try:
            self.core.drains.drain_all(
                deadline_of(_GRACE_S if rest is None else min(rest, _GRACE_S))
            )
        except TierNotDrainedError:
            self._cut_off_loiterers()
            self.core.drains.drain_all(deadline)

    def _cut_off_loiterers(self) -> None:
        """Close the connections of clients that hold memory and do not fill it."""
        with self._lock:
            socks = [s for s, c in self._connections.items() if c is not None and c.holds_room]
        for sock in socks:
            _shut(sock)

    def _end(self, deadline: float | None) -> None:
        """Send the clients the outcomes of their writes, then disconnect."""
        with self.core.ledger.lock:
            self.core.ledger.closing = True
            self.core.ledger.allocator.refuse_all()
        self.core.end_drains(deadline)
        with self._lock:
            sessions, socks = list(self._sessions.values()), list(self._connections)
            threads = list(self._threads)
        for session in sessions:
            session.end(_GRACE_S)
        for sock in socks:
            _shut(sock)
        for thread in threads:
            thread.join(left(deadline))
        self.core.close()
        self._listener.close()

    # Clients

    def pause(self, session: Session) -> None:
        """Begin no more drains until this client resumes them, or ends, as it may have already."""
        with self._lock:
            if session.id in self._sessions:
                self._pausing.add(session)
                self.core.drains.pause()

    def resume(self, session: Session) -> None:
        """Begin drains again, unless another client has paused them too."""
        with self._lock:
            self._pausing.discard(session)
            if not self._pausing:
                self.core.drains.resume()

    def retry_failed(self, only: Collection[OpenReceipt] | None = None) -> None:
        """Retry failed writes, some or all; every client has got the events on return.

        A block that absorbed a failed write is retried for both clients.
        """
        self.core.ledger.retry_failed(only)
        self.watch_again()

    def watch_again(self) -> None:
        """Send every client events for its failed writes that are open again."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.watch_again()

    # Connections

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                sock, _ = self._listener.socket.accept()
            except OSError:
                self._ending.wait(_CROWDED_S)  # out of descriptors, or about to end
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name="kvio-client", daemon=True)
        with self._lock:
            self._connections[sock] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as exc:  # out of threads
            self._forget(sock, thread)
            self._log(f"a client was turned away: {exc}")

    def _forget(self, sock: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            del self._connections[sock]
            self._threads.discard(thread)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            peer = peer_of(sock)
            if peer.uid == self._uid:
                self._greet(sock, peer)
            else:
                self._log(f"uid {peer.uid} was turned away (process {peer.pid})")
                text = f"the drain daemon does not serve uid {peer.uid}"
                send(sock, failure_of(AccessDeniedError(text)))
        except ProtocolError as exc:
            self._log(f"a client was cut off: {exc}")
        except OSError:
            pass  # it is gone
        finally:
            self._forget(sock, threading.current_thread())

    def _greet(self, sock: socket.socket, peer: Peer) -> None:
        hello = receive(sock)
        if hello is None:
            return
        if not isinstance(hello, say.Hello):
            raise ProtocolError(f"{type(hello).__name__} before Hello")
        try:
            session = self._session_of(hello, peer)
        except KvioError as exc:
            send(sock, failure_of(exc))
            return
        if session is None:
            self._send_events(sock, peer)
            return
        connection = Connection(self, self.core, sock, session)
        with self._lock:
            self._connections[sock] = connection
        send(sock, self._welcome(session))
        connection.serve()

    def _session_of(self, hello: say.Hello, peer: Peer) -> Session | None:
        """Return the session of a connection; None: a new client's."""
        if hello.store != self._store_name:
            raise ConfigError(
                f"the drain daemon stores to {self._store_name}, not to {hello.store}: open the "
                "store by the same URL and options"
            )
        if hello.session == say.NO_SESSION:
            return None
        with self._lock:
            session = self._sessions.get(hello.session)
        if session is None or session.peer != peer:
            raise ConfigError("the drain daemon knows no such client")
        return session

    def _send_events(self, sock: socket.socket, peer: Peer) -> None:
        session = Session(sock, peer)
        session.start()  # before any call can wait for its events
        with self._lock:
            self._sessions[session.id] = session
        try:
            send(sock, self._welcome(session), fd=self.core.memory.fd)
            if receive(sock) is not None:
                raise ProtocolError("a question where only events go")
        finally:
            with self._lock:
                del self._sessions[session.id]
            self.resume(session)
            session.end(_GRACE_S)

    def _welcome(self, session: Session) -> say.Welcome:
        core = self.core
        return say.Welcome(
            session.id,
            core.memory.capacity_bytes,
            core.level,
            eager=core.eager,
            populated=self._populated,
        )


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it ended by itself
