"""Batches: split into groups for the I/O threads; one backend call per group."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat, zip_longest
from typing import Final, TypeAlias

from kvio.abc import Backend, WriteResult
from kvio.core import buffers, threads
from kvio.core.buffers import Data
from kvio.core.calls import Calls, Pending
from kvio.core.damage import DamagedKeys
from kvio.errors import (
    KvioError,
    OutOfMemoryError,
    StorageError,
    StorageTimeoutError,
    out_of_memory,
)
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

_Work: TypeAlias = Callable[[Blocks, Cancellation], list[BlockResult]]
_One: TypeAlias = Callable[[str, Parts, int], BlockResult]
#: The result of each block, and the memory it was read into.
_Private: TypeAlias = list[tuple[BlockResult, memoryview | None]]

#: Most blocks in a group with a deadline, because such a group times out as a whole.
_MAX_TIMED_GROUP: Final = 64
#: Groups for each thread, where a backend sends one request per block: a thread that ends early
#: takes another.
_REQUESTS: Final = 8
#: Handing a group to a thread costs about as much as writing this much to the page cache.
_MIN_GROUP_BYTES: Final = 256 * KiB
#: Larger groups save nothing, and make the wait for the last one longer.
_GOOD_GROUP_BYTES: Final = 16 * MiB
#: The cost of a block besides its bytes, as a number of bytes that cost the same.
_BLOCK_BYTES: Final = 4 * KiB


def write(
    calls: Calls,
    backend: Backend,
    damaged: DamagedKeys,
    items: Iterable[tuple[str, Data]],
    if_exists: IfExists,
    timeout: float | None,
    cancel: Cancellation,
) -> list[BlockResult]:
    """Write a batch until *cancel* is requested; return one result per block, in order."""
    blocks = _blocks(items, writable=False)
    limited = calls.limit(timeout) is not None

    def work(group: Blocks, cancel: Cancellation) -> list[BlockResult]:
        one = partial(_write_one, backend, if_exists, cancel if limited else None)
        if not damaged.keys:
            return _write_group(backend, group, if_exists, cancel, one)
        broken = damaged.choose_all(backend, group, cancel) if if_exists == "keep" else []
        replace = partial(_write_one, backend, "replace", cancel if limited else None)
        results = _write_in_two(backend, group, broken, if_exists, cancel, (replace, one))
        for result in results:
            if result.ok and result.key in damaged.keys:
                damaged.forget(result.key)
        return results

    return _run(
        calls,
        blocks,
        work,
        timeout,
        cancel,
        read=False,
        least=_least(backend),
        per_thread=_per_thread(backend),
        done="stored",
    )


def _write_group(
    backend: Backend, group: Blocks, if_exists: IfExists, cancel: Cancellation, one: _One
) -> list[BlockResult]:
    try:
        results = backend.write_blocks(group, if_exists=if_exists, cancel=cancel)
    except OutOfMemoryError:  # raised before any I/O: small blocks of the group may fit
        results = None
    return _one_by_one(group, cancel, one) if results is None else results


def _write_in_two(
    backend: Backend,
    group: Blocks,
    broken: Sequence[int],
    if_exists: IfExists,
    cancel: Cancellation,
    ones: tuple[_One, _One],
) -> list[BlockResult]:
    """Write the *broken* blocks of a group with ``replace``, then the others; results in order."""
    if not broken:
        return _write_group(backend, group, if_exists, cancel, ones[1])
    others = sorted(set(range(len(group.keys))).difference(broken))
    halves: list[tuple[Sequence[int], Cancellation]] = []

    def so_far() -> list[BlockResult]:
        found: dict[int, BlockResult] = {}
        for positions, own in halves:
            if own.results is not None:
                found.update(zip(positions, own.results(), strict=True))
        unreached = map(BlockResult, group.keys, repeat(BlockStatus.CANCELLED))
        return [found.get(at, none) for at, none in enumerate(unreached)]

    cancel.results = so_far
    results: dict[int, BlockResult] = {}
    how: tuple[IfExists, IfExists] = ("replace", if_exists)
    for positions, asked, one in zip((broken, others), how, ones, strict=True):
        if positions:
            halves.append((positions, _below(cancel)))
            part = _pick(group, positions)
            written = _write_group(backend, part, asked, halves[-1][1], one)
            results.update(zip(positions, written, strict=True))
    return [results[at] for at in range(len(group.keys))]


def _pick(group: Blocks, positions: Sequence[int]) -> Blocks:
    return Blocks(
        [group.keys[at] for at in positions],
        [group.parts[at] for at in positions],
        [group.sizes[at] for at in positions],
    )


def read(
    calls: Calls,
    backend: Backend,
    items: Iterable[tuple[str, Data]],
    timeout: float | None,
    cancel: Cancellation,
) -> list[BlockResult]:
    """Read a batch into buffers until *cancel* is requested; return one result per block."""
    blocks = _blocks(items, writable=True)
    limited = calls.limit(timeout) is not None

    def work(group: Blocks, cancel: Cancellation) -> list[BlockResult]:
        try:
            results = backend.read_blocks_into(group, cancel=cancel)
        except OutOfMemoryError:  # raised before any I/O: small blocks of the group may fit
            results = None
        if results is not None:
            return results
        one = partial(_read_one, backend, cancel if limited else None)
        return _one_by_one(group, cancel, one)

    return _run(
        calls,
        blocks,
        work,
        timeout,
        cancel,
        read=True,
        least=_least(backend),
        per_thread=_per_thread(backend),
        done="read",
    )


def delete(
    calls: Calls, backend: Backend, keys: Iterable[str], timeout: float | None
) -> list[BlockResult]:
    """Delete the blocks of all keys; return one result per block, in order."""
    wanted = list(keys)
    check_keys(wanted)
    blocks = Blocks(wanted, [()] * len(wanted), [0] * len(wanted))
    limited = calls.limit(timeout) is not None

    def work(group: Blocks, cancel: Cancellation) -> list[BlockResult]:
        results = backend.delete_blocks(group.keys, cancel=cancel)
        if results is not None:
            return results
        one = partial(_delete_one, backend, cancel if limited else None)
        return _one_by_one(group, cancel, one)

    return _run(
        calls, blocks, work, timeout, Cancellation(),
        read=False, least=_least(backend), per_thread=1, done="deleted",
    )  # fmt: skip


def note(error: BaseException, results: Sequence[WriteResult], done: str) -> None:
    """Attach the results of a batch to the exception that ended it early."""
    count = sum(result.ok for result in results)
    error.add_note(
        f"{count} of {len(results)} blocks were {done} before this; "
        "its attribute kvio_results has the result of each, with the receipt"
    )
    error.kvio_results = results  # type: ignore[attr-defined]  # an exception of any type


def _one_by_one(group: Blocks, cancel: Cancellation, one: _One) -> list[BlockResult]:
    """Do one block after another, for a backend without batches, until *cancel* is requested."""
    results: list[BlockResult] = []

    def so_far() -> list[BlockResult]:
        return results + _cancelled(group.keys[len(results) :])

    cancel.results = so_far
    for block in zip(*group, strict=True):
        if cancel.requested:
            break
        results.append(one(*block))
    return so_far()


def _cancelled(keys: Iterable[str]) -> list[BlockResult]:
    return list(map(BlockResult, keys, repeat(BlockStatus.CANCELLED)))


def _fans_out(backend: Backend) -> bool:
    """Return whether a backend sends one request per block."""
    return type(backend).write_blocks is Backend.write_blocks


def _per_thread(backend: Backend) -> int:
    return _REQUESTS if _fans_out(backend) else 1


def _least(backend: Backend) -> int:
    """Return the least bytes of a group; 0 for backends that send one request per block."""
    return 0 if _fans_out(backend) else _MIN_GROUP_BYTES


def split(
    blocks: Blocks, threads: int, most: int | None = None, least: int = _MIN_GROUP_BYTES
) -> list[Blocks]:
    """Split a batch into groups for *threads* threads.

    A group ends at *most* blocks, or at its share of the bytes, which is at least *least*.
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
    cancel: Cancellation,
    *,
    read: bool,
    least: int,
    per_thread: int,
    done: str,
) -> list[BlockResult]:
    if not blocks.keys:
        return []
    limit = calls.limit(timeout)
    if limit is not None:
        return _run_timed(calls, blocks, work, limit, cancel, read=read, least=least, done=done)
    shares = calls.threads * per_thread
    groups = split(blocks, shares, least=least) if calls.threads > 1 else [blocks]
    cancels = [_below(cancel) for _ in groups]
    tasks = [
        partial(_run_group, work, group, cancel, own)
        for group, own in zip(groups, cancels, strict=True)
    ]
    try:
        if len(tasks) == 1:
            return calls.here(tasks[0])
        answers = calls.here(calls.executor.run_all, tasks, read=read, cancel=cancel.request)
    except BaseException as exc:  # the handler of a signal raised it, or memory ran out
        note(exc, _results_of(groups, cancels), done)
        raise
    return [result for answer in answers for result in answer]


