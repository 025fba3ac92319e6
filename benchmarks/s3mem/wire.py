"""HTTP/1.1 over a blocking socket: heads parsed once, bodies received where they stay.

Named neither ``http`` nor ``xml``: run as a file, this directory comes first in ``sys.path``.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote, unquote_plus

#: A request's head, and as much of its body as came with it: what is copied once more is bounded.
_BUFFER_BYTES: Final = 16 << 10
#: writev(2) takes at most this many buffers at once (IOV_MAX).
_BUFFERS_A_CALL: Final = 1024
_CHUNK_LINE_BYTES: Final = 8 << 10
#: How a client that wants TLS begins, and then waits.
_TLS_HANDSHAKE: Final = 0x16
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS: Final = frozenset((204, 304))
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class WireError(ConnectionError):
    """The peer stopped in the middle, or spoke no HTTP that could be followed."""


@dataclass(slots=True)
class Request:
    """One request's head; header names in lower case, values as latin-1 text."""

    method: str
    raw_path: str
    path: str
    query: list[tuple[str, str]]
    headers: dict[str, str]

    def argument(self, name: str) -> str | None:
        """Return the first value of a query parameter."""
        return next((value for key, value in self.query if key == name), None)


@dataclass(slots=True)
class Reply:
    """One response; *holds* keeps alive what *body* points into until it is sent."""

    status: int
    headers: str = ""
    body: Sequence[bytes | memoryview] = ()
    nbytes: int = 0
    holds: object = None


def date(seconds: float) -> str:
    """Return a time as HTTP writes it."""
    return _date(int(seconds))


@lru_cache(maxsize=16)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def is_number(value: str) -> bool:
    """Return whether a text is a number of at most 19 digits."""
    return value.isascii() and value.isdigit() and len(value) < 20


def parse(head: bytes) -> Request:
    """Read a request's head.

    Raises:
        WireError: it is no HTTP/1.1 request.
        UnicodeDecodeError: the path or the query is no percent-encoded UTF-8.
    """
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
    except ValueError:
        raise WireError(f"not a request line: {lines[0]!r}") from None
    if version != "HTTP/1.1":
        raise WireError(f"not HTTP/1.1: {version!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise WireError(f"not a header: {line!r}")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    if not target.isascii():
        target = target.encode("latin-1").decode()
    if "://" in target and not target.startswith("/"):
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    raw_path, _, raw_query = target.partition("?")
    path = unquote(raw_path, errors="strict") if "%" in raw_path else raw_path
    return Request(method, raw_path, path, _pairs(raw_query) if raw_query else [], headers)


def _pairs(raw_query: str) -> list[tuple[str, str]]:
    pairs = []
    for field in raw_query.split("&"):
        if field:
            name, _, value = field.partition("=")
            pairs.append(
                (unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict"))
            )
    return pairs


class Connection:
    """One client's connection: requests out of it, bodies into memory, replies back."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._whole = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        #: Bytes of the current request's body still to come; -1 where it comes in chunks.
        self.pending = 0
        #: The client waits for "100 Continue" before it sends the body.
        self.awaited = False

    def next_request(self) -> Request | None:
        """Return the next request, or None when the client is done."""
        head = self._head()
        if head is None:
            return None
        request = parse(head)
        length = request.headers.get("content-length", "0")
        if not is_number(length):
            raise WireError(f"not a length: {length[:80]!r}")
        chunked = request.headers.get("transfer-encoding", "").lower() == "chunked"
        self.pending = -1 if chunked else int(length)
        self.awaited = request.headers.get("expect", "").lower() == "100-continue"
        return request

    def read_into(self, out: memoryview) -> None:
        """Fill *out* from the current body."""
        self.go_ahead()
        self._fill(out)
        if self.pending > 0:
            self.pending -= len(out)

    def read_chunks(self) -> bytearray:
        """Return the whole of a body sent with ``Transfer-Encoding: chunked``."""
        self.go_ahead()
        body = bytearray()
        while nbytes := self._chunk_bytes():
            chunk = bytearray(nbytes)
            self._fill(memoryview(chunk))
            body += chunk
            self._line()
        while self._line():
            pass
        self.pending = 0
        return body

    def go_ahead(self) -> None:
        """Send "100 Continue" to a client that waits for it."""
        if self.awaited:
            self.awaited = False
            self._sock.sendall(_CONTINUE)

    def discard(self) -> bool:
        """Drop what is left of the body; False when only closing gets rid of it."""
        if self.awaited and self.pending:
            return False
        if self.pending < 0:
            self.read_chunks()
        while self.pending > 0:
            self.read_into(memoryview(bytearray(min(self.pending, 1 << 20))))
        return True

    def send(self, reply: Reply, *, only_head: bool, close: bool) -> None:
        """Send a reply, its body left out where only its head was asked for."""
        length = "" if reply.status in _BODILESS else f"Content-Length: {reply.nbytes}\r\n"
        head = (
            f"HTTP/1.1 {reply.status} {_PHRASES[reply.status]}\r\n{reply.headers}"
            f"{length}Date: {date(time.time())}\r\nServer: s3mem\r\n"
            f"{'Connection: close' if close else 'Connection: keep-alive'}\r\n\r\n"
        ).encode("latin-1")
        if only_head or not reply.nbytes:
            self._sock.sendall(head)
        elif self._whole:
            self._gather([head, *reply.body])
        else:
            self._sock.sendall(head)  # TLS has no gather, and makes records of its own anyway
            for part in reply.body:
                self._sock.sendall(part)

    def _gather(self, parts: list[bytes | memoryview]) -> None:
        for first in range(0, len(parts), _BUFFERS_A_CALL):
            some = parts[first : first + _BUFFERS_A_CALL]
            sent = self._sock.sendmsg(some)
            for part in some:
                if sent < len(part):
                    self._sock.sendall(memoryview(part)[sent:])
                sent = max(0, sent - len(part))

    def _head(self) -> bytes | None:
        at = self._buffer.find(b"\r\n\r\n", self._start, self._end)
        while at < 0:
            if not self._more():
                if self._start == self._end:
                    return None
                raise WireError("the client left in the middle of a head")
            if self._buffer[self._start] == _TLS_HANDSHAKE:
                self._sock.sendall(_BAD_REQUEST)
                raise WireError("TLS to a server of plain http")
            at = self._buffer.find(b"\r\n\r\n", self._start, self._end)
        head = bytes(self._view[self._start : at])
        self._start = at + 4
        return head

    def _line(self) -> bytes:
        at = self._buffer.find(b"\r\n", self._start, self._end)
        while at < 0:
            if self._end - self._start > _CHUNK_LINE_BYTES or not self._more():
                raise WireError("the client left in the middle of a chunk")
            at = self._buffer.find(b"\r\n", self._start, self._end)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _chunk_bytes(self) -> int:
        line = self._line()
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise WireError(f"not a chunk: {line[:80]!r}") from None

    def _more(self) -> int:
        """Receive more after what the buffer holds; the bytes received."""
        held = self._end - self._start
        if self._start:
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        if held == _BUFFER_BYTES:
            raise WireError("a head longer than the buffer")
        nbytes = self._sock.recv_into(self._view[held:])
        self._end += nbytes
        return nbytes

    def _fill(self, out: memoryview) -> None:
        wanted = len(out)
        held = min(self._end - self._start, wanted)
        if held:
            out[:held] = self._view[self._start : self._start + held]
            self._start += held
        while held < wanted:
            nbytes = self._sock.recv_into(out[held:], 0, self._whole)
            if not nbytes:
                raise WireError("the client left in the middle of a body")
            held += nbytes
