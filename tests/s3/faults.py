"""The words in a key that make `FaultyServer` misbehave, and what each one does.

A word counts where no letter or digit touches it, in a key, in the prefix of a listing, or in the
name of a bucket; before it may stand one operation that alone is to fail: ``get-trunc/a`` is
written well and read badly, ``part-reset`` fails the parts of a multipart upload only.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import BinaryIO, Final
from xml.sax.saxutils import escape

READS: Final = frozenset({"GetObject", "ListObjects"})
WRITES: Final = frozenset({"PutObject", "CompleteMultipartUpload"})
#: The operations by what stands before a word.
OPERATIONS: Final[Mapping[str, frozenset[str]]] = {
    "put": frozenset({"PutObject"}),
    "get": frozenset({"GetObject"}),
    "head": frozenset({"HeadObject", "HeadBucket"}),
    "delete": frozenset({"DeleteObject", "DeleteObjects"}),
    "list": frozenset({"ListObjects"}),
    "create": frozenset({"CreateMultipartUpload"}),
    "part": frozenset({"UploadPart"}),
    "complete": frozenset({"CompleteMultipartUpload"}),
    "abort": frozenset({"AbortMultipartUpload"}),
}
#: Seconds between two bytes of ``slowdrip``: no timeout of a single read ever ends it.
DRIP_S: Final = 0.1
#: What ``slowtake`` takes of a body before it rests again, and how long it rests.
SIP_NBYTES: Final = 64 << 10
SIP_S: Final = 0.02
RETRY_AFTER: Final = {"retry-after": "1"}
#: Where ``redirect`` says that the bucket is.
ELSEWHERE: Final = {"x-amz-bucket-region": "eu-central-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as S3 understands it; names of headers in lower case."""

    method: str
    operation: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; *length* is the Content-Length where that is not the body's."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    length: int | None = None

    def head(self) -> bytes:
        """Return the status line and the headers as they go over the wire."""
        length = len(self.body) if self.length is None else self.length
        headers = {"x-amz-request-id": "0", "content-length": str(length), **self.headers}
        if self.status in (204, 304):
            del headers["content-length"]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{lines}\r\n".encode()


