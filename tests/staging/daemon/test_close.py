"""A client that closes has no write half made, and a daemon is closed for all who close it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon.client import connect
from kvio.staging.daemon.protocol import MAX_KEYS
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.options import TierOptions
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, SOON_S, ControlledBackend, begin
from tests.staging.daemon.daemons import client_of, serving, until
from tests.staging.engines import remote


class Copier:
    """A write whose bytes are on their way until it is let go."""

    def __init__(self, tier: StagingTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copying, self._tier_state = threading.Event(), threading.Event()
        self._fill = remote(tier).memory.fill
        self.receipts: list[kvio.StagedReceipt] = []
        monkeypatch.setattr(remote(tier).memory, "fill", self._wait)
        self._thread = begin(lambda: self.receipts.append(tier.write_block("k", b"data")))
        assert self._copying.wait(LONG_S)

    def _wait(self, *args: Any, **options: Any) -> Any:
        self._copying.set()
        assert self._tier_state.wait(LONG_S)
        return self._fill(*args, **options)

    def end(self) -> None:
        """Let the bytes arrive."""
        self._tier_state.set()
        self._thread.join(LONG_S)


def test_a_write_that_has_begun_is_stored_before_the_client_closes(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted, so it must not fail for want of a connection; later ones are refused."""
    tier = client_of(store, daemon)
    copier = Copier(tier, monkeypatch)
    closer = begin(tier.close)
    until(lambda: remote(tier).pending_writes._refusing)
    with pytest.raises(kvio.StoreClosedError):
        tier.write_block("late", b"")
    assert not tier._closed
    copier.end()
    closer.join(LONG_S)

    assert not closer.is_alive()
    assert [receipt.level for receipt in copier.receipts] == ["durable"]
    assert store.wrapper.peek("k") == b"data"
    assert store.wrapper.peek("late") is None


def test_a_client_whose_writes_do_not_end_stays_open(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so in time, and takes writes again."""
    tier = client_of(store, daemon)
    copier = Copier(tier, monkeypatch)
    with pytest.raises(kvio.TierNotDrainedError, match="timed out"):
        tier.close(timeout=SOON_S)
    copier.end()
    tier.write_block("again", b"data").wait(timeout=LONG_S)
    tier.close(timeout=LONG_S)

    assert [receipt.level for receipt in copier.receipts] == ["durable"]


def test_a_second_one_who_closes_the_daemon_waits_for_the_first(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """What was accepted is stored when either returns."""
    with client_of(store, daemon) as tier:
        store.wrapper.hold("k")
        receipt = tier.write_block("k", b"data")
        store.wrapper.wait_for("begin", "k")
        first = begin(daemon.close)
        assert daemon._ending.wait(LONG_S)
        second = begin(daemon.close)
        second.join(SOON_S)
        assert second.is_alive()
        store.wrapper.let_go()
        for closer in (first, second):
            closer.join(LONG_S)

        assert not first.is_alive()
        assert not second.is_alive()
        assert receipt.wait(timeout=LONG_S).nbytes == 4


def test_a_client_that_the_daemon_knows_no_more_closes(
    store: WrappedStore[ControlledBackend],
) -> None:
    """Its events broke off, so it has lost its session, and has nothing to wait for."""
    with serving(store, drain_from="high_water") as daemon:
        tier = client_of(store, daemon)
        remote(tier).connections.events.shutdown(socket.SHUT_RDWR)
        until(lambda: remote(tier).pending_writes.lost is not None and not daemon._sessions)
        tier.close(timeout=LONG_S)

        assert tier._closed


def test_a_client_whose_blocks_miss_the_deadline_says_so(
    store: WrappedStore[ControlledBackend], daemon: StageDaemon
) -> None:
    """All bytes were copied, and none failed: only timed out."""
    tier = client_of(store, daemon)
    store.wrapper.hold("k")
    receipt = tier.write_block("k", b"data")
    with pytest.raises(kvio.TierNotDrainedError, match="timed out") as caught:
        tier.close(timeout=SOON_S)
    store.wrapper.let_go()

    assert caught.value.keys == ("k",)
    assert receipt.wait(timeout=LONG_S).nbytes == 4
    tier.close(timeout=LONG_S)


def test_a_store_of_this_process_alone_has_no_daemon(daemon: StageDaemon) -> None:
    """Another process would not see what it stores."""
    with (
        kvio.open_store("memory://") as store,
        pytest.raises(kvio.UnsupportedError, match="does not see a memory store"),
    ):
        connect(store, daemon.path, TierOptions(drain_threads=1))


def test_a_client_lists_more_keys_than_a_page_has(tier: StagingTier) -> None:
    """Each once."""
    tier.pause()
    keys = [f"k{number:04}" for number in range(2 * MAX_KEYS + 1)]
    for key in keys:
        tier.write_block(key, b"")
    listed = list(tier.list_keys())
    tier.resume()

    assert sorted(listed) == keys
