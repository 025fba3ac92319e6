"""Store blocks in S3 with s3torchconnectorclient, the Rust client below s3torchconnector.

torch is not needed. Every PUT is a multipart upload of at least three requests; the last one
publishes it. Its sockets lack TCP_NODELAY (Nagle), so a small PUT takes tens of milliseconds
whatever the options are. Bodies are neither hashed nor sent with a checksum.

Credentials of the options are passed in a profile in an in-memory file, never in the environment.
While a client is created, environment variables name this file and the CA file. They are set with
putenv, so native code in every thread sees them, but not `os.environ`.

A client is never freed; the next store of the same configuration uses it. The library joins its
threads lazily, when the next thread ends. After a fork in between, the child would join threads
that it does not have, and abort.

The library has no timeouts: `kvio.backends.s3.timeouts` abandons calls. It makes each failed
request at least twice. With an untrusted certificate it retries for 40 seconds or more; therefore,
when a store cannot be opened over https, kvio makes a TLS handshake to find the reason. A write
to an upload that has already failed has no reason in its error: it counts as a lost connection.

A write copies the block twice (joined; into the library's parts), a read too (into bytes; into the
caller's buffer). A GET returns neither length nor ETag: see `kvio.backends.s3.ranges`.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client, S3Exception

from kvio.abc import RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.backend import S3Backend
from kvio.backends.s3.client import Connect, Head, Traits, UnsupportedOption
from kvio.backends.s3.errors import ErrorKind, RequestFailed, error_kind, error_of
from kvio.backends.s3.options import MAX_PARTS, S3Options, is_loopback
from kvio.backends.s3.ranges import RangeObjects
from kvio.errors import ConfigError, StorageTimeoutError, TransientStorageError
from kvio.types import Cancellation, Parts

T = TypeVar("T")

_NO_TIMEOUT: Final = "it has no such timeout; use request_timeout_s, which limits a whole request"
TRAITS = Traits(
    conditional=False,
    empty_objects=False,  # an upload without parts: Garage refuses that
    checks_upload="none",
    after_fork="reopen",
    timeouts="abandon",
    unsupported_options=(
        UnsupportedOption("sse", "it asks for no encryption; set it for the bucket"),
        UnsupportedOption("sse_kms_key_id", "it asks for no encryption; set it for the bucket"),
        UnsupportedOption("tls_verify", "it always checks the server's certificate; give ca_file"),
        UnsupportedOption("conditional", "it sends no If-None-Match", ("trust",)),
        UnsupportedOption("payload_signing", "it never hashes a body", ("signed",)),
        UnsupportedOption("connect_timeout_s", _NO_TIMEOUT),
        UnsupportedOption("read_timeout_s", _NO_TIMEOUT),
    ),
)

#: The library takes 1 as its default of 4, so 2 is the minimum.
_MAX_ATTEMPTS: Final = 2

_STATUS: Final = re.compile(r"response_status: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
#: The first phrase found in a text decides its kind.
FAILURES: Final[tuple[tuple[str, ErrorKind], ...]] = (
    ("Service error: The key does not exist", ErrorKind.MISSING),
    ("Service error: The object was not found", ErrorKind.MISSING),
    ("Service error: The bucket does not exist", ErrorKind.NO_BUCKET),
    ("Service error: At least one of the preconditions", ErrorKind.EXISTS),
    ("Client error: Forbidden: ", ErrorKind.DENIED),
    ("Client error: No signing credentials available", ErrorKind.NO_CREDENTIALS),
    ("Client error: Request throttled", ErrorKind.BUSY),
    ("Client error: Wrong region ", ErrorKind.ELSEWHERE),
    ("AWS_ERROR_S3_INTERNAL_ERROR", ErrorKind.BUSY),
    ("AWS_ERROR_S3_SLOW_DOWN", ErrorKind.BUSY),
    ("AWS_ERROR_S3_TOKEN_EXPIRED", ErrorKind.DENIED),
    ("AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED", ErrorKind.DENIED),
    ("AWS_ERROR_S3_REQUEST_HAS_COMPLETED", ErrorKind.LOST),  # the upload failed without a reason
    ("AWS_ERROR_S3_RESPONSE_CHECKSUM_MISMATCH", ErrorKind.CORRUPT),
    ("AWS_ERROR_S3_OBJECT_MODIFIED", ErrorKind.CONFLICT),
    # The server answers a range request with the whole object.
    ("AWS_ERROR_S3_MISSING_CONTENT_RANGE_HEADER", ErrorKind.UNSUPPORTED),
    ("AWS_ERROR_DEST_COPY_TOO_SMALL", ErrorKind.UNSUPPORTED),
    ("AWS_IO_TLS_", ErrorKind.TLS),
    ("AWS_IO_SOCKET_TIMEOUT", ErrorKind.TIMEOUT),
    ("AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT", ErrorKind.TIMEOUT),
    ("AWS_IO_SOCKET_CONNECTION_REFUSED", ErrorKind.UNREACHABLE),
    ("AWS_IO_SOCKET_NO_ROUTE_TO_HOST", ErrorKind.UNREACHABLE),
    ("AWS_IO_SOCKET_NETWORK_DOWN", ErrorKind.UNREACHABLE),
    ("AWS_IO_DNS_", ErrorKind.UNREACHABLE),
    ("AWS_IO_SOCKET_", ErrorKind.LOST),
    ("AWS_IO_BROKEN_PIPE", ErrorKind.LOST),
    ("AWS_ERROR_HTTP_", ErrorKind.LOST),
)


class TorchObjects(RangeObjects):
    """One bucket, accessed with one client; see `kvio.backends.s3.timeouts.BlockingObjects`."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._storage_class = options.storage_class
        self._client = _client(options)

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        if_none_match: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,
    ) -> None:
        """Store an object; see `kvio.backends.s3.timeouts.BlockingObjects`."""
        total = body.total_bytes(parts)
        if if_none_match:
            raise RequestFailed(
                ErrorKind.UNSUPPORTED, "s3torchconnectorclient sends no If-None-Match"
            )
        if total > self._part_bytes * MAX_PARTS:
            raise RequestFailed(ErrorKind.UNSUPPORTED, f"more than {MAX_PARTS} parts of part_bytes")
        stream = None
        try:
            stream = self._client.put_object(self._bucket, name, self._storage_class)
            for start, stop in body.ranges(total, self._part_bytes):
                stream.write(body.join(body.cut(parts, start, stop)))
                if cancel is not None and cancel.requested:  # the caller's memory may have changed
                    raise RequestFailed(ErrorKind.TIMEOUT, "the call was cancelled")
            stream.close()
        except S3Exception as exc:
            raise parse_error(str(exc)) from exc
        finally:
            del stream  # freeing it aborts an unclosed upload; a traceback would keep it alive

    def get_range(self, name: str, start: int, nbytes: int) -> list[bytes]:
        """Return the bytes of a range."""
        pieces = _call(
            lambda: list(self._client.get_object(self._bucket, name, start, start + nbytes))
        )
        if sum(map(len, pieces)) > nbytes:
            raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
        return pieces

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        found = _call(lambda: self._client.head_object(self._bucket, name))
        return Head(found.size, found.last_modified * 10**9, found.etag)

    def delete(self, name: str) -> None:
        """Delete an object."""
        _call(lambda: self._client.delete_object(self._bucket, name))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page."""
        pages = iter(self._client.list_objects(self._bucket, prefix))
        while (page := _call(lambda: next(pages, None))) is not None:
            yield from [entry.key for entry in page.object_info]

    def close(self) -> None:
        """Do nothing: the next store of this configuration uses the client."""


def _call(request: Callable[[], T]) -> T:
    try:
        return request()
    except S3Exception as exc:
        raise parse_error(str(exc)) from exc


def parse_error(text: str) -> RequestFailed:
    """Classify an error by the library's text."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        found = error_kind(int(status[1]), code[1] if code else "")
        return RequestFailed(found, f"{status[1]} {code[1] if code else ''}".strip())
    kind = next((kind for phrase, kind in FAILURES if phrase in text), ErrorKind.OTHER)
    return RequestFailed(kind, text)