def failure(
    request: Request, status: int, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer of S3 to a request that fails; that to HEAD has no body."""
    said = {"content-type": "application/xml", **(headers or {})}
    if request.method == "HEAD":
        return Response(status, said)
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>said to be {code}</Message>"
        f"<BucketName>{escape(request.bucket)}</BucketName><Key>{escape(request.key)}</Key>"
        "<RequestId>0</RequestId><HostId>0</HostId></Error>"
    )
    return Response(status, said, body.encode())


#: Refuse: status, code, headers. A word ending in ``once`` refuses the first request alone, of
#: each operation on a key.
REFUSALS: Final[Mapping[str, tuple[int, str, Mapping[str, str]]]] = {
    "e500": (500, "InternalError", {}),
    "e500once": (500, "InternalError", {}),
    "e503": (503, "SlowDown", RETRY_AFTER),
    "e503once": (503, "SlowDown", RETRY_AFTER),
    "e403": (403, "AccessDenied", {}),
    "expired": (400, "ExpiredToken", {}),
    "badsig": (403, "SignatureDoesNotMatch", {}),
    "e412": (412, "PreconditionFailed", {}),
    "e416": (416, "InvalidRange", {}),
    "no-bucket": (404, "NoSuchBucket", {}),
    "redirect": (301, "PermanentRedirect", ELSEWHERE),
    "completeerror": (200, "InternalError", {}),  # S3 may say 200 before it knows
}


def without_headers(request: Request, *names: str) -> Request:
    """Return the request as a server sees it that does not know some headers."""
    kept = {name: value for name, value in request.headers.items() if name not in names}
    return replace(request, headers=kept)


#: Misunderstand the request.
DEAFNESS: Final[Mapping[str, tuple[str, ...]]] = {
    "wrongrange": ("range",),
    "ignores-conditions": ("if-none-match", "if-match"),
}


def _flip(response: Response) -> Response:
    """Flip one bit in the middle, and send nothing that shows it."""
    flipped = bytearray(response.body)
    if flipped:
        flipped[len(flipped) // 2] ^= 1
    kept = {k: v for k, v in response.headers.items() if not k.startswith("x-amz-checksum-")}
    return replace(response, headers=kept, body=bytes(flipped))


def _flip_and_tell(response: Response) -> Response:
    """Flip one bit under the checksums of the original; S3 has none for a range."""
    if response.status != 200:
        return _flip(response)
    crc32 = b64encode(zlib.crc32(response.body).to_bytes(4, "big")).decode()
    headers = {"x-amz-checksum-type": "FULL_OBJECT", **response.headers}
    return replace(_flip(response), headers={**headers, "x-amz-checksum-crc32": crc32})


def _halve(response: Response) -> Response:
    """Lose the second half, as if there had never been one."""
    return replace(response, body=response.body[: len(response.body) // 2])


#: Change what is answered.
CHANGES: Final[Mapping[str, Callable[[Response], Response]]] = {
    "flip": _flip,
    "badcrc": _flip_and_tell,
    "shortlen": _halve,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A connection to a client, and the event that lets go of what hangs."""

    socket: socket.socket
    released: threading.Event

    def reset(self) -> None:
        """Break the connection with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def narrow(self) -> None:
        """Let the kernel take little for us that we do not take ourselves."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIP_NBYTES)

    def hang(self) -> None:
        """Send nothing more until released."""
        self.released.wait()


def _hang(line: Line, response: Response) -> None:  # noqa: ARG001  # it is never sent
    line.hang()


def _hang_before_body(line: Line, response: Response) -> None:
    line.socket.sendall(response.head())
    line.hang()


def _stall(line: Line, response: Response) -> None:
    _send_half(line, response)
    line.hang()


def _drip(line: Line, response: Response) -> None:
    line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.socket.sendall(response.head())
    for byte in response.body:
        line.socket.sendall(bytes([byte]))
        if line.released.wait(DRIP_S):
            return


def _reset(line: Line, response: Response) -> None:  # noqa: ARG001  # it is never sent
    line.reset()


def _reset_in_body(line: Line, response: Response) -> None:
    _send_half(line, response)
    line.reset()


def _cut_head(line: Line, response: Response) -> None:
    """End in the first header that says anything: the status has arrived."""
    head = response.head()
    line.socket.sendall(head[: head.index(b"x-amz-request-id") + 4])


def _send_half(line: Line, response: Response) -> None:
    half = response.body[: len(response.body) // 2]
    line.socket.sendall(response.head() + half)


#: Go wrong on the wire; the connection ends after it.
DELIVERIES: Final[Mapping[str, Callable[[Line, Response], None]]] = {
    "hang": _hang,
    "hangbody": _hang_before_body,
    "stall": _stall,
    "slowdrip": _drip,
    "reset": _reset,
    "resetmid": _reset_in_body,
    "trunc": _send_half,
    "cuthead": _cut_head,
}


class Sips:
    """What a client sends, taken slowly: as over a line with much less room than it has."""

    def __init__(self, reader: BinaryIO, line: Line) -> None:
        self._reader, self._line = reader, line
        line.narrow()

    def readline(self) -> bytes:
        """Take a line."""
        return self._reader.readline()

    def read(self, nbytes: int) -> bytes:
        """Take some bytes, and rest now and then; all of them, unless the client goes away."""
        taken = bytearray()
        while len(taken) < nbytes and not self._line.released.wait(SIP_S):
            sip = self._reader.read(min(SIP_NBYTES, nbytes - len(taken)))
            if not sip:
                break
            taken += sip
        return bytes(taken)


def _take_nothing(line: Line, reader: BinaryIO, nbytes: int) -> None:  # noqa: ARG001  # that is it
    line.narrow()
    line.hang()


def _reset_in_request(line: Line, reader: BinaryIO, nbytes: int) -> None:
    reader.read(nbytes // 2)
    line.reset()


#: Go wrong while the request's body is under way; the request is never carried out.
TAKINGS: Final[Mapping[str, Callable[[Line, BinaryIO, int], None]]] = {
    "deaf": _take_nothing,
    "resetsend": _reset_in_request,
}
#: Take a body slowly, and then carry the request out.
SLOW_TAKING: Final = "slowtake"
#: Whom a word concerns where no operation stands before it; all where it is not here.
CONCERNS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("hangbody", "stall", "slowdrip", "resetmid", "trunc"), READS),
    **dict.fromkeys(("flip", "badcrc", "shortlen", "wrongrange"), frozenset({"GetObject"})),
    **dict.fromkeys((*TAKINGS, SLOW_TAKING), frozenset({"PutObject", "UploadPart"})),
    **dict.fromkeys(("lieput", "ignores-conditions"), WRITES),
    **dict.fromkeys(("lostpart", "completeerror"), frozenset({"CompleteMultipartUpload"})),
}
WORDS: Final = frozenset(
    {*REFUSALS, *DEAFNESS, *CHANGES, *DELIVERIES, *TAKINGS, SLOW_TAKING, "lieput", "lostpart"}
)

_FAULT: Final = re.compile(
    rf"(?<![A-Za-z0-9])(?:({'|'.join(OPERATIONS)})-)?"
    rf"({'|'.join(sorted(WORDS, key=len, reverse=True))})(?![A-Za-z0-9])"
)


def fault_of(request: Request) -> str:
    """Name the fault that a request meets, by its key or prefix, else by its bucket; or ''."""
    for text in (request.key or request.query.get("prefix", ""), request.bucket):
        for only, word in _FAULT.findall(text):
            concerned = OPERATIONS[only] if only else CONCERNS.get(word)
            if concerned is None or request.operation in concerned:
                return str(word)
    return ""
