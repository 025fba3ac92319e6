"""The counters of a tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvio.wrappers.staging.ledger import Ledger


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
    capacity, counts = ledger.room.capacity_bytes, ledger.counts
    return TierStats(
        memory=memory,
        capacity_bytes=capacity,
        used_bytes=ledger.room.used_bytes,
        high_water_bytes=int(marks[0] * capacity),
        low_water_bytes=int(marks[1] * capacity),
        staged_blocks=sum(1 for _ in ledger.lanes.entries()),
        running_blocks=ledger.lanes.running,
        failed_blocks=len(ledger.failed),
        failed_bytes=sum(entry.nbytes for entry in ledger.failed.values()),
        open_bytes=ledger.room.open_bytes,
        waiting_writers=ledger.room.waiting,
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
