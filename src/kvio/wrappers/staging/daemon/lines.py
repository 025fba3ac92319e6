"""A client's connections to its daemon: one for events, and as many as there are calls at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Final

from kvio.errors import StorageError, StorageTimeoutError, StoreClosedError
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.faults import error_of
from kvio.wrappers.staging.daemon.fields import MAX_BYTES, ProtocolError
from kvio.wrappers.staging.daemon.messages import decode
from kvio.wrappers.staging.daemon.sockets import connect, poll, receive_fd, send
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.host import HostMemory

#: How much later than a call's own time limit an answer may come: the daemon keeps the limit.
_LATE_S: Final = 5.0
#: A socket cannot wait longer than some weeks; whoever would has no limit.
_LONGEST_S: Final = 86_400.0
#: How long to look for an answer before going to sleep: most are there by then, and to wake a
#: processor that went idle takes 50 us and more on a virtual machine. A write of 4 KiB: 241 -> 136.
_POLL_S: Final = 60e-6


class Line:
    """One connection, in the hands of one thread at a time.

    Attributes:
        idle: nothing is asked or held: another call may use it.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self.sock = sock
        self._path = path
        self.idle = True

    def ask(self, question: say.Message, *, timeout: float | None = None) -> say.Message:
        """Send a question and wait for its answer.

        Raises:
            KvioError: what the daemon says went wrong.
            StorageTimeoutError: it said nothing, long after *timeout* seconds.
            StorageError: it is gone.
        """
        self.tell(question)
        self.idle = False
        answer = self._receive(timeout)
        self.idle = not isinstance(answer, say.Grant | say.Pinned | say.Fenced)
        if isinstance(answer, say.Failure):
            raise error_of(answer)
        return answer

    def tell(self, message: say.Message) -> None:
        """Send what has no answer."""
        try:
            send(self.sock, message)
        except OSError as exc:
            self.idle = False
            raise gone(self._path) from exc

    def release(self, ticket: int) -> None:
        """Give back what a ticket is for."""
        self.tell(say.Release(ticket))
        self.idle = True

    def spans_of(self, head: say.Grant | say.Pinned, memory: HostMemory) -> list[Span]:
        """Collect the spans of an answer, all within the memory.

        Raises:
            ProtocolError: they are not.
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


class Lines:
    """All connections of one client.

    Attributes:
        welcome: what the daemon said of itself.
        events: the connection on which it tells how writes end.
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
        """Lend a connection; one on which something is open at the end is closed, not reused."""
        line = self._take()
        try:
            yield line
        finally:
            self._put(line)

    def ask(self, question: say.Message, *, timeout: float | None = None) -> say.Message:
        """Ask one question; see `Line.ask`."""
        with self.line() as line:
            return line.ask(question, timeout=timeout)

    def tell(self, message: say.Message) -> None:
        """Send what has no answer."""
        with self.line() as line:
            line.tell(message)

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
        """Hang up; calls under way end with an error."""
        with self._lock:
            self._closed = True
            socks, self._all = self._all, set()
            self._idle.clear()
        for sock in socks:
            with contextlib.suppress(OSError):  # the daemon went first
                sock.shutdown(socket.SHUT_RDWR)
            if sock is not self.events:  # whoever listens there closes it
                sock.close()

    def abandon(self) -> None:
        """Let go in a forked child: what is said there is the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may hold the old one
        self._closed = True
        for sock in self._all:
            sock.close()


def gone(path: str) -> StorageError:
    """Make the error of a daemon that does not live any more."""
    return StorageError(f"the drain daemon at {path} is gone", errno=errno.ECONNRESET)