#: The environment variables that the library's provider chain reads first.
_CREDENTIAL_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
)
#: Clients are created one at a time because the environment belongs to all threads.
_lock = threading.Lock()
_clients: Final[dict[tuple[object, ...], MountpointS3Client]] = {}


def _client(options: S3Options) -> MountpointS3Client:
    if options.signs_payload and not _may_be_unsigned(options):
        raise ConfigError(
            "s3+torch cannot sign bodies, and over plain http the network could change a body "
            "unnoticed: use https, or another backend"
        )
    client_key = _configuration(options)
    with _lock:
        if client_key not in _clients:
            client = _connect(options)
            # The extra reference keeps it alive through interpreter shutdown.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
            _clients[client_key] = client
        return _clients[client_key]


def _configuration(options: S3Options) -> tuple[object, ...]:
    """Return everything that affects a client."""
    return (
        os.getpid(),
        options.endpoint_url,
        options.region,
        options.path_style,
        options.part_bytes,
        options.ca_file,
        options.access_key,
        options.secret_key,
        options.session_token,
        *(os.environ.get(name) for name in _CREDENTIAL_VARIABLES),
    )


def _connect(options: S3Options) -> MountpointS3Client:
    profile = None
    variables: dict[str, str | None] = {"AWS_MAX_ATTEMPTS": None}  # it overrides max_attempts
    if options.ca_file is not None:
        variables["SSL_CERT_FILE"] = options.ca_file
    if options.access_key is not None:
        profile = "kvio"
        path = _in_memory_file(_profile(profile, options))
        variables |= {"AWS_SHARED_CREDENTIALS_FILE": path, "AWS_CONFIG_FILE": os.devnull}
    _putenv(variables)
    try:
        return MountpointS3Client(
            options.region,
            endpoint=options.endpoint_url,
            force_path_style=options.path_style,
            max_attempts=_MAX_ATTEMPTS,
            # The smallest size with which the library makes one request per read of the store.
            part_size=options.part_bytes + body.NBYTES + 1,
            profile=profile,
        )
    except S3Exception as exc:
        raise ConfigError(f"s3torchconnectorclient cannot create a client: {exc}") from None
    finally:
        _putenv({name: os.environ.get(name) for name in variables})


