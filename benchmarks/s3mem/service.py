"""What all operations share: the buckets, the bodies, the ways to read a request's fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.memory import Memory
from benchmarks.s3mem.objects import Buckets, Conditions, Piece
from benchmarks.s3mem.payload import receive
from benchmarks.s3mem.sigv4 import Signed, Verifier
from benchmarks.s3mem.wire import Connection, Reply, Request, is_number

_KEPT: Final = (
    "content-type", "content-encoding", "content-language", "content-disposition",
    "cache-control", "expires",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the server was asked to behave."""

    etag: Literal["md5", "cheap"] = "cheap"
    domain: str = ""
    drop_bodies: bool = False
    trust_bodies: bool = False
    reserve_bytes: int = 0


class Call(NamedTuple):
    """One request whose signature holds, and where it came from."""

    connection: Connection
    request: Request
    signed: Signed
    bucket: str
    key: str


class Service:
    """All buckets behind one account.

    Args:
        verifier: what checks signatures.
        behaviour: how to behave.
    """

    def __init__(self, verifier: Verifier, behaviour: Behaviour) -> None:
        self.verifier = verifier
        self.behaviour = behaviour
        self.buckets = Buckets(behaviour.etag)
        self._memory = Memory(reserve_bytes=behaviour.reserve_bytes)

    def piece(self, call: Call) -> tuple[Piece, dict[str, str]]:
        """Receive a body that is to be kept, and the checksums that held for it."""
        payload = receive(
            call.connection, call.request, call.signed,
            memory=self._memory, trust=self.behaviour.trust_bodies,
        )  # fmt: skip
        if self.behaviour.drop_bodies:
            return self._memory.zeros(len(payload.block)), payload.checksums
        return payload.block, payload.checksums

    def document(self, call: Call) -> bytes:
        """Receive a body that is a document, verified whatever the behaviour."""
        payload = receive(
            call.connection, call.request, call.signed, memory=self._memory, trust=False
        )
        return bytes(payload.block.view)


def kept_headers(request: Request) -> str:
    """Return the headers of a write that every read of the object repeats."""
    headers = request.headers
    kept = [f"{name}: {headers[name]}\r\n" for name in _KEPT if name in headers]
    if headers.get("content-encoding", "").startswith("aws-chunked"):
        rest = headers["content-encoding"].removeprefix("aws-chunked").strip(", ")
        kept = [line for line in kept if not line.startswith("content-encoding")]
        kept += [f"content-encoding: {rest}\r\n"] if rest else []
    if "content-type" not in headers:
        kept.append("content-type: binary/octet-stream\r\n")
    kept += [f"{n}: {value}\r\n" for n, value in headers.items() if n.startswith("x-amz-meta-")]
    return "".join(kept)


def conditions(request: Request) -> Conditions:
    """Return the conditions of a write."""
    return Conditions(request.headers.get("if-match"), request.headers.get("if-none-match"))


def number(value: str, most: int) -> int:
    """Return a number out of a query, at most *most*."""
    if not is_number(value):
        raise S3Error("InvalidArgument", f"Not a number: {value[:40]}")
    return min(int(value), most)


Operation: TypeAlias = Callable[[Service, Call], Reply]
