"""From what is on the wire to a body in memory, verified by every digest that came with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.s3mem import checksums, sigv4
from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.memory import Block, Memory
from benchmarks.s3mem.sigv4 import Signed
from benchmarks.s3mem.wire import Connection, Request, is_number

_LARGEST_BYTES: Final = 5 << 30


@dataclass(frozen=True, slots=True)
class Payload:
    """A body as received, and the checksum headers that held for it."""

    block: Block
    checksums: dict[str, str]


def receive(
    connection: Connection, request: Request, signed: Signed, *, memory: Memory, trust: bool
) -> Payload:
    """Receive and verify a request's body.

    Args:
        connection: where it comes from.
        request: its head.
        signed: what the signature says of it.
        memory: where it shall lie.
        trust: take it as it is: no digest is made.

    Raises:
        S3Error: a digest, a signature or a length does not hold.
    """
    trailer: dict[str, str] = {}
    if signed.payload in sigv4.STREAMING:
        raw = _raw(connection, memory)
        block, trailer = _decode(raw, request, signed, memory)
    else:
        block = _raw(connection, memory)
    if trust:
        return Payload(block, {})
    views = [block.view]
    if len(signed.payload) == 64 and signed.payload != checksums.hashed("sha256", views).hex():
        raise S3Error("XAmzContentSHA256Mismatch")
    return Payload(block, checksums.verify({**request.headers, **trailer}, views))


def _raw(connection: Connection, memory: Memory) -> Block:
    if connection.pending > _LARGEST_BYTES:
        raise S3Error("EntityTooLarge")
    if connection.pending < 0:
        chunks = connection.read_chunks()
        block = memory.take(len(chunks))
        block.view[:] = chunks
        return block
    block = memory.take(connection.pending)
    connection.read_into(block.view)
    return block


def _decode(
    raw: Block, request: Request, signed: Signed, memory: Memory
) -> tuple[Block, dict[str, str]]:
    """Take an ``aws-chunked`` body apart: its bytes, and its trailer."""
    length = request.headers.get("x-amz-decoded-content-length", "")
    if not is_number(length):
        raise S3Error("MissingContentLength")
    block = memory.take(min(int(length), len(raw)))
    chunks = _Chunks(raw.view, signed)
    filled = 0
    while data := chunks.following():
        if filled + len(data) > len(block):
            raise S3Error("IncompleteBody")
        block.view[filled : filled + len(data)] = data
        filled += len(data)
    if filled != int(length):
        raise S3Error("IncompleteBody")
    return block, chunks.trailer()


class _Chunks:
    """A walk through an ``aws-chunked`` body that checks the chain of signatures."""

    def __init__(self, raw: memoryview, signed: Signed) -> None:
        self._raw = raw
        self._at = 0
        self._signed = signed
        self._previous = signed.signature
        self._is_signed = signed.payload != sigv4.STREAMING_UNSIGNED
        self._has_trailer = signed.payload != sigv4.STREAMING_SIGNED

    def following(self) -> memoryview:
        """Return the next chunk; an empty one is the last."""
        size, _, extension = self._line().partition(b";")
        try:
            nbytes = int(size, 16)
        except ValueError:
            raise S3Error("IncompleteBody", "A chunk's size is no number.") from None
        data = self._raw[self._at : self._at + nbytes]
        self._at += nbytes
        if nbytes < 0 or len(data) != nbytes:
            raise S3Error("IncompleteBody")
        if self._is_signed:
            given = extension.partition(b"chunk-signature=")[2].decode("latin-1").strip()
            self._check(given, sigv4.chunk_signature(self._signed, self._previous, data))
        if nbytes and self._line():
            raise S3Error("IncompleteBody", "A chunk is longer than it says.")
        return data

    def trailer(self) -> dict[str, str]:
        """Return the headers that follow the last chunk."""
        fields, signature = {}, ""
        while self._at < len(self._raw) and (line := self._line()):
            name, _, value = line.decode("latin-1").partition(":")
            if name.lower() == "x-amz-trailer-signature":
                signature = value.strip()
            else:
                fields[name.lower()] = value.strip()
        if self._is_signed and self._has_trailer:
            lines = "".join(f"{name}:{value}\n" for name, value in fields.items())
            self._check(
                signature,
                sigv4.trailer_signature(self._signed, self._previous, lines.encode("latin-1")),
            )
        return fields

    def _check(self, given: str, expected: str) -> None:
        if given != expected:
            raise S3Error("SignatureDoesNotMatch")
        self._previous = expected

    def _line(self) -> bytes:
        """Return the line here; lines are short, so only a little is looked at."""
        window = bytes(self._raw[self._at : self._at + 1024])
        end = window.find(b"\r\n")
        if end < 0:
            raise S3Error("IncompleteBody", "A chunk has no end of line.")
        self._at += end + 2
        return window[:end]
