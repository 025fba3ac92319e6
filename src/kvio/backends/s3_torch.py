"""S3 through s3torchconnectorclient, the Rust client below s3torchconnector; torch is not needed.

Every PUT is a multipart upload of three requests at least, published by the last. Its sockets wait
for acknowledgements before they send the rest of a request (Nagle), so a small PUT takes tens of
milliseconds, whatever is configured here. Bodies are never hashed, nor sent with a checksum.

Credentials that are given are handed over in a profile whose file is in memory: they are never in
the environment. The variables that name this file and the CA's exist, for native code alone and for
all its threads, while a client is made.

A client is never destroyed: the next store of the same configuration uses it again. Its threads are
joined lazily, by the next one that ends, and a child that was forked in between would join threads
that it does not have, and be aborted.

The library has no timeouts: `kvio.s3.bounded` gives calls up. It makes each failed request twice at
least. Of a certificate that it does not trust it says nothing for 40 seconds or more: when a store
cannot be opened over https, a handshake of Python's own tells whether that is why. A write into an
upload that has failed by then does not tell why it did: it counts as a lost connection.

A block is copied twice on its way out (joined; into the library's parts) and twice on its way in
(into bytes; into the caller's memory). A GET tells neither length nor ETag: see `kvio.s3.lengths`.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client, S3Exception

from kvio.abc import RunAll
from kvio.errors import ConfigError, StorageTimeoutError, TransientStorageError
from kvio.s3 import body, lengths, trailers
from kvio.s3.backend import S3Backend
from kvio.s3.conditions import Condition, Refused, condition_of, error_of
from kvio.s3.objects import Connect, Got, Head, Ignored, Traits
from kvio.s3.options import MAX_PARTS, S3Options, is_loopback
from kvio.types import Cancellation, Parts

T = TypeVar("T")

_NO_TIMEOUT: Final = "it has no timeouts; request_timeout_s bounds a whole request"
TRAITS = Traits(
    conditional=False,
    checks_upload="none",
    after_fork="reopen",
    bounded=False,
    ignores=(
        Ignored("tls_verify", "it always checks the server's certificate; give ca_file"),
        Ignored("conditional", "it sends no If-None-Match", ("trust",)),
        Ignored("payload_signing", "it never hashes a body", ("signed",)),
        Ignored("connect_timeout_s", _NO_TIMEOUT),
        Ignored("read_timeout_s", _NO_TIMEOUT),
    ),
)

#: One means its default of four; two is the least.
_REQUESTS_MADE: Final = 2
#: Asked for when a store is opened. Nothing is ever stored there.
_NOTHING: Final = ".kvio-nothing"

_STATUS: Final = re.compile(r"response_status: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
#: In this order: the first phrase found says what a failure means.
FAILURES: Final[tuple[tuple[str, Condition], ...]] = (
    ("Service error: The key does not exist", Condition.MISSING),
    ("Service error: The object was not found", Condition.MISSING),
    ("Service error: The bucket does not exist", Condition.NO_BUCKET),
    ("Service error: At least one of the preconditions", Condition.EXISTS),
    ("Client error: Forbidden: ", Condition.DENIED),
    ("Client error: No signing credentials available", Condition.NO_CREDENTIALS),
    ("Client error: Request throttled", Condition.BUSY),
    ("Client error: Wrong region ", Condition.ELSEWHERE),
    ("AWS_ERROR_S3_INTERNAL_ERROR", Condition.BUSY),
    ("AWS_ERROR_S3_SLOW_DOWN", Condition.BUSY),
    ("AWS_ERROR_S3_TOKEN_EXPIRED", Condition.DENIED),
    ("AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED", Condition.DENIED),
    ("AWS_ERROR_S3_REQUEST_HAS_COMPLETED", Condition.LOST),  # an upload ended; nothing says why
    ("AWS_ERROR_S3_RESPONSE_CHECKSUM_MISMATCH", Condition.CORRUPT),
    ("AWS_ERROR_S3_OBJECT_MODIFIED", Condition.CONFLICT),
    # An answer to a range that is the whole object.
    ("AWS_ERROR_S3_MISSING_CONTENT_RANGE_HEADER", Condition.UNSUPPORTED),
    ("AWS_ERROR_DEST_COPY_TOO_SMALL", Condition.UNSUPPORTED),
    ("AWS_IO_TLS_", Condition.TLS),
    ("AWS_IO_SOCKET_TIMEOUT", Condition.TIMEOUT),
    ("AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT", Condition.TIMEOUT),
    ("AWS_IO_SOCKET_CONNECTION_REFUSED", Condition.UNREACHABLE),
    ("AWS_IO_SOCKET_NO_ROUTE_TO_HOST", Condition.UNREACHABLE),
    ("AWS_IO_SOCKET_NETWORK_DOWN", Condition.UNREACHABLE),
    ("AWS_IO_DNS_", Condition.UNREACHABLE),
    ("AWS_IO_SOCKET_", Condition.LOST),
    ("AWS_IO_BROKEN_PIPE", Condition.LOST),
    ("AWS_ERROR_HTTP_", Condition.LOST),
)


class TorchObjects:
    """One bucket through one client; see `kvio.s3.bounded.Fetching`."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._client = _client(options)

    def check_bucket(self) -> None:
        """Ask for an object that is not there: the answer tells whether the bucket is."""
        try:
            self._get(_NOTHING, 0, 1)
        except Refused as refused:
            if refused.condition is not Condition.MISSING:
                raise

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        only_new: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,
    ) -> None:
        """Store an object; see `kvio.s3.bounded.Fetching`."""
        total = body.total_bytes(parts)
        if only_new:
            raise Refused(Condition.UNSUPPORTED, "s3torchconnectorclient sends no If-None-Match")
        if total > self._part_bytes * MAX_PARTS:
            raise Refused(Condition.UNSUPPORTED, f"more than {MAX_PARTS} parts of part_bytes")
        stream = None
        try:
            stream = self._client.put_object(self._bucket, name)
            for start, stop in body.ranges(total, self._part_bytes):
                stream.write(body.join(body.cut(parts, start, stop)))
                if cancel is not None and cancel.requested:  # the caller's memory may have changed
                    raise Refused(Condition.TIMEOUT, "the caller waits no more")
            stream.close()
        except S3Exception as exc:
            raise refused_of(str(exc)) from exc
        finally:
            del stream  # dropped, it gives up what was not closed; a traceback would keep it

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts from an object; see `kvio.s3.objects.Objects`."""
        pieces, total, etag = self.fetch(name, start, stop, body.total_bytes(parts))
        return Got(body.scatter(pieces, parts), total, etag)

    def fetch(
        self, name: str, start: int, stop: int | None, room: int
    ) -> tuple[Sequence[Any], int, str | None]:
        """Get an object's bytes in memory of their own; see `kvio.s3.bounded.Fetching`."""
        return lengths.fetch(
            lambda first, nbytes: self._get(name, first, nbytes),
            lambda: self.head(name),
            start,
            stop,
            room,
        )

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the end of an object; see `kvio.s3.objects.Objects`."""
        return lengths.end(
            lambda first, nbytes: self._get(name, first, nbytes), lambda: self.head(name), nbytes
        )

    def _get(self, name: str, start: int, nbytes: int) -> list[bytes]:
        pieces = _ask(
            lambda: list(self._client.get_object(self._bucket, name, start, start + nbytes))
        )
        if sum(map(len, pieces)) > nbytes:
            raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
        return pieces

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        found = _ask(lambda: self._client.head_object(self._bucket, name))
        return Head(found.size, found.last_modified * 10**9, found.etag)

    def delete(self, name: str) -> None:
        """Remove an object."""
        _ask(lambda: self._client.delete_object(self._bucket, name))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page."""
        pages = iter(self._client.list_objects(self._bucket, prefix))
        while (page := _ask(lambda: next(pages, None))) is not None:
            yield from [entry.key for entry in page.object_info]

    def close(self) -> None:
        """Leave the client to the next store of this configuration."""


