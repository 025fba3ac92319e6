"""HTTP messages as they go over the wire, taken apart no further than a proxy has to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, Final
from urllib.parse import unquote

_NO_BODY: Final = (b"204", b"304")


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer: its head with the empty line, and its body as it was sent."""

    head: bytes
    body: bytes = field(default=b"", repr=False)

    @property
    def raw(self) -> bytes:
        """Everything, as it is sent on."""
        return self.head + self.body

    @property
    def method(self) -> str:
        """Of a request."""
        return self.head.partition(b" ")[0].decode("latin-1")

    @property
    def target(self) -> str:
        """Of a request: path and query, unquoted."""
        return unquote(self.head.split(b" ", 2)[1].decode("latin-1"))

    @property
    def names_in_body(self) -> bool:
        """Whether it asks for what its body names: several objects to be deleted."""
        return self.method == "POST" and self.target.partition("?")[2].startswith("delete")

    @property
    def says_close(self) -> bool:
        """Whether the other side is asked not to go on."""
        return self.header("connection").lower() == "close"

    def header(self, name: str) -> str:
        """Return a header's value, or nothing."""
        found = re.search(rf"(?im)^{name}:[ \t]*(.*?)\r$", self.head.decode("latin-1"))
        return found[1] if found else ""

    def without_header(self, name: str) -> Message:
        """Drop a header."""
        head = re.sub(rf"(?im)^{name}:.*\r\n", "", self.head.decode("latin-1"))
        return Message(head.encode("latin-1"), self.body)

    def with_flipped_body(self) -> Message:
        """Flip a bit in the middle of the body; in a chunked one, of its first chunk.

        In XML it is a bit of the markup: of one in a name nobody could tell.
        """
        if len(self.body) < 8:
            return self
        at = len(self.body) // 2
        if self.body.startswith(b"<?xml"):
            at = self.body.index(b"<", at)
        elif self.header("transfer-encoding").lower() == "chunked":
            at = self.body.index(b"\r\n") + 3
        changed = self.body[:at] + bytes([self.body[at] ^ 0x10]) + self.body[at + 1 :]
        return Message(self.head, changed)

    def with_half_body(self) -> Message:
        """Lose the second half, as if there had never been one."""
        half = self.body[: len(self.body) // 2]
        head = re.sub(
            r"(?im)^content-length:.*\r\n",
            f"content-length: {len(half)}\r\n",
            self.head.decode("latin-1"),
        )
        return Message(head.encode("latin-1"), half)

    def with_wrong_checksums(self) -> Message:
        """Change every checksum that the head reports, and return one where there is none."""
        head, count = re.subn(
            r"(?im)^(x-amz-checksum-(?!type|mode)\S+:[ \t]*)\S+",
            r"\g<1>AAAAAA==",
            self.head.decode("latin-1"),
        )
        if not count:
            head = head[:-2] + "x-amz-checksum-crc32: AAAAAA==\r\n\r\n"
        return Message(head.encode("latin-1"), self.body)

    def with_wrong_etag(self) -> Message:
        """Replace the ETag by another object's."""
        head = re.sub(
            r'(?im)^(etag:[ \t]*)"?[^"\r]*"?',
            r'\g<1>"00000000000000000000000000000000"',
            self.head.decode("latin-1"),
        )
        return Message(head.encode("latin-1"), self.body)


def read_request(reader: BinaryIO, expected: Callable[[], None]) -> Message:
    """Take one request; *expected* is called for one that waits for leave to send its body.

    Raises:
        EOFError: the client has gone.
    """
    message = Message(_head(reader))
    if message.header("expect").lower() == "100-continue":
        message = message.without_header("expect")
        expected()
    return Message(message.head, _body(reader, message))


def read_response(reader: BinaryIO, method: str) -> Message:
    """Take one answer to a request of a method.

    Raises:
        EOFError: the server has gone.
    """
    while True:
        message = Message(_head(reader))
        status = message.head.split(b" ", 2)[1][:3]
        if status != b"100":
            break
    if method == "HEAD" or status in _NO_BODY:
        return message
    return Message(message.head, _body(reader, message, to_end=True))


def _head(reader: BinaryIO) -> bytes:
    head = bytearray()
    while True:
        line = reader.readline()
        if not line:
            raise EOFError
        head += line
        if line in (b"\r\n", b"\n"):
            return bytes(head)


def _body(reader: BinaryIO, message: Message, *, to_end: bool = False) -> bytes:
    if message.header("transfer-encoding").lower() == "chunked":
        return _chunks(reader)
    length = message.header("content-length")
    if not length:
        return reader.read() if to_end else b""
    body = reader.read(int(length))
    if len(body) < int(length):
        raise EOFError
    return body


def _chunks(reader: BinaryIO) -> bytes:
    found = bytearray()
    while True:
        line = reader.readline()
        size = int(line.partition(b";")[0], 16)
        found += line + reader.read(size + 2 if size else 0)
        if not size:
            return bytes(found) + _head(reader)
