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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import pytest

import kvio
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon import server
from kvio.staging.daemon.protocol import MAX_BYTES, ProtocolError, failure_of
from kvio.staging.daemon.server import Connection, StageDaemon
from kvio.staging.daemon.sockets import connect, name_of, receive, receive_fd
from kvio.types import Level
from tests.faults.security.fuzz.mutation import mutate
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.staging.controlled import LONG_S
from tests.staging.daemon.daemons import open_files, serving, until
from tests.staging.daemon.test_fuzz import _SAMPLES as MESSAGES
from tests.staging.daemon.test_fuzz import _is_answered

#: What another client stored: it must be in no answer.
SECRET: Final = b"another client's bytes " * 60
PAGE: Final = 4096
#: How long a stranger waits for an answer before it goes.
PATIENCE_S: Final = 2.0
#: How long the daemon's threads may need to close their sockets.
CLOSED_S: Final = 5.0
#: All that is said but Resize, by which any client may leave the others no memory.
KINDS: Final[list[Callable[[random.Random], say.Message]]] = [
    *MESSAGES,
    lambda dice: say.Hold(bool(dice.randrange(2))),
    lambda dice: say.Retry(tuple(dice.choices(range(99), k=dice.randrange(9)))),
]
_BINDING: Final = (say.Commit, say.Release, say.Wrote, say.Absent, say.Hello)
#: What ends no connection that holds nothing, and what one says that holds something.
FREE: Final = [make for make in KINDS if not isinstance(make(random.Random(1)), _BINDING)]
HOLDING: Final[list[Callable[[random.Random, int], say.Message]]] = [
    lambda dice, ticket: say.Commit(ticket, dice.getrandbits(32)),
    lambda _, ticket: say.Release(ticket),
    lambda _, ticket: say.Wrote(ticket, None, Level.DURABLE, existed=False),
]
Receive: TypeAlias = Callable[[socket.socket], say.Message | None]


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
        self._name = name_of(daemon.core.store.url)
        self._ticket = 0
        self.answered = 0

    def visit(self) -> None:
        """Connect, most often as one who was let in, and talk until cut off."""
        path, hello = self._daemon.path, say.Hello(say.NO_SESSION, self._name)
        with connect(path) as events, connect(path) as sock:
            events.settimeout(LONG_S)
            sock.settimeout(PATIENCE_S)
            if self._dice.randrange(8):  # what is said then is heard by a `Connection`
                events.send(say.encode(hello))
                welcome = say.decode(self._hear(events))
                assert isinstance(welcome, say.Welcome)
                hello = say.Hello(welcome.session, self._name)
            with suppress(OSError):  # cut off, or it waits for room that it holds itself
                self._talk(sock, say.encode(hello))

    def _talk(self, sock: socket.socket, hello: bytes) -> None:
        dice, self._ticket = self._dice, 0
        if dice.randrange(8):
            self._say(sock, hello)
            self._hear(sock)
        patient = dice.randrange(2)  # hears each answer, and knows what it holds
        for _ in range(dice.randrange(1, 40)):
            data = self._words(hello)
            self._say(sock, data)
            if patient and _is_answered(data):
                answer = self._hear(sock)
                if not answer:
                    return
                self.answered += 1
                self._ticket = getattr(say.decode(answer), "ticket", 0)
        sock.shutdown(socket.SHUT_WR)
        while answer := self._hear(sock):
            self.answered += not isinstance(say.decode(answer), say.Welcome)

    def _words(self, hello: bytes) -> bytes:
        """Return what is right most often: one wrong word ends a connection."""
        dice = self._dice
        match dice.randrange(40):
            case 0:
                return dice.randbytes(dice.choice((1, 8, 300, 1 << 15)))
            case 1:
                return hello
            case 2:
                message = dice.choice(KINDS)(dice)
            case _ if self._ticket:
                message = dice.choice(HOLDING)(dice, self._ticket)
            case _:
                message = dice.choice(FREE)(dice)
        data = say.encode(message)
        if dice.randrange(4):
            return data
        return mutate(data, dice, [say.encode(make(dice)) for make in KINDS])

    def _say(self, sock: socket.socket, data: bytes) -> None:
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
        assert SECRET[:23] not in data, "an answer has another client's bytes"
        return data


