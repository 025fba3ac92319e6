"""Failed drains: which are retried and when, and one error for several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvio.errors import BlockError, StorageError, TierNotDrainedError
from kvio.wrappers.staging.receipts import StagedReceipt

_FIRST_DELAY_S: Final = 0.01
_LONGEST_DELAY_S: Final = 2.0
_NAMED: Final = 20


def is_retryable(error: BaseException) -> bool:
    """Return whether the same write, with a new inode or request, may succeed later."""
    return isinstance(error, StorageError)


def delay_s(attempts: int) -> float:
    """Return the delay after so many failed attempts, in seconds: 10 ms, doubled each time."""
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempts - 1)))


def name_keys(keys: Sequence[str]) -> str:
    """Return keys for a message; of many only the first, and the number."""
    shown = ", ".join(map(repr, keys[:_NAMED]))
    return shown if len(keys) <= _NAMED else f"{shown}, … ({len(keys)} in all)"


def combine(failed: Sequence[StagedReceipt]) -> BaseException:
    """Return one error for several: of the type of the first, with every key in its message."""
    first = failed[0].error
    keys = [receipt.key for receipt in failed]
    message = f"{len(keys)} staged block(s) failed: {', '.join(map(repr, keys))}; first: {first}"
    if isinstance(first, TierNotDrainedError):
        return TierNotDrainedError(message, keys=tuple(keys))
    if isinstance(first, StorageError):
        return type(first)(message, errno=first.errno, key=keys[0], backend=first.backend)
    if isinstance(first, BlockError):
        return type(first)(message, key=keys[0])
    return StorageError(message, key=keys[0])


def not_drained(keys: Sequence[str], why: str) -> TierNotDrainedError:
    """Return the error for staged blocks that the store lacks."""
    text = f"{len(keys)} staged block(s) are not stored ({why}): {', '.join(map(repr, keys))}"
    return TierNotDrainedError(text, keys=tuple(keys))
