"""A proxy before a real S3 server that loses, breaks, repeats and delays what passes through it.

Requests reach the server byte for byte as the library signed them, but for ``Expect``, which the
proxy answers itself. One fault at a time is armed; what there is stands in `FAULTS`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO, Final, Self
from urllib.parse import urlsplit

from tests.faults.s3.faults import CHANGED_ABOVE, CHANGES, REFUSALS, Fault, shows
from tests.faults.s3.messages import Message, read_request, read_response
from tests.s3.servers import Endpoint

_JOIN_S: Final = 10.0


class Broken(Exception):  # noqa: N818  # it is how a conversation ends
    """This connection to the client goes no further."""


class Armed:
    """One fault, as it waits for requests about some blocks.

    Attributes:
        met: by word, the requests that met it, as ``PUT /bucket/key?partNumber=1``.
    """

    def __init__(self, fault: Fault, times: int, after: int, about: Sequence[str]) -> None:
        self.fault = fault
        self.met: dict[str, list[str]] = {word: [] for word in about}
        self._times = dict.fromkeys(about, times)
        self._after = dict.fromkeys(about, after)
        self._lock = threading.Lock()

    def takes(self, request: Message) -> str | None:
        """Return the word that a request is about, if the fault is to meet it."""
        if self.fault.methods and request.method not in self.fault.methods:
            return None
        said = request.target + (request.body.decode("latin-1") if request.names_in_body else "")
        word = next((word for word in self.met if word in said), None)
        with self._lock:
            if word is None or not self._times[word]:
                return None
            if self._after[word]:
                self._after[word] -= 1
                return None
            self._times[word] -= 1
            return word

    def meets(self, word: str, request: Message) -> None:
        """Note that it changes what goes over the wire."""
        with self._lock:
            self.met[word].append(f"{request.method} {request.target}")

    def misses(self, word: str) -> None:
        """Wait for another request: there was nothing to change."""
        with self._lock:
            self._times[word] += 1


class Proxy:
    """Listens on a free loopback port from entering the context to leaving it.

    Attributes:
        endpoint: the server's, at the proxy's address.
        requests: how many came from clients.
        met: how many of them met each fault, by its name.
        hanging: how many answers are being withheld now.
        expecting: how many requests waited for leave to send their body.
    """

    def __init__(self, upstream: Endpoint) -> None:
        parts = urlsplit(upstream.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = parts.hostname, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = self._listener.getsockname()[1]
        self.endpoint = replace(upstream, url=f"http://127.0.0.1:{port}")
        self.requests = self.hanging = self.expecting = 0
        self.met: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._armed: Armed | None = None
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
    def armed(
        self, fault: Fault, times: int, *, about: Sequence[str], after: int = 0
    ) -> Iterator[Mapping[str, Sequence[str]]]:
        """Let so many requests meet a fault, once *after* others have passed, for each of *about*.

        A request is about a word that its target holds. What has met it is reported meanwhile.
        """
        armed = Armed(fault, times, after, about)
        with self._lock:
            self._armed = armed
        try:
            yield armed.met
        finally:
            with self._lock:
                self._armed = None
                self.met[fault.name] += sum(map(len, armed.met.values()))
            released, self._released = self._released, threading.Event()
            released.set()

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
        def expected() -> None:
            with self._lock:
                self.expecting += 1
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        request = read_request(reader, expected)
        with self._lock:
            self.requests += 1
            armed = self._armed
        Exchange(self, connection, request).go(armed)
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
        """Send nothing until the fault is disarmed."""
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

    def go(self, armed: Armed | None) -> None:
        """Answer, well or badly."""
        request = self._request
        word = armed.takes(request) if armed else None
        if armed is None or word is None:
            self._client.sendall(self._proxy.ask(request).raw)
            return
        name = armed.fault.name
        if armed.fault.before:
            armed.meets(word, request)
            self._refuse(name)
            return
        sent = request.with_flipped_body() if name == CHANGED_ABOVE else request
        response = self._proxy.ask(sent)
        if not shows(name, request, response):
            armed.misses(word)
            self._client.sendall(response.raw)
            return
        armed.meets(word, request)
        self._spoil(name, response)

    def _refuse(self, name: str) -> None:
        refusal = REFUSALS.get(name)
        if refusal is not None:
            self._client.sendall(refusal(self._request).raw)
        elif name == "reset before":
            self._reset()
        else:
            self._proxy.withhold()

    def _spoil(self, name: str, response: Message) -> None:
        if name == "delivered twice":
            response = self._proxy.ask(self._request)
        if name in CHANGES:
            response = CHANGES[name](response)
        head, raw = response.head, response.raw
        half = raw[: len(head) + len(response.body) // 2]
        match name:
            case "answer lost":
                self._reset()
            case "hang when done":
                self._proxy.withhold()
            case "reset in the headers":
                self._client.sendall(head[: len(head) // 2])
                self._reset()
            case "reset in the body":
                self._client.sendall(half)
                self._reset()
            case "body cut off":
                self._client.sendall(half)
                raise Broken
            case "stall in the body":
                self._client.sendall(half)
                self._proxy.withhold()
            case _:
                self._client.sendall(raw)
                if name == "closed between requests":
                    raise Broken

    def _reset(self) -> None:
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.close()
        raise Broken
