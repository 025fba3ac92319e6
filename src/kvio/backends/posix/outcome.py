"""From what the C core says of an operation to results, receipts and typed errors."""

from __future__ import annotations

import errno
from typing import Any, Final

from kvio._native import CORRUPTIONS, SITES, lib
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    KvioError,
    StorageTimeoutError,
    storage_error,
)
from kvio.types import BlockResult, IOMode, Level, Receipt, status_of

MODES: Final = (IOMode.BUFFERED, IOMode.DONTCACHE, IOMode.DIRECT)
MODE_NUMBERS: Final = {mode: number for number, mode in enumerate(MODES)}

_MISSING: Final = (-errno.ENOENT, -errno.ENOTDIR)
_LOOKUPS: Final = (lib.KVIO_SITE_OPEN_READ, lib.KVIO_SITE_UNLINK)
_CORRUPT: Final[int] = lib.KVIO_CORRUPT
_TOO_SMALL: Final[int] = lib.KVIO_TOO_SMALL
_BEYOND_END: Final[int] = lib.KVIO_BEYOND_END
_HAS_CHECKSUM: Final[int] = lib.KVIO_OP_HAS_CHECKSUM


def error_of(op: Any, key: str, backend: str) -> KvioError:
    """Make the typed error of an operation that failed."""
    status = op.status
    if status == _CORRUPT:
        return CorruptBlockError(f"block {key!r} is corrupt: {CORRUPTIONS[op.site]}", key=key)
    if status == _TOO_SMALL:
        text = f"block {key!r} has {op.block_nbytes} bytes, the buffer {op.nbytes}"
        return BlockSizeError(text, key=key)
    if status == _BEYOND_END:
        text = f"offset {op.offset} lies beyond block {key!r} of {op.block_nbytes} bytes"
        return BlockSizeError(text, key=key)
    if status in _MISSING and op.site in _LOOKUPS:
        return BlockNotFoundError(f"no block {key!r}", key=key)
    if status == -errno.EEXIST:
        return BlockExistsError(f"block {key!r} exists", key=key)
    if status == -errno.ECANCELED:
        return StorageTimeoutError(
            f"gave up on block {key!r}", errno=errno.ETIMEDOUT, key=key, backend=backend
        )
    return storage_error(-status, f"{backend}: {SITES[op.site]} failed", key=key, backend=backend)


def failure(key: str, error: KvioError) -> BlockResult:
    """Make the result of a block that failed."""
    return BlockResult(key, status_of(error), 0, error)


def receipt_of(op: Any, key: str, level: Level, reason: str, *, checksum: bool) -> Receipt:
    """Make the receipt of a block that is stored."""
    if op.existed:
        has = bool(op.flags & _HAS_CHECKSUM)
        why = "an intact block of this length stood there"
        return Receipt(key, op.nbytes, op.crc if has else None, level, IOMode.BUFFERED, why, True)
    mode = MODES[op.mode_taken]
    return Receipt(key, op.nbytes, op.crc if checksum else None, level, mode, reason, False)
