"""A fault is met only where it changes what goes over the wire."""

from __future__ import annotations

import pytest

from tests.faults.s3.faults import Fault, shows
from tests.faults.s3.messages import Message
from tests.faults.s3.proxy import Armed

PUT = Message(b"PUT /b/p/write/1/block HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"some body")
EMPTY = Message(b"PUT /b/p/write/1/block HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
WHOLE = Message(b'HTTP/1.1 200 OK\r\nETag: "1"\r\ncontent-length: 9\r\n\r\n', b"some body")
BARE = Message(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("name", "request_", "response", "shown"),
    [
        ("wrong ETag", PUT, WHOLE, True),
        ("wrong ETag", PUT, BARE, False),
        ("body shortened", PUT, WHOLE, True),
        ("body changed on the way down", PUT, BARE, False),
        ("body changed on the way up", PUT, BARE, True),
        ("body changed on the way up", EMPTY, BARE, False),
        ("body cut off", PUT, WHOLE, True),
        ("stall in the body", PUT, BARE, False),
        ("closed between requests", PUT, WHOLE, True),
        ("closed between requests", PUT, BARE, False),
    ],
)
def test_a_fault_shows_where_there_is_something_to_change(
    name: str, request_: Message, response: Message, *, shown: bool
) -> None:
    """No header, no body, or a connection that ends anyway: then there is no fault."""
    assert shows(name, request_, response) is shown


def test_a_fault_that_has_nothing_to_change_waits_for_the_next_request() -> None:
    """It is not used up, and not counted; once met it is both."""
    armed = Armed(Fault("wrong ETag"), 1, 0, ["p/write/1/"])

    word = armed.takes(PUT)
    assert word == "p/write/1/"
    armed.misses(word)
    assert armed.takes(PUT) == word
    armed.meets(word, PUT)

    assert armed.takes(PUT) is None
    assert armed.met == {word: ["PUT /b/p/write/1/block"]}


def test_a_fault_is_met_by_what_is_asked_of_its_blocks_alone() -> None:
    """Late requests of an earlier operation do not use it up, nor those of other methods."""
    armed = Armed(Fault("500", before=True, methods=frozenset({"PUT"})), 1, 1, ["p/write/1/"])
    other = Message(PUT.head.replace(b"write/1", b"write/11"), PUT.body)
    read = Message(PUT.head.replace(b"PUT", b"GET"))

    assert [armed.takes(one) for one in (other, read, PUT)] == [None, None, None]
    assert armed.takes(PUT) == "p/write/1/"
