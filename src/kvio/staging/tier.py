"""The staging tier: writes return when their bytes are copied, and are drained to a store."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Literal, Never, Self, overload

from kvio.core import lifetime
from kvio.core.buffers import Data
from kvio.core.store import Store
from kvio.errors import ConfigError, TierNotDrainedError, UnsupportedError
from kvio.staging import receipts, writing
from kvio.staging.engine import TierEngine
from kvio.staging.files import StagedFile, StagedReader, open_block
from kvio.staging.options import TierOptions, TierStats
from kvio.staging.pending import deadline_of, left
from kvio.staging.reading import Consistency
from kvio.staging.receipts import StagedReceipt
from kvio.staging.writing import StagedResult
from kvio.types import BlockResult, BlockStat, IfExists, Level, check_if_exists, check_key


class StagingTier:
    """A write-back cache in front of a store, with a receipt for each write; made by `stage`.

    Thread-safe, and a context manager that drains at its end. Methods are those of `Store`; reads
    see staged blocks. ``timeout`` limits any call, in seconds; default: that of the tier.

    Writes of one key reach the store in order, but a drain that has not begun is absorbed by a
    newer ``replace``, whose receipt ends both. A block that could not be stored stays staged: it
    can be read, is in `failed`, and is reported by the next `barrier` or `close`. A tier cannot be
    used in a forked child.
    """

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
        lifetime.watch_forks(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        memory = self._engine.memory
        size = f"{memory.kind} {memory.capacity_bytes} bytes"
        return f"<kvio.StagingTier {size}, {self._store!r} {state}>"

    def __del__(self) -> None:
        """Warn that it was not closed, and close it when all staged blocks are stored."""
        if not getattr(self, "_closed", True) and not self._tier_state.forked:
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
        check_key(key)
        check_if_exists(if_exists)
        self._tier_state.check_fork()
        self._drains.start()
        return self._writes.write(key, data, if_exists=if_exists, timeout=self._limit(timeout))

    def write_blocks(
        self,
        items: Iterable[tuple[str, Data]],
        *,
        if_exists: IfExists = "replace",
        timeout: float | None = None,
    ) -> list[StagedResult]:
        """Stage (key, data) pairs; return one result per block, in order, with its receipt.

        Raises:
            InvalidKeyError: before anything is staged.
        """
        check_if_exists(if_exists)
        self._tier_state.check_fork()
        self._drains.start()
        return self._writes.write_all(items, if_exists=if_exists, timeout=self._limit(timeout))

    def delete_block(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove a block from the tier and the store; False if there was none.

        Waits for a running drain of the key; receipts of writes whose drain had not begun end with
        `BlockNotFoundError`, which no barrier reports.
        """
        check_key(key)
        self._check_open()
        return self._writes.delete(key, timeout=self._limit(timeout))

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
        self._check_open()
        return self._reads.read_batch(items, timeout=self._limit(timeout))

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

    def list_keys(self, prefix: str = "", *, consistency: Consistency = "tier") -> Iterator[str]:
        """Yield the keys that start with *prefix*, staged or stored, each once."""
        self._check_open()
        return self._reads.list(prefix, consistency=consistency)

    def verify_block(
        self, key: str, *, timeout: float | None = None, consistency: Consistency = "tier"
    ) -> BlockResult:
        """Check a whole block: the staged bytes, or as `Store.verify_block`."""
        self._check_open()
        return self._reads.verify(key, timeout=self._limit(timeout), consistency=consistency)

    # Promises

    def barrier(self, level: Level | str | None = None, *, timeout: float | None = None) -> None:
        """Wait until every write accepted so far has reached a level, by default the store's best.

        Raises:
            UnsupportedError: the store does not reach it; raised at once.
            StorageTimeoutError: some were not stored after *timeout* seconds.
            KvioError: writes failed for good that no barrier has reported: an error of the type
                of the first one's, whose message names every key.
        """
        self._engine.barrier(level, timeout=timeout)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every write accepted so far is stored; raises as `barrier` does."""
        self.barrier(timeout=timeout)

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
        """The receipts of writes that failed for good; their bytes are still staged."""
        self._tier_state.check_fork()
        return self._engine.failed

    def retry_failed(self) -> list[StagedReceipt]:
        """Retry every failed write, and return their receipts, which are open again."""
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

    def close(self, *, timeout: float | None = None) -> None:
        """Store all staged blocks, also if paused, then close; if that fails it stays open.

        Raises:
            TierNotDrainedError: blocks failed, or were not stored after *timeout* seconds;
                ``.keys`` names those that the store lacks.
            KvioError: writes with ``if_exists="error"`` failed and no barrier has reported them;
                the tier is closed.
        """
        if self._tier_state.forked:
            return
        deadline = deadline_of(timeout)
        with self._close_lock:
            if not self._closed:
                self._engine.drain(deadline)
                self._end(deadline)

    def _end(self, deadline: float | None) -> None:
        self._engine.end(deadline)
        self._closed = True
        lifetime.forget_forks(self)
        if self._options.close_store:
            self._store.close(timeout=left(deadline))
        lost = self._engine.take_unreported()
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