def _run_timed(
    calls: Calls,
    blocks: Blocks,
    work: _Work,
    limit: float,
    cancel: Cancellation,
    *,
    read: bool,
    least: int,
    done: str,
) -> list[BlockResult]:
    groups = split(blocks, calls.threads, _MAX_TIMED_GROUP, least)
    deadline = time.monotonic() + limit
    pending: list[Pending | StorageError] = []
    results: list[BlockResult] = []
    try:
        for group in groups:
            one = _pending(group, work, cancel, read=read)
            pending.append(one)
            try:
                calls.start(one, max(0.0, deadline - time.monotonic()))
            except StorageError as exc:  # no room before the deadline, or no thread
                pending[-1] = exc
        for started, group in zip(pending, groups, strict=True):
            results += _collect(calls, started, group, deadline)
    except BaseException as exc:  # the handler of a signal raised it, or memory ran out
        cancel.request()
        note(exc, _results_at_end(calls, pending, groups, deadline, read=read), done)
        raise
    finally:
        for started in pending:
            if isinstance(started, Pending):
                started.expire(calls.executor)  # has no effect on those that have ended
    return results


def _below(cancel: Cancellation) -> Cancellation:
    """Return the cancellation of one group, which that of the whole batch requests too."""
    own = Cancellation()
    cancel.on_request(own.request)
    return own


