"""Batches: split over the I/O threads, one backend call a group, a result a block."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias

from kvio import buffers
from kvio.abc import Backend
from kvio.buffers import Data
from kvio.calls import Calls, Pending
from kvio.errors import KvioError, StorageTimeoutError
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStatus,
    Cancellation,
    IfExists,
    KiB,
    MiB,
    Parts,
    check_keys,
    status_of,
)

_Work: TypeAlias = Callable[[Blocks, Cancellation | None], list[BlockResult]]

#: A group with a deadline ends in time or not, as a whole.
_MAX_TIMED_GROUP: Final = 64
#: Handing a group to a thread costs about as much as writing this much to the page cache.
_MIN_GROUP_BYTES: Final = 256 * KiB
#: From here on a larger group saves nothing, and the last one is waited for longer.
_GOOD_GROUP_BYTES: Final = 16 * MiB
#: What a block costs besides its bytes, in bytes.
_BLOCK_BYTES: Final = 4 * KiB


def write(
    calls: Calls,
    backend: Backend,
    items: Iterable[tuple[str, Data]],
    if_exists: IfExists,
    timeout: float | None,
) -> list[BlockResult]:
    """Write every item; results in order."""
    blocks = _blocks(items, writable=False)

    def work(group: Blocks, cancel: Cancellation | None) -> list[BlockResult]:
        results = backend.write_blocks(group, if_exists=if_exists, cancel=cancel)
        if results is not None:
            return results
        return [
            _write_one(backend, *block, if_exists, cancel) for block in zip(*group, strict=True)
        ]

    return _run(calls, blocks, work, timeout, read=False, least=_least(backend))


def read(
    calls: Calls,
    backend: Backend,
    items: Iterable[tuple[str, Data]],
    timeout: float | None,
) -> list[BlockResult]:
    """Read every item into its buffers; results in order."""
    blocks = _blocks(items, writable=True)

    def work(group: Blocks, cancel: Cancellation | None) -> list[BlockResult]:
        results = backend.read_blocks_into(group, cancel=cancel)
        if results is not None:
            return results
        return [_read_one(backend, *block, cancel) for block in zip(*group, strict=True)]

    return _run(calls, blocks, work, timeout, read=True, least=_least(backend))


def delete(
    calls: Calls, backend: Backend, keys: Iterable[str], timeout: float | None
) -> list[BlockResult]:
    """Delete every key; results in order."""
    wanted = list(keys)
    check_keys(wanted)
    blocks = Blocks(wanted, [()] * len(wanted), [0] * len(wanted))

    def work(group: Blocks, cancel: Cancellation | None) -> list[BlockResult]:
        return [_delete_one(backend, key, cancel) for key in group.keys]

    return _run(calls, blocks, work, timeout, read=False, least=_least(backend))


def _least(backend: Backend) -> int:
    """Give the bytes worth a group of their own: none where every block is a request."""
    fans_out = type(backend).write_blocks is Backend.write_blocks
    return 0 if fans_out else _MIN_GROUP_BYTES


def split(
    blocks: Blocks, threads: int, most: int | None = None, least: int = _MIN_GROUP_BYTES
) -> list[Blocks]:
    """Cut a batch into groups: enough for all threads, none too small to be worth it.

    A group ends at *most* blocks or at its share of the work, which is no less than *least* bytes.
    """
    count = len(blocks.keys)
    ends = list(accumulate(map(_BLOCK_BYTES.__add__, blocks.sizes)))
    share = max(least, min(-(-ends[-1] // threads), _GOOD_GROUP_BYTES))
    groups, start, done = [], 0, 0
    while start < count:
        stop = max(start + 1, bisect_right(ends, done + share, start))
        if most is not None:
            stop = min(stop, start + most)
        cut = slice(start, stop)
        groups.append(Blocks(blocks.keys[cut], blocks.parts[cut], blocks.sizes[cut]))
        start, done = stop, ends[stop - 1]
    return groups


def _blocks(items: Iterable[tuple[str, Data]], *, writable: bool) -> Blocks:
    keys: list[str] = []
    data: list[Data] = []
    for key, one in items:
        keys.append(key)
        data.append(one)
    parts, sizes = buffers.flatten(data, writable=writable)
    check_keys(keys)
    return Blocks(keys, parts, sizes)


def _run(
    calls: Calls,
    blocks: Blocks,
    work: _Work,
    timeout: float | None,
    *,
    read: bool,
    least: int,
) -> list[BlockResult]:
    if not blocks.keys:
        return []
    limit = calls.limit(timeout)
    if limit is None:
        groups = split(blocks, calls.threads, least=least) if calls.threads > 1 else [blocks]
        with calls:
            if len(groups) == 1:
                return work(blocks, None)
            tasks = [partial(work, group, None) for group in groups]
            answers = calls.executor.run_all(tasks, read=read)
        return [result for answer in answers for result in answer]
    groups = split(blocks, calls.threads, _MAX_TIMED_GROUP, least)
    deadline = time.monotonic() + limit
    pending: list[Pending | StorageTimeoutError] = []
    results: list[BlockResult] = []
    try:
        pending.extend(_start(calls, group, work, deadline, read=read) for group in groups)
        for one, group in zip(pending, groups, strict=True):
            results += _collect(calls, one, group, deadline)
    finally:
        for one in pending:
            if isinstance(one, Pending):
                one.expire(calls.executor)  # nothing, but where an error left it alone
    return results


def _start(
    calls: Calls, group: Blocks, work: _Work, deadline: float, *, read: bool
) -> Pending | StorageTimeoutError:
    target = group
    deliver = None
    if read:
        target = group._replace(parts=[(buffers.aligned(nbytes),) for nbytes in group.sizes])
        deliver = partial(_deliver, group, target)
    try:
        pending = Pending(
            partial(work, target),
            nbytes=sum(group.sizes),
            read=read,
            describe=f"a group of {len(group.keys)} blocks",
            deliver=deliver,
        )
        return calls.start(pending, max(0.0, deadline - time.monotonic()))
    except StorageTimeoutError as exc:
        return exc


def _collect(
    calls: Calls, pending: Pending | StorageTimeoutError, group: Blocks, deadline: float
) -> list[BlockResult]:
    if isinstance(pending, StorageTimeoutError):
        return [BlockResult(key, BlockStatus.TIMEOUT, 0, pending) for key in group.keys]
    try:
        results: list[BlockResult] = calls.wait(pending, deadline)
    except StorageTimeoutError as exc:
        return [BlockResult(key, BlockStatus.TIMEOUT, 0, exc) for key in group.keys]
    return results


def _deliver(group: Blocks, target: Blocks, results: list[BlockResult]) -> list[BlockResult]:
    """Copy what arrived in time from private memory to the caller's."""
    for parts, private, result in zip(group.parts, target.parts, results, strict=True):
        if result.nbytes:
            buffers.scatter(private[0][: result.nbytes], parts)
    return results


def _write_one(
    backend: Backend,
    key: str,
    parts: Parts,
    nbytes: int,
    if_exists: IfExists,
    cancel: Cancellation | None,
) -> BlockResult:
    try:
        receipt = backend.write_block(key, parts, if_exists=if_exists, cancel=cancel)
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    status = BlockStatus.KEPT if receipt.existed else BlockStatus.OK
    return BlockResult(key, status, nbytes, None, receipt)


def _read_one(
    backend: Backend, key: str, parts: Parts, nbytes: int, cancel: Cancellation | None
) -> BlockResult:
    try:
        got = backend.read_block_into(key, parts, cancel=cancel)
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    return BlockResult(key, BlockStatus.OK if got == nbytes else BlockStatus.SHORT, got)


def _delete_one(backend: Backend, key: str, cancel: Cancellation | None) -> BlockResult:
    try:
        gone = backend.delete_block(key, cancel=cancel)
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    return BlockResult(key, BlockStatus.OK if gone else BlockStatus.MISSING)
