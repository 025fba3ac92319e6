"""The staging tier: writes return when their bytes are copied, and are drained to a store."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, Never, Self, overload

from kvio.core import buffers, lifetime, reads
from kvio.core.buffers import Data
from kvio.core.calls import Calls, Pending, Settings
from kvio.core.store import Store
from kvio.errors import (
    ConfigError,
    StorageError,
    StorageTimeoutError,
    TierNotDrainedError,
    UnsupportedError,
)
from kvio.staging import receipts, writing
from kvio.staging.engine import TierEngine
from kvio.staging.files import StagedFile, StagedReader, open_block
from kvio.staging.host import flat_parts
from kvio.staging.options import TierOptions, TierStats
from kvio.staging.pending import deadline_of, left
from kvio.staging.reading import Consistency
from kvio.staging.receipts import StagedReceipt
from kvio.staging.writing import StagedResult
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    IfExists,
    Level,
    check_if_exists,
    check_key,
    check_keys,
)

_NOTES: Final = (
    "a write is accepted when its bytes are copied; its receipt says when it is stored, and if "
    "if_exists='error' was first",
    "other processes see a block when it is stored",
)


class StagingTier:
    """A write-back cache in front of a store, with a receipt for each write; made by `stage`.

    Thread-safe, and a context manager that drains at its end. Methods are those of `Store`; reads
    see staged blocks. ``timeout`` limits any call, in seconds; default: that of the tier.

    Writes of one key reach the store in order, but a drain that has not begun is absorbed by a
    newer ``replace``, whose receipt ends both. A block that could not be stored stays staged: it
    can be read, is in `failed`, and is reported by every `barrier` and by `close` until it is
    retried, discarded, or replaced by a newer write. A tier cannot be used in a forked child.
    """

    _if_exists: Final[IfExists] = "replace"

    def __init__(self, store: Store, engine: TierEngine, options: TierOptions) -> None:
        self._store = store
        self._engine = engine
        self._options = options
        self._tier_state = engine.tier_state
        self._drains = engine.drains
        self._tier_state.ask = self._drains.ask
        self._reads, self._writes, self._files = engine.reads, engine.writes, engine.files
        self._close_lock = threading.Lock()
        self._closed = False
        lifetime.watch(engine.accepting)
        # Made after it: what is submitted is accepted first at the end of a program.
        settings = Settings(timeout=options.timeout)
        self._calls = Calls(
            settings, f"a staging tier of {store.url.place}", threads=store.io_threads
        )
        lifetime.watch_forks(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        memory = self._engine.memory
        size = f"{memory.kind} {memory.capacity_bytes} bytes"
        return f"<kvio.StagingTier {size}, {self._store!r} {state}>"

    def __del__(self) -> None:
        """Warn that it was not closed, and close it when all staged blocks are stored."""
        if (
            not getattr(self, "_closed", True)
            and not self._tier_state.forked
            and lifetime.dropped is not None
        ):
            lifetime.dropped(self, f"staging tier of {self._store.url.place}", self._close_dropped)

    def _close_dropped(self) -> None:
        try:
            self.close()
        except TierNotDrainedError:
            self._end(None)  # the caller can no longer retry or discard failed blocks
            raise

    # Writing

    def write_block(
        self, key: str, data: Data, *, if_exists: IfExists = "replace", timeout: float | None = None
    ) -> StagedReceipt:
        """Copy *data* to staging memory, to be stored under a key; it may be reused on return.

        ``keep``: a staged block of the same length is kept; else the store decides when the block
        is drained, and reads see the staged bytes until then. ``error`` refuses a key that has a
        staged or stored block now; if another writer is faster later, the receipt has the error.
        A block larger than the tier is written directly to the store.

        Raises:
            InvalidKeyError, BlockSizeError, TypeError: as `Store.write_block`.
            BlockExistsError: there is a block already and *if_exists* is ``"error"``.
            StorageFullError: the tier is full of failed blocks, or full and ``when_full="raise"``.
            StorageError: a direct write to the store failed, or there was no room before the
                deadline.
        """
        self._drains.start()
        if if_exists == "replace":
            receipt = self._writes.quick(key, data)
            if receipt is not None:
                return receipt
        check_key(key)
        check_if_exists(if_exists)
        self._tier_state.check_fork()
        return self._writes.write(key, data, if_exists=if_exists, timeout=self._limit(timeout))

    def write_blocks(
        self,
        items: Iterable[tuple[str, Data]],
        *,
        if_exists: IfExists = "replace",
        timeout: float | None = None,
    ) -> list[StagedResult]:
        """Stage (key, data) pairs; return one result per block, in order, with its receipt.

        A signal ends the batch early, as in `Store.write_blocks`.

        Raises:
            InvalidKeyError, BlockSizeError, TypeError: before anything is staged.
        """
        return self._write_batch(items, if_exists, timeout, Cancellation())

    def _write_batch(
        self,
        items: Iterable[tuple[str, Data]],
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation,
    ) -> list[StagedResult]:
        check_if_exists(if_exists)
        self._check_open()
        self._drains.start()
        limit = self._limit(timeout)
        return self._writes.write_all(items, if_exists=if_exists, timeout=limit, cancel=cancel)

    def submit_write(
        self, key: str, data: Data, *, if_exists: IfExists = "replace", timeout: float | None = None
    ) -> Future[StagedReceipt]:
        """Queue a `write_block`; *data* must not change until the future is done.

        The future has the receipt of the accepted write, which can be waited for in turn. Waits
        while the queue holds more than 1 GiB.
        """
        return self._calls.submit(self._pending_write(key, data, if_exists), timeout)

    def _pending_write(self, key: str, data: Data, if_exists: IfExists) -> Pending:
        check_key(key)
        check_if_exists(if_exists)
        self._check_open()
        self._drains.start()
        parts = flat_parts(data)
        write = partial(
            self._writes.write, key, parts, if_exists=if_exists, timeout=self._options.timeout
        )
        return Pending(
            lambda cancel: write(cancel=cancel),
            nbytes=buffers.total_bytes(parts),
            read=False,
            describe="the write",
            key=key,
        )

    def delete_block(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove a block from the tier and the store; False if there was none.

        Waits for a running drain of the key; receipts of writes whose drain had not begun end with
        `BlockNotFoundError`, which no barrier reports.
        """
        check_key(key)
        self._check_open()
        return self._writes.delete(key, timeout=self._limit(timeout))

    def delete_blocks(
        self, keys: Iterable[str], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Remove blocks from the tier and the store; return one result per block, in order.

        Each as `delete_block` does; the store removes them as one batch.
        """
        wanted = list(keys)
        check_keys(wanted)
        self._check_open()
        return self._writes.delete_all(wanted, timeout=self._limit(timeout))

    # Files

    @overload
    def open(
        self,
        key: str,
        mode: Literal["wb"],
        *,
        if_exists: IfExists = ...,
        timeout: float | None = ...,
    ) -> StagedFile: ...
    @overload
    def open(
        self, key: str, mode: Literal["rb"], *, timeout: float | None = ...
    ) -> StagedReader: ...
    def open(
        self, key: str, mode: str, *, if_exists: IfExists = "replace", timeout: float | None = None
    ) -> StagedFile | StagedReader:
        """Open a block as a binary file: ``wb`` is published at close, ``rb`` can seek.

        *timeout* limits every call of the file.
        """
        if mode not in ("wb", "rb"):
            raise ConfigError(f"mode must be 'wb' or 'rb', not {mode!r}")
        check_key(key)
        check_if_exists(if_exists)
        self._check_open()
        self._drains.start()
        limit = self._limit(timeout)
        if mode == "rb":
            return open_block(self._files, key, timeout=limit)
        return StagedFile(self._files, key, if_exists=if_exists, timeout=limit)

    # Reading

    def read_block_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
        consistency: Consistency = "tier",
    ) -> int:
        """Read a block as `Store.read_block_into` does, staged bytes first."""
        self._check_open()
        limit = self._limit(timeout)
        return self._reads.read_into(
            key, out, offset=offset, nbytes=nbytes, timeout=limit, consistency=consistency
        )

    def read_block(
        self,
        key: str,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
        consistency: Consistency = "tier",
    ) -> memoryview:
        """Read a block as `Store.read_block` does, staged bytes first."""
        self._check_open()
        limit = self._limit(timeout)
        return self._reads.read(
            key, offset=offset, nbytes=nbytes, timeout=limit, consistency=consistency
        )

    def read_blocks_into(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Read whole blocks as `Store.read_blocks_into` does, staged ones from the tier."""
        return self._read_batch(items, timeout, Cancellation())

    def _read_batch(
        self, items: Iterable[tuple[str, Data]], timeout: float | None, cancel: Cancellation
    ) -> list[BlockResult]:
        self._check_open()
        return self._reads.read_batch(items, timeout=self._limit(timeout), cancel=cancel)

    def submit_read_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Queue a `read_block_into`, as `Store.submit_read_into` does."""
        return self._calls.submit(self._pending_read(key, out, offset, nbytes, timeout), timeout)

    def _pending_read(
        self, key: str, out: Data, offset: int, nbytes: int | None, timeout: float | None
    ) -> Pending:
        parts = reads.target(key, out, offset, nbytes)
        self._check_open()
        private = self._limit(timeout) is not None
        work, deliver = reads.into(self._reads, key, parts, offset, nbytes, private=private)
        return Pending(
            work,
            nbytes=buffers.total_bytes(parts),
            describe="the read",
            key=key,
            deliver=deliver,
            holding=not private,
        )

    def stat_block(
        self, key: str, *, timeout: float | None = None, consistency: Consistency = "tier"
    ) -> BlockStat:
        """Return the facts about a block as `Store.stat_block`; a staged one as it will be."""
        self._check_open()
        return self._reads.stat(key, timeout=self._limit(timeout), consistency=consistency)

    def contains(
        self, key: str, *, timeout: float | None = None, consistency: Consistency = "tier"
    ) -> bool:
        """Return whether a block is staged or stored."""
        self._check_open()
        return self._reads.contains(key, timeout=self._limit(timeout), consistency=consistency)

    def count_leading(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Return how many keys from the front have a staged or stored block."""
        self._check_open()
        return self._reads.count_leading(keys, timeout=self._limit(timeout))

    def list_keys(
        self,
        prefix: str = "",
        *,
        timeout: float | None = None,
        consistency: Consistency = "tier",
    ) -> Iterator[str]:
        """Yield the keys that start with *prefix*, staged or stored, each once."""
        self._check_open()
        limit = self._limit(timeout)
        return self._while_open(self._reads.list(prefix, timeout=limit, consistency=consistency))

    def _while_open(self, keys: Iterator[str]) -> Iterator[str]:
        for key in keys:
            self._check_open()
            yield key

    def verify_block(
        self, key: str, *, timeout: float | None = None, consistency: Consistency = "tier"
    ) -> BlockResult:
        """Check a whole block: the staged bytes, or as `Store.verify_block`."""
        self._check_open()
        return self._reads.verify(key, timeout=self._limit(timeout), consistency=consistency)

    def drop_cache(self, keys: Iterable[str], *, timeout: float | None = None) -> list[BlockResult]:
        """Drop stored blocks from the page cache as `Store.drop_cache`; staged bytes stay.

        A block that is only staged is not in the page cache: its result is ``ok``.
        """
        self._check_open()
        results = self._store.drop_cache(keys, timeout=self._limit(timeout))
        return [
            BlockResult(one.key, BlockStatus.OK)
            if one.status is BlockStatus.MISSING and self.contains(one.key)
            else one
            for one in results
        ]

    def path_of(self, key: str, *, timeout: float | None = None) -> Path:
        """Return the file of a block as `Store.path_of`; a block that is only staged has none."""
        self._check_open()
        return self._store.path_of(key, timeout=self._limit(timeout))

    # Promises

    def barrier(self, level: Level | str | None = None, *, timeout: float | None = None) -> None:
        """Wait until every write accepted so far has reached a level, by default the store's best.

        Raises:
            UnsupportedError: the store does not reach it; raised at once.
            StorageTimeoutError: some were not stored after *timeout* seconds.
            KvioError: some of these writes failed for good, and were not replaced by newer ones: an
                error of the type of the first one's, whose message names every key. Every barrier
                says so, on any thread, until `retry_failed`, or `discard` of what failed.
        """
        self._engine.barrier(level, timeout=timeout)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until submitted work has ended and every accepted write is stored.

        Raises:
            StorageTimeoutError, KvioError: as `barrier`.
        """
        self._check_open()
        deadline = deadline_of(timeout)
        if not self._calls.executor.drain(timeout=timeout):
            raise StorageTimeoutError("submitted work did not end before the deadline")
        self.barrier(timeout=left(deadline))

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write has reached the store's level; it never decreases.

        A write also counts if a newer write of its key has reached it, or if its receipt says that
        it was deleted, discarded, or refused because another writer was faster.
        """
        self._tier_state.check_fork()
        return self._engine.durable_sequence

    def verify(self, receipt: StagedReceipt, *, timeout: float | None = None) -> None:
        """Read a block back from the store and compare it with the accepted bytes.

        Waits until it is stored. It is read directly if the store reads directly.

        Raises:
            CorruptBlockError: the stored bytes differ: they are corrupt, or were written since.
            UnsupportedError: a newer write absorbed this one, or there is no checksum.
        """
        self._check_open()
        writing.verify(self._reads, receipt, timeout=timeout)

    def replace_when_durable(self, old: str, new: StagedReceipt) -> Future[bool]:
        """Delete *old* when *new* is durable, never before; return a future of `delete_block`.

        If *new* fails, the future has its error and *old* stays.

        Raises:
            UnsupportedError: the store is not durable.
            ConfigError: both have the same key.
        """
        check_key(old)
        self._check_open()
        self._tier_state.check_level(Level.DURABLE)
        limit = self._options.timeout
        return writing.delete_when_durable(self._writes, old, new, timeout=limit)

    @property
    def failed(self) -> list[StagedReceipt]:
        """The receipts of writes that failed for good; their bytes are still staged.

        But for those with ``if_exists="error"`` that another writer was faster than: there is
        nothing to retry, only to `discard`.
        """
        self._tier_state.check_fork()
        return self._engine.failed

    def retry_failed(self) -> list[StagedReceipt]:
        """Retry the failed writes that are staged; return their receipts, which are open again."""
        self._check_open()
        return self._engine.retry_failed()

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed write and its bytes; False if it has not failed or was dropped before."""
        self._tier_state.check_fork()
        return self._engine.discard(receipt)

    # The tier itself

    def pause(self) -> None:
        """Begin no more drains until `resume`; running ones go on."""
        self._tier_state.check_fork()
        self._drains.pause()

    def resume(self) -> None:
        """Drain again."""
        self._tier_state.check_fork()
        self._drains.resume()

    def shrink(self, nbytes: int) -> int:
        """Return staging memory to the system; return the number of bytes freed at once.

        Memory in use is freed when it is drained; `stats` has the remaining capacity.
        """
        self._check_open()
        return self._engine.shrink(nbytes)

    def grow(self, nbytes: int) -> int:
        """Use memory again that `shrink` returned; return the number of bytes."""
        self._check_open()
        return self._engine.grow(nbytes)

    def stats(self) -> TierStats:
        """Return the counts since the tier was made, and its present content."""
        self._tier_state.check_fork()
        return self._engine.stats()

    @property
    def store(self) -> Store:
        """The store that the tier drains to."""
        return self._store

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the store as far as they hold for the tier."""
        return dataclasses.replace(
            self._store.capabilities,
            native_batch=False,
            shared=False,
            raw_blocks=False,
            usable_after_fork=False,
            notes=(*_NOTES, *self._store.capabilities.notes),
        )

    def close(self, *, timeout: float | None = None) -> None:
        """Store all staged blocks, also if paused, then close; if that fails it stays open.

        Raises:
            TierNotDrainedError: blocks failed, or were not stored after *timeout* seconds;
                ``.keys`` names those that the store lacks.
            KvioError: writes with ``if_exists="error"`` failed and were not discarded; the tier is
                closed.
        """
        if self._tier_state.forked:
            return
        deadline = deadline_of(timeout)
        with self._close_lock:
            if not self._closed:
                self._accept_submitted(deadline)
                self._engine.drain(deadline)
                self._end(deadline)

    def _accept_submitted(self, deadline: float | None) -> None:
        executor = self._calls.executor
        if executor.queued_bytes:
            with suppress(StorageError):  # a daemon that is gone
                self._drains.resume()  # they may wait for room
        if not executor.drain(timeout=left(deadline)):
            raise receipts.not_drained((), "submitted writes were not accepted before the deadline")

    def _end(self, deadline: float | None) -> None:
        self._calls.refuse()
        self._calls.close(left(deadline))
        self._engine.end(deadline)
        self._closed = True
        lifetime.forget_forks(self)
        if self._options.close_store:
            self._store.close(timeout=left(deadline))
        lost = self._engine.lost
        if lost:
            raise receipts.combine(lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise UnsupportedError("a staging tier cannot be pickled: its memory is in this process")

    def _check_open(self) -> None:
        self._tier_state.check_fork()
        self._engine.check_open()

    def _limit(self, timeout: float | None) -> float | None:
        return self._options.timeout if timeout is None else timeout

    def _after_fork(self) -> None:
        self._engine.after_fork()