def _failing_handshake(options: S3Options) -> str | None:
    """Return why a TLS handshake with the endpoint fails; None if it succeeds or is unclear."""
    endpoint = urlsplit(options.endpoint_url or "")
    if endpoint.scheme != "https" or endpoint.hostname is None:
        return None
    host = endpoint.hostname if options.path_style else f"{options.bucket}.{endpoint.hostname}"
    context = ssl.create_default_context(cafile=options.ca_file)
    limit_s = min(options.connect_timeout_s, options.request_timeout_s)
    try:
        with (
            socket.create_connection((host, endpoint.port or 443), limit_s) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return None
    except ssl.SSLEOFError:
        return None  # the server closed the connection: this may be transient
    except ssl.SSLError as exc:
        return str(exc)
    except OSError:
        return None


def _may_be_unsigned(options: S3Options) -> bool:
    host = urlsplit(options.endpoint_url or "").hostname or ""
    return options.payload_signing == "auto" and is_loopback(host)


def _profile(name: str, options: S3Options) -> str:
    given = {
        "aws_access_key_id": options.access_key,
        "aws_secret_access_key": options.secret_key,
        "aws_session_token": options.session_token,
    }
    lines = [f"[{name}]"]
    for field, secret in given.items():
        if secret is None:
            continue
        value = secret.reveal()
        if not value.isprintable() or value != value.strip() or " #" in value:
            raise ConfigError(
                f"s3+torch cannot use this {field}: a profile cannot contain such a value"
            )
        lines.append(f"{field} = {value}")
    return "\n".join([*lines, ""])


def _in_memory_file(text: str) -> str:
    """Return the path of an in-memory file that exists until this process ends."""
    fd = os.memfd_create("kvio", os.MFD_CLOEXEC)
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    return f"/proc/self/fd/{fd}"


def _putenv(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


def _forget_lock() -> None:
    global _lock  # another thread may have held it at the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


class TorchBackend(S3Backend):
    """Stores blocks in a bucket with s3torchconnectorclient."""

    name = "s3+torch"
    library: ClassVar[Connect] = TorchObjects
    traits = TRAITS

    def __init__(self, options: S3Options) -> None:
        try:
            super().__init__(options)
        except (StorageTimeoutError, TransientStorageError) as exc:
            untrusted = _failing_handshake(options)
            if untrusted is None:
                raise
            failed = RequestFailed(ErrorKind.TLS, untrusted)
            doing = f"open the bucket {options.bucket!r}"
            raise error_of(failed, doing, key=None, backend=self.name) from exc
