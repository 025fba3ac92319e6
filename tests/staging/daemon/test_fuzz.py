"""Clients that send anything: the daemon lives, and its other clients never notice."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest

import kvio
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.protocol import ProtocolError
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import connect, name_of, receive
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from kvio.types import Level
from tests.staging.controlled import LONG_S, ControlledBackend, open_controlled
from tests.staging.daemon.daemons import serving, until

ROUNDS = 400
_PAGE = 4096


class Stranger:
    """A client that was let in and then says what it likes."""

    def __init__(self, daemon: StageDaemon, choose: random.Random) -> None:
        self.choose = choose
        name = name_of(daemon.core.store.url)
        self.events = connect(daemon.path)
        self.events.send(say.encode(say.Hello(say.NO_SESSION, name)))
        welcome, _fd = self._first()
        self.calls = connect(daemon.path)
        self.calls.settimeout(LONG_S)
        self.calls.send(say.encode(say.Hello(welcome.session, name)))
        assert isinstance(receive(self.calls), say.Welcome)

    def _first(self) -> tuple[say.Welcome, int]:
        data, fds, _, _ = socket.recv_fds(self.events, 1 << 17, 1)
        os.close(fds[0])
        welcome = say.decode(data)
        assert isinstance(welcome, say.Welcome)
        return welcome, fds[0]

    def message(self) -> bytes:
        """Make something that looks more or less like a message, but about no block of another's.

        One byte makes a Delete of a Pin.
        """
        while _removes_mine(data := self._any_message()):
            pass
        return data

    def _any_message(self) -> bytes:
        choose = self.choose
        data = bytearray(say.encode(choose.choice(_SAMPLES)(choose)))
        match choose.randrange(8):
            case 0:
                data[choose.randrange(len(data))] = choose.randrange(256)
            case 1:
                del data[choose.randrange(len(data)) :]
            case 2:
                data += choose.randbytes(choose.randrange(1, 50))
            case 3:
                data = bytearray(choose.randbytes(choose.randrange(1, 200)))
                data[:8] = struct.pack("<4sHH", b"kvsd", say.VERSION, choose.randrange(100))
        return bytes(data)

    def babble(self) -> int:
        """Send messages until it is cut off or tired; how many."""
        with self.events, self.calls, suppress(OSError):
            for sent in range(20):
                data = self.message()
                self.calls.send(data)
                if not _is_answered(data):
                    continue
                if not self.calls.recv(1 << 17):
                    return sent
        return 20


def _is_answered(data: bytes) -> bool:
    """Return whether the daemon will say something, if only good-bye."""
    return not isinstance(_decoded(data), say.Ask | say.Release)


def _removes_mine(data: bytes) -> bool:
    message = _decoded(data)
    return isinstance(message, say.Delete | say.Fence) and message.key == "mine"


def _decoded(data: bytes) -> say.Message | None:
    try:
        return say.decode(data)
    except ProtocolError:
        return None


def _key(choose: random.Random) -> str:
    return f"fuzz/{choose.randrange(4)}"


#: Messages that change nothing of another client's; fences and pauses would.
_SAMPLES: list[Callable[[random.Random], say.Message]] = [
    lambda c: say.Reserve(_key(c), c.choice([0, 1, _PAGE, 1 << 63]), "replace", "raise", 9),
    lambda c: say.Reserve(_key(c), c.randrange(_PAGE), "keep", "pass_through", None),
    lambda c: say.Commit(c.randrange(4), c.getrandbits(32)),
    lambda c: say.Release(c.randrange(4)),
    lambda c: say.Pin(c.choice(["mine", _key(c)]), c.choice([False, True])),
    lambda c: say.Fence(_key(c), c.randrange(9), "replace", 1000),
    lambda c: say.Wrote(c.randrange(4), None, Level.DURABLE, existed=False),
    lambda c: say.Delete(_key(c), 1000),
    lambda _: say.Present(("mine", "fuzz/1")),
    lambda c: say.List(c.choice(["", "m", "\0", "é" * 50]), c.choice(["", "zzz"])),
    lambda c: say.Ask(c.getrandbits(64)),
    lambda c: say.Discard(c.randrange(99)),
    lambda c: say.Over(tuple(c.choices(range(99), k=c.randrange(9)))),
    lambda _: say.Stats(),
    lambda _: say.Absent(),
    lambda _: say.Hello(say.NO_SESSION, "again"),
]  # fmt: skip


@pytest.mark.slow
def test_no_bytes_crash_the_daemon_or_disturb_another_client() -> None:
    """Hundreds of strangers, each cut off alone; one client writes and reads all the while."""
    seed = os.environ.get("KVIO_FUZZ_SEED", "7")
    choose = random.Random(seed)
    store: WrappedStore[ControlledBackend] = open_controlled()
    said = 0
    with (
        serving(store, 32 * _PAGE, retries=0) as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        for round_number in range(ROUNDS):
            data = payloads.payload(choose.randrange(1, 3 * _PAGE), round_number)
            receipt = tier.write_block("mine", data)
            said += Stranger(daemon, random.Random(f"{seed}/{round_number}")).babble()

            assert bytes(tier.read_block("mine")) == data
            assert receipt.wait(timeout=LONG_S).nbytes == len(data)
        tier.barrier(timeout=LONG_S)
        assert daemon._accepting.is_alive()
        ledger = daemon.core.ledger
        until(lambda: not ledger.progress.unsettled)  # what the strangers wrote
        for entry in [*ledger.failed.values()]:
            ledger.discard(entry.receipt)
    assert said > ROUNDS
    assert ledger.allocator.used_bytes == 0
    store.close()


def test_malformed_first_words_are_the_last() -> None:
    """Before Hello nothing is answered."""
    choose = random.Random(3)
    store = open_controlled()
    with serving(store) as daemon:
        for _ in range(50):
            with connect(daemon.path) as sock:
                sock.send(choose.randbytes(choose.randrange(1, 300)))
                assert sock.recv(100) == b""
        with kvio.stage(store, daemon=daemon.path) as tier:
            assert tier.write_block("k", b"data").wait(timeout=LONG_S).nbytes == 4
    store.close()
