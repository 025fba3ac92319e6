"""Batches: split over the I/O threads, one backend call a group, a result a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvio import buffers
from kvio.abc import Backend
from kvio.buffers import Data
from kvio.calls import Calls, Pending
from kvio.errors import KvioError, StorageTimeoutError
from kvio.types import (
    BlockResult,
    BlockStatus,
    Cancellation,
    IfExists,
    KiB,
    ReadItem,
    WriteItem,
    check_keys,
    status_of,
)

Item = TypeVar("Item", WriteItem, ReadItem)
_Work = Callable[[list[Any], Cancellation | None], list[BlockResult]]

#: A durable group holds this many descriptors open at once.
_MAX_GROUP: Final = 64
#: Handing a group to a thread costs about as much as writing this much to the page cache.
_MIN_GROUP_BYTES: Final = 256 * KiB


def write(
    calls: Calls,
    backend: Backend,
    items: Iterable[tuple[str, Data]],
    if_exists: IfExists,
    timeout: float | None,
) -> list[BlockResult]:
    """Write every item; results in order."""
    checked = [_write_item(key, data) for key, data in items]
    check_keys([item.key for item in checked])
    native = backend.capabilities.native_batch

    def work(group: list[WriteItem], cancel: Cancellation | None) -> list[BlockResult]:
        if native:
            results = backend.write_blocks(group, if_exists=if_exists, cancel=cancel)
            if results is not None:
                return results
        return [_write_one(backend, item, if_exists, cancel) for item in group]

    return _run(calls, checked, work, timeout, read=False)


def read(
    calls: Calls,
    backend: Backend,
    items: Iterable[tuple[str, Data]],
    timeout: float | None,
) -> list[BlockResult]:
    """Read every item into its buffers; results in order."""
    checked = [_read_item(key, out) for key, out in items]
    check_keys([item.key for item in checked])
    native = backend.capabilities.native_batch

    def work(group: list[ReadItem], cancel: Cancellation | None) -> list[BlockResult]:
        if native:
            results = backend.read_blocks_into(group, cancel=cancel)
            if results is not None:
                return results
        return [_read_one(backend, item, cancel) for item in group]

    return _run(calls, checked, work, timeout, read=True)


def delete(
    calls: Calls, backend: Backend, keys: Iterable[str], timeout: float | None
) -> list[BlockResult]:
    """Delete every key; results in order."""
    items = [WriteItem(key, (), 0) for key in keys]
    check_keys([item.key for item in items])

    def work(group: list[WriteItem], _: Cancellation | None) -> list[BlockResult]:
        return [_delete_one(backend, item.key) for item in group]

    return _run(calls, items, work, timeout, read=False)


def split(items: Sequence[Item], threads: int) -> list[list[Item]]:
    """Cut a batch into groups: enough for all threads, none too small or too large to be worth it.

    A group ends at `_MAX_GROUP` blocks or at its share of the bytes.
    """
    total = sum(item.nbytes for item in items)
    share = max(_MIN_GROUP_BYTES, -(-total // (2 * threads)))
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and (len(groups[-1]) >= _MAX_GROUP or size + item.nbytes > share):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    return groups


def _run(
    calls: Calls, items: Sequence[Item], work: _Work, timeout: float | None, *, read: bool
) -> list[BlockResult]:
    if not items:
        return []
    limit = calls.limit(timeout)
    groups = split(items, calls.threads)
    if limit is None:
        tasks = [partial(work, group, None) for group in groups]
        with calls:
            answers = calls.executor.run_all(tasks, read=read)
        return [result for answer in answers for result in answer]
    deadline = time.monotonic() + limit
    pending = [_start(calls, group, work, deadline, read=read) for group in groups]
    results: list[BlockResult] = []
    for one, group in zip(pending, groups, strict=True):
        results += _collect(calls, one, group, deadline)
    return results


def _start(
    calls: Calls, group: list[Item], work: _Work, deadline: float, *, read: bool
) -> Pending | StorageTimeoutError:
    nbytes = sum(item.nbytes for item in group)
    targets: list[Any] = group
    deliver = None
    if read:
        targets = [ReadItem(i.key, [buffers.aligned(i.nbytes)], i.nbytes) for i in group]
        deliver = partial(_deliver, tuple(group), targets)
    try:
        return calls.start(
            lambda cancel: work(targets, cancel),
            nbytes=nbytes,
            read=read,
            timeout=max(0.0, deadline - time.monotonic()),
            describe=f"a group of {len(group)} blocks",
            deliver=deliver,
        )
    except StorageTimeoutError as exc:
        return exc


def _collect(
    calls: Calls,
    pending: Pending | StorageTimeoutError,
    group: Sequence[Item],
    deadline: float,
) -> list[BlockResult]:
    if isinstance(pending, StorageTimeoutError):
        return [BlockResult(item.key, BlockStatus.TIMEOUT, 0, pending) for item in group]
    try:
        results: list[BlockResult] = calls.wait(pending, deadline)
    except StorageTimeoutError as exc:
        return [BlockResult(item.key, BlockStatus.TIMEOUT, 0, exc) for item in group]
    return results


def _deliver(
    group: Sequence[Any], targets: Sequence[ReadItem], results: list[BlockResult]
) -> list[BlockResult]:
    """Copy what arrived in time from private memory to the caller's."""
    for item, target, result in zip(group, targets, results, strict=True):
        if result.nbytes:
            buffers.scatter(target.parts[0][: result.nbytes], item.parts)
    return results


def _write_item(key: str, data: Data) -> WriteItem:
    parts = buffers.as_parts(data)
    return WriteItem(key, parts, len(parts[0]) if len(parts) == 1 else buffers.total_bytes(parts))


def _read_item(key: str, out: Data) -> ReadItem:
    parts = buffers.as_parts(out, writable=True)
    return ReadItem(key, parts, len(parts[0]) if len(parts) == 1 else buffers.total_bytes(parts))


def _write_one(
    backend: Backend, item: WriteItem, if_exists: IfExists, cancel: Cancellation | None
) -> BlockResult:
    try:
        receipt = backend.write_block(item.key, item.parts, if_exists=if_exists, cancel=cancel)
    except KvioError as exc:
        return BlockResult(item.key, status_of(exc), 0, exc)
    status = BlockStatus.KEPT if receipt.existed else BlockStatus.OK
    return BlockResult(item.key, status, item.nbytes, None, receipt)


def _read_one(backend: Backend, item: ReadItem, cancel: Cancellation | None) -> BlockResult:
    try:
        nbytes = backend.read_block_into(item.key, item.parts, cancel=cancel)
    except KvioError as exc:
        return BlockResult(item.key, status_of(exc), 0, exc)
    status = BlockStatus.OK if nbytes == item.nbytes else BlockStatus.SHORT
    return BlockResult(item.key, status, nbytes)


def _delete_one(backend: Backend, key: str) -> BlockResult:
    try:
        gone = backend.delete_block(key)
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    return BlockResult(key, BlockStatus.OK if gone else BlockStatus.MISSING)
