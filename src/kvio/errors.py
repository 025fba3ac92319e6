"""Every error kvio raises.

KvioError
├─ ConfigError (ValueError)             an option or URL that is wrong
├─ UnknownBackendError (LookupError)    no backend of that name
├─ MissingDependencyError (ImportError) an extra is not installed
├─ UnsupportedError                     this storage or library cannot do it
├─ StoreClosedError (RuntimeError)      used after close()
├─ RankFailedError (.rank)              another rank raised an exception of another library
├─ BlockError (.key)
│  ├─ InvalidKeyError (ValueError)
│  ├─ BlockNotFoundError (LookupError)
│  ├─ BlockExistsError
│  ├─ BlockSizeError (ValueError)       the buffer or range does not fit the block
│  └─ CorruptBlockError                 the stored bytes are not those written
└─ StorageError (OSError; .errno)
   ├─ StorageFullError                  ENOSPC, EDQUOT, EFBIG
   ├─ AccessDeniedError                 EACCES, EPERM, EROFS
   ├─ TransientStorageError             retryable: EAGAIN, EMFILE, …
   │  └─ OutOfMemoryError (MemoryError)  ENOMEM, or more than the machine has; .nbytes
   ├─ RootMovedError                    a store's root was moved, removed or replaced
   ├─ StorageTimeoutError               the deadline passed
   └─ TierNotDrainedError (.keys)       a staging tier holds blocks that its store lacks
"""

from __future__ import annotations

import errno
import os
from typing import Final


class KvioError(Exception):
    """Root of every error kvio raises on purpose."""


class ConfigError(KvioError, ValueError):
    """An option, a URL or a root directory is wrong."""


class UnknownBackendError(KvioError, LookupError):
    """No installed package registers a backend of this name."""


class MissingDependencyError(KvioError, ImportError):
    """A package that the backend needs is not installed."""


class UnsupportedError(KvioError):
    """The storage, the library or this machine cannot do what was asked."""


class StoreClosedError(KvioError, RuntimeError):
    """The store was closed before or during the call."""


class RankFailedError(KvioError):
    """Another rank of a collective call raised an error that is not kvio's; see ``.rank``."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class BlockError(KvioError):
    """An operation on one block failed; ``.key`` is its name."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_block_error, (type(self), str(self), self.key)


class InvalidKeyError(BlockError, ValueError):
    """The key is not valid; raised before any I/O."""


class BlockNotFoundError(BlockError, LookupError):
    """There is no block under the key."""


class BlockExistsError(BlockError):
    """There is a block under the key already, and the call had ``if_exists="error"``."""


class BlockSizeError(BlockError, ValueError):
    """The buffer is too small for the block, or the range lies beyond its end."""


class CorruptBlockError(BlockError):
    """The stored bytes are not those written; none of them was returned as good."""


class StorageError(KvioError, OSError):
    """The storage failed; ``.errno`` says how, ``.key`` and ``.backend`` where."""

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
    """The device is full, or a quota or a limit of file sizes is reached."""


class AccessDeniedError(StorageError):
    """Permissions or a read-only file system forbid it."""


class TransientStorageError(StorageError):
    """The failure may be transient: the same call may succeed later."""


class OutOfMemoryError(TransientStorageError, MemoryError):
    """There is no memory for a block, a buffer or a tier; ``.nbytes`` were needed."""

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
    """The root that a store opened was moved or removed, or its path leads elsewhere now."""


class StorageTimeoutError(StorageError):
    """The deadline passed; a write may or may not become visible, never in part."""


class TierNotDrainedError(StorageError):
    """A staging tier holds blocks that its store lacks; ``.keys`` names them."""

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
    """Return the typed error of an errno; *doing* says which step failed."""
    kind = _BY_ERRNO.get(number, StorageError)
    name = errno.errorcode.get(number, str(number))
    where = f" for block {key!r}" if key is not None else ""
    message = f"{doing}{where}: {os.strerror(number)} ({name})"
    return kind(message, errno=number, key=key, backend=backend)


def out_of_memory(cause: MemoryError, key: str, nbytes: int | None) -> OutOfMemoryError:
    """Return an error that names the block and the *nbytes* that were needed."""
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
