"""A daemon and its clients: what they share, what is given back, and what is never trusted."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.connection_pool import ConnectionPool, Line
from kvio.staging.daemon.protocol import ProtocolError
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import connect, name_of, poll, receive, send
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, ControlledBackend, disk_error
from tests.staging.daemon.daemons import client_of, serving, socket_path, until
from tests.staging.engines import remote

PAGE = 4096


# Several clients


def test_clients_see_and_absorb_each_others_writes(tier: StagingTier, other: StagingTier) -> None:
    """One tier for all: the newest bytes of a key are read, and its older receipt ends with it."""
    tier.pause()
    first = tier.write_block("k", b"first")
    seen = bytes(other.read_block("k"))
    second = other.write_block("k", b"second")
    tier.resume()

    assert seen == b"first"
    assert bytes(tier.read_block("k")) == b"second"
    assert first.wait(timeout=LONG_S) == second.wait(timeout=LONG_S)
    assert (first.absorbed, second.absorbed) == (True, False)


def test_a_client_is_reported_of_its_own_failures_alone(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The other's barrier passes, and it has nothing to retry or to discard."""
    store.wrapper.fail("bad", disk_error("bad"))
    bad = tier.write_block("bad", b"data")
    other.write_block("good", b"data")
    other.barrier(timeout=LONG_S)
    with pytest.raises(kvio.StorageError, match="'bad'"):
        tier.barrier(timeout=LONG_S)

    assert (tier.failed, other.failed) == ([bad], [])
    assert not other.discard(bad)
    assert tier.discard(bad)


