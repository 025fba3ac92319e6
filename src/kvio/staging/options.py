"""The options of a staging tier, and its counters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from kvio.abc import Backend
from kvio.core.store import Store
from kvio.errors import ConfigError
from kvio.staging.ledger import Ledger
from kvio.staging.writing import WhenFull

DrainFrom: TypeAlias = Literal["accept", "high_water"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The checked options of `stage`; each drain thread calls *on_start* first.

    Raises:
        ConfigError: an option is wrong.
    """

    drain_threads: int
    drain_nice: int = 10
    on_start: Callable[[int], None] | None = None
    high_water: float = 0.9
    low_water: float = 0.7
    when_full: WhenFull = "block"
    drain_from: DrainFrom = "accept"
    retries: int = 3
    checksum: bool = True
    timeout: float | None = None
    close_store: bool = False
    spool: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low_water <= self.high_water <= 1:
            marks = f"low_water={self.low_water} and high_water={self.high_water}"
            raise ConfigError(f"{marks} must be fractions, the low one no higher")
        _check_word("when_full", self.when_full, get_args(WhenFull))
        _check_word("drain_from", self.drain_from, get_args(DrainFrom))
        if self.drain_threads < 1:
            raise ConfigError(f"drain_threads must be at least 1, not {self.drain_threads}")
        if not 0 <= self.drain_nice <= 19:
            raise ConfigError(f"drain_nice must be 0 to 19, not {self.drain_nice}")
        if self.retries < 0:
            raise ConfigError(f"retries must be at least 0, not {self.retries}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, not {self.timeout}")
        if self.spool is not None and not os.path.isdir(self.spool):
            raise ConfigError(f"spool={self.spool!r} is not a directory")


def default_drain_threads(store: Store) -> int:
    """Return how many threads drain to a store: one per processor, at most its I/O threads.

    More than there are processors store no faster to files and hold writers up. A backend that
    sends one request per block waits for its answers, not for a processor: all I/O threads.
    """
    if type(store._backend).write_blocks is Backend.write_blocks:  # noqa: SLF001
        return store.io_threads
    return min(store.io_threads, len(os.sched_getaffinity(0)))


def _check_word(name: str, given: str, words: tuple[str, ...]) -> None:
    if given not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, not {given!r}")


# --------------------------------------------------------------------------------------------------
# The counters of a tier.


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts since a tier was made, and its present content.

    Attributes:
        memory: the kind of staging memory.
        capacity_bytes, used_bytes: staging memory, in whole pages.
        high_water_bytes, low_water_bytes: the marks, in bytes of the present capacity.
        staged_blocks: blocks in staging memory, failed ones included.
        running_blocks: those the store is writing now.
        failed_blocks, failed_bytes: those that failed for good and are still staged.
        open_bytes: memory of open files and readers, in whole pages.
        waiting_writers: writers that wait for room.
        accepted, accepted_bytes: accepted writes, with those that passed through or were kept.
        kept: writes with ``if_exists="keep"`` for which a staged block was kept.
        absorbed: staged blocks that a newer write or a deletion replaced before they were stored.
        drained, drained_bytes: blocks written from staging memory to the store.
        passed_through: writes directly to the store.
        retries: failed drains that were retried.
        failures: writes that failed for good.
        sequence, durable_sequence: see `StagingTier.durable_sequence`.
        paused: draining is paused.
    """

    memory: str
    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int
    low_water_bytes: int
    staged_blocks: int
    running_blocks: int
    failed_blocks: int
    failed_bytes: int
    open_bytes: int
    waiting_writers: int
    accepted: int
    accepted_bytes: int
    kept: int
    absorbed: int
    drained: int
    drained_bytes: int
    passed_through: int
    retries: int
    failures: int
    sequence: int
    durable_sequence: int
    paused: bool


def take_stock(
    ledger: Ledger, *, memory: str, marks: tuple[float, float], paused: bool
) -> TierStats:
    """Return all counts of a tier; the caller has its lock."""
    capacity, counts = ledger.allocator.capacity_bytes, ledger.counts
    return TierStats(
        memory=memory,
        capacity_bytes=capacity,
        used_bytes=ledger.allocator.used_bytes,
        high_water_bytes=int(marks[0] * capacity),
        low_water_bytes=int(marks[1] * capacity),
        staged_blocks=sum(1 for _ in ledger.key_queues.entries()),
        running_blocks=ledger.key_queues.running,
        failed_blocks=len(ledger.failed),
        failed_bytes=sum(entry.nbytes for entry in ledger.failed.values()),
        open_bytes=ledger.allocator.open_bytes,
        waiting_writers=ledger.allocator.waiting,
        accepted=counts.accepted,
        accepted_bytes=counts.accepted_bytes,
        kept=counts.kept,
        absorbed=counts.absorbed,
        drained=counts.drained,
        drained_bytes=counts.drained_bytes,
        passed_through=counts.passed_through,
        retries=counts.retries,
        failures=counts.failed,
        sequence=ledger.progress.sequence,
        durable_sequence=ledger.progress.durable_sequence,
        paused=paused,
    )
