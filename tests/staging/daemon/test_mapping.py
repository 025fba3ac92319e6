"""Memory that a daemon has populated is mapped by its clients before they use it, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvio import KiB, MiB
from kvio.staging import StagingTier
from kvio.staging.allocator import Span
from kvio.staging.daemon.client import allocated_spans
from kvio.staging.daemon.server import StageDaemon
from kvio.staging.host import HostMemory
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import ControlledBackend
from tests.staging.daemon.daemons import client_of, open_files, serving, until
from tests.staging.engines import remote
from tests.staging.test_pages import address_of, smaps_of


def mapped_bytes(tier: StagingTier) -> int:
    """Ask the kernel how much of a client's staging memory has page tables."""
    (view,) = remote(tier).memory.views([Span(0, 1)])
    return int(smaps_of(address_of(view))["Rss"].split()[0]) * KiB


def file_bytes(daemon: StageDaemon) -> int:
    """Ask the kernel how many bytes the memory itself has."""
    assert daemon.core.memory.fd is not None
    return os.fstat(daemon.core.memory.fd).st_blocks * 512


def mapped(tier: StagingTier) -> StagingTier:
    """Wait until a client has mapped what it will."""
    mapping = remote(tier).mapping
    assert mapping is not None
    mapping.wait()
    return tier


def test_clients_map_what_a_daemon_has_populated(store: WrappedStore[ControlledBackend]) -> None:
    """All of it, each of them, without a byte of memory more."""
    with serving(store, 8 * MiB, populate=True) as daemon:
        before = file_bytes(daemon)
        with client_of(store, daemon) as one, client_of(store, daemon) as two:
            assert [mapped_bytes(mapped(tier)) for tier in (one, two)] == [8 * MiB, 8 * MiB]
            assert file_bytes(daemon) == before == 8 * MiB


def test_huge_pages_are_had_where_the_machine_gives_them(
    store: WrappedStore[ControlledBackend],
) -> None:
    """By the daemon and its clients alike: both ask."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not switch.exists() or not {"[advise]", "[always]"} & set(switch.read_text().split()):
        pytest.skip("this system gives no huge pages to shared memory (shmem_enabled)")
    with serving(store, 8 * MiB, populate=True) as daemon, client_of(store, daemon) as tier:
        for memory in (daemon.core.memory, remote(mapped(tier)).memory):
            (view,) = memory.views([Span(0, 1)])
            assert smaps_of(address_of(view))["ShmemPmdMapped"] != "0 kB"


def test_clients_leave_alone_what_is_not_populated(store: WrappedStore[ControlledBackend]) -> None:
    """Memory that comes as it is used is not taken by who only connects."""
    with serving(store, 8 * MiB) as daemon, client_of(store, daemon) as tier:
        assert remote(tier).mapping is None
        assert (mapped_bytes(tier), file_bytes(daemon)) == (0, 0)


def test_memory_that_was_given_back_is_not_taken_again(
    store: WrappedStore[ControlledBackend],
) -> None:
    """A client that comes after a shrink maps what is left."""
    with serving(store, 8 * MiB, populate=True) as daemon, client_of(store, daemon) as one:
        assert mapped(one).shrink(5 * MiB) == 5 * MiB
        with client_of(store, daemon) as two:
            assert mapped_bytes(mapped(two)) == 3 * MiB
        assert file_bytes(daemon) == 3 * MiB
        assert one.grow(5 * MiB) == 5 * MiB


def test_holes_are_looked_for_while_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that goes back between two steps stays where it went, whatever was seen before."""
    monkeypatch.setattr("kvio.staging.daemon.client.STEP_BYTES", MiB)
    memory = HostMemory(8 * MiB, shared=True, populate=True)
    assert memory.fd is not None
    steps = allocated_spans(memory.fd, memory.capacity_bytes)
    first = [next(steps), next(steps)]
    memory.release([Span(4 * MiB, 3 * MiB)])

    assert first == [Span(0, MiB), Span(MiB, MiB)]
    assert list(steps) == [Span(2 * MiB, MiB), Span(3 * MiB, MiB), Span(7 * MiB, MiB)]


def test_a_client_that_leaves_at_once_leaves_nothing(
    store: WrappedStore[ControlledBackend],
) -> None:
    """No descriptor of the memory stays open, and nothing maps what is closed."""
    with serving(store, 8 * MiB, populate=True) as daemon:
        client_of(store, daemon).close()
        until(lambda: not daemon._connections)
        before = open_files()
        for _ in range(5):
            tier = client_of(store, daemon)
            tier.close()
            mapping = remote(tier).mapping
            assert mapping is not None
            assert not mapping._thread.is_alive()
        until(lambda: open_files() <= before)


def test_bytes_are_those_of_the_daemon(store: WrappedStore[ControlledBackend]) -> None:
    """Mapping changes none of them."""
    with serving(store, MiB, populate=True) as daemon, client_of(store, daemon) as one:
        one.pause()
        one.write_block("k", b"\7" * 100_000)
        with client_of(store, daemon) as two:
            assert bytes(mapped(two).read_block("k")) == b"\7" * 100_000
        one.resume()