def _run_group(
    work: _Work, group: Blocks, whole: Cancellation, own: Cancellation
) -> list[BlockResult]:
    """Do a group's work; if the handler of a signal interrupts it, end the whole batch."""
    if own.requested:
        return _cancelled(group.keys)
    try:
        return work(group, own)
    except MemoryError as exc:
        return _out_of_memory(group, own, exc)
    except BaseException:
        whole.request()
        raise


def _out_of_memory(group: Blocks, cancel: Cancellation, error: MemoryError) -> list[BlockResult]:
    """Return the results of a group that ran out of memory."""
    if cancel.results is not None:
        return cancel.results()
    return [
        BlockResult(key, BlockStatus.FAILED, 0, out_of_memory(error, key, nbytes))
        for key, nbytes in zip(group.keys, group.sizes, strict=True)
    ]


def _results_of(groups: Iterable[Blocks], cancels: Iterable[Cancellation]) -> list[BlockResult]:
    """Return the results of groups that have all ended."""
    results: list[BlockResult] = []
    for group, cancel in zip(groups, cancels, strict=True):
        results += _cancelled(group.keys) if cancel.results is None else cancel.results()
    return results


def _results_at_end(
    calls: Calls,
    pending: Iterable[Pending | StorageError],
    groups: Iterable[Blocks],
    deadline: float,
    *,
    read: bool,
) -> list[BlockResult]:
    """Cancel the running groups, wait for them until *deadline*, and return all results."""
    started = [one for one in pending if isinstance(one, Pending)]
    for one in started:
        one.expire(calls.executor)
    left = max(0.0, deadline - time.monotonic())
    threads.wait([one.job.future for one in started if not one.job.future.cancel()], left)
    threads.wait([one.future for one in started if one.before_deadline])
    results: list[BlockResult] = []
    for pending_one, group in zip_longest(pending, groups):
        results += _result_of(pending_one, group, read=read)
    return results


