"""The staging tier: write-back in front of any store, with a receipt for every write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvio.core.store import Store
from kvio.staging.engine import LocalEngine
from kvio.staging.files import StagedFile, StagedReader
from kvio.staging.options import DrainFrom, TierOptions, TierStats, default_drain_threads
from kvio.staging.receipts import StagedReceipt
from kvio.staging.tier import StagingTier
from kvio.staging.writing import StagedResult, WhenFull
from kvio.url import parse_size

if TYPE_CHECKING:
    from kvio.placement import Placement

__all__ = [
    "StagedFile",
    "StagedReader",
    "StagedReceipt",
    "StagedResult",
    "StagingTier",
    "TierStats",
    "stage",
]


def stage(
    store: Store,
    capacity: int | str = "8GiB",
    memory: str = "host",
    *,
    high_water: float = 0.9,
    low_water: float = 0.7,
    when_full: WhenFull = "block",
    drain_from: DrainFrom = "accept",
    drain_threads: int | None = None,
    drain_nice: int = 10,
    retries: int = 3,
    checksum: bool = True,
    timeout: float | None = None,
    close_store: bool = False,
    huge_pages: bool = True,
    numa_node: int | None = None,
    placement: Placement | None = None,
    populate: bool | None = None,
    spool: str | os.PathLike[str] | None = None,
    daemon: str | None = None,
) -> StagingTier:
    """Put staging memory in front of a store: writes return when their bytes are copied.

    Args:
        store: what drains write to; it stays open behind the tier.
        capacity: bytes of staging memory, never exceeded; a number, or text such as ``"8GiB"``.
        memory: ``"host"``, ``"pinned"``, or a torch device such as ``"cuda:0"``.
        high_water: fraction of the capacity at which ``drain_from="high_water"`` begins to drain.
        low_water: fraction at which it stops.
        when_full: a writer whose bytes do not fit waits for room in turn (``block``), gets
            `StorageFullError` (``raise``), or writes directly to the store (``pass_through``).
        drain_from: ``accept``: drain at once; ``high_water``: only from that fraction on, or when
            a caller waits, so that more overwrites are absorbed.
        drain_threads: number of concurrent writes to the store; default: one per processor, at most
            the store's I/O threads, and all of these where it sends a request per block.
        drain_nice: nice value of these threads (0 to 19), so that writers and the rest of the
            program run first.
        retries: how often a failed drain is retried before its write has failed for good.
        checksum: compute a checksum (CRC32C) while bytes are copied.
        timeout: seconds for calls and drains without a timeout of their own; None: no limit.
        close_store: closing the tier closes the store.
        huge_pages: ask for huge pages of host memory.
        numa_node: NUMA node of host memory; None: that of *placement*, else the system's choice.
        placement: a `kvio.placement.Placement`: processors for drain threads, near the store's
            device or a GPU, and with ``memory="bind"`` or ``"local"`` the node of host memory.
        populate: allocate all pages of host memory now, or never before the first write to each
            (False); None: on a thread meanwhile, as long as a 16th of the RAM stays free.
        spool: a directory on disk for open files that do not fit into the tier; without one they
            fail with `StorageFullError`.
        daemon: the socket of a ``kvio stage-daemon`` for the same store: its memory is used, and
            accepted writes are stored even if this process is killed. Of the other options only
            *when_full*, *timeout* and *close_store* are used; the rest are the daemon's.

    Raises:
        ConfigError: an option is wrong, or the daemon writes to another store.
        AccessDeniedError: the daemon belongs to another user.
        UnsupportedError, MissingDependencyError: this machine has no such memory.
        OutOfMemoryError: there is not enough memory.
        StorageError: no daemon listens on the socket.
    """
    from kvio.staging.memory import open_memory  # imported late: few programs use it

    threads = default_drain_threads(store) if drain_threads is None else drain_threads
    on_start = None
    if placement is not None:
        from kvio.placement import memory_node, thread_placer

        on_start = thread_placer(placement, max(threads, 1))
        if numa_node is None and placement.memory is not None:
            numa_node = memory_node(placement)
    options = TierOptions(
        drain_threads=threads,
        on_start=on_start,
        drain_nice=drain_nice,
        high_water=high_water,
        low_water=low_water,
        when_full=when_full,
        drain_from=drain_from,
        retries=retries,
        checksum=checksum,
        timeout=timeout,
        close_store=close_store,
        spool=None if spool is None else os.fspath(spool),
    )
    if daemon is not None:
        from kvio.staging.daemon.client import connect

        return StagingTier(store, connect(store, daemon, options), options)
    staging = open_memory(
        memory,
        parse_size(capacity),
        huge_pages=huge_pages,
        numa_node=numa_node,
        populate=populate,
    )
    return StagingTier(store, LocalEngine(store, staging, options), options)
