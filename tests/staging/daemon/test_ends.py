"""How daemons end, and their clients with them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon import connection_pool, sockets
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.connection_pool import ConnectionPool
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions
from kvio.testing.fakes import WrappedStore
from tests.inside import wait_until_inside
from tests.staging.controlled import LONG_S, ControlledBackend, Held, begin, disk_error
from tests.staging.daemon.daemons import client_of, socket_path
from tests.staging.engines import remote
from tests.staging.test_tier_full import Writer

PAGE = 4096
OPTIONS = TierOptions(drain_threads=1)


def test_a_daemon_that_ends_stores_everything_first(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """Its clients hear how their writes ended, and later calls are refused."""
    tier = client_of(store, daemon)
    tier.pause()
    receipts = [tier.write_block(f"k{n}", b"data") for n in range(8)]
    daemon.close(timeout=LONG_S)

    assert [r.wait(timeout=LONG_S).level for r in receipts] == ["durable"] * 8
    assert sorted(store.list_keys()) == [r.key for r in receipts]
    assert not os.path.exists(daemon.path)
    with pytest.raises(kvio.StorageError):
        tier.write_block("late", b"data")
    tier.close()


def test_a_client_that_ends_has_reported_everybody_first(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """A callback of its last write may still ask the daemon, as the deletion of an old key does."""
    tier, held, stats = client_of(store, daemon), Held(), []

    def ask(receipt: kvio.StagedReceipt) -> None:
        held(receipt)
        stats.append(tier.stats())

    store.wrapper.hold("k")
    tier.write_block("k", b"data").add_done_callback(ask)
    store.wrapper.let_go()
    assert held.entered.wait(LONG_S)
    closer = begin(tier.close)
    closer.join(0.2)
    held.let_go()
    closer.join(LONG_S)

    assert not closer.is_alive()
    assert len(stats) == 1


def test_a_daemon_that_cannot_store_leaves_no_writer_waiting(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came to wait for room after the daemon had stopped draining."""
    tier = client_of(store, daemon)
    store.wrapper.hold("a")
    tier.write_block("a", bytes(16 * PAGE))
    core = daemon.core
    monkeypatch.setattr(core.drains, "drain_all", lambda _: None)
    monkeypatch.setattr(core.drains, "end", lambda _: True)
    writer = Writer(tier, "b", 1).start_and_wait()
    closer = begin(daemon.close)
    closer.join(LONG_S)
    writer.join(LONG_S)

    assert not closer.is_alive()
    assert writer.error is not None
    monkeypatch.undo()
    store.wrapper.let_go()
    assert core.drains.end(None)
    with pytest.raises(kvio.TierNotDrainedError):
        tier.close()


