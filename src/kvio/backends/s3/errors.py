"""Classify failed requests, the same for every library, and map them to kvio's errors."""

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


class ErrorKind(Enum):
    """Why a request failed; the value is the text of the error."""

    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    DENIED = "the server denies access"
    NO_CREDENTIALS = (
        "no credentials were found: give access_key and secret_key (a pickled store has none), or "
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )
    EXISTS = "the object exists"
    CONFLICT = "another writer changed the object at the same time"
    RANGE = "the range lies beyond the end of the object"
    BUSY = "the server is overloaded or had an internal error"
    LOST = "the connection broke before the response was complete"
    UNREACHABLE = "the server cannot be reached"
    TLS = "no trusted TLS connection could be made"
    TIMEOUT = "the request timed out"
    CORRUPT = "the response does not match its checksum"
    MANGLED = "the body was changed on its way to the server"
    FULL = "the server has no free space"
    NAME = "the library cannot list a name of the bucket; boto3 and minio, once installed, can"
    ELSEWHERE = "the bucket belongs to another region or endpoint"
    UNSUPPORTED = "the server does not support this"
    OTHER = "the request failed"


#: Transient errors. Only these are retried.
RETRYABLE: Final = frozenset(
    {
        ErrorKind.CONFLICT,
        ErrorKind.BUSY,
        ErrorKind.LOST,
        ErrorKind.UNREACHABLE,
        ErrorKind.MANGLED,
    }
)
#: Errors of a server that restarts: some seconds later it may be there again.
PASSING: Final = frozenset({ErrorKind.BUSY, ErrorKind.LOST, ErrorKind.UNREACHABLE})
#: After these errors the server may still have carried out the request.
AMBIGUOUS: Final = frozenset({ErrorKind.LOST, ErrorKind.TIMEOUT, ErrorKind.BUSY})


