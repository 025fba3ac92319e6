"""Operations on several writes: barriers, verification, and deletion after a durable write."""

from __future__ import annotations

from functools import partial

from kvio.errors import (
    ConfigError,
    CorruptBlockError,
    StorageTimeoutError,
    UnsupportedError,
)
from kvio.threads import Future
from kvio.types import Level, Receipt
from kvio.wrappers.staging import failures
from kvio.wrappers.staging.ledger import Ledger
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.reading import StagedReads
from kvio.wrappers.staging.receipts import StagedReceipt
from kvio.wrappers.staging.writing import StagedWrites


def barrier(ledger: Ledger, level: Level | str | None, *, timeout: float | None) -> None:
    """Wait for every write so far; see `StagingTier.barrier`."""
    ledger.gate.check_fork()
    if ledger.gate.check_level(level) is Level.ACCEPTED:
        return
    deadline, progress = deadline_of(timeout), ledger.progress
    with ledger.lock:
        goal = progress.sequence
        ledger.work.notify_all()
        reached = progress.wait(goal, lambda: progress.passed(goal), left(deadline))
        failed, ledger.unreported = ledger.unreported, []
    if failed:
        raise failures.combine(failed)
    if not reached:
        text = f"{progress.unsettled} staged block(s) were not stored before the deadline"
        raise StorageTimeoutError(text)


def verify(reads: StagedReads, receipt: StagedReceipt, *, timeout: float | None) -> None:
    """Compare the stored bytes with the accepted ones; see `StagingTier.verify`."""
    stored = receipt.wait(timeout=timeout)
    expected = stored.checksum if receipt.checksum is None else receipt.checksum
    if receipt.absorbed or expected is None:
        why = "a newer write absorbed it" if receipt.absorbed else "it has no checksum"
        raise UnsupportedError(f"block {receipt.key!r} cannot be verified: {why}")
    found = reads.stored_checksum(receipt.key, receipt.nbytes, timeout=timeout)
    if found != expected:
        reads.note_damage(receipt.key)
        text = f"the stored bytes of block {receipt.key!r} are not those accepted"
        raise CorruptBlockError(text, key=receipt.key)


def delete_when_durable(
    writes: StagedWrites, old: str, new: StagedReceipt, *, timeout: float | None
) -> Future[bool]:
    """Delete a block when another is durable; see `StagingTier.replace_when_durable`."""
    if old == new.key:
        raise ConfigError(f"block {old!r} cannot be its own predecessor")
    deleted: Future[bool] = Future()
    deleted.set_running_or_notify_cancel()
    new.as_future().add_done_callback(partial(_delete, writes, old, timeout, deleted))
    return deleted


def _delete(
    writes: StagedWrites,
    old: str,
    timeout: float | None,
    deleted: Future[bool],
    stored: Future[Receipt],
) -> None:
    error = stored.exception()
    if error is None and stored.result().level < Level.DURABLE:
        error = UnsupportedError(f"block {stored.result().key!r} is not durable")
    if error is not None:
        deleted.set_exception(error)
        return
    try:
        gone = writes.delete(old, timeout=timeout)
    except Exception as exc:  # noqa: BLE001  # raised to the caller that waits for the future
        deleted.set_exception(exc)
    else:
        deleted.set_result(gone)
