"""How a request can fail, whatever library made it, and which error a caller sees."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum
from typing import Final

from kvio.errors import (
    AccessDeniedError,
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    KvioError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    TransientStorageError,
    UnsupportedError,
)


class Condition(Enum):
    """Why a request was refused or lost, in the words of the protocol."""

    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    DENIED = "the server denies access"
    NO_CREDENTIALS = "no credentials were found"
    EXISTS = "the object exists"
    CONFLICT = "another writer was at work on the object"
    RANGE = "the range lies beyond the object"
    BUSY = "the server is overloaded or failed inside"
    LOST = "the connection broke before the answer was whole"
    UNREACHABLE = "the server cannot be reached"
    TLS = "no trusted TLS connection could be made"
    TIMEOUT = "the server did not answer in time"
    CORRUPT = "the answer does not match its checksum"
    MANGLED = "the body reached the server changed"
    FULL = "the server has no room"
    ELSEWHERE = "the bucket belongs to another region or endpoint"
    UNSUPPORTED = "the server does not support this"
    OTHER = "the request failed"


#: What may go well when asked again. Nothing else is tried twice.
PASSING: Final = frozenset(
    {
        Condition.CONFLICT,
        Condition.BUSY,
        Condition.LOST,
        Condition.UNREACHABLE,
        Condition.MANGLED,
    }
)
#: The request may have been carried out all the same.
UNDECIDED: Final = frozenset({Condition.LOST, Condition.TIMEOUT, Condition.BUSY})


class Refused(Exception):  # noqa: N818  # not every one of them is an error
    """A request failed; raised by a library's file, never seen by a caller of kvio.

    Attributes:
        condition: how.
        detail: the library's or server's own words, without secrets.
    """

    def __init__(self, condition: Condition, detail: str = "") -> None:
        super().__init__(condition, detail)
        self.condition = condition
        self.detail = detail


_BY_CODE: Final = {
    "NoSuchKey": Condition.MISSING,
    "NoSuchUpload": Condition.LOST,
    "NoSuchBucket": Condition.NO_BUCKET,
    "PreconditionFailed": Condition.EXISTS,
    "ConditionalRequestConflict": Condition.CONFLICT,
    "OperationAborted": Condition.CONFLICT,
    "InvalidRange": Condition.RANGE,
    "SlowDown": Condition.BUSY,
    "SlowDownRead": Condition.BUSY,
    "SlowDownWrite": Condition.BUSY,
    "ServiceUnavailable": Condition.BUSY,
    "InternalError": Condition.BUSY,
    "RequestTimeout": Condition.LOST,
    "BadDigest": Condition.MANGLED,
    "XAmzContentSHA256Mismatch": Condition.MANGLED,
    "XAmzContentChecksumMismatch": Condition.MANGLED,
    "IncompleteBody": Condition.LOST,
    "QuotaExceeded": Condition.FULL,
    "InsufficientCapacity": Condition.FULL,
    "XMinioStorageFull": Condition.FULL,
    "XMinioAdminBucketQuotaExceeded": Condition.FULL,
    "EntityTooLarge": Condition.FULL,
    "PermanentRedirect": Condition.ELSEWHERE,
    "TemporaryRedirect": Condition.ELSEWHERE,
    "AuthorizationHeaderMalformed": Condition.ELSEWHERE,
    "NotImplemented": Condition.UNSUPPORTED,
    "AccessDenied": Condition.DENIED,
    "InvalidAccessKeyId": Condition.DENIED,
    "SignatureDoesNotMatch": Condition.DENIED,
    "ExpiredToken": Condition.DENIED,
    "InvalidToken": Condition.DENIED,
    "TokenRefreshRequired": Condition.DENIED,
}
_BY_STATUS: Final = {
    301: Condition.ELSEWHERE,
    307: Condition.ELSEWHERE,
    401: Condition.DENIED,
    403: Condition.DENIED,
    404: Condition.MISSING,
    408: Condition.LOST,
    409: Condition.CONFLICT,
    412: Condition.EXISTS,
    416: Condition.RANGE,
    429: Condition.BUSY,
    501: Condition.UNSUPPORTED,
    507: Condition.FULL,
}


def condition_of(status: int | None, code: str = "") -> Condition:
    """Say what an HTTP status and an S3 error code mean; the code tells more where it is known."""
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return Condition.BUSY if status is not None and status >= 500 else Condition.OTHER


def timed_out(exc: BaseException) -> bool:
    """Tell whether urllib3 means a timeout where it says that a connection was aborted."""
    return any(isinstance(why, TimeoutError) for why in exc.args)


def _block(kind: type[BlockNotFoundError | BlockExistsError | BlockSizeError | CorruptBlockError]):  # type: ignore[no-untyped-def]  # noqa: ANN202
    return lambda text, key, _: kind(text, key=key)


def _storage(kind: type[StorageError], number: int) -> Callable[[str, str | None, str], KvioError]:
    return lambda text, key, backend: kind(text, errno=number, key=key, backend=backend)


#: The one error of every condition.
ERRORS: Final[dict[Condition, Callable[[str, str | None, str], KvioError]]] = {
    Condition.MISSING: _block(BlockNotFoundError),
    Condition.NO_BUCKET: _storage(StorageError, errno.ENOENT),
    Condition.DENIED: _storage(AccessDeniedError, errno.EACCES),
    Condition.NO_CREDENTIALS: _storage(AccessDeniedError, errno.ENOKEY),
    Condition.EXISTS: _block(BlockExistsError),
    Condition.CONFLICT: _storage(TransientStorageError, errno.EBUSY),
    Condition.RANGE: _block(BlockSizeError),
    Condition.BUSY: _storage(TransientStorageError, errno.EAGAIN),
    Condition.LOST: _storage(TransientStorageError, errno.ECONNRESET),
    Condition.UNREACHABLE: _storage(TransientStorageError, errno.EHOSTUNREACH),
    Condition.TLS: _storage(StorageError, errno.EPROTO),
    Condition.TIMEOUT: _storage(StorageTimeoutError, errno.ETIMEDOUT),
    Condition.CORRUPT: _block(CorruptBlockError),
    Condition.MANGLED: _storage(TransientStorageError, errno.EIO),
    Condition.FULL: _storage(StorageFullError, errno.ENOSPC),
    Condition.ELSEWHERE: _storage(StorageError, errno.EREMOTE),
    Condition.UNSUPPORTED: lambda text, _key, _backend: UnsupportedError(text),
    Condition.OTHER: _storage(StorageError, errno.EIO),
}


def error_of(refused: Refused, doing: str, *, key: str | None, backend: str) -> KvioError:
    """Make the typed error of a refusal; *doing* says what was asked for."""
    where = f" block {key!r}" if key is not None else ""
    detail = f" ({refused.detail})" if refused.detail else ""
    text = f"{backend}: {doing}{where}: {refused.condition.value}{detail}"
    return ERRORS[refused.condition](text, key, backend)
