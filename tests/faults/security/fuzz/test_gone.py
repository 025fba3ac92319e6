"""Clients of a daemon that are gone at a bad moment: what they held or stopped goes on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import connect, name_of, receive, receive_fd
from tests.faults.sizes import size
from tests.faults.totals import Tally
from tests.staging.daemon.daemons import serving, until

#: A block of another client is stored long before.
SOON_S: Final = 5.0


@contextmanager
def let_in(daemon: StageDaemon) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two connections of a client: for events, and for questions."""
    name = name_of(daemon.core.store.url)
    with connect(daemon.path) as events, connect(daemon.path) as sock:
        events.send(say.encode(say.Hello(say.NO_SESSION, name)))
        welcome, fd = receive_fd(events)
        assert isinstance(welcome, say.Welcome)
        assert fd is not None
        os.close(fd)
        sock.send(say.encode(say.Hello(welcome.session, name)))
        assert isinstance(receive(sock), say.Welcome)
        yield events, sock


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[tuple[StageDaemon, kvio.StagingTier]]:
    """Yield a daemon and the tier of another client."""
    options = {"create": True}
    with (
        kvio.open_store("posix-tmpfile", root=tmp_path / "root", options=options) as store,
        serving(store, "1MiB") as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        yield daemon, tier


@pytest.mark.slow
def test_who_is_gone_holds_no_drains(
    staged: tuple[StageDaemon, kvio.StagingTier], tally: Tally
) -> None:
    """A client asks that drains wait, and dies before it is answered: they do not wait for it."""
    daemon, tier = staged
    served, rounds = len(daemon._connections), size(50, 500)
    for _ in range(rounds):
        with let_in(daemon) as (events, sock):
            sock.send(say.encode(say.Hold(True)))
            events.close()
    until(lambda: len(daemon._connections) <= served)
    tally.add(rounds=rounds)
    tier.write_block("k", b"data")
    try:
        tier.barrier(timeout=SOON_S)
    finally:
        daemon.core.drains.resume()  # so that it can end


def test_who_is_gone_keeps_no_key(
    staged: tuple[StageDaemon, kvio.StagingTier], tally: Tally
) -> None:
    """A client keeps drains off a key, waits for that key itself, and goes: it is free again."""
    daemon, tier = staged
    served = len(daemon._connections)
    with let_in(daemon) as (_, sock):
        sock.send(say.encode(say.Fence("k", 9, "replace", 1000)))
        assert isinstance(receive(sock), say.Fenced)
        sock.send(say.encode(say.Delete("k", None)))
    tally.add(rounds=1)
    until(lambda: len(daemon._connections) <= served)
    tier.write_block("k", b"data")
    tier.barrier(timeout=SOON_S)