def test_a_daemon_does_not_wait_for_a_client_that_does_not_copy(
    store: WrappedStore[ControlledBackend],
    daemon: StageDaemon,
    lines: ConnectionPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room that was granted and never filled is taken back after a while."""
    monkeypatch.setattr("kvio.staging.daemon.server._GRACE_S", 0.05)
    with lines.line() as line:
        line.ask(say.Reserve("k", PAGE, "keep", "raise", None))
        daemon.close(timeout=LONG_S)

    assert list(store.list_keys()) == []


def test_a_daemon_that_cannot_store_names_the_keys(store: WrappedStore[ControlledBackend]) -> None:
    """And ends all the same."""
    store.wrapper.fail("k", disk_error(), times=2)
    with socket_path() as path:
        options = TierOptions(drain_threads=1, retries=0)
        daemon = StageDaemon(store, path, capacity_bytes=PAGE, options=options)
        tier = client_of(store, daemon)
        receipt = tier.write_block("k", b"data")
        with pytest.raises(kvio.StorageError):
            receipt.wait(timeout=LONG_S)
        with pytest.raises(kvio.TierNotDrainedError) as caught:
            daemon.close()

    assert caught.value.keys == ("k",)
    with pytest.raises(kvio.StorageError):
        tier.close()


def test_a_connection_made_while_the_client_closes_is_closed_too(
    tier: StagingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would."""
    made: list[socket.socket] = []
    with remote(tier).connections.line(), monkeypatch.context() as patched:

        def connect(path: str) -> socket.socket:
            made.append(sockets.connect(path))
            remote(tier).connections._closed = True
            return made[0]

        patched.setattr(connection_pool, "connect", connect)
        with pytest.raises(kvio.StoreClosedError):
            tier.stats()
        remote(tier).connections._closed = False

    assert [sock.fileno() for sock in made] == [-1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_clients_tier_refuses_in_a_forked_child(tier: StagingTier) -> None:
    """Its connections are the parent's, which goes on; the child's close is nothing."""
    tier.pause()
    receipt = tier.write_block("k", b"data")

    def child() -> None:
        for call in (
            lambda: tier.write_block("k", b""),
            lambda: tier.read_block("k"),
            lambda: receipt.wait(),
            lambda: tier.barrier(),
            lambda: tier.stats(),
            lambda: tier.failed,
        ):
            with pytest.raises(kvio.UnsupportedError, match="fork"):
                call()
        remote(tier).connections._put(line)  # as a reader does that is dropped
        tier.close()

    line = remote(tier).connections._take()
    # Held at the fork: the child must not wait for them.
    with remote(tier).tier_state.lock, remote(tier).connections._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(LONG_S))  # a child that waits must not stay
            code = 1
            try:
                child()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    remote(tier).connections._put(line)
    tier.resume()
    assert receipt.wait(timeout=LONG_S).nbytes == 4


def test_a_daemon_ends_with_its_context(store: WrappedStore[ControlledBackend]) -> None:
    """Its socket is gone with it, and the directory that it made is open to no other user."""
    with socket_path() as path:
        inside = os.path.join(os.path.dirname(path), "new", "socket")
        options = TierOptions(drain_threads=1)
        with StageDaemon(store, inside, capacity_bytes=PAGE, options=options) as daemon:
            mode = os.stat(os.path.dirname(inside)).st_mode & 0o777
            assert os.path.exists(daemon.path)

        assert mode == 0o700
        assert not os.path.exists(inside)


def test_a_wait_without_a_limit_ends_with_the_daemon(
    tier: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """On any thread: the error names what may not be stored."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    errors: list[kvio.KvioError] = []

    def wait() -> None:
        try:
            tier.barrier()
        except kvio.KvioError as exc:
            errors.append(exc)

    thread = begin(wait)
    wait_until_inside(thread, "wait_for")
    remote(tier).connections.events.shutdown(socket.SHUT_RDWR)
    thread.join(LONG_S)

    assert ["is gone; what may not be stored: 'k'" in str(error) for error in errors] == [True]
    assert (tier.discard(receipt), tier.discard(receipt)) == (True, False)
    tier.barrier()


def _regular(path: Path) -> None:
    path.write_bytes(b"weights")


def _link(path: Path) -> None:
    path.with_name("target").write_bytes(b"weights")
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize("make", [_regular, _link, os.mkfifo, Path.mkdir])
def test_a_file_that_is_no_socket_is_never_replaced(
    store: WrappedStore[ControlledBackend], make: Callable[[Path], object]
) -> None:
    """A mistyped ``--socket`` names a file of the user's: the daemon refuses it by its name."""
    with socket_path() as path:
        make(Path(path))
        before = os.lstat(path)
        with pytest.raises(kvio.ConfigError, match=f"{path} is no socket and is kept"):
            StageDaemon(store, path, capacity_bytes=1 << 20, options=OPTIONS)
        assert os.path.samestat(os.lstat(path), before)
        if make in (_regular, _link):
            assert Path(path).read_bytes() == b"weights"


def test_the_socket_of_a_daemon_that_was_killed_is_replaced(
    store: WrappedStore[ControlledBackend],
) -> None:
    """What is left of it is a socket without a listener."""
    with socket_path() as path:
        left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left.bind(path)
        left.close()
        with StageDaemon(store, path, capacity_bytes=1 << 20, options=OPTIONS) as daemon:
            client_of(store, daemon).close()
        assert not os.path.lexists(path)


def test_a_daemon_removes_its_own_socket_alone(store: WrappedStore[ControlledBackend]) -> None:
    """A file that was put in its place meanwhile stays when the daemon ends."""
    with socket_path() as path:
        with StageDaemon(store, path, capacity_bytes=1 << 20, options=OPTIONS):
            os.unlink(path)
            _regular(Path(path))
        assert Path(path).read_bytes() == b"weights"