class RequestFailed(Exception):  # noqa: N818  # internal: callers see `ERRORS`
    """A request failed; raised by `Objects` and never seen by a caller of kvio.

    Attributes:
        kind: the reason.
        detail: the text of the library or server, without secrets.
    """

    def __init__(self, kind: ErrorKind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


_BY_CODE: Final = {
    "NoSuchKey": ErrorKind.MISSING,
    "NoSuchUpload": ErrorKind.LOST,
    "NoSuchBucket": ErrorKind.NO_BUCKET,
    "PreconditionFailed": ErrorKind.EXISTS,
    "ConditionalRequestConflict": ErrorKind.CONFLICT,
    "OperationAborted": ErrorKind.CONFLICT,
    "InvalidRange": ErrorKind.RANGE,
    "SlowDown": ErrorKind.BUSY,
    "SlowDownRead": ErrorKind.BUSY,
    "SlowDownWrite": ErrorKind.BUSY,
    "ServiceUnavailable": ErrorKind.BUSY,
    "InternalError": ErrorKind.BUSY,
    "RequestTimeout": ErrorKind.LOST,
    "BadDigest": ErrorKind.MANGLED,
    "InvalidDigest": ErrorKind.MANGLED,
    "XAmzContentSHA256Mismatch": ErrorKind.MANGLED,
    "XAmzContentChecksumMismatch": ErrorKind.MANGLED,
    "IncompleteBody": ErrorKind.LOST,
    "QuotaExceeded": ErrorKind.FULL,
    "InsufficientCapacity": ErrorKind.FULL,
    "XMinioStorageFull": ErrorKind.FULL,
    "XMinioAdminBucketQuotaExceeded": ErrorKind.FULL,
    "EntityTooLarge": ErrorKind.FULL,
    "PermanentRedirect": ErrorKind.ELSEWHERE,
    "TemporaryRedirect": ErrorKind.ELSEWHERE,
    "AuthorizationHeaderMalformed": ErrorKind.ELSEWHERE,
    "NotImplemented": ErrorKind.UNSUPPORTED,
    "AccessDenied": ErrorKind.DENIED,
    "InvalidAccessKeyId": ErrorKind.DENIED,
    "SignatureDoesNotMatch": ErrorKind.DENIED,
    "ExpiredToken": ErrorKind.DENIED,
    "InvalidToken": ErrorKind.DENIED,
    "InvalidTokenId": ErrorKind.DENIED,
    "TokenRefreshRequired": ErrorKind.DENIED,
}
_BY_STATUS: Final = {
    301: ErrorKind.ELSEWHERE,
    307: ErrorKind.ELSEWHERE,
    401: ErrorKind.DENIED,
    403: ErrorKind.DENIED,
    404: ErrorKind.MISSING,
    408: ErrorKind.LOST,
    409: ErrorKind.CONFLICT,
    412: ErrorKind.EXISTS,
    416: ErrorKind.RANGE,
    429: ErrorKind.BUSY,
    501: ErrorKind.UNSUPPORTED,
    507: ErrorKind.FULL,
}


def error_kind(status: int | None, code: str = "") -> ErrorKind:
    """Classify an HTTP status and an S3 error code; a known code takes precedence."""
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return ErrorKind.BUSY if status is not None and status >= 500 else ErrorKind.OTHER


def timed_out(exc: BaseException) -> bool:
    """Return whether urllib3's "connection aborted" error was caused by a timeout."""
    return any(isinstance(why, TimeoutError) for why in exc.args)


def _block(cls: type[BlockNotFoundError | BlockExistsError | BlockSizeError | CorruptBlockError]):  # type: ignore[no-untyped-def]  # noqa: ANN202
    return lambda text, key, _: cls(text, key=key)


def _storage(cls: type[StorageError], number: int) -> Callable[[str, str | None, str], KvioError]:
    return lambda text, key, backend: cls(text, errno=number, key=key, backend=backend)


#: The error that a caller sees for each kind.
ERRORS: Final[dict[ErrorKind, Callable[[str, str | None, str], KvioError]]] = {
    ErrorKind.MISSING: _block(BlockNotFoundError),
    ErrorKind.NO_BUCKET: _storage(StorageError, errno.ENOENT),
    ErrorKind.DENIED: _storage(AccessDeniedError, errno.EACCES),
    ErrorKind.NO_CREDENTIALS: _storage(AccessDeniedError, errno.ENOKEY),
    ErrorKind.EXISTS: _block(BlockExistsError),
    ErrorKind.CONFLICT: _storage(TransientStorageError, errno.EBUSY),
    ErrorKind.RANGE: _block(BlockSizeError),
    ErrorKind.BUSY: _storage(TransientStorageError, errno.EAGAIN),
    ErrorKind.LOST: _storage(TransientStorageError, errno.ECONNRESET),
    ErrorKind.UNREACHABLE: _storage(TransientStorageError, errno.EHOSTUNREACH),
    ErrorKind.TLS: _storage(StorageError, errno.EPROTO),
    ErrorKind.TIMEOUT: _storage(StorageTimeoutError, errno.ETIMEDOUT),
    ErrorKind.CORRUPT: _block(CorruptBlockError),
    ErrorKind.MANGLED: _storage(TransientStorageError, errno.EIO),
    ErrorKind.FULL: _storage(StorageFullError, errno.ENOSPC),
    ErrorKind.NAME: _storage(StorageError, errno.EILSEQ),
    ErrorKind.ELSEWHERE: _storage(StorageError, errno.EREMOTE),
    ErrorKind.UNSUPPORTED: lambda text, _key, _backend: UnsupportedError(text),
    ErrorKind.OTHER: _storage(StorageError, errno.EIO),
}


def error_of(failed: RequestFailed, doing: str, *, key: str | None, backend: str) -> KvioError:
    """Return the typed error of a failed request; *doing* names the operation."""
    where = f" block {key!r}" if key is not None else ""
    detail = f" ({failed.detail})" if failed.detail else ""
    text = f"{backend}: {doing}{where}: {failed.kind.value}{detail}"
    return ERRORS[failed.kind](text, key, backend)
