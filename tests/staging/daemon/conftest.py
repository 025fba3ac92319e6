"""The rules of a tier are tested on a daemon's client by the same tests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest

import kvio
from kvio.staging import StagingTier
from kvio.staging.daemon.connection_pool import ConnectionPool
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.daemon.sockets import name_of
from kvio.testing.fakes import WrappedStore
from kvio.types import Capabilities
from tests.staging import (
    test_files,
    test_files_reading,
    test_tier,
    test_tier_failures,
    test_tier_full,
    test_tier_promises,
    test_tier_verbs,
)
from tests.staging.controlled import ControlledBackend, open_controlled
from tests.staging.daemon import daemons
from tests.staging.daemon.daemons import client_of, serving


def _shared(backend: ControlledBackend) -> Capabilities:
    return dataclasses.replace(backend.inner.capabilities, shared=True)


@pytest.fixture(autouse=True)
def by_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests of tiers stage by a daemon, over a backend that claims to be seen by all."""
    monkeypatch.setattr(ControlledBackend, "capabilities", property(_shared))
    for module in (
        *(test_files, test_files_reading),
        *(test_tier, test_tier_failures, test_tier_full, test_tier_promises),
        test_tier_verbs,
    ):
        monkeypatch.setattr(module, "staged", daemons.staged)


@pytest.fixture
def store() -> Iterator[WrappedStore[ControlledBackend]]:
    """A store whose writes can be held."""
    with open_controlled(level="durable") as store:
        yield store
        store.wrapper.let_go()


@pytest.fixture
def daemon(store: WrappedStore[ControlledBackend]) -> Iterator[StageDaemon]:
    """A daemon of 16 pages that does not retry."""
    with serving(store, 16 * 4096, retries=0) as daemon:
        yield daemon
        store.wrapper.let_go()


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend], daemon: StageDaemon) -> Iterator[StagingTier]:
    """A client."""
    with client_of(store, daemon) as tier:
        yield tier
        store.wrapper.let_go()


@pytest.fixture
def other(store: WrappedStore[ControlledBackend], daemon: StageDaemon) -> Iterator[StagingTier]:
    """Another client of the same daemon."""
    with client_of(store, daemon) as tier:
        yield tier


@pytest.fixture
def lines(daemon: StageDaemon, store: kvio.Store) -> Iterator[ConnectionPool]:
    """Connections of a client that asks what it likes."""
    lines = ConnectionPool(daemon.path, name_of(store.url))
    os.close(lines.fd)
    yield lines
    lines.close()
    lines.events.close()
