"""Errors that the daemon sends to a client, with their type, message and key."""

from __future__ import annotations

from errno import ENOMEM
from typing import Final

from kvio import errors
from kvio.errors import BlockError, KvioError, StorageError, TierNotDrainedError
from kvio.types import is_key
from kvio.wrappers.staging.daemon.fields import ProtocolError
from kvio.wrappers.staging.daemon.messages import MAX_KEYS, Failure

#: The number of a kind is its place; new ones go to the end.
_KINDS: Final[tuple[type[KvioError], ...]] = (
    errors.StorageError,
    errors.StorageFullError,
    errors.AccessDeniedError,
    errors.TransientStorageError,
    errors.StorageTimeoutError,
    errors.TierNotDrainedError,
    errors.BlockError,
    errors.InvalidKeyError,
    errors.BlockNotFoundError,
    errors.BlockExistsError,
    errors.BlockSizeError,
    errors.CorruptBlockError,
    errors.ConfigError,
    errors.UnsupportedError,
    errors.StoreClosedError,
)


def failure_of(error: BaseException) -> Failure:
    """Encode an error; a type that clients do not know becomes its nearest base class."""
    kind = next((k for k in type(error).__mro__ if k in _KINDS), StorageError)
    key = getattr(error, "key", None)
    number = getattr(error, "errno", None)
    return Failure(
        _KINDS.index(kind),
        number if isinstance(number, int) else None,
        str(error) if isinstance(error, KvioError) else f"{type(error).__name__}: {error}",
        key if isinstance(key, str) and is_key(key) else None,
        tuple(getattr(error, "keys", ()))[: MAX_KEYS // 2],
    )


def error_of(failure: Failure) -> KvioError:
    """Decode an error that a client raises.

    Raises:
        ProtocolError: there is no such type.
    """
    if failure.kind >= len(_KINDS):
        raise ProtocolError(f"there is no error {failure.kind}")
    kind = _KINDS[failure.kind]
    if issubclass(kind, TierNotDrainedError):
        return kind(failure.text, keys=failure.keys)
    if kind is errors.TransientStorageError and failure.errno == ENOMEM:
        kind = errors.OutOfMemoryError  # which the protocol has no number for
    if issubclass(kind, StorageError):
        return kind(failure.text, errno=failure.errno, key=failure.key)
    if issubclass(kind, BlockError):
        return kind(failure.text, key=failure.key)
    return kind(failure.text)