def _ask(request: Callable[[], T]) -> T:
    try:
        return request()
    except S3Exception as exc:
        raise refused_of(str(exc)) from exc


def refused_of(text: str) -> Refused:
    """Say what the library's words mean."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        found = condition_of(int(status[1]), code[1] if code else "")
        return Refused(found, f"{status[1]} {code[1] if code else ''}".strip())
    condition = next((c for phrase, c in FAILURES if phrase in text), Condition.OTHER)
    return Refused(condition, text)


#: Where the library's own chain of providers begins.
_CHAIN: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
#: One client may be made at a time: what it reads in the environment is every thread's.
_lock = threading.Lock()
_clients: Final[dict[tuple[object, ...], MountpointS3Client]] = {}


def _client(options: S3Options) -> MountpointS3Client:
    if options.signs_payload and not _may_be_unsigned(options):
        raise ConfigError(
            "s3+torch cannot sign bodies, and over plain http to another machine anybody between "
            "could change what is stored: use https, or another backend"
        )
    place = _configuration(options)
    with _lock:
        if place not in _clients:
            made = _connect(options)
            ctypes.pythonapi.Py_IncRef(
                ctypes.py_object(made)
            )  # not at the interpreter's end either
            _clients[place] = made
        return _clients[place]


def _configuration(options: S3Options) -> tuple[object, ...]:
    """Give all that makes a difference to a client."""
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
        *(os.environ.get(name) for name in _CHAIN),
    )


def _connect(options: S3Options) -> MountpointS3Client:
    profile = None
    seen: dict[str, str | None] = {"AWS_MAX_ATTEMPTS": None}  # it would go before max_attempts
    if options.ca_file is not None:
        seen["SSL_CERT_FILE"] = options.ca_file
    if options.access_key is not None:
        profile = "kvio"
        at = _in_memory(_profile(profile, options))
        seen |= {"AWS_SHARED_CREDENTIALS_FILE": at, "AWS_CONFIG_FILE": os.devnull}
    _put(seen)
    try:
        return MountpointS3Client(
            options.region,
            endpoint=options.endpoint_url,
            force_path_style=options.path_style,
            max_attempts=_REQUESTS_MADE,
            # The least part that takes every read which the store makes in one request.
            part_size=options.part_bytes + trailers.NBYTES + 1,
            profile=profile,
        )
    except S3Exception as exc:
        raise ConfigError(f"s3torchconnectorclient makes no client: {exc}") from None
    finally:
        _put({name: os.environ.get(name) for name in seen})


def _failing_handshake(options: S3Options) -> str | None:
    """Say why no TLS connection can be made to the endpoint; None: one can, or nobody can tell."""
    place = urlsplit(options.endpoint_url or "")
    if place.scheme != "https" or place.hostname is None:
        return None
    host = place.hostname if options.path_style else f"{options.bucket}.{place.hostname}"
    context = ssl.create_default_context(cafile=options.ca_file)
    limit_s = min(options.connect_timeout_s, options.request_timeout_s)
    try:
        with (
            socket.create_connection((host, place.port or 443), limit_s) as line,
            context.wrap_socket(line, server_hostname=host),
        ):
            return None
    except ssl.SSLEOFError:
        return None  # hung up on: that may pass
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
            raise ConfigError(f"s3+torch cannot hand over this {field}: it does not fit a profile")
        lines.append(f"{field} = {value}")
    return "\n".join([*lines, ""])


def _in_memory(text: str) -> str:
    """Give the path of a file that lasts as long as this process, as its client does."""
    fd = os.memfd_create("kvio", os.MFD_CLOEXEC)
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    return f"/proc/self/fd/{fd}"


def _put(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


def _forget_lock() -> None:
    global _lock  # it may have been held when the process was forked
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


class TorchBackend(S3Backend):
    """Blocks in a bucket, by s3torchconnectorclient."""

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
            refused = Refused(Condition.TLS, untrusted)
            doing = f"open the bucket {options.bucket!r}"
            raise error_of(refused, doing, key=None, backend=self.name) from exc
