"""Accept a write: allocate memory, copy the bytes, and commit it; or write to the store."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvio import buffers, threads
from kvio.buffers import Data
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    CorruptBlockError,
    KvioError,
    StorageFullError,
    StorageTimeoutError,
    StoreClosedError,
)
from kvio.store import Store
from kvio.types import BlockStatus, IfExists, check_keys, status_of
from kvio.wrappers.staging import failures
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.ledger import Ledger
from kvio.wrappers.staging.pending import State
from kvio.wrappers.staging.pieces import flat_parts
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.receipts import StagedReceipt
from kvio.wrappers.staging.results import StagedResult
from kvio.wrappers.staging.room import Verdict

if TYPE_CHECKING:
    from kvio.wrappers.staging.memory import StagingMemory

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
            return self._ledger.lanes.newest(key) is not None

    def _make_room_locked(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:
        """Allocate memory, waiting for it if ``when_full`` says so; None: write to the store."""
        room = self._ledger.room
        if not room.fits(nbytes):
            return None
        spans = room.take(nbytes)
        if spans is not None or self._when_full == "pass_through":
            return spans
        if self._when_full == "raise":
            raise self._full(nbytes, "it is full")
        answer = self._wait_locked(nbytes, deadline)
        if answer is Verdict.HOPELESS:
            raise self._full(nbytes, "blocks that failed are in the way")
        return None if isinstance(answer, Verdict) else answer

    def take_for_file(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:
        """Allocate memory of an open file, which keeps it until `Room.unhold`; None: there is none.

        Waits, where that is the rule, for what drains will free, but never for another file: each
        of the two might wait for the other's room and keep its own.
        """
        ledger, room = self._ledger, self._ledger.room
        ledger.gate.check_fork()
        with ledger.lock:
            ledger.check_open_locked()
            answer: Sequence[Span] | Verdict | None = room.take(nbytes)
            if answer is None and self._when_full == "block":
                answer = self._wait_locked(nbytes, deadline)
            if answer is None or isinstance(answer, Verdict):
                return None
            room.hold(nbytes)
            return answer

    def _wait_locked(self, nbytes: int, deadline: float | None) -> Sequence[Span] | Verdict:
        room = self._ledger.room
        ticket = room.queue(nbytes)
        self._ledger.work.notify_all()
        try:
            threads.wait_for(ticket.turn, lambda: ticket.answer is not None, left(deadline))
        except BaseException:  # an interrupt: memory that is granted later is not used
            room.give_up(ticket)
            raise
        if self._ledger.closing or ticket.answer is Verdict.CLOSING:
            room.give_up(ticket)
            raise StoreClosedError("the staging tier closed before there was room")
        if ticket.answer is None:
            room.give_up(ticket)
            text = f"no room for {nbytes} bytes in the staging tier in time"
            raise StorageTimeoutError(text, errno=errno.ETIMEDOUT)
        return ticket.answer

    def _full(self, nbytes: int, why: str) -> StorageFullError:
        failed = [entry.key for entry in self._ledger.failed.values()]
        text = f"no room for {nbytes} bytes in the staging tier: {why}"
        if failed:
            text += f"; failed, see retry_failed() and discard(): {failures.name_keys(failed)}"
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
            lane, before = ledger.claim(key, deadline, after_races=True)
            try:
                with ledger.lock:
                    answer = ledger.answer_locked(key, nbytes, if_exists)
                    newest = lane.newest
                if answer is not None:
                    return answer
                staged = newest is not None and newest.state is not State.FAILED
                receipt = self._store.write_block(
                    key,
                    [part if isinstance(part, memoryview) else part.cpu() for part in parts],
                    if_exists="replace" if staged else if_exists,
                    timeout=left(deadline),
                )
                return ledger.wrote_through(lane, receipt, before)
            finally:
                ledger.unclaim(lane)
        finally:
            ledger.cancel_fill(())

    def delete(self, key: str, *, timeout: float | None) -> bool:
        """Remove a block from the tier and the store, after a running drain."""
        deadline = deadline_of(timeout)
        lane, before = self._ledger.claim(key, deadline, after_races=False)
        try:
            stored = self._store.delete_block(key, timeout=left(deadline))
            staged = self._ledger.deleted(lane, before)
        finally:
            self._ledger.unclaim(lane)
        return stored or staged
