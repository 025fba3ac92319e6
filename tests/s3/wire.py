"""HTTP over raw sockets: how tests see what a server sends, and how a connection ends."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.s3.faulty import FaultyServer

#: How long nothing must come, after a request has arrived, to count as silence: too short a time
#: fails no test wrongly.
SILENCE_S = 0.2
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Answer:
    """What came over a connection, and how it ended: whole, eof, reset or silent."""

    status: int | None
    headers: Mapping[str, str]
    body: bytes
    end: str


def connect(server: FaultyServer) -> socket.socket:
    port = urlsplit(server.url).port
    assert port is not None
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def request(method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = {"host": "x", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body


def wait_for_request(server: FaultyServer) -> None:
    """Wait until a request has arrived."""
    turn, deadline = threading.Event(), time.monotonic() + 20
    while not server.requests:
        assert time.monotonic() < deadline, "no request arrived"
        turn.wait(0.01)


def receive(
    connection: socket.socket, method: str = "GET", *, silent_after: int | None = None
) -> Answer:
    """Take one answer, or what there is of it.

    Args:
        connection: The connection.
        method: What was asked: HEAD has no body.
        silent_after: Bytes of the body after which nothing may come; -1 for nothing at all.
    """
    received = b""
    while True:
        answer = parse(received, "whole")
        there = -1 if answer.status is None else len(answer.body)
        wanted = 0 if method == "HEAD" else int(answer.headers.get("content-length", "0"))
        if there >= wanted:
            return answer
        if there == silent_after and not _says_more(connection):
            return parse(received, "silent")
        try:
            piece = connection.recv(1 << 20)
        except ConnectionResetError:
            return parse(received, "reset")
        if not piece:
            return parse(received, "eof")
        received += piece


def parse(received: bytes, end: str) -> Answer:
    head, blank, body = received.partition(b"\r\n\r\n")
    if not blank:
        return Answer(None, {}, b"", end)
    first, *rest = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in rest)
    return Answer(int(first.split()[1]), headers, body, end)


def ask(
    server: FaultyServer,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    body: bytes = b"",
) -> Answer:
    """Send one request over a raw socket of its own."""
    with connect(server) as connection:
        connection.sendall(request(method, target, headers, body))
        return receive(connection, method)


def _says_more(connection: socket.socket) -> bool:
    poll = select.poll()  # select(2) knows no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(SILENCE_S * 1000))
