"""Accept a write: allocate memory, copy the bytes, and commit it; or write to the store."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from kvio.core import buffers, threads
from kvio.core.buffers import Data
from kvio.core.store import Store
from kvio.core.threads import Future
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    ConfigError,
    CorruptBlockError,
    KvioError,
    StorageFullError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
)
from kvio.staging import receipts
from kvio.staging.allocator import Span, Verdict
from kvio.staging.host import flat_parts
from kvio.staging.ledger import Ledger
from kvio.staging.pending import State, deadline_of, left
from kvio.staging.reading import StagedReads
from kvio.staging.receipts import StagedReceipt
from kvio.types import BlockStatus, IfExists, Level, Receipt, check_keys, status_of

if TYPE_CHECKING:
    from kvio.staging.memory import StagingMemory


class StagedResult(NamedTuple):
    """The outcome for one block of a staged batch.

    Attributes:
        key: the block's name.
        status: ``ok`` if it was accepted.
        nbytes: its length if it was accepted.
        error: the error that a call for this block alone would have raised, or None.
        receipt: the receipt if it was accepted, else None.
    """

    key: str
    status: BlockStatus
    nbytes: int = 0
    error: KvioError | None = None
    receipt: StagedReceipt | None = None

    @property
    def ok(self) -> bool:
        """The block was accepted."""
        return self.status is BlockStatus.OK


# --------------------------------------------------------------------------------------------------
# Operations on several writes: barriers, verification, and deletion after a durable write.


def barrier(ledger: Ledger, level: Level | str | None, *, timeout: float | None) -> None:
    """Wait for every write so far; see `StagingTier.barrier`."""
    ledger.tier_state.check_fork()
    if ledger.tier_state.check_level(level) is Level.ACCEPTED:
        return
    deadline, progress = deadline_of(timeout), ledger.progress
    with ledger.lock:
        goal = progress.sequence
        ledger.work.notify_all()
        reached = progress.wait(goal, lambda: progress.passed(goal), left(deadline))
        failed, ledger.unreported = ledger.unreported, []
    if failed:
        raise receipts.combine(failed)
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


WhenFull: TypeAlias = Literal["block", "raise", "pass_through"]


class StagedWrites:
    """The writes and deletions of a tier."""

    def __init__(
        self,
        ledger: Ledger,
        memory: StagingMemory,
        store: Store,
        *,
        when_full: WhenFull,
        checksum: bool,
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._store = store
        self._when_full = when_full
        self._checksum = checksum

    def write(
        self, key: str, data: Data, *, if_exists: IfExists, timeout: float | None
    ) -> StagedReceipt:
        """Stage a block, keep a staged one, or write to the store."""
        ledger, deadline = self._ledger, deadline_of(timeout)
        parts = flat_parts(data)
        nbytes = buffers.total_bytes(parts)
        if if_exists == "error":
            self.look(key, deadline)
        with ledger.lock:
            ledger.check_open_locked()
            answer = ledger.answer_locked(key, nbytes, if_exists)
            if answer is not None:
                return answer
            spans = self._make_room_locked(nbytes, deadline)
            ledger.filling += 1
        if spans is None:
            return self._write_through(key, parts, nbytes, if_exists, deadline)
        try:
            filled = self._memory.fill(spans, parts, checksum=self._checksum)
        except BaseException:
            ledger.cancel_fill(spans)
            raise
        try:
            return ledger.commit(
                key, spans, nbytes=nbytes, checksum=filled.crc32c, if_exists=if_exists
            )
        finally:
            ledger.deliver()

    def write_all(
        self, items: Iterable[tuple[str, Data]], *, if_exists: IfExists, timeout: float | None
    ) -> list[StagedResult]:
        """Stage (key, data) pairs one after the other; return one result per block, in order."""
        blocks, deadline = list(items), deadline_of(timeout)
        check_keys([key for key, _ in blocks])
        results = []
        for key, data in blocks:
            try:
                receipt = self.write(key, data, if_exists=if_exists, timeout=left(deadline))
            except KvioError as exc:
                results.append(StagedResult(key, status_of(exc), 0, exc))
            else:
                results.append(StagedResult(key, BlockStatus.OK, receipt.nbytes, None, receipt))
        return results

    def look(self, key: str, deadline: float | None) -> None:
        """Refuse a key that is staged or stored; what is stored in pieces, its drain will judge.

        In this order: what is drained while one looks is in the store by then.

        Raises:
            BlockExistsError: it is.
        """
        if self._is_staged(key):
            raise BlockExistsError(f"block {key!r} exists: it is staged", key=key)
        try:
            self._store.stat_block(key, timeout=left(deadline))
        except (BlockNotFoundError, CorruptBlockError):
            return
        raise BlockExistsError(f"block {key!r} exists", key=key)

    def _is_staged(self, key: str) -> bool:
        with self._ledger.lock:
            return self._ledger.key_queues.newest(key) is not None

    def _make_room_locked(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:
        """Allocate memory, waiting for it if ``when_full`` says so; None: write to the store."""
        allocator = self._ledger.allocator
        if not allocator.fits(nbytes):
            return None
        spans = allocator.reserve(nbytes)
        if spans is not None or self._when_full == "pass_through":
            return spans
        if self._when_full == "raise":
            raise self._full(nbytes, "it is full")
        answer = self._wait_locked(nbytes, deadline)
        if answer is Verdict.FAILED_BLOCKS:
            raise self._full(nbytes, "blocks that failed are in the way")
        return None if isinstance(answer, Verdict) else answer

    def take_for_file(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:
        """Allocate memory that an open file keeps until `Allocator.remove_open`, or None.

        Waits, where that is the rule, for what drains will free, but never for another file: each
        of the two might wait for the other's room and keep its own.
        """
        ledger, allocator = self._ledger, self._ledger.allocator
        ledger.tier_state.check_fork()
        with ledger.lock:
            ledger.check_open_locked()
            answer: Sequence[Span] | Verdict | None = allocator.reserve(nbytes)
            if answer is None and self._when_full == "block":
                answer = self._wait_locked(nbytes, deadline)
            if answer is None or isinstance(answer, Verdict):
                return None
            allocator.add_open(nbytes)
            return answer

    def _wait_locked(self, nbytes: int, deadline: float | None) -> Sequence[Span] | Verdict:
        allocator = self._ledger.allocator
        waiter = allocator.enqueue(nbytes)
        self._ledger.work.notify_all()
        try:
            threads.wait_for(waiter.ready, lambda: waiter.answer is not None, left(deadline))
        except BaseException:  # an interrupt: memory that is granted later is not used
            allocator.cancel(waiter)
            raise
        if self._ledger.closing or waiter.answer is Verdict.CLOSING:
            allocator.cancel(waiter)
            raise StoreClosedError("the staging tier closed before there was room")
        if waiter.answer is None:
            allocator.cancel(waiter)
            text = f"no room for {nbytes} bytes in the staging tier before the deadline"
            raise StorageTimeoutError(text, errno=errno.ETIMEDOUT)
        return waiter.answer

    def _full(self, nbytes: int, why: str) -> StorageFullError:
        failed = [entry.key for entry in self._ledger.failed.values()]
        text = f"no room for {nbytes} bytes in the staging tier: {why}"
        if failed:
            text += f"; failed, see retry_failed() and discard(): {receipts.name_keys(failed)}"
        return StorageFullError(text, errno=errno.ENOSPC)

    def _write_through(
        self,
        key: str,
        parts: Sequence[Any],
        nbytes: int,
        if_exists: IfExists,
        deadline: float | None,
    ) -> StagedReceipt:
        """Write to the store after older entries, absorbing those whose drain has not begun."""
        ledger = self._ledger
        try:
            key_queue, before = ledger.claim(key, deadline, after_races=True)
            try:
                with ledger.lock:
                    answer = ledger.answer_locked(key, nbytes, if_exists)
                    newest = key_queue.newest
                if answer is not None:
                    return answer
                staged = newest is not None and newest.state is not State.FAILED
                receipt = self._store.write_block(
                    key,
                    [part if isinstance(part, memoryview) else part.cpu() for part in parts],
                    if_exists="replace" if staged else if_exists,
                    timeout=left(deadline),
                )
                return ledger.wrote_through(key_queue, receipt, before)
            finally:
                ledger.unclaim(key_queue)
        finally:
            ledger.cancel_fill(())

    def delete(self, key: str, *, timeout: float | None) -> bool:
        """Remove a block from the tier and the store, after a running drain."""
        deadline = deadline_of(timeout)
        key_queue, before = self._ledger.claim(key, deadline, after_races=False)
        try:
            stored = self._store.delete_block(key, timeout=left(deadline))
            staged = self._ledger.deleted(key_queue, before)
        finally:
            self._ledger.unclaim(key_queue)
        return stored or staged
