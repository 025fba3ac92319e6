"""What goes wrong between a client and a server, and how the bytes on the wire change by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.faults.s3.messages import Message


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and with which requests.

    Attributes:
        name: what it is called.
        before: the request does not reach the server.
        methods: of the requests that it concerns; none: all.
    """

    name: str
    before: bool = False
    methods: frozenset[str] = frozenset()


def _refusal(status: str, code: str) -> Callable[[Message], Message]:
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>said to be {code}</Message><RequestId>0</RequestId></Error>"
    ).encode()

    def make(request: Message) -> Message:
        length = f"content-type: application/xml\r\ncontent-length: {len(body)}\r\n"
        head = f"HTTP/1.1 {status}\r\n{length}\r\n".encode()
        return Message(head, b"" if request.method == "HEAD" else body)

    return make


#: Answers in the server's place. No clock is wrong here; see `tests.faults.s3.skewed`.
REFUSALS: Final = {
    "500": _refusal("500 Internal Server Error", "InternalError"),
    "503 SlowDown": _refusal("503 Service Unavailable", "SlowDown"),
    "clock skew": _refusal("403 Forbidden", "RequestTimeTooSkewed"),
}
#: What becomes of an answer.
CHANGES: Final = {
    "body changed on the way down": Message.with_flipped_body,
    "body shortened": Message.with_half_body,
    "wrong checksum header": Message.with_wrong_checksums,
    "wrong ETag": Message.with_wrong_etag,
}
#: The answer's body ends, or stands still, in its middle.
HALVES: Final = frozenset({"reset in the body", "body cut off", "stall in the body"})
CHANGED_ABOVE: Final = "body changed on the way up"
_READS: Final = frozenset({"GET"})
#: Every fault. It is met only where it changes what goes over the wire: one that finds no body, or
#: no such header, waits for the next request.
FAULTS: Final = (
    Fault("500", before=True),
    Fault("503 SlowDown", before=True),
    Fault("clock skew", before=True),
    Fault("reset before", before=True),
    Fault("reset in the headers"),
    Fault("reset in the body", methods=_READS),
    Fault("body cut off", methods=_READS),
    Fault("body shortened", methods=_READS),
    Fault("body changed on the way down", methods=_READS),
    Fault(CHANGED_ABOVE, methods=frozenset({"PUT"})),
    Fault("wrong checksum header"),
    Fault("wrong ETag"),
    Fault("answer lost"),
    Fault("delivered twice"),
    Fault("closed between requests"),
    Fault("stall in the body", methods=_READS),
    Fault("hang", before=True),
    Fault("hang when done"),
)
HANGING: Final = ("stall in the body", "hang", "hang when done")
#: Met once and passed: a retry must make it good.
PASSING: Final = frozenset(
    {"500", "503 SlowDown", "reset before", "reset in the headers", "reset in the body"}
    | {"body cut off", "closed between requests", "delivered twice", "answer lost"}
)


def shows(name: str, request: Message, response: Message) -> bool:
    """Return whether a fault would change anything of this request or its answer."""
    if name in CHANGES:
        return CHANGES[name](response).raw != response.raw
    if name == CHANGED_ABOVE:
        return request.with_flipped_body().raw != request.raw
    if name in HALVES:
        return len(response.body) > 1
    if name == "closed between requests":
        return not request.says_close and not response.says_close
    return True
