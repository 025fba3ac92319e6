"""The drain daemon: a tier over shared memory, and a thread for each connection to it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import Final, Self

from kvio.errors import (
    AccessDeniedError,
    ConfigError,
    KvioError,
    TierNotDrainedError,
    UnsupportedError,
)
from kvio.store import Store
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.connections import Connection
from kvio.wrappers.staging.daemon.custody import Custody
from kvio.wrappers.staging.daemon.faults import failure_of
from kvio.wrappers.staging.daemon.fields import ProtocolError
from kvio.wrappers.staging.daemon.naming import name_of
from kvio.wrappers.staging.daemon.sessions import Session
from kvio.wrappers.staging.daemon.sockets import Listener, Peer, peer_of, receive, send
from kvio.wrappers.staging.host import HostMemory
from kvio.wrappers.staging.options import TierOptions
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.receipts import OpenReceipt

#: How long clients that were given room may take to copy their bytes once the daemon ends.
_GRACE_S: Final = 5.0
#: How long to wait before another connection is taken when descriptors have run out.
_CROWDED_S: Final = 0.1


class StageDaemon:
    """Takes writes of local processes into memory of its own, and stores them behind their backs.

    Listens at once, until `close`. A write that was accepted is the daemon's: what becomes of the
    client does not matter to it. Only processes of our own user are served: the kernel tells who
    connects, and root is not excepted. *tell* is called with a line about each client that was
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
        tell: Callable[[str], object] = str,
    ) -> None:
        if not store.capabilities.shared:
            raise UnsupportedError(f"other processes do not see a {store.url.scheme} store")
        self._store_name = name_of(store.url)
        self._listener = Listener(path)
        try:
            memory = HostMemory(capacity_bytes, shared=True, numa_node=numa_node, populate=populate)
            self.custody = Custody(store, memory, options)
        except BaseException:
            self._listener.close()
            raise
        self._uid = os.geteuid()
        self._populated = populate
        self._tell = tell
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
        self.custody.drains.start()
        with self._lock:
            self._pausing.clear()
        rest = left(deadline)
        try:
            self.custody.drains.drain_all(
                deadline_of(_GRACE_S if rest is None else min(rest, _GRACE_S))
            )
        except TierNotDrainedError:
            self._cut_off_loiterers()
            self.custody.drains.drain_all(deadline)

    def _cut_off_loiterers(self) -> None:
        """Close the connections of clients that hold memory and do not fill it."""
        with self._lock:
            socks = [s for s, c in self._connections.items() if c is not None and c.holds_room]
        for sock in socks:
            _shut(sock)

    def _end(self, deadline: float | None) -> None:
        """Send the clients the outcomes of their writes, then disconnect."""
        with self.custody.ledger.lock:
            self.custody.ledger.closing = True
            self.custody.ledger.room.refuse_all()
        self.custody.end_drains(deadline)
        with self._lock:
            sessions, socks = list(self._sessions.values()), list(self._connections)
            threads = list(self._threads)
        for session in sessions:
            session.end(_GRACE_S)
        for sock in socks:
            _shut(sock)
        for thread in threads:
            thread.join(left(deadline))
        self.custody.close()
        self._listener.close()

    # Clients

    def pause(self, session: Session) -> None:
        """Begin no more drains until this client resumes them, or ends, as it may have already."""
        with self._lock:
            if session.id in self._sessions:
                self._pausing.add(session)
                self.custody.drains.pause()

    def resume(self, session: Session) -> None:
        """Begin drains again, unless another client has paused them too."""
        with self._lock:
            self._pausing.discard(session)
            if not self._pausing:
                self.custody.drains.resume()

    def retry_failed(self, only: Collection[OpenReceipt] | None = None) -> None:
        """Retry failed writes, some or all; every client has got the events on return.

        A block that absorbed a failed write is retried for both clients.
        """
        self.custody.ledger.retry_failed(only)
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
            self._tell(f"a client was turned away: {exc}")

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
                self._tell(f"uid {peer.uid} was turned away (process {peer.pid})")
                text = f"the drain daemon does not serve uid {peer.uid}"
                send(sock, failure_of(AccessDeniedError(text)))
        except ProtocolError as exc:
            self._tell(f"a client was cut off: {exc}")
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
            self._tell_events(sock, peer)
            return
        connection = Connection(self, self.custody, sock, session)
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

    def _tell_events(self, sock: socket.socket, peer: Peer) -> None:
        session = Session(sock, peer)
        session.start()  # before any call can wait for its events
        with self._lock:
            self._sessions[session.id] = session
        try:
            send(sock, self._welcome(session), fd=self.custody.memory.fd)
            if receive(sock) is not None:
                raise ProtocolError("a question where only events go")
        finally:
            with self._lock:
                del self._sessions[session.id]
            self.resume(session)
            session.end(_GRACE_S)

    def _welcome(self, session: Session) -> say.Welcome:
        custody = self.custody
        return say.Welcome(
            session.id,
            custody.memory.capacity_bytes,
            custody.level,
            eager=custody.eager,
            populated=self._populated,
        )


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it ended by itself
