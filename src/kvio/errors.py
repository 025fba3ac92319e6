"""Every error kvio raises.

KvioError
├─ ConfigError (ValueError)             an option or URL that cannot be
├─ UnknownBackendError (LookupError)    no backend of that name
├─ MissingDependencyError (ImportError) an extra is not installed
├─ UnsupportedError                     this medium or library cannot do it
├─ StoreClosedError (RuntimeError)      used after close()
├─ RankFailedError (.rank)              another rank raised what is no KvioError
├─ BlockError (.key)
│  ├─ InvalidKeyError (ValueError)
│  ├─ BlockNotFoundError (LookupError)
│  ├─ BlockExistsError
│  ├─ BlockSizeError (ValueError)       the buffer or range does not fit the block
│  └─ CorruptBlockError                 the stored bytes are not those written
└─ StorageError (OSError; .errno)
   ├─ StorageFullError                  ENOSPC, EDQUOT, EFBIG
   ├─ AccessDeniedError                 EACCES, EPERM, EROFS
   ├─ TransientStorageError             worth a retry: EAGAIN, EMFILE, …
   │  └─ OutOfMemoryError (MemoryError)  ENOMEM, or more than there is; .nbytes
   ├─ RootMovedError                    a store's root was moved, removed or replaced
   ├─ StorageTimeoutError               the deadline passed
   └─ TierNotDrainedError (.keys)       blocks are staged that the store does not have
"""

from __future__ import annotations

import errno
import os
from typing import Final


class KvioError(Exception):
    """Root of every error kvio raises on purpose."""


class ConfigError(KvioError, ValueError):
    """An option, a URL or a root directory that cannot be used as it is."""


class UnknownBackendError(KvioError, LookupError):
    """No installed distribution registers a backend of this name."""


class MissingDependencyError(KvioError, ImportError):
    """The backend exists, but a package it needs is not installed."""


class UnsupportedError(KvioError):
    """The medium, the library or this machine cannot do what was asked."""


class StoreClosedError(KvioError, RuntimeError):
    """The store was closed before or during the call."""


class RankFailedError(KvioError):
    """Another rank of a call that all ranks make raised what is no KvioError; ``.rank``: which."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class BlockError(KvioError):
    """Something about one block; ``.key`` is its name."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_block_error, (type(self), str(self), self.key)


class InvalidKeyError(BlockError, ValueError):
    """The key breaks the rules; raised before any I/O."""


class BlockNotFoundError(BlockError, LookupError):
    """No block stands under the key."""


class BlockExistsError(BlockError):
    """The key is taken and ``if_exists="error"`` was asked for."""


class BlockSizeError(BlockError, ValueError):
    """The buffer is too small for the block, or the range lies beyond its end."""


class CorruptBlockError(BlockError):
    """What is stored is not what was written; none of it was returned as good."""


class StorageError(KvioError, OSError):
    """The medium failed; ``.errno`` says how, ``.key`` and ``.backend`` where."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        key: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.key = key
        self.backend = backend

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_storage_error, (type(self), str(self), self.errno, self.key, self.backend)


class StorageFullError(StorageError):
    """No room: the device, a quota or a file size limit is exhausted."""


class AccessDeniedError(StorageError):
    """Permissions or a read-only medium forbid it."""


class TransientStorageError(StorageError):
    """It failed for now; the same call may succeed later."""


class OutOfMemoryError(TransientStorageError, MemoryError):
    """There is no memory for a block, a buffer or a tier; ``.nbytes`` is what was asked for."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = errno.ENOMEM,
        key: str | None = None,
        backend: str | None = None,
        nbytes: int | None = None,
    ) -> None:
        super().__init__(message, errno=errno, key=key, backend=backend)
        self.nbytes = nbytes

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_out_of_memory, (str(self), self.key, self.backend, self.nbytes)


class RootMovedError(StorageError):
    """The path of a store's root does not lead to the directory any more that the store opened."""


class StorageTimeoutError(StorageError):
    """The deadline passed; a write may or may not become visible, never in part."""


class TierNotDrainedError(StorageError):
    """A staging tier holds blocks that its store does not have; ``.keys`` names them."""

    def __init__(self, message: str, *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message, key=keys[0] if keys else None)
        self.keys = keys

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_not_drained, (str(self), self.keys)


_BY_ERRNO: Final[dict[int, type[StorageError]]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), StorageFullError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), AccessDeniedError),
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EINTR,
            errno.EMFILE,
            errno.ENFILE,
            errno.EBUSY,
            errno.ESTALE,
        ),
        TransientStorageError,
    ),
    errno.ENOMEM: OutOfMemoryError,
    errno.ETIMEDOUT: StorageTimeoutError,
}


def storage_error(
    number: int, doing: str, *, key: str | None = None, backend: str | None = None
) -> StorageError:
    """Make the typed error of an errno; *doing* says which step failed."""
    kind = _BY_ERRNO.get(number, StorageError)
    name = errno.errorcode.get(number, str(number))
    where = f" for block {key!r}" if key is not None else ""
    message = f"{doing}{where}: {os.strerror(number)} ({name})"
    return kind(message, errno=number, key=key, backend=backend)


def out_of_memory(cause: MemoryError, key: str, nbytes: int | None) -> OutOfMemoryError:
    """Make the error of a block from one that does not name it; *nbytes*: what was asked for."""
    said = f"block {key!r}: {cause}" if str(cause) else f"block {key!r}: there is no memory"
    if isinstance(cause, OutOfMemoryError):
        said = said if cause.key is None else str(cause)
        nbytes = nbytes if cause.nbytes is None else cause.nbytes
    return OutOfMemoryError(said, key=key, nbytes=nbytes)


def _rebuild_block_error(kind: type[BlockError], message: str, key: str | None) -> BlockError:
    return kind(message, key=key)


def _rebuild_storage_error(
    kind: type[StorageError],
    message: str,
    number: int | None,
    key: str | None,
    backend: str | None,
) -> StorageError:
    return kind(message, errno=number, key=key, backend=backend)


def _rebuild_out_of_memory(
    message: str, key: str | None, backend: str | None, nbytes: int | None
) -> OutOfMemoryError:
    return OutOfMemoryError(message, key=key, backend=backend, nbytes=nbytes)


def _rebuild_not_drained(message: str, keys: tuple[str, ...]) -> TierNotDrainedError:
    return TierNotDrainedError(message, keys=keys)
