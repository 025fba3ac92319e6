"""Failed drains: which are worth another try, when, and how several are told as one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvio.errors import BlockError, StorageError, TierNotDrainedError
from kvio.wrappers.staging.receipts import StagedReceipt

_FIRST_DELAY_S: Final = 0.01
_LONGEST_DELAY_S: Final = 2.0
_NAMED: Final = 20


def worth_a_retry(error: BaseException) -> bool:
    """Tell whether the same write, on a fresh inode or request, may succeed later."""
    return isinstance(error, StorageError)


def delay_s(attempts: int) -> float:
    """Give the pause after so many failed attempts, in seconds: 10 ms, doubled each time."""
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempts - 1)))


def name_keys(keys: Sequence[str]) -> str:
    """Write keys for a message; of very many the first and their number."""
    shown = ", ".join(map(repr, keys[:_NAMED]))
    return shown if len(keys) <= _NAMED else f"{shown}, … ({len(keys)} in all)"


def combine(failed: Sequence[StagedReceipt]) -> BaseException:
    """Make one error of many: of the first one's kind, its message naming every key."""
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
    """Say which blocks a tier holds that its store does not have."""
    text = f"{len(keys)} staged block(s) are not stored ({why}): {', '.join(map(repr, keys))}"
    return TierNotDrainedError(text, keys=tuple(keys))
