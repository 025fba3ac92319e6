"""What a client held goes back when it is gone, and what it said is not just trusted."""

from __future__ import annotations

import threading

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon import server
from kvio.staging.daemon.connection_pool import ConnectionPool
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import receive, send
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, ControlledBackend
from tests.staging.daemon.daemons import client_of, open_files, until

PAGE = 4096


def test_room_of_a_client_that_is_gone_is_given_back(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """Between reserve and commit the room is the connection's, and nothing is staged."""
    with lines.line() as line:
        assert isinstance(line.ask(say.Reserve("k", 9 * PAGE, "keep", "raise", None)), say.Grant)
        held = tier.stats()

    assert (held.used_bytes, held.staged_blocks) == (9 * PAGE, 0)
    until(lambda: tier.stats().used_bytes == 0)
    assert not tier.contains("k")


def test_a_limit_may_be_as_long_as_can_be_said(tier: StagingTier, lines: ConnectionPool) -> None:
    """Longer than a lock can wait; and nobody has to say so."""
    tier.pause()
    tier.write_block("w", bytes(9 * PAGE))
    with lines.line() as line:
        line.idle = False
        send(line.sock, say.Reserve("k", 9 * PAGE, "keep", "block", (1 << 64) - 1))
        until(lambda: tier.stats().waiting_writers == 1)
        tier.resume()
        assert isinstance(receive(line.sock), say.Grant)
    assert tier.write_block("y", b"", timeout=1e30).wait(timeout=LONG_S)


def test_room_goes_to_who_waits_when_its_holder_is_gone(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """A writer that was pushed back goes on."""
    with lines.line() as line:
        line.ask(say.Reserve("k", 9 * PAGE, "keep", "raise", None))
        writer = threading.Thread(target=tier.write_block, args=("w", bytes(9 * PAGE)))
        writer.start()
        until(lambda: tier.stats().waiting_writers == 1)
    writer.join(LONG_S)

    assert bytes(tier.read_block("w")) == bytes(9 * PAGE)


def test_who_waits_for_room_and_is_gone_takes_none(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """The room that comes after the deadline goes back."""
    tier.pause()
    tier.write_block("w", bytes(9 * PAGE))
    with lines.line() as line:
        line.idle = False
        send(line.sock, say.Reserve("k", 9 * PAGE, "keep", "block", None))
        until(lambda: tier.stats().waiting_writers == 1)
    tier.resume()
    tier.barrier(timeout=LONG_S)

    until(lambda: tier.stats().used_bytes == 0)
    assert not tier.contains("k")


def test_bytes_that_a_client_read_when_it_went_are_let_go(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """Until then they stay where they are, though they are stored and gone from the tier."""
    tier.pause()
    receipt = tier.write_block("k", b"data")
    with lines.line() as line:
        assert isinstance(line.ask(say.Pin("k", lasting=False)), say.Pinned)
        tier.resume()
        receipt.wait(timeout=LONG_S)
        pinned = tier.stats()

    assert (pinned.used_bytes, pinned.staged_blocks) == (PAGE, 0)
    until(lambda: tier.stats().used_bytes == 0)


def test_a_key_that_a_client_wrote_past_the_tier_is_free_again(
    tier: StagingTier, lines: ConnectionPool, store: WrappedStore[ControlledBackend]
) -> None:
    """Drains stand back while it writes, and go on when it is gone."""
    with lines.line() as line:
        assert isinstance(line.ask(say.Fence("k", 4, "replace", None)), say.Fenced)
        receipt = tier.write_block("k", b"data")
        tier.write_block("other", b"data").wait(timeout=LONG_S)
        held = receipt.done

    assert not held
    assert receipt.wait(timeout=LONG_S).nbytes == 4
    assert store.wrapper.peek("k") == b"data"


def test_staged_bytes_are_not_dropped_on_a_clients_word(
    tier: StagingTier, lines: ConnectionPool
) -> None:
    """Who says that it wrote past the tier, and did not, is found out."""
    tier.pause()
    tier.write_block("k", b"staged")
    with lines.line() as line:
        fenced = line.ask(say.Fence("k", 4, "replace", None))
        assert isinstance(fenced, say.Fenced)
        with pytest.raises(kvio.StorageError, match="'k'"):
            line.ask(say.Wrote(fenced.ticket, None, kvio.Level.DURABLE, existed=False))

    assert bytes(tier.read_block("k")) == b"staged"


def test_spans_that_do_not_fit_one_packet_go_in_several(
    tier: StagingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For writing and for reading."""
    monkeypatch.setattr(say, "MAX_SPANS", 2)
    tier.pause()
    scattered = [tier.write_block(f"k{n}", bytes(PAGE)) for n in range(16)]
    for receipt in scattered[::2]:
        tier.delete_block(receipt.key)
    data = payloads.payload(7 * PAGE + 5, 1)
    tier.write_block("large", data)

    assert bytes(tier.read_block("large")) == data
    tier.resume()
    tier.barrier(timeout=LONG_S)
    assert bytes(tier.read_block("large", consistency="backend")) == data


def threads() -> int:
    """Count the threads that connections have; a store keeps its own."""
    return sum(t.name in ("kvio-client", "kvio-events") for t in threading.enumerate())


def test_clients_that_come_and_go_leave_nothing_behind(
    tier: StagingTier, store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """No descriptor and no thread, on either side."""

    def come_and_go() -> None:
        with client_of(store, daemon) as client:
            client.write_block("k", b"data").wait(timeout=LONG_S)
            client.read_block("k")

    come_and_go()
    tier.contains("k")
    until(lambda: len(daemon._sessions) == 1)
    until(lambda: len(daemon._connections) == 2)
    before = (open_files(), threads())
    for _ in range(10):
        come_and_go()
    until(lambda: len(daemon._connections) == 2)

    until(lambda: open_files() <= before[0])
    until(lambda: threads() <= before[1])


def test_a_client_that_does_not_listen_is_given_up(
    tier: StagingTier, lines: ConnectionPool, daemon: StageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events are not kept for ever, its writes are stored, and nobody waits for it."""
    monkeypatch.setattr(server, "MAX_EVENTS", 3)
    for n in range(3000):  # far more than its socket holds
        with lines.line() as line:
            grant = line.ask(say.Reserve(f"k{n % 7}", 0, "replace", "block", None))
            assert isinstance(grant, say.Grant)
            line.ask(say.Commit(grant.ticket, 0))
    tier.write_block("mine", b"data").wait(timeout=LONG_S)

    until(lambda: len(daemon._sessions) == 1)
    assert [tier.contains(f"k{n}") for n in range(7)] == [True] * 7
