"""From what the C core says of an operation to results, receipts and typed errors."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final

from kvio._native import CORRUPTIONS, SITES, lib
from kvio._native.ops import Answer, Ops
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    KvioError,
    StorageError,
    StorageTimeoutError,
    storage_error,
)
from kvio.types import BlockResult, Blocks, BlockStatus, IOMode, Level, Receipt, status_of

MODES: Final = (IOMode.BUFFERED, IOMode.DONTCACHE, IOMode.DIRECT)

_MISSING: Final = (-errno.ENOENT, -errno.ENOTDIR)
_LOOKUPS: Final = (lib.KVIO_SITE_OPEN_READ, lib.KVIO_SITE_UNLINK)
_CORRUPT: Final[int] = lib.KVIO_CORRUPT
_TOO_SMALL: Final[int] = lib.KVIO_TOO_SMALL
_BEYOND_END: Final[int] = lib.KVIO_BEYOND_END
_CANCELLED: Final = -errno.ECANCELED
_KEPT: Final = "there was an intact block of this length"
_HAS_CHECKSUM: Final[int] = lib.KVIO_OP_HAS_CHECKSUM
_NONE: Final = repeat(None)


def error_of(answer: Answer, key: str, nbytes: int, offset: int, backend: str) -> KvioError:
    """Return the typed error of a failed operation on *nbytes* bytes."""
    status, site = answer.status, answer.site
    if status == _CORRUPT:
        return CorruptBlockError(f"block {key!r} is corrupt: {CORRUPTIONS[site]}", key=key)
    if status == _TOO_SMALL:
        text = f"block {key!r} has {answer.block_nbytes} bytes, the buffer {nbytes}"
        return BlockSizeError(text, key=key)
    if status == _BEYOND_END:
        text = f"offset {offset} lies beyond block {key!r} of {answer.block_nbytes} bytes"
        return BlockSizeError(text, key=key)
    if status in _MISSING and site in _LOOKUPS:
        return BlockNotFoundError(f"no block {key!r}", key=key)
    if status == -errno.EEXIST:
        return BlockExistsError(f"block {key!r} exists", key=key)
    if status == _CANCELLED:
        return StorageTimeoutError(
            f"block {key!r}: cancelled", errno=errno.ETIMEDOUT, key=key, backend=backend
        )
    return storage_error(-status, f"{backend}: {SITES[site]} failed", key=key, backend=backend)


def failure(key: str, error: KvioError) -> BlockResult:
    """Return the result of a block that failed."""
    return BlockResult(key, status_of(error), 0, error)


def _not_done(answer: Answer, key: str, nbytes: int, backend: str) -> BlockResult:
    if answer.status == _CANCELLED:
        return BlockResult(key, BlockStatus.CANCELLED)
    return failure(key, error_of(answer, key, nbytes, 0, backend))


def receipt_of(
    answer: Answer, key: str, nbytes: int, level: Level, reason: str, *, checksum: bool
) -> Receipt:
    """Return the receipt of a stored block."""
    if answer.existed:
        crc = answer.crc if answer.flags & _HAS_CHECKSUM else None
        return Receipt(key, nbytes, crc, level, IOMode.BUFFERED, _KEPT, True)
    mode = MODES[answer.mode_taken]
    return Receipt(key, nbytes, answer.crc if checksum else None, level, mode, reason, False)


def written(
    blocks: Blocks,
    reasons: Sequence[str],
    ops: Ops,
    level: Level,
    *,
    checksum: bool,
    backend: str,
) -> list[BlockResult]:
    """Return the results of a batch of writes."""
    summary = ops.sum_up()
    if summary.good != ops.count or summary.existed or summary.mode_taken < 0:
        make = partial(_written, level=level, checksum=checksum, backend=backend)
        return list(map(make, blocks.keys, blocks.sizes, reasons, ops.answers()))
    crcs: Iterable[int | None] = ops.checksums() if checksum else repeat(None)
    same = (repeat(level), repeat(MODES[summary.mode_taken]), reasons, repeat(False))
    receipts = _rows(Receipt, blocks.keys, blocks.sizes, crcs, *same)
    return _rows(BlockResult, blocks.keys, repeat(BlockStatus.OK), blocks.sizes, _NONE, receipts)


def refused(key: str, error: StorageError) -> BlockResult:
    """Return the result of a block that failed because of an error of its store."""
    return failure(key, type(error)(str(error), errno=error.errno, key=key))


def without_receipts(results: Sequence[BlockResult], error: StorageError) -> list[BlockResult]:
    """Return the results of a batch whose root has moved: written blocks get no receipt."""
    return [
        refused(result.key, error)
        if result.ok or getattr(result.error, "errno", None) == errno.ENOENT
        else result
        for result in results
    ]


def was_read(blocks: Blocks, ops: Ops, backend: str) -> list[BlockResult]:
    """Return the results of a batch of reads."""
    summary = ops.sum_up()
    if summary.good != ops.count or summary.moved_less:
        make = partial(_was_read, backend=backend)
        return list(map(make, blocks.keys, blocks.sizes, ops.answers()))
    return _rows(BlockResult, blocks.keys, repeat(BlockStatus.OK), blocks.sizes, _NONE, _NONE)


def deleted(keys: Sequence[str], ops: Ops, backend: str) -> list[BlockResult]:
    """Return the results of a batch of deletions."""
    return list(map(partial(_deleted, backend=backend), keys, ops.answers()))


def _rows(kind: type[Any], *columns: Iterable[object]) -> list[Any]:
    """Return named tuples made of columns, at half the cost of calling their class."""
    return list(map(tuple.__new__, repeat(kind), zip(*columns, strict=False)))


def _written(
    key: str,
    nbytes: int,
    reason: str,
    answer: Answer,
    *,
    level: Level,
    checksum: bool,
    backend: str,
) -> BlockResult:
    if answer.status:
        return _not_done(answer, key, nbytes, backend)
    receipt = receipt_of(answer, key, nbytes, level, reason, checksum=checksum)
    status = BlockStatus.KEPT if answer.existed else BlockStatus.OK
    return BlockResult(key, status, nbytes, None, receipt)


def _was_read(key: str, nbytes: int, answer: Answer, *, backend: str) -> BlockResult:
    if answer.status:
        return _not_done(answer, key, nbytes, backend)
    status = BlockStatus.OK if answer.done == nbytes else BlockStatus.SHORT
    return BlockResult(key, status, answer.done)


def _deleted(key: str, answer: Answer, *, backend: str) -> BlockResult:
    if not answer.status:
        return BlockResult(key, BlockStatus.OK)
    result = _not_done(answer, key, 0, backend)
    return result._replace(error=None) if result.status is BlockStatus.MISSING else result