def test_a_client_retries_its_own_failures_alone(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The other's stay failed, and are not even begun: it may know why they must wait."""
    for key in ("ours", "theirs"):
        store.wrapper.fail(key, disk_error(key))
    ours, theirs = tier.write_block("ours", b"data"), other.write_block("theirs", b"data")
    for receipt in (ours, theirs):
        with pytest.raises(kvio.StorageError):
            receipt.wait(timeout=LONG_S)

    assert tier.retry_failed() == [ours]
    assert ours.wait(timeout=LONG_S)
    tier.barrier(timeout=LONG_S)

    assert sorted(store.wrapper.order("begin")) == ["ours", "ours", "theirs"]
    assert (tier.failed, other.failed) == ([], [theirs])
    assert other.retry_failed() == [theirs]
    assert theirs.wait(timeout=LONG_S)


def test_a_block_in_the_place_of_anothers_failed_one_is_driven_for_both(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Who wrote the older block may ask for the newer, and both hear how it ends."""
    store.wrapper.fail("k", disk_error())
    tier.pause()
    old, new = tier.write_block("k", b"old"), other.write_block("k", b"new")
    tier.resume()
    for receipt in (old, new):
        with pytest.raises(kvio.StorageError):
            receipt.wait(timeout=LONG_S)

    assert tier.retry_failed() == []  # its own write is absorbed: there is nothing to give
    assert old.wait(timeout=LONG_S).nbytes == 3
    until(lambda: new.receipt is not None)

    assert store.wrapper.peek("k") == b"new"
    other.barrier(timeout=LONG_S)
    assert other.failed == []


def test_room_of_open_readers_is_counted(tier: StagingTier) -> None:
    """In whole pages, for as long as they are open."""
    tier.pause()
    tier.write_block("k", bytes(5000))
    with tier.open("k", "rb"):
        held = tier.stats().open_bytes

    assert held == 2 * PAGE
    until(lambda: tier.stats().open_bytes == 0)
    tier.resume()


def test_a_pause_ends_with_the_client_that_asked_for_it(
    tier: StagingTier, store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """And not before the last one's."""
    one, two = client_of(store, daemon), client_of(store, daemon)
    one.pause()
    two.pause()
    receipt = tier.write_block("k", b"data")
    one.resume()
    before = (tier.stats().paused, receipt.done)
    remote(two).connections.close()  # as the kernel does for a process that was killed
    remote(two).listening.join(LONG_S)

    assert before == (True, False)
    assert receipt.wait(timeout=LONG_S).nbytes == 4
    one.close()
    two.close()


def test_failed_writes_of_a_client_that_is_gone_are_retried_at_the_end(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Nobody else will; the daemon does before its retries end."""
    store.wrapper.fail("k", disk_error())
    with serving(store, retries=0) as daemon:
        tier = client_of(store, daemon)
        with pytest.raises(kvio.StorageError):
            tier.write_block("k", b"data").wait(timeout=LONG_S)
        remote(tier).connections.close()
        remote(tier).listening.join(LONG_S)

    assert store.wrapper.peek("k") == b"data"
    assert store.wrapper.order("failed") == ["k"]
    with pytest.raises(kvio.StorageError):
        tier.close()


# Bytes that changed


def scribble(tier: StagingTier, key: str) -> None:
    """Change one staged byte behind everybody's back."""
    with remote(tier).connections.line() as line:
        pinned = line.ask(say.Pin(key, lasting=False))
        assert isinstance(pinned, say.Pinned)
        remote(tier).memory.views(pinned.spans)[0][0] ^= 1
        line.release(pinned.ticket)


def test_staged_bytes_that_changed_are_never_stored(
    tier: StagingTier, other: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Their receipt says so, no read returns them, and their neighbours are stored."""
    tier.pause()
    before, bad, after = (tier.write_block(key, b"data") for key in ("a", "bad", "z"))
    scribble(other, "bad")
    with pytest.raises(kvio.CorruptBlockError):
        other.read_block("bad")
    results = other.read_blocks_into([("a", bytearray(4)), ("bad", bytearray(4))])
    tier.resume()
    with pytest.raises(kvio.CorruptBlockError) as caught:
        bad.wait(timeout=LONG_S)

    assert caught.value.key == "bad"
    assert [(r.status, r.nbytes) for r in results] == [("ok", 4), ("corrupt", 0)]
    assert [before.wait(timeout=LONG_S).key, after.wait(timeout=LONG_S).key] == ["a", "z"]
    assert store.wrapper.peek("bad") is None
    assert tier.discard(bad)


def test_bytes_that_change_while_they_are_stored_do_not_matter(
    tier: StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The store is given a copy that was checked, not memory that others can write to."""
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    store.wrapper.wait_for("begin", "k")
    scribble(tier, "k")
    store.wrapper.let_go()
    receipt.wait(timeout=LONG_S)

    assert store.wrapper.peek("k") == b"data"


def test_nobody_can_take_pages_away_from_the_daemon(tier: StagingTier, daemon: StageDaemon) -> None:
    """The descriptor that clients get cannot be cut: no SIGBUS for anybody."""
    lines = ConnectionPool(daemon.path, name_of(tier.store.url))
    with pytest.raises(PermissionError):
        os.ftruncate(lines.fd, PAGE)
    os.close(lines.fd)
    lines.close()
    lines.events.close()


# Who is refused


def test_a_client_of_another_store_is_refused(daemon: StageDaemon, tmp_path: Path) -> None:
    """Reads past the tier would see something else."""
    other = kvio.open_store(f"posix-tmpfile://{tmp_path}/other?create=true")
    with other, pytest.raises(kvio.ConfigError, match="not to posix-tmpfile"):
        kvio.stage(other, daemon=daemon.path)


def test_a_client_without_a_daemon_is_reported(
    store: WrappedStore[ControlledBackend], tmp_path: Path
) -> None:
    """At once."""
    with pytest.raises(kvio.StorageError, match="connect to the drain daemon"):
        kvio.stage(store, daemon=str(tmp_path / "none"))
    with pytest.raises(kvio.ConfigError):
        kvio.stage(store, daemon=str(tmp_path / ("x" * 200)))


def test_a_second_daemon_is_refused_and_the_first_stays(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """The socket of one that listens is not taken away."""
    with (
        pytest.raises(kvio.ConfigError, match="another drain daemon"),
        serving(store, path=daemon.path),
    ):
        pass

    with client_of(store, daemon) as tier:
        assert tier.write_block("k", b"data").wait(timeout=LONG_S)


def test_a_directory_that_is_open_to_others_is_refused(
    store: WrappedStore[ControlledBackend], tmp_path: Path
) -> None:
    """Whoever can enter it can try to connect."""
    tmp_path.chmod(0o750)
    with (
        pytest.raises(kvio.ConfigError, match="open to others"),
        serving(store, path=str(tmp_path / "s")),
    ):
        pass


def test_the_socket_is_ours_alone(daemon: StageDaemon) -> None:
    """0600, in 0700."""
    assert os.stat(daemon.path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(daemon.path)).st_mode & 0o777 == 0o700


def test_a_connection_of_nobody_known_is_refused(daemon: StageDaemon) -> None:
    """A session is not guessed."""
    name = name_of(daemon.core.store.url)
    with connect(daemon.path) as sock:
        send(sock, say.Hello(bytes(range(16)), name))
        answer = receive(sock)

    assert isinstance(answer, say.Failure)
    assert "knows no such client" in answer.text


def test_a_line_waits_as_long_as_it_takes_after_a_call_with_a_limit(
    lines: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit is one call's; and where nothing is there yet, looking does not wait."""
    monkeypatch.setattr("kvio.staging.daemon.connection_pool._POLL_S", 0)
    with lines.line() as line:
        line.ask(say.Hold(on=False), timeout=LONG_S)
        assert line.sock.gettimeout() is None
        assert poll(line.sock, 0) is None
        send(line.sock, say.Hold(on=False))
        assert receive(line.sock) == say.Done(0)
        assert line.idle


def test_every_packet_is_whole_or_refused(daemon: StageDaemon) -> None:
    """Packets keep their borders: what is too long is not cut to something that looks right."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(daemon.path)
        sock.send(say.encode(say.Hello(say.NO_SESSION, "x")) + bytes(70_000))
        assert sock.recv(100) == b""


def test_a_page_of_staged_keys_begins_after_the_key_that_was_asked_for(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """A long list is read page by page: no key comes twice, and the pages end."""
    tier.pause()
    for key in ("a", "b", "c", "d"):
        tier.write_block(key, b"")

    assert lines.ask(say.List("", after="b")) == say.Keys(more=False, keys=("c", "d"))


def test_a_message_without_an_answer_fails_if_the_daemon_is_gone() -> None:
    """The caller learns at once that its message did not arrive."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    line = Line(ours, "socket")
    with pytest.raises(kvio.StorageError, match="is gone"):
        line.send(say.Ask(1))
    ours.close()

    assert not line.idle


def test_a_server_that_does_not_welcome_is_refused() -> None:
    """Something else may listen on that path."""
    with socket_path() as path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()

        def answer() -> None:
            with server.accept()[0] as client:
                receive(client)
                send(client, say.Done(0))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="Done as a welcome"):
            ConnectionPool(path, "store")
        thread.join(LONG_S)
