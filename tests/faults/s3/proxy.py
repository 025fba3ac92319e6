"""A proxy before a real S3 server that loses, breaks, repeats and delays what passes through it.

Requests reach the server byte for byte as the library signed them, but for ``Expect``, which the
proxy answers itself. One fault at a time is armed; what each does is told in `FAULTS`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, Final, Self
from urllib.parse import urlsplit

from tests.faults.s3.messages import Message, read_request, read_response
from tests.s3.servers import Endpoint

_JOIN_S: Final = 10.0


class Broken(Exception):  # noqa: N818  # it is how a conversation ends
    """This connection to the client goes no further."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and with which requests.

    Attributes:
        name: what it is called; see `tests.faults.s3.faults`.
        before: the request does not reach the server.
        methods: of the requests that it concerns; none: all.
    """

    name: str
    before: bool = False
    methods: frozenset[str] = frozenset()


class Proxy:
    """Listens on a free loopback port from entering the context to leaving it.

    Attributes:
        endpoint: the server's, at the proxy's address.
        requests: how many came from clients.
        injected: how many of them met the armed fault.
        hanging: how many answers are being withheld now.
    """

    def __init__(self, upstream: Endpoint) -> None:
        parts = urlsplit(upstream.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = parts.hostname, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = self._listener.getsockname()[1]
        self.endpoint = replace(upstream, url=f"http://127.0.0.1:{port}")
        self.requests = self.injected = self.hanging = 0
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._times = self._after = 0
        self._released = threading.Event()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._accepting = threading.Thread(target=self._accept, name="faulting", daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_JOIN_S)
        self._listener.close()
        self._released.set()
        with self._lock:
            working = dict(self._open)
        for thread, connection in working.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_JOIN_S)
        stuck = [thread for thread in working if thread.is_alive()]
        assert not stuck, f"{len(stuck)} threads of the proxy did not end"

    @contextmanager
    def armed(self, fault: Fault, times: int, *, after: int = 0) -> Iterator[None]:
        """Let so many requests that a fault concerns meet it, once some others have passed."""
        with self._lock:
            self._fault, self._times, self._after = fault, times, after
        try:
            yield
        finally:
            with self._lock:
                self._fault = None
            released, self._released = self._released, threading.Event()
            released.set()

    def _meets(self, request: Message) -> Fault | None:
        with self._lock:
            self.requests += 1
            fault = self._fault
            if fault is None or not self._times:
                return None
            if fault.methods and request.method not in fault.methods:
                return None
            if self._after:
                self._after -= 1
                return None
            self._times -= 1
            self.injected += 1
            return fault

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._converse, args=(connection,), daemon=True)
                with self._lock:
                    self._open[thread] = connection
                thread.start()

    def _converse(self, connection: socket.socket) -> None:
        # Whoever goes away, or says what nobody should, ends the conversation.
        with (
            contextlib.suppress(OSError, ValueError, EOFError, Broken),
            contextlib.closing(connection),
            connection.makefile("rb") as reader,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                self._pass_on(connection, reader)
        with self._lock:
            self._open.pop(threading.current_thread(), None)

    def _pass_on(self, connection: socket.socket, reader: BinaryIO) -> None:
        # Which fault a request meets is known only when its head is there, and that one withholds
        # the answer to Expect.
        met: list[Fault | None] = []

        def expected(head: Message) -> None:
            met.append(self._meets(head))
            if met[0] is None or met[0].name != "no 100-continue":
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        request = read_request(reader, expected)
        fault = met[0] if met else self._meets(request)
        Exchange(self, connection, request).go(fault)
        if request.says_close:
            raise Broken

    def ask(self, request: Message) -> Message:
        """Send a request to the server and give its answer."""
        with (
            socket.create_connection(self._upstream, timeout=60) as upstream,
            upstream.makefile("rb") as reader,
        ):
            upstream.sendall(request.raw)
            return read_response(reader, request.method)

    def withhold(self) -> None:
        """Say nothing until the fault is disarmed."""
        released = self._released
        with self._lock:
            self.hanging += 1
        released.wait()
        with self._lock:
            self.hanging -= 1
        raise Broken


class Exchange:
    """One request and what becomes of it."""

    def __init__(self, proxy: Proxy, client: socket.socket, request: Message) -> None:
        self._proxy, self._client, self._request = proxy, client, request

    def go(self, fault: Fault | None) -> None:
        """Answer, well or badly."""
        name = fault.name if fault else ""
        refusal = REFUSALS.get(name)
        if refusal is not None:
            self._client.sendall(refusal(self._request).raw)
        elif name == "reset before":
            self._reset()
        elif name == "hang":
            self._proxy.withhold()
        else:
            self._go_through(name)

    def _go_through(self, name: str) -> None:
        request = self._request
        if name == "body changed on the way up":
            request = request.with_flipped_body()
        response = self._proxy.ask(request)
        if name == "delivered twice":
            response = self._proxy.ask(request)
        change = CHANGES.get(name)
        if change is not None:
            response = change(response)
        raw, middle = response.raw, len(response.head) + len(response.body) // 2
        match name:
            case "answer lost":
                self._reset()
            case "reset in the headers":
                self._client.sendall(response.head[: len(response.head) // 2])
                self._reset()
            case "reset in the body":
                self._client.sendall(raw[:middle])
                self._reset()
            case "body cut off":
                self._client.sendall(raw[:middle])
                raise Broken
            case "stall in the body":
                self._client.sendall(raw[:middle])
                self._proxy.withhold()
            case _:
                self._client.sendall(raw)
                if name == "closed between requests":
                    raise Broken

    def _reset(self) -> None:
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.close()
        raise Broken


def _refusal(status: str, code: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>said to be {code}</Message><RequestId>0</RequestId></Error>"
    ).encode()

    def make(request: Message) -> Message:
        length = f"content-type: application/xml\r\ncontent-length: {len(body)}\r\n"
        head = f"HTTP/1.1 {status}\r\n{length}\r\n".encode()
        return Message(head, b"" if request.method == "HEAD" else body)

    return make


REFUSALS: Final = {
    "500": _refusal("500 Internal Server Error", "InternalError"),
    "503 SlowDown": _refusal("503 Service Unavailable", "SlowDown"),
    "clock skew": _refusal("403 Forbidden", "RequestTimeTooSkewed"),
}
CHANGES: Final = {
    "body changed on the way down": Message.with_flipped_body,
    "body shortened": Message.with_half_body,
    "wrong checksum header": Message.with_wrong_checksums,
    "wrong ETag": Message.with_wrong_etag,
}
_READS: Final = frozenset({"GET"})
#: Every fault. Some say nothing where there is no body, or no such header; that is counted too.
FAULTS: Final = tuple(
    Fault(name, before=before, methods=methods)
    for name, before, methods in (
        ("500", True, frozenset[str]()),
        ("503 SlowDown", True, frozenset[str]()),
        ("clock skew", True, frozenset[str]()),
        ("reset before", True, frozenset[str]()),
        ("reset in the headers", False, frozenset[str]()),
        ("reset in the body", False, _READS),
        ("body cut off", False, _READS),
        ("body shortened", False, _READS),
        ("body changed on the way down", False, _READS),
        ("body changed on the way up", False, frozenset({"PUT"})),
        ("wrong checksum header", False, frozenset[str]()),
        ("wrong ETag", False, frozenset[str]()),
        ("answer lost", False, frozenset[str]()),
        ("delivered twice", False, frozenset[str]()),
        ("no 100-continue", False, frozenset({"PUT"})),
        ("closed between requests", False, frozenset[str]()),
        ("stall in the body", False, _READS),
        ("hang", True, frozenset[str]()),
    )
)
HANGING: Final = ("stall in the body", "hang")
