"""The least a client can do: raw sockets, kept alive, each request signed with SigV4.

It is a bound and no product: no retries, no redirects, bodies of known length only. The signing
is written apart from the server's, and imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

UNSIGNED: Final = "UNSIGNED-PAYLOAD"

_HEAD_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is, and as whom to ask it."""

    host: str
    port: int
    access: str
    secret: str
    region: str = "us-east-1"
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(
        cls, url: str, access: str, secret: str, *, tls: ssl.SSLContext | None = None
    ) -> Endpoint:
        """Return the endpoint at a URL such as ``http://127.0.0.1:9000``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an endpoint: {url!r}")
        is_tls = parts.scheme == "https"
        if is_tls and tls is None:
            tls = ssl.create_default_context()
        port = parts.port or (443 if is_tls else 80)
        return cls(
            host=parts.hostname, port=port, access=access, secret=secret,
            tls=tls if is_tls else None,
        )  # fmt: skip

    def connect(self) -> socket.socket:
        """Open a connection without Nagle's delay."""
        sock = socket.create_connection((self.host, self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.tls.wrap_socket(sock, server_hostname=self.host) if self.tls else sock


class Signer:
    """Makes signed heads of requests.

    Args:
        endpoint: for whom.
        now: the time they are made at; None for the time of each call.
    """

    def __init__(self, endpoint: Endpoint, now: float | None = None) -> None:
        self._endpoint = endpoint
        self._now = now
        self._host = f"{endpoint.host}:{endpoint.port}"
        self._key = (b"", "")
        self.signature = ""

    def head(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        length: int | None = None,
        payload: str = UNSIGNED,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return a request's head; *path* and *query* are percent-encoded already.

        The query's fields are in order. All *headers* are signed but those a proxy may change.
        """
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now))
        signed = {"host": self._host, "x-amz-content-sha256": payload, "x-amz-date": stamp}
        if headers:
            signed |= {name.lower(): value.strip() for name, value in headers.items()}
            signed = dict(sorted(signed.items()))
        names = ";".join(signed)
        lines = "".join([f"{name}:{value}\n" for name, value in signed.items()])
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
        key, scope = self.key(stamp[:8])
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{_sha256(canonical)}"
        self.signature = hmac.digest(key, text.encode(), "sha256").hex()
        fields = "".join([f"{name}: {value}\r\n" for name, value in signed.items()])
        target = f"{path}?{query}" if query else path
        return (
            f"{method} {target} HTTP/1.1\r\n{fields}"
            f"authorization: AWS4-HMAC-SHA256 Credential={self._endpoint.access}/{scope},"
            f"SignedHeaders={names},Signature={self.signature}\r\n"
            f"{'' if length is None else f'content-length: {length}{chr(13)}{chr(10)}'}\r\n"
        ).encode("latin-1")

    def key(self, day: str) -> tuple[bytes, str]:
        """Return the signing key of a day, and its scope."""
        scope = f"{day}/{self._endpoint.region}/s3/aws4_request"
        if self._key[1] != scope:
            key = f"AWS4{self._endpoint.secret}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key = (key, scope)
        return self._key


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One connection; for one thread at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sock = endpoint.connect()
        self._gathers = endpoint.tls is None
        self._whole = socket.MSG_WAITALL if self._gathers else 0
        self._head = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._head)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def send(self, head: bytes, body: bytes | memoryview | None = None) -> None:
        """Send a request, head and body in one call where the socket can."""
        if not body:
            self._sock.sendall(head)
        elif self._gathers:
            sent = self._sock.sendmsg([head, body])
            if sent < len(head):
                self._sock.sendall(head[sent:])
            if sent < len(head) + len(body):
                self._sock.sendall(memoryview(body)[max(0, sent - len(head)) :])
        else:
            self._sock.sendall(head)
            self._sock.sendall(body)

    def receive_into(self, out: memoryview, *, has_body: bool = True) -> tuple[int, bytes, int]:
        """Receive a response, its body into *out*; status, head, and bytes of the body."""
        held, at = 0, -1
        while at < 0:
            nbytes = self._sock.recv_into(self._view[held:])
            if not nbytes:
                raise ConnectionError("the server closed the connection")
            held += nbytes
            at = self._head.find(b"\r\n\r\n", 0, held)
        head = bytes(self._view[:at])
        length = _length(head) if has_body else 0
        filled = held - at - 4
        if filled > length:
            raise ConnectionError("the server sent more than the response it announced")
        out[:filled] = self._view[at + 4 : held]
        while filled < length:
            nbytes = self._sock.recv_into(out[filled:length], 0, self._whole)
            if not nbytes:
                raise ConnectionError("the server closed the connection within a body")
            filled += nbytes
        if b"\r\nconnection: close" in head.lower():
            self._sock.close()
            self._sock = self._endpoint.connect()
        return int(head[9:12]), head, length


class Client:
    """One connection that signs each call; for tests and for single requests.

    Args:
        endpoint: what to connect to.
        now: the time to sign with; None for the time of each call.
        most_bytes: the largest body that can be received.
    """

    def __init__(
        self, endpoint: Endpoint, *, now: float | None = None, most_bytes: int = 16 << 20
    ) -> None:
        self._connection = Connection(endpoint)
        self._out = bytearray(most_bytes)
        self.signer = Signer(endpoint, now)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: bytes | memoryview | None = None,
        payload: str = UNSIGNED,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sign and send a request with the path and query as they are meant, not encoded."""
        head = self.signer.head(
            method, quote(path, safe="/~"), query=_query(query or {}), payload=payload,
            headers=headers, length=None if body is None else len(body),
        )  # fmt: skip
        return self.exchange(head, body, has_body=method != "HEAD")

    def exchange(
        self, head: bytes, body: bytes | memoryview | None = None, *, has_body: bool = True
    ) -> Answer:
        """Send what was made elsewhere and return the response."""
        self._connection.send(head, body)
        view = memoryview(self._out)
        status, found, nbytes = self._connection.receive_into(view, has_body=has_body)
        lines = found.decode("latin-1").split("\r\n")[1:]
        fields = dict(line.split(": ", 1) for line in lines)
        return Answer(
            status, {name.lower(): value for name, value in fields.items()}, bytes(view[:nbytes])
        )

    def put(self, bucket: str, key: str, data: bytes) -> Answer:
        """Store an object."""
        return self.call("PUT", f"/{bucket}/{key}", body=data)

    def get(self, bucket: str, key: str) -> Answer:
        """Read an object."""
        return self.call("GET", f"/{bucket}/{key}")

    def get_range(self, bucket: str, key: str, start: int, nbytes: int) -> Answer:
        """Read some bytes of an object."""
        extent = {"range": f"bytes={start}-{start + nbytes - 1}"}
        return self.call("GET", f"/{bucket}/{key}", headers=extent)

    def head(self, bucket: str, key: str) -> Answer:
        """Ask about an object."""
        return self.call("HEAD", f"/{bucket}/{key}")

    def list(self, bucket: str, prefix: str = "") -> Answer:
        """List the first page of a bucket."""
        return self.call("GET", f"/{bucket}", {"list-type": "2", "prefix": prefix})


def _length(head: bytes) -> int:
    at = head.lower().find(b"\r\ncontent-length:")
    return int(head[at + 17 :].partition(b"\r\n")[0]) if at >= 0 else 0


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("latin-1")).hexdigest()


def _query(fields: Mapping[str, str]) -> str:
    pairs = sorted(
        (quote(name, safe="~"), quote(value, safe="~")) for name, value in fields.items()
    )
    return "&".join(f"{name}={value}" for name, value in pairs)
