"""From what the C core says of an operation to results, receipts and typed errors."""

from __future__ import annotations

import errno
from typing import Final

from kvio._native import CORRUPTIONS, SITES, Answer, lib
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
_STOOD_THERE: Final = "an intact block of this length stood there"
_HAS_CHECKSUM: Final[int] = lib.KVIO_OP_HAS_CHECKSUM


def error_of(answer: Answer, key: str, nbytes: int, offset: int, backend: str) -> KvioError:
    """Make the typed error of an operation on *nbytes* bytes that failed."""
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
    if status == -errno.ECANCELED:
        return StorageTimeoutError(
            f"gave up on block {key!r}", errno=errno.ETIMEDOUT, key=key, backend=backend
        )
    return storage_error(-status, f"{backend}: {SITES[site]} failed", key=key, backend=backend)


def failure(key: str, error: KvioError) -> BlockResult:
    """Make the result of a block that failed."""
    return BlockResult(key, status_of(error), 0, error)


def raisable(result: BlockResult) -> KvioError:
    """Give the error of a block that failed."""
    assert result.error is not None
    return result.error


def receipt_of(
    answer: Answer, key: str, nbytes: int, level: Level, reason: str, *, checksum: bool
) -> Receipt:
    """Make the receipt of a block that is stored."""
    if answer.existed:
        crc = answer.crc if answer.flags & _HAS_CHECKSUM else None
        return Receipt(key, nbytes, crc, level, IOMode.BUFFERED, _STOOD_THERE, True)
    mode = MODES[answer.mode_taken]
    return Receipt(key, nbytes, answer.crc if checksum else None, level, mode, reason, False)