class Ear:
    """Counts what a daemon hears, and keeps what its threads die of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: Counter[str] = Counter()
        self.died: list[str] = []
        self.listening = False
        monkeypatch.setattr(server, "receive", partial(self._receive, vars(server)["receive"]))
        monkeypatch.setattr(threading, "excepthook", self._note)

    @property
    def words(self) -> int:
        """How many there were beside those by which one is let in."""
        return self.heard.total() - self.heard["Hello"]

    def _receive(self, receive: Receive, sock: socket.socket) -> say.Message | None:
        try:
            message = receive(sock)
        except ProtocolError:
            self.heard["nothing that can be"] += self.listening
            raise
        if message is not None:
            self.heard[type(message).__name__] += self.listening
        return message

    def _note(self, error: threading.ExceptHookArgs) -> None:
        self.died.append(f"{error.thread and error.thread.name}: {error.exc_value!r}")


class Siege:
    """A daemon with one client that stores and reads, and strangers; what goes wrong for it."""

    def __init__(self, daemon: StageDaemon, tier: kvio.StagingTier, ear: Ear) -> None:
        self._daemon, self._tier, self._ear = daemon, tier, ear
        self._stranger = Stranger(daemon, random.Random(f"{seed()} daemon"))
        tier.write_block("victim", SECRET)
        tier.barrier(timeout=LONG_S)
        self._connections = len(daemon._connections)
        self._files = open_files()

    @property
    def answered(self) -> int:
        """How often strangers were answered more than a welcome."""
        return self._stranger.answered

    def last(self, words: int) -> list[str]:
        """Let strangers come until so many words of theirs were heard; what went wrong."""
        wrong = self._besiege(words)
        self._settle()
        return wrong or self._after()

    def _besiege(self, words: int) -> list[str]:
        rounds = 0
        while self._ear.words < words:
            self._ear.listening = True
            try:
                self._stranger.visit()
            except AssertionError as exc:
                return [str(exc)]
            finally:
                self._ear.listening = False
            rounds += 1
            if self._ear.died:
                return self._ear.died
            if rounds % 10 == 0 and (wrong := self._victim()):
                return [wrong]
        return []

    def _victim(self) -> str | None:
        try:
            self._tier.write_block("victim", SECRET)
            found = bytes(self._tier.read_block("victim"))
        except kvio.KvioError as exc:
            return f"the other client got {exc!r}"
        return None if found == SECRET else "the other client's bytes have changed"

    def _settle(self) -> None:
        """Wait until the daemon has noticed that its strangers are gone, and give up theirs."""
        ledger = self._daemon.core.ledger

        def empty() -> bool:
            for entry in [*ledger.failed.values()]:
                ledger.discard(entry.receipt)
            with ledger.lock:
                return not ledger.key_queues.keys("")

        until(lambda: len(self._daemon._connections) <= self._connections)
        until(empty)
        self._tier.barrier(timeout=LONG_S)

    def _after(self) -> list[str]:
        daemon, ledger = self._daemon, self._daemon.core.ledger
        kept = self._files_kept()
        wrong = [
            (not daemon._accepting.is_alive(), "it takes no more clients"),
            (kept > 0, f"{kept} descriptors are kept"),
            (ledger.allocator.used_bytes > 0, f"{ledger.allocator.used_bytes} bytes are kept"),
        ]
        found = [self._victim(), *(text for bad, text in wrong if bad)]
        return [one for one in found if one is not None]

    def _files_kept(self) -> int:
        """Count the descriptors too many: a thread closes its socket when it is off the list."""
        deadline = time.monotonic() + CLOSED_S
        while (kept := open_files() - self._files) > 0 and time.monotonic() < deadline:
            pass
        return kept


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_daemon_outlives_what_strangers_say(
    store: kvio.Store, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of words, right and wrong, in any order: another client never notices."""
    ear = Ear(monkeypatch)
    wanted = size(2000, 120_000)
    with (
        serving(store, 64 * PAGE, retries=0) as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        siege = Siege(daemon, tier, ear)
        wrong = siege.last(wanted)

    print(f"{siege.answered} answers to {dict(ear.heard)}")
    tally.add(fuzzed=ear.words)
    assert wrong == []
    assert siege.answered > wanted // 10
    kinds = {type(make(random.Random(0))).__name__ for make in KINDS}
    assert kinds - {"Absent"} <= set(+ear.heard)


def _dies(_: Connection, question: say.List) -> Sequence[say.Message]:
    raise KeyError(question.prefix)


def _reports(*_: object) -> Sequence[say.Message]:
    return [failure_of(kvio.StorageError(SECRET[:60].decode()))]


def _keeps_room(self: Connection) -> None:
    """Keep some, not all of it: who waits for room would wait for ever."""
    held = self._held
    few = isinstance(held, server._Room) and 0 < held.nbytes <= PAGE and len(_HOLDERS) < 20
    if few:
        _HOLDERS.append(self)
    else:
        _GIVE_BACK(self)


def _keeps_files(sock: socket.socket) -> say.Message | None:
    data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES + 1, 4)
    _KEPT.extend(fds)
    return say.decode(data) if data else None


