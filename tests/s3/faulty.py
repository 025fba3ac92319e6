"""A small S3 server in memory that misbehaves by key name and counts what it is asked.

Ordinary keys are served properly. Every bucket is there, and nobody is asked for a signature.
What the words in a key do is reported in `tests.s3.faults`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import BinaryIO, Self
from urllib.parse import parse_qsl, unquote

from tests.s3.faults import (
    CHANGES,
    DEAFNESS,
    DELIVERIES,
    REFUSALS,
    SLOW_TAKING,
    TAKINGS,
    Line,
    Request,
    Response,
    Sips,
    failure,
    fault_of,
    without_headers,
)
from tests.s3.faulty_objects import Bucket, operation_of, serve, stored
from tests.s3.servers import REGION, Endpoint

_UNDONE = ("hang", "reset")
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that arrived; *status* is None where no answer began."""

    method: str
    operation: str
    bucket: str
    key: str
    status: int | None
    range: str | None


class FaultyServer:
    """Listen on a free loopback port from entering the context to leaving it.

    Attributes:
        url: Where it listens.
        endpoint: The same, with credentials that nobody looks at.
        watch: Called with every request after it was carried out, and before it is answered.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.endpoint = Endpoint(
            url=self.url,
            access_key="anyone",
            secret_key="anything",
            region=REGION,
            name="faulty",
            is_mock=True,
        )
        self.watch: Callable[[Seen], None] = lambda _: None
        self._lock = threading.Lock()
        self._buckets: defaultdict[str, Bucket] = defaultdict(Bucket)
        self._seen: list[Seen] = []
        self._refused_once: set[tuple[str, ...]] = set()
        self._numbers = itertools.count(1)
        self._released = threading.Event()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._accepting = threading.Thread(target=self._accept, name="faulty", daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def requests(self) -> list[Seen]:
        """List what arrived so far, in order; a request is here before its answer is sent."""
        with self._lock:
            return list(self._seen)

    def count(self, key: str, operation: str | None = None) -> int:
        """Count the requests for a key, of one operation or all."""
        return sum(
            seen.key == key and operation in (None, seen.operation) for seen in self.requests
        )

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Place an object, whatever its key says."""
        with self._lock:
            self._buckets[bucket].objects[key] = stored(data)

    def get(self, bucket: str, key: str) -> bytes | None:
        """Look at an object, whatever its key says; None if there is none."""
        with self._lock:
            found = self._buckets[bucket].objects.get(key)
        return None if found is None else found.data

    def uploads(self, bucket: str) -> list[str]:
        """List the keys of multipart uploads that were neither completed nor aborted."""
        with self._lock:
            return [key for key, _ in self._buckets[bucket].uploads.values()]

    def release(self) -> None:
        """Let go of all that hangs now; each such connection ends."""
        released, self._released = self._released, threading.Event()
        released.set()

    def close(self) -> None:
        """Let go of all that hangs, end every connection, and wait for every thread."""
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
        stuck = [thread for thread in (self._accepting, *working) if thread.is_alive()]
        assert not stuck, f"{len(stuck)} threads of the faulty server did not end"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._converse, args=(connection,), daemon=True)
                with self._lock:
                    self._open[thread] = connection
                thread.start()

    def _converse(self, connection: socket.socket) -> None:
        # A client that goes away, or says what no client should, ends its own connection.
        with (
            contextlib.suppress(OSError, ValueError, EOFError),
            contextlib.closing(connection),
            connection.makefile("rb") as reader,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._serve(connection, reader):
                pass
        with self._lock:
            self._open.pop(threading.current_thread(), None)

    def _serve(self, connection: socket.socket, reader: BinaryIO) -> bool:
        """Take one request and answer it; tell whether the connection goes on."""
        head = read_head(reader)
        line = Line(connection, self._released)
        fault = self._fault_of(head)
        if head.headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault in TAKINGS:
            self._note(head, None)
            TAKINGS[fault](line, reader, int(head.headers.get("content-length", "0")))
            return False
        request = with_body(head, Sips(reader, line) if fault == SLOW_TAKING else reader)
        response = self._respond(request, fault)
        if fault in DELIVERIES and (fault in _UNDONE or response.status < 300):
            DELIVERIES[fault](line, response)
            return False
        connection.sendall(response.head() + response.body)
        return request.headers.get("connection", "").lower() != "close"

    def _fault_of(self, request: Request) -> str:
        fault = fault_of(request)
        if not fault.endswith("once"):
            return fault
        part = request.query.get("partNumber", "")
        first = (request.operation, request.bucket, request.key, part)
        with self._lock:
            if first in self._refused_once:
                return ""
            self._refused_once.add(first)
        return fault

    def _respond(self, request: Request, fault: str) -> Response:
        with self._lock:
            response = self._do(request, fault)
        self._note(request, None if fault in _UNDONE else response.status)
        return response

    def _note(self, request: Request, status: int | None) -> None:
        where = (request.method, request.operation, request.bucket, request.key)
        seen = Seen(*where, status, request.headers.get("range"))
        with self._lock:
            self._seen.append(seen)
        self.watch(seen)

    def _do(self, request: Request, fault: str) -> Response:
        if fault in REFUSALS:
            return failure(request, *REFUSALS[fault])
        if fault in _UNDONE:
            return Response(200)
        bucket = self._buckets[request.bucket]
        if fault == "lieput":
            bucket = Bucket(copy(bucket.objects), copy(bucket.uploads))
        heard = without_headers(request, *DEAFNESS.get(fault, ()))
        response = serve(bucket, heard, fault=fault, number=next(self._numbers))
        if fault in CHANGES and response.status < 300:
            return CHANGES[fault](response)
        return response


def read_head(reader: BinaryIO) -> Request:
    """Take one request from a connection, but for its body.

    Raises:
        EOFError: the client has gone.
        ValueError: it is no request.
    """
    method, target, _ = _line(reader).split(" ")
    headers = _headers(reader)
    path, _, query_text = target.partition("?")
    bucket, _, key = path.removeprefix("/").partition("/")
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    return Request(
        method=method,
        operation=operation_of(method, bucket=unquote(bucket), key=unquote(key), query=query),
        bucket=unquote(bucket),
        key=unquote(key),
        query=query,
        headers=headers,
        body=b"",
    )


def with_body(head: Request, reader: BinaryIO | Sips) -> Request:
    """Take a request's body, whole and decoded.

    Raises:
        EOFError: the client has gone.
        ValueError: it is no body.
    """
    headers = dict(head.headers)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body, _ = _unchunk(reader)
    else:
        length = int(headers.get("content-length", "0"))
        body = reader.read(length)
        if len(body) < length:
            raise EOFError
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        body, trailer = _unchunk(io.BytesIO(body))
        headers |= trailer
    return replace(head, headers=headers, body=body)


def _line(reader: BinaryIO | Sips) -> str:
    line = reader.readline()
    if not line:
        raise EOFError
    return line.decode("latin-1").strip()


def _headers(reader: BinaryIO | Sips) -> dict[str, str]:
    headers = {}
    while line := _line(reader):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _unchunk(reader: BinaryIO | Sips) -> tuple[bytes, dict[str, str]]:
    """Decode HTTP's chunks, and AWS's in them, which say more after each size."""
    body = bytearray()
    while size := int(_line(reader).partition(";")[0], 16):
        body += reader.read(size)
        _line(reader)
    return bytes(body), _headers(reader)
