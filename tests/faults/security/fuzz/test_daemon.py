"""A live daemon and strangers who say what they like: it lives, keeps its own, and leaks nothing.

What the daemon's own tests say in words that are nearly right is said here by mutation, out of
order, in floods, with descriptors and without; and another client's bytes are looked for in every
answer.
"""

from __future__ import annotations

import array
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.naming import name_of
from kvio.wrappers.staging.daemon.server import StageDaemon
from kvio.wrappers.staging.daemon.sockets import connect
from tests.faults.security.fuzz.mutation import mutate
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.staging.daemon.daemons import open_files, serving, until
from tests.staging.daemon.test_fuzz import _SAMPLES as MESSAGES
from tests.staging.medium import LONG_S

#: What another client stored: it must be in no answer.
SECRET: Final = b"another client's bytes " * 60
PAGE: Final = 4096


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    """A store that other processes see."""
    options = {"create": True}
    with kvio.open_store("posix-tmpfile", root=tmp_path / "root", options=options) as store:
        yield store


class Stranger:
    """A client on the socket that says anything, as fast as it can."""

    def __init__(self, daemon: StageDaemon, dice: random.Random) -> None:
        self._daemon, self._dice = daemon, dice
        self._hello = say.encode(say.Hello(say.NO_SESSION, name_of(daemon.custody.store.url)))
        self.sent = 0

    def visit(self) -> None:
        """Connect, perhaps with good manners at first, and talk until cut off."""
        with connect(self._daemon.path) as sock, suppress(OSError):
            sock.settimeout(LONG_S)
            if self._dice.randrange(3):
                self._say(sock, self._hello)
                self._hear(sock)
            for _ in range(self._dice.randrange(1, 30)):
                self._say(sock, self._words())
            sock.shutdown(socket.SHUT_WR)
            while self._hear(sock):
                pass

    def _words(self) -> bytes:
        dice = self._dice
        if not dice.randrange(8):
            return dice.randbytes(dice.choice((1, 8, 300, 1 << 15)))
        samples = [say.encode(make(dice)) for make in MESSAGES]
        data = dice.choice([self._hello, *samples])
        return mutate(data, dice, samples) if dice.randrange(4) else data

    def _say(self, sock: socket.socket, data: bytes) -> None:
        self.sent += 1
        if self._dice.randrange(6):
            sock.send(data[: 1 << 16] or b"\0")
            return
        # Descriptors that nobody asked for: the daemon must close them.
        own = [os.open(os.devnull, os.O_RDONLY) for _ in range(self._dice.randrange(1, 4))]
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own))
            sock.sendmsg([data or b"\0"], [rights])
        finally:
            for fd in own:
                os.close(fd)

    def _hear(self, sock: socket.socket) -> bytes:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 17, 4)
        for fd in fds:
            os.close(fd)
        assert SECRET[:23] not in data
        return data


def settled(daemon: StageDaemon, before: int) -> None:
    """Wait until the daemon has noticed that its strangers are gone."""
    until(lambda: open_files() <= before)
    assert daemon._accepting.is_alive()


def test_a_daemon_outlives_what_strangers_say(store: kvio.Store, tally: Tally) -> None:
    """Thousands of words, right and wrong, in any order: another client never notices."""
    dice = random.Random(f"{seed()} daemon")
    wanted = size(3000, 120_000)
    with (
        serving(store, 64 * PAGE, retries=0) as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        tier.write_block("victim", SECRET)
        tier.barrier(timeout=LONG_S)
        before = open_files()
        stranger = Stranger(daemon, dice)
        rounds = 0
        while stranger.sent < wanted:
            stranger.visit()
            rounds += 1
            if rounds % 20 == 0:
                tier.write_block("victim", SECRET)
                assert bytes(tier.read_block("victim")) == SECRET
        settled(daemon, before)
        for entry in [*daemon.custody.ledger.failed.values()]:
            daemon.custody.ledger.discard(entry.receipt)
        tier.barrier(timeout=LONG_S)
        until(lambda: daemon.custody.ledger.room.used_bytes == 0)
        assert bytes(tier.read_block("victim")) == SECRET
    tally.add(fuzzed=stranger.sent)


def test_a_flood_of_connections_leaks_nothing(store: kvio.Store, tally: Tally) -> None:
    """Hundreds who connect and say nothing, or go at once, cost a daemon nothing when gone."""
    with serving(store, 64 * PAGE) as daemon, kvio.stage(store, daemon=daemon.path) as tier:
        tier.write_block("k", b"x")
        tier.barrier(timeout=LONG_S)
        before = open_files()
        for _ in range(size(2, 10)):
            crowd = [connect(daemon.path) for _ in range(60)]
            for sock in crowd[::2]:
                with suppress(OSError):  # it may have been told to go already
                    sock.send(b"\0")
            assert bytes(tier.read_block("k")) == b"x"
            for sock in crowd:
                sock.close()
            tally.add(fuzzed=len(crowd))
        settled(daemon, before)


def test_names_of_strangers_reach_no_file(store: kvio.Store, tally: Tally) -> None:
    """A key on the wire that is none is a message that cannot be, whatever bytes it has."""
    words = (b"../x", b"/etc/passwd", b"a\0b", b"a\nb", b".kvio", b"a//b", b"a/..", b"\xff", b"")
    with serving(store, 64 * PAGE) as daemon, kvio.stage(store, daemon=daemon.path) as tier:
        for word in words:
            for number in (2, 5, 6, 8, 9):
                key = bytes([len(word)]) + word
                body = b"\1\0" + key if number == 9 else key + bytes(40)
                with connect(daemon.path) as sock:
                    sock.send(say.encode(say.Hello(say.NO_SESSION, name_of(store.url))))
                    _, fds, _, _ = socket.recv_fds(sock, 1 << 17, 4)
                    for fd in fds:
                        os.close(fd)
                    sock.send(say.encode(say.Absent())[:6] + bytes([number, 0]) + body)
                    tally.add(fuzzed=1)
        assert list(tier.list_keys()) == []
    assert list(store.list_keys()) == []
