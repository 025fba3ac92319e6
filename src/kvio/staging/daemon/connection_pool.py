"""A client's connections to its daemon: one for events, and one per concurrent call."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Final

from kvio.errors import StorageError, StorageTimeoutError, StoreClosedError
from kvio.staging.allocator import Span
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.protocol import MAX_BYTES, ProtocolError, decode, error_of
from kvio.staging.daemon.sockets import connect, poll, receive_fd, send
from kvio.staging.host import HostMemory

#: How much later than its timeout a call waits for the answer: the daemon enforces the timeout.
_LATE_S: Final = 5.0
#: A socket cannot wait longer than some weeks; a longer timeout is no limit.
_LONGEST_S: Final = 86_400.0
#: How long to poll for an answer before sleeping: most arrive by then, and waking an idle
#: processor takes 50 us and more on a virtual machine. A write of 4 KiB: 241 us before, 136 after.
_POLL_S: Final = 60e-6


class Line:
    """One connection, used by one thread at a time.

    Attributes:
        idle: no request is open: another call may use it.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self.sock = sock
        self._path = path
        self.idle = True

    def ask(self, question: say.Message, *, timeout: float | None = None) -> say.Message:
        """Send a request and wait for its answer.

        Raises:
            KvioError: the error that the daemon returned.
            StorageTimeoutError: no answer came, long after *timeout* seconds.
            StorageError: the daemon is gone.
        """
        self.send(question)
        self.idle = False
        answer = self._receive(timeout)
        self.idle = not isinstance(answer, say.Grant | say.Pinned | say.Fenced)
        if isinstance(answer, say.Failure):
            raise error_of(answer)
        return answer

    def send(self, message: say.Message) -> None:
        """Send what has no answer."""
        try:
            send(self.sock, message)
        except OSError as exc:
            self.idle = False
            raise gone(self._path) from exc

    def release(self, ticket: int) -> None:
        """Release the memory or key of a ticket."""
        self.send(say.Release(ticket))
        self.idle = True

    def spans_of(self, head: say.Grant | say.Pinned, memory: HostMemory) -> list[Span]:
        """Return the spans of an answer.

        Raises:
            ProtocolError: one lies outside the memory.
        """
        spans, more = list(head.spans), head.more
        while more:
            page = self._receive(None)
            if not isinstance(page, say.Grant) or page.ticket != head.ticket:
                raise ProtocolError(f"{type(page).__name__} among spans")
            spans += page.spans
            more = page.more
        if any(offset + nbytes > memory.capacity_bytes for offset, nbytes in spans):
            raise ProtocolError("a span lies beyond the staging memory")
        return spans

    def _receive(self, timeout: float | None) -> say.Message:
        try:
            data = poll(self.sock, _POLL_S)
            if data is None:
                data = self._wait(timeout)
            message = decode(data) if data else None
        except TimeoutError:
            text = f"the drain daemon at {self._path} does not answer"
            raise StorageTimeoutError(text, errno=errno.ETIMEDOUT) from None
        except OSError as exc:
            if isinstance(exc, ProtocolError):
                raise
            raise gone(self._path) from exc
        if message is None:
            raise gone(self._path)
        return message

    def _wait(self, timeout: float | None) -> bytes:
        if timeout is None or timeout > _LONGEST_S:
            return self.sock.recv(MAX_BYTES + 1)
        self.sock.settimeout(timeout + _LATE_S)
        try:
            return self.sock.recv(MAX_BYTES + 1)
        finally:
            self.sock.settimeout(None)  # else `poll` would sleep


class ConnectionPool:
    """All connections of one client.

    Attributes:
        welcome: the daemon's first message.
        events: the connection for the outcomes of writes.
    """

    def __init__(self, path: str, store: str) -> None:
        self.path = os.path.abspath(path)
        self._store = store
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._all: set[socket.socket] = set()
        self._closed = False
        self.events, self.welcome, self.fd = self._greet_first()

    def _greet_first(self) -> tuple[socket.socket, say.Welcome, int]:
        sock = connect(self.path)
        try:
            send(sock, say.Hello(say.NO_SESSION, self._store))
            answer, fd = receive_fd(sock)
            welcome = self._welcomed(answer)
            if fd is None:
                raise ProtocolError("a welcome without memory")
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError) and not isinstance(exc, StorageError):
                raise gone(self.path) from exc
            raise
        self._all.add(sock)
        return sock, welcome, fd

    def _welcomed(self, answer: say.Message | None) -> say.Welcome:
        if isinstance(answer, say.Failure):
            raise error_of(answer)
        if answer is None:
            raise gone(self.path)
        if not isinstance(answer, say.Welcome):
            raise ProtocolError(f"{type(answer).__name__} as a welcome")
        return answer

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """Lend a connection; if a request is open at the end, it is closed and not reused."""
        line = self._take()
        try:
            yield line
        finally:
            self._put(line)

    def ask(self, question: say.Message, *, timeout: float | None = None) -> say.Message:
        """Send one request and wait for its answer; see `Line.ask`."""
        with self.line() as line:
            return line.ask(question, timeout=timeout)

    def send(self, message: say.Message) -> None:
        """Send what has no answer."""
        with self.line() as line:
            line.send(message)

    def _take(self) -> Line:
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
        sock = connect(self.path)
        line = Line(sock, self.path)
        try:
            self._welcomed(line.ask(say.Hello(self.welcome.session, self._store)))
            with self._lock:
                self._check_open()
                self._all.add(sock)
        except BaseException:
            sock.close()
            raise
        return line

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the staging tier is closed")

    def _put(self, line: Line) -> None:
        with self._lock:
            if line.idle and not self._closed:
                self._idle.append(line)
                return
            self._all.discard(line.sock)
        line.sock.close()

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        with self._lock:
            self._closed = True
            socks, self._all = self._all, set()
            self._idle.clear()
        for sock in socks:
            with contextlib.suppress(OSError):  # the daemon went first
                sock.shutdown(socket.SHUT_RDWR)
            if sock is not self.events:  # its reader closes it
                sock.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child: the connections are the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may hold the old one
        self._closed = True
        for sock in self._all:
            sock.close()


def gone(path: str) -> StorageError:
    """Return the error of a daemon that is gone."""
    return StorageError(f"the drain daemon at {path} is gone", errno=errno.ECONNRESET)
