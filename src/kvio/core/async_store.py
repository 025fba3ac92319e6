"""The methods of a store for asyncio, with the same promises."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar

from kvio.abc import BlockStore, WriteResult
from kvio.core import batches, threads
from kvio.core.buffers import Data
from kvio.core.calls import Calls, Pending
from kvio.core.store import Store
from kvio.errors import TransientStorageError, UnsupportedError
from kvio.types import (
    BlockResult,
    BlockStat,
    Cancellation,
    Capabilities,
    IfExists,
    Receipt,
    StoreStats,
)

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

    from typing_extensions import TypeVar as Defaulted  # the checker's own: it is not installed

    #: The receipts, the results of batches and the counts of a store; `kvio.Store` has these.
    ReceiptT = Defaulted("ReceiptT", default=Receipt)
    ResultT = Defaulted("ResultT", bound=WriteResult, default=BlockResult)
    StatsT_co = Defaulted("StatsT_co", default=StoreStats, covariant=True)
else:
    ReceiptT, ResultT, StatsT_co = (
        TypeVar("ReceiptT"),
        TypeVar("ResultT"),
        TypeVar("StatsT_co", covariant=True),
    )

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound=WriteResult)
_LIST_CHUNK = 256


class Queueing(BlockStore, Protocol[ReceiptT, ResultT, StatsT_co]):
    """What `AsyncStore` needs of a store or a staging tier: calls that can be queued."""

    _calls: Calls

    @property
    def _if_exists(self) -> IfExists:
        """The default of writes."""

    def submit_write(  # noqa: D102
        self, key: str, data: Data, *, if_exists: IfExists = ..., timeout: float | None = None
    ) -> Future[ReceiptT]: ...
    def stats(self) -> StatsT_co: ...  # noqa: D102
    def list_keys(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[str]: ...  # noqa: D102
    def _pending_write(self, key: str, data: Data, if_exists: IfExists) -> Pending: ...
    def _pending_read(
        self, key: str, out: Data, offset: int, nbytes: int | None, timeout: float | None
    ) -> Pending: ...
    def _write_batch(
        self,
        items: Iterable[tuple[str, Data]],
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation,
    ) -> list[ResultT]: ...
    def _read_batch(
        self, items: Iterable[tuple[str, Data]], timeout: float | None, cancel: Cancellation
    ) -> list[BlockResult]: ...


class AsyncStore(Generic[ReceiptT, ResultT, StatsT_co]):
    """A store or a staging tier for asyncio; the event loop never waits for storage.

    Each method does what that of `Store`, or of `StagingTier`, with the same name does, and
    *if_exists* has its default: a write to a tier ends when it is accepted, and its receipt can be
    awaited. Cancelling a task cancels its
    call: a write that is not published by then never is. The task ends when its memory may be
    reused: a batch ends early, with a note of its results (see `Store.write_blocks`), and a read
    without a timeout that has begun is waited for. Leaving ``async with`` closes the store.
    """

    def __init__(self, store: Queueing[ReceiptT, ResultT, StatsT_co]) -> None:
        self._store = store

    async def write_block(
        self,
        key: str,
        data: Data,
        *,
        if_exists: IfExists | None = None,
        timeout: float | None = None,
    ) -> ReceiptT:
        """Store *data* under a key; it must not change until this returns."""
        chosen = self._store._if_exists if if_exists is None else if_exists  # noqa: SLF001
        pending = self._store._pending_write(key, data, chosen)  # noqa: SLF001  # same package
        receipt: ReceiptT = await self._outcome_of(pending, timeout)
        return receipt

    async def write_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        move: bool = False,
        if_exists: IfExists = "keep",
        timeout: float | None = None,
    ) -> Receipt:
        """Store the bytes of a file under a key; with *move* the store takes the file.

        Raises:
            UnsupportedError: this is a staging tier, which stores no files: its store does.
        """
        store: object = self._store
        if not isinstance(store, Store):
            raise UnsupportedError("a staging tier stores no files; write them to its store")
        pending = store._pending_file(key, path, move=move, if_exists=if_exists)  # noqa: SLF001
        receipt: Receipt = await self._outcome_of(pending, timeout)
        return receipt

    async def read_block_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Read a block, or a range of it, into the caller's buffers."""
        pending = self._store._pending_read(key, out, offset, nbytes, timeout)  # noqa: SLF001
        got: int = await self._outcome_of(pending, timeout)
        return got

    async def read_block(
        self, key: str, *, offset: int = 0, nbytes: int | None = None, timeout: float | None = None
    ) -> memoryview:
        """Read a block, or a range of it, into fresh page-aligned memory."""
        return await _in_thread(
            self._store.read_block, key, offset=offset, nbytes=nbytes, timeout=timeout
        )

    async def write_blocks(
        self,
        items: Iterable[tuple[str, Data]],
        *,
        if_exists: IfExists | None = None,
        timeout: float | None = None,
    ) -> list[ResultT]:
        """Write (key, data) pairs; return one result per block, in order."""
        cancel = Cancellation()
        chosen = self._store._if_exists if if_exists is None else if_exists  # noqa: SLF001
        write = partial(self._store._write_batch, items, chosen, timeout, cancel)  # noqa: SLF001
        return await _batch(write, cancel, "stored")

    async def read_blocks_into(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Read whole blocks into (key, out) pairs; return one result per block, in order."""
        cancel = Cancellation()
        read = partial(self._store._read_batch, items, timeout, cancel)  # noqa: SLF001
        return await _batch(read, cancel, "read")

    async def stat_block(self, key: str, *, timeout: float | None = None) -> BlockStat:
        """Return the facts about a block that its trailer has."""
        return await _in_thread(self._store.stat_block, key, timeout=timeout)

    async def contains(self, key: str, *, timeout: float | None = None) -> bool:
        """Return whether there is a block under a key with an intact trailer."""
        return await _in_thread(self._store.contains, key, timeout=timeout)

    async def count_leading(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Return how many keys from the front have a block."""
        return await _in_thread(self._store.count_leading, keys, timeout=timeout)

    async def verify_block(self, key: str, *, timeout: float | None = None) -> BlockResult:
        """Check a whole stored block without returning its bytes."""
        return await _in_thread(self._store.verify_block, key, timeout=timeout)

    async def delete_block(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove a block; False if there was none."""
        return await _in_thread(self._store.delete_block, key, timeout=timeout)

    async def delete_blocks(
        self, keys: Iterable[str], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Remove blocks; return one result per block, in order."""
        return await _in_thread(self._store.delete_blocks, keys, timeout=timeout)

    async def drop_cache(
        self, keys: Iterable[str], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Drop blocks from the page cache; return one result per block, in order."""
        return await _in_thread(self._store.drop_cache, keys, timeout=timeout)

    async def path_of(self, key: str, *, timeout: float | None = None) -> Path:
        """Return the path of the file that has a block."""
        return await _in_thread(self._store.path_of, key, timeout=timeout)

    async def list_keys(
        self, prefix: str = "", *, timeout: float | None = None
    ) -> AsyncIterator[str]:
        """Yield the keys that start with *prefix*, in any order."""
        keys = self._store.list_keys(prefix, timeout=timeout)
        while chunk := await _in_thread(_take, keys):
            for key in chunk:
                yield key

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until all submitted work has ended."""
        await _in_thread(self._store.flush, timeout=timeout)

    async def close(self, *, timeout: float | None = None) -> None:
        """Finish submitted work, then close the store."""
        await _in_thread(self._store.close, timeout=timeout)

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the store."""
        return self._store.capabilities

    def stats(self) -> StatsT_co:
        """Return the counts since the store was opened."""
        return self._store.stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _outcome_of(self, pending: Pending, timeout: float | None) -> Any:
        """Queue a call and wait for it; cancel it if the task is cancelled."""
        import asyncio

        calls = self._store._calls  # noqa: SLF001
        future = asyncio.wrap_future(pending.future)
        try:
            _start(partial(_begin, calls, pending, timeout))
        except TransientStorageError as exc:
            pending.refuse(exc)  # it may have been queued all the same, and then does nothing
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not pending.future.cancel():
                await _ended(future)
            raise


def _take(keys: Iterator[str]) -> list[str]:
    return list(islice(keys, _LIST_CHUNK))


def _start(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call on a thread of the event loop.

    Raises:
        TransientStorageError: the system cannot start a thread for it.
    """
    import asyncio  # imported late: it would double the time of `import kvio`

    try:
        return asyncio.get_running_loop().run_in_executor(None, copy_context().run, call)
    except (RuntimeError, MemoryError) as exc:
        raise threads.not_started("asyncio", exc) from exc


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await _start(partial(call, *args, **kwargs))


async def _batch(run: Callable[[], list[W]], cancel: Cancellation, done: str) -> list[W]:
    """Run a batch; if the task is cancelled, end it early and wait until it has ended."""
    import asyncio

    try:
        running = _start(run)
    except TransientStorageError:
        cancel.request()  # it may have been queued all the same
        raise
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as exc:
        cancel.request()
        await _ended(running)
        if not running.cancelled() and running.exception() is None:
            batches.note(exc, running.result(), done)
        raise


def _begin(calls: Calls, pending: Pending, timeout: float | None) -> None:
    try:
        calls.submit(pending, timeout)
    except BaseException as exc:  # noqa: BLE001  # raised in the task that waits
        pending.refuse(exc)


async def _ended(future: asyncio.Future[Any]) -> None:
    import asyncio

    while not future.done():
        with suppress(asyncio.CancelledError):  # it is being cancelled already
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # asyncio reports an exception that is never retrieved
