"""Accept a write: allocate memory, copy the bytes, and commit it; or write to the store."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from kvio._native import copy_small, flat_nbytes
from kvio.core import batches, buffers, threads
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
from kvio.staging.host import HostMemory, flat_parts
from kvio.staging.ledger import Ledger
from kvio.staging.pending import KeyQueue, State, deadline_of, left
from kvio.staging.reading import StagedReads
from kvio.staging.receipts import StagedReceipt
from kvio.types import (
    BlockResult,
    BlockStatus,
    Cancellation,
    IfExists,
    KiB,
    Level,
    Receipt,
    check_keys,
    status_of,
)

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
        failed = ledger.failures_locked(goal)
    if failed:
        raise receipts.combine(failed)
    if not reached:
        text = f"{progress.unsettled} staged block(s) were not stored before the deadline"
        raise StorageTimeoutError(text)


def verify(reads: StagedReads, receipt: StagedReceipt, *, timeout: float | None) -> None:
    """Compare the stored bytes with the accepted ones; see `StagingTier.verify`."""
    stored = receipt.wait(timeout=timeout)
    other = stored.existed or receipt.checksum is None  # what `keep` left has its own checksum
    expected = stored.checksum if other else receipt.checksum
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


def check_wanted(key: str, cancel: Cancellation | None) -> None:
    """Refuse to accept a block that the caller no longer waits for.

    Raises:
        StorageTimeoutError: it is so.
    """
    if cancel is not None and cancel.requested:
        raise StorageTimeoutError(f"block {key!r} was not accepted before the deadline", key=key)


#: To copy as many takes about 10 us.
_SMALL_BYTES: Final = 256 * KiB

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
        #: Whether bytes are copied by a processor, as `quick` does.
        self._plain = type(memory) is HostMemory

    def quick(self, key: str, data: object) -> StagedReceipt | None:
        """Stage a small block in one step, in the place of others; None: nothing was done.

        It is for one flat buffer, where there is room and nothing has to be waited for. While the
        bytes are copied no other thread runs, which for so few of them is less than it takes to
        give way. 64 KiB took 34 us before and 15 us after with paused drains, with running ones 156
        and 28 (docs/staging.md).
        """
        nbytes = flat_nbytes(key, data)
        if nbytes is None or nbytes > _SMALL_BYTES or not self._plain:
            return None
        ledger = self._ledger
        with ledger.lock:
            if ledger.closing or ledger.tier_state.forked:
                return None
            spans = ledger.allocator.reserve(nbytes)
            if spans is None or len(spans) != 1:
                if spans:
                    ledger.allocator.release(spans)
                return None
            try:
                crc = copy_small(self._memory.whole, spans[0][0], data, self._checksum)  # type: ignore[attr-defined]
            except BaseException:
                ledger.allocator.release(spans)
                raise
            return ledger.accept_locked(key, spans, nbytes, crc)

    def write(
        self,
        key: str,
        data: Data,
        *,
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation | None = None,
    ) -> StagedReceipt:
        """Stage a block, keep a staged one, or write to the store.

        What is not accepted when *cancel* is requested is not accepted at all.
        """
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
            spans = self._make_room_locked(nbytes, deadline, cancel)
            ledger.filling += 1
        if spans is None:
            return self._write_through(key, parts, nbytes, if_exists, deadline, cancel)
        try:
            filled = self._memory.fill(spans, parts, checksum=self._checksum)
            check_wanted(key, cancel)
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
        self,
        items: Iterable[tuple[str, Data]],
        *,
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation,
    ) -> list[StagedResult]:
        """Stage (key, data) pairs one after the other; return one result per block, in order.

        After *cancel* is requested no more are staged.
        """
        deadline = deadline_of(timeout)
        blocks = [(key, flat_parts(data)) for key, data in items]
        check_keys([key for key, _ in blocks])
        results: list[StagedResult] = []
        try:
            for key, parts in blocks:
                results.append(self._write_one(key, parts, if_exists, deadline, cancel))
        except BaseException as exc:  # the handler of a signal raised it
            rest = [StagedResult(key, BlockStatus.CANCELLED) for key, _ in blocks[len(results) :]]
            batches.note(exc, [*results, *rest], "accepted")
            raise
        return results

    def _write_one(
        self,
        key: str,
        parts: Data,
        if_exists: IfExists,
        deadline: float | None,
        cancel: Cancellation,
    ) -> StagedResult:
        if cancel.requested:
            return StagedResult(key, BlockStatus.CANCELLED)
        try:
            receipt = self.write(
                key, parts, if_exists=if_exists, timeout=left(deadline), cancel=cancel
            )
        except KvioError as exc:
            return StagedResult(key, status_of(exc), 0, exc)
        return StagedResult(key, BlockStatus.OK, receipt.nbytes, None, receipt)

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

    def _make_room_locked(
        self, nbytes: int, deadline: float | None, cancel: Cancellation | None = None
    ) -> Sequence[Span] | None:
        """Allocate memory, waiting for it if ``when_full`` says so; None: write to the store."""
        allocator = self._ledger.allocator
        if not allocator.fits(nbytes):
            return None
        spans = allocator.reserve(nbytes)
        if spans is not None or self._when_full == "pass_through":
            return spans
        if self._when_full == "raise":
            raise self._full(nbytes, "it is full")
        answer = self._wait_locked(nbytes, deadline, cancel)
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

    def _wait_locked(
        self, nbytes: int, deadline: float | None, cancel: Cancellation | None = None
    ) -> Sequence[Span] | Verdict:
        allocator, lock = self._ledger.allocator, self._ledger.lock
        waiter = allocator.enqueue(nbytes)
        self._ledger.work.notify_all()

        def wake() -> None:
            with lock:
                waiter.ready.notify()

        def ended() -> bool:
            return waiter.answer is not None or (cancel is not None and cancel.requested)

        if cancel is not None:
            cancel.on_request(wake)
        try:
            threads.wait_for(waiter.ready, ended, left(deadline))
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
        cancel: Cancellation | None,
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
                receipt = self._write_to_store(
                    key, parts, "replace" if staged else if_exists, deadline, cancel
                )
                return ledger.wrote_through(key_queue, receipt, before)
            finally:
                ledger.unclaim(key_queue)
        finally:
            ledger.cancel_fill(())

    def _write_to_store(
        self,
        key: str,
        parts: Sequence[Any],
        if_exists: IfExists,
        deadline: float | None,
        cancel: Cancellation | None,
    ) -> Receipt:
        """Write past the tier; nothing is published once *cancel* was requested."""
        store, timeout = self._store, left(deadline)
        data = [part if isinstance(part, memoryview) else part.cpu() for part in parts]
        if cancel is None:
            return store.write_block(key, data, if_exists=if_exists, timeout=timeout)
        future = store.submit_write(key, data, if_exists=if_exists, timeout=timeout)

        def withdraw() -> None:
            future.cancel()

        cancel.on_request(withdraw)
        try:
            return future.result()
        except futures.CancelledError:
            check_wanted(key, cancel)
            raise

    def delete_all(self, keys: Sequence[str], *, timeout: float | None) -> list[BlockResult]:
        """Remove blocks as `Store.delete_blocks` does, after running drains of them."""
        ledger, deadline = self._ledger, deadline_of(timeout)
        claims: dict[str, tuple[KeyQueue, int]] = {}
        found: dict[str, BlockResult] = {}
        try:
            for key in sorted(set(keys)):  # in one order: two calls never wait for each other
                try:
                    claims[key] = ledger.claim(key, deadline, after_races=False)
                except StorageTimeoutError as exc:
                    found[key] = BlockResult(key, BlockStatus.TIMEOUT, 0, exc)
            for result in self._store.delete_blocks(claims, timeout=left(deadline)):
                if result.error is None and ledger.deleted(*claims[result.key]):
                    result = BlockResult(result.key, BlockStatus.OK)
                found[result.key] = result
        finally:
            for key_queue, _ in claims.values():
                ledger.unclaim(key_queue)
        return [found.pop(key, BlockResult(key, BlockStatus.MISSING)) for key in keys]

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