def _result_of(
    pending: Pending | StorageError | None, group: Blocks, *, read: bool
) -> list[BlockResult]:
    if isinstance(pending, Pending):
        future = pending.future
        if pending.before_deadline and not future.cancelled() and not future.exception():
            delivered: list[BlockResult] = future.result()
            return delivered
        if not read and pending.job.future.done():
            return _results_of([group], [pending.cancel])
    return _cancelled(group.keys)


def _pending(group: Blocks, work: _Work, cancel: Cancellation, *, read: bool) -> Pending:
    pending = Pending(
        partial(_read_privately if read else _run_timed_group, work, group),
        nbytes=sum(group.sizes),
        read=read,
        describe=f"a group of {len(group.keys)} blocks",
        deliver=partial(_deliver, group) if read else None,
    )
    cancel.on_request(pending.cancel.request)
    return pending


def _collect(
    calls: Calls, pending: Pending | StorageError, group: Blocks, deadline: float
) -> list[BlockResult]:
    if isinstance(pending, StorageError):
        return [BlockResult(key, status_of(pending), 0, pending) for key in group.keys]
    try:
        results: list[BlockResult] = calls.wait(pending, deadline)
    except StorageTimeoutError as exc:
        return [BlockResult(key, BlockStatus.TIMEOUT, 0, exc) for key in group.keys]
    return results


def _run_timed_group(work: _Work, group: Blocks, cancel: Cancellation) -> list[BlockResult]:
    try:
        return work(group, cancel)
    except MemoryError as exc:
        return _out_of_memory(group, cancel, exc)


def _read_privately(work: _Work, group: Blocks, cancel: Cancellation) -> _Private:
    """Read a group into new memory; a block for which there is no memory fails alone."""
    views: dict[int, memoryview] = {}
    results: dict[int, BlockResult] = {}
    for index, (key, nbytes) in enumerate(zip(group.keys, group.sizes, strict=True)):
        try:
            views[index] = buffers.aligned(nbytes)
        except OutOfMemoryError as exc:
            error = out_of_memory(exc, key, nbytes)
            results[index] = BlockResult(key, BlockStatus.FAILED, 0, error)
    target = Blocks(
        [group.keys[index] for index in views],
        [(view,) for view in views.values()],
        [group.sizes[index] for index in views],
    )
    results |= zip(views, _run_timed_group(work, target, cancel) if views else (), strict=True)
    return [(results[index], views.get(index)) for index in range(len(group.keys))]


def _deliver(group: Blocks, private: _Private) -> list[BlockResult]:
    """Copy the blocks that were read before the deadline to the caller's memory."""
    for parts, (result, view) in zip(group.parts, private, strict=True):
        if result.nbytes and view is not None:
            buffers.scatter(view[: result.nbytes], parts)
    return [result for result, _ in private]


def _write_one(
    backend: Backend,
    if_exists: IfExists,
    cancel: Cancellation | None,
    key: str,
    parts: Parts,
    nbytes: int,
) -> BlockResult:
    try:
        receipt = backend.write_block(key, parts, if_exists=if_exists, cancel=cancel)
    except MemoryError as exc:
        return BlockResult(key, BlockStatus.FAILED, 0, out_of_memory(exc, key, nbytes))
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    status = BlockStatus.KEPT if receipt.existed else BlockStatus.OK
    return BlockResult(key, status, nbytes, None, receipt)


def _read_one(
    backend: Backend, cancel: Cancellation | None, key: str, parts: Parts, nbytes: int
) -> BlockResult:
    try:
        got = backend.read_block_into(key, parts, cancel=cancel)
    except MemoryError as exc:
        return BlockResult(key, BlockStatus.FAILED, 0, out_of_memory(exc, key, nbytes))
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    return BlockResult(key, BlockStatus.OK if got == nbytes else BlockStatus.SHORT, got)


def _delete_one(
    backend: Backend, cancel: Cancellation | None, key: str, _: Parts, __: int
) -> BlockResult:
    try:
        gone = backend.delete_block(key, cancel=cancel)
    except KvioError as exc:
        return BlockResult(key, status_of(exc), 0, exc)
    return BlockResult(key, BlockStatus.OK if gone else BlockStatus.MISSING)