_HOLDERS: Final[list[Connection]] = []
_GIVE_BACK: Final = Connection._give_back
_KEPT: Final[list[int]] = []
#: Daemons that are broken: where, and what is there instead.
BROKEN: Final[dict[str, tuple[object, str, object]]] = {
    "a handler dies": (Connection, "_list", _dies),
    "bytes are reported": (Connection, "_list", _reports),
    "room is kept": (Connection, "_give_back", _keeps_room),
    "descriptors are kept": (server, "receive", _keeps_files),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_daemon_that_minds_strangers_is_found(
    name: str, store: kvio.Store, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same against a daemon that is broken: a stranger or the other client sees it."""
    tally.add(mutants=1)
    monkeypatch.setattr(*BROKEN[name])
    ear = Ear(monkeypatch)
    with (
        serving(store, 64 * PAGE, retries=0) as daemon,
        kvio.stage(store, daemon=daemon.path, timeout=1.0) as tier,
    ):
        wrong = Siege(daemon, tier, ear).last(800)
        while _HOLDERS:
            _GIVE_BACK(_HOLDERS.pop())
    while _KEPT:
        os.close(_KEPT.pop())

    print(wrong)
    tally.add(caught=bool(wrong))
    assert wrong


def test_a_flood_of_connections_leaks_nothing(store: kvio.Store) -> None:
    """Hundreds who connect and say nothing, or go at once, cost a daemon nothing when gone."""
    with serving(store, 64 * PAGE) as daemon, kvio.stage(store, daemon=daemon.path) as tier:
        tier.write_block("k", b"x")
        tier.barrier(timeout=LONG_S)
        files, served = open_files(), len(daemon._connections)
        for _ in range(size(2, 10)):
            crowd = [connect(daemon.path) for _ in range(60)]
            for sock in crowd[::2]:
                with suppress(OSError):  # it may have been asked to go already
                    sock.send(b"\0")
            assert bytes(tier.read_block("k")) == b"x"
            for sock in crowd:
                sock.close()
        until(lambda: len(daemon._connections) <= served and open_files() <= files)
        assert daemon._accepting.is_alive()


#: Numbers of messages that begin with a key; the last has a list of them.
_OF_KEYS: Final = (2, 5, 6, 8, 9)


def test_names_of_strangers_reach_no_file(
    store: kvio.Store, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on the wire that is none is a message that cannot be, whatever bytes it has."""
    ear = Ear(monkeypatch)
    words = (b"../x", b"/etc/passwd", b"a\0b", b"a\nb", b".kvio", b"a//b", b"a/..", b"\xff", b"")
    name = name_of(store.url)
    with serving(store, 64 * PAGE) as daemon, kvio.stage(store, daemon=daemon.path) as tier:
        with connect(daemon.path) as events:
            events.send(say.encode(say.Hello(say.NO_SESSION, name)))
            welcome, fd = receive_fd(events)
            assert isinstance(welcome, say.Welcome)
            assert fd is not None
            os.close(fd)
            for word in words:
                for number in _OF_KEYS:
                    key = bytes([len(word)]) + word
                    body = b"\1\0" + key if number == 9 else key + bytes(40)
                    with connect(daemon.path) as sock:
                        sock.send(say.encode(say.Hello(welcome.session, name)))
                        assert isinstance(receive(sock), say.Welcome)
                        ear.listening = True
                        sock.send(say.encode(say.Absent())[:6] + bytes([number, 0]) + body)
                        assert receive(sock) is None, (word, number)  # it was cut off
                        ear.listening = False
        assert list(tier.list_keys()) == []
    tally.add(names=ear.heard.total())
    assert +ear.heard == {"nothing that can be": len(words) * len(_OF_KEYS)}
    assert list(store.list_keys()) == []
