"""Store blocks in S3 with s3dlio: a Rust client with one configuration per process.

s3dlio reads the endpoint, credentials and timeouts from the process's environment once and keeps
them, so a second store with other values is refused. kvio sets the variables with putenv, not in
`os.environ`, and restores those that other libraries also read after the first request. If the
process used s3dlio before kvio, that configuration stays; kvio cannot detect this.

A write copies the block once (payload and trailer joined), or not at all if it is one buffer. A
read copies it once from the library's buffer. A GET returns neither length nor ETag: see
`kvio.backends.s3.ranges`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import ClassVar, Final, TypeVar

import s3dlio

from kvio.abc import RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.backend import S3Backend
from kvio.backends.s3.client import Connect, Head, Traits, UnsupportedOption
from kvio.backends.s3.errors import ErrorKind, RequestFailed, error_kind
from kvio.backends.s3.options import MAX_PARTS, PARTS_AT_ONCE, S3Options
from kvio.backends.s3.ranges import RangeObjects
from kvio.errors import ConfigError
from kvio.types import Cancellation, Parts

T = TypeVar("T")

TRAITS = Traits(
    conditional=False,
    checks_upload="none",  # "sha256" where payloads are signed
    after_fork="refuse",
    timeouts="abandon reads",  # its timeout does not cover the body of a response
    unsupported_options=(
        UnsupportedOption("sse", "it asks for no encryption; set it for the bucket"),
        UnsupportedOption("sse_kms_key_id", "it asks for no encryption; set it for the bucket"),
        UnsupportedOption("storage_class", "it names none"),
        UnsupportedOption("tls_verify", "it always checks the server's certificate; give ca_file"),
        UnsupportedOption("conditional", "it sends no If-None-Match", ("trust",)),
        UnsupportedOption("addressing", "it always puts the bucket in the path", ("virtual",)),
    ),
)

#: The server's error code in s3dlio's texts; a HEAD has only the status.
_SERVICE_ERROR: Final = re.compile(
    r"service error: (?:unhandled error \()?(\w+)(?: \(|\))|not deleted: \S+: (\w+) \("
)
_STATUS: Final = re.compile(r" — HTTP (\d{3}) ")
#: The first phrase found in a text decides its kind. Each has a space, which no key has.
FAILURES: Final[tuple[tuple[str, ErrorKind], ...]] = (
    ("Missing AWS_ACCESS_KEY_ID or", ErrorKind.NO_CREDENTIALS),
    ("request timed out after", ErrorKind.TIMEOUT),
    ("minimum throughput was specified", ErrorKind.TIMEOUT),
    ("invalid peer certificate", ErrorKind.TLS),
    ("received fatal alert", ErrorKind.TLS),
    ("received corrupt message", ErrorKind.TLS),
    ("Connection refused", ErrorKind.UNREACHABLE),
    ("dns error", ErrorKind.UNREACHABLE),
    ("operation timed out", ErrorKind.TIMEOUT),
    ("deadline has elapsed", ErrorKind.TIMEOUT),
    ("client error (Connect)", ErrorKind.UNREACHABLE),
    ("client error (SendRequest)", ErrorKind.LOST),
    ("streaming error: ", ErrorKind.LOST),
    ("dispatch failure", ErrorKind.LOST),
    (": response error", ErrorKind.LOST),  # a truncated listing
)


class S3dlioObjects(RangeObjects):
    """One bucket, accessed with the one s3dlio client of the process."""

    def __init__(self, options: S3Options) -> None:
        _configure(options)
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._in_flight = min(PARTS_AT_ONCE, options.connections)
        self.traits = replace(TRAITS, checks_upload="sha256") if options.signs_payload else TRAITS

    def check_bucket(self, name: str) -> None:
        """Read an object that never exists: the error shows whether the bucket exists."""
        try:
            super().check_bucket(name)
        finally:
            _restore()

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        if_none_match: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,  # unused: a PUT is never abandoned
    ) -> None:
        """Store an object; see `kvio.backends.s3.timeouts.BlockingObjects`."""
        if if_none_match:
            raise RequestFailed(ErrorKind.UNSUPPORTED, "s3dlio sends no If-None-Match")
        if body.total_bytes(parts) > self._part_bytes:
            self._put_in_parts(name, parts)
            return
        whole = parts[0] if len(parts) == 1 else body.join(parts)
        _call(lambda: s3dlio.put_bytes(self._uri(name), whole))

    def _put_in_parts(self, name: str, parts: Parts) -> None:
        total = body.total_bytes(parts)
        step = max(self._part_bytes, -(-total // MAX_PARTS))
        writer = _call(
            lambda: s3dlio.MultipartUploadWriter(
                self._bucket,
                name,
                part_size=step,
                max_in_flight=self._in_flight,
                abort_on_drop=True,
            )
        )
        try:
            for start, stop in body.ranges(total, step):
                with _call(partial(writer.reserve, stop - start)) as room:
                    nbytes = body.scatter(body.cut(parts, start, stop), [room])
                _call(partial(writer.commit, nbytes))
            _call(writer.close)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # s3dlio may have aborted it already
                writer.abort()
            raise

    def get_range(self, name: str, start: int, nbytes: int) -> list[memoryview]:
        """Return the bytes of a range in s3dlio's buffer."""
        # get_range() and not get(), which makes a HEAD first and reads the whole object.
        answer = _call(lambda: s3dlio.get_range(self._uri(name), start, nbytes))
        found = memoryview(answer)
        if len(found) > nbytes:
            raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
        return [found]

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        found = _call(lambda: s3dlio.stat(self._uri(name)))
        changed = found["last_modified"]
        mtime_ns = changed and int(datetime.fromisoformat(changed).timestamp()) * 10**9
        return Head(int(found["size"]), mtime_ns, found["etag"])

    def delete(self, name: str) -> None:
        """Delete an object."""
        _call(lambda: s3dlio.delete(self._uri(name)))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names; s3dlio first collects all pages of 1000 names."""
        pattern = f"{prefix}**" if prefix else ""  # no kvio prefix contains glob characters
        names = _call(lambda: s3dlio.list(self._uri(pattern), recursive=True))
        skip = len(self._uri(""))
        for name in names:
            yield name[skip:]

    def close(self) -> None:
        """Do nothing: s3dlio's one client per process cannot be closed."""

    def _uri(self, name: str) -> str:
        return f"s3://{self._bucket}/{name}"


def _call(request: Callable[[], T]) -> T:
    try:
        return request()
    except RuntimeError as exc:
        raise parse_error(str(exc)) from exc


def parse_error(text: str) -> RequestFailed:
    """Classify an error by s3dlio's text."""
    service_error = _SERVICE_ERROR.search(text)
    if service_error is not None:
        code = service_error[1] or service_error[2]
        status = _STATUS.search(text)
        known = 404 if code == "NotFound" else _STATUS_OF_CODE.get(code)
        return RequestFailed(error_kind(int(status[1]) if status else known, code), text)
    kind = next((kind for phrase, kind in FAILURES if phrase in text), ErrorKind.OTHER)
    return RequestFailed(kind, text)


#: The HTTP status of codes that `error_kind` does not know; s3dlio's texts omit the status.
_STATUS_OF_CODE: Final = {
    "AccessDenied": 403,
    "SignatureDoesNotMatch": 403,
    "InvalidAccessKeyId": 403,
    "RequestTimeTooSkewed": 403,
    "AccountProblem": 403,
    "AllAccessDisabled": 403,
    "InvalidObjectState": 403,
    "TooManyRequests": 429,
    "InternalFailure": 500,
}

#: Environment variables that kvio sets for s3dlio, and the options they come from.
_VARIABLES: Final = {
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ENDPOINT_URL_S3": "endpoint_url",
    "AWS_REGION": "region",
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_CA_BUNDLE": "ca_file",
    "S3DLIO_UNSIGNED_PAYLOAD": "payload_signing",
    "S3DLIO_CONNECT_TIMEOUT_SECS": "connect_timeout_s",
    "S3DLIO_OPERATION_TIMEOUT_SECS": "read_timeout_s",
    "S3DLIO_POOL_MAX_IDLE_PER_HOST": "connections",
}
_lock = threading.Lock()
_chosen: Final[dict[str, str | None]] = {}


def _configure(options: S3Options) -> None:
    """Configure s3dlio for the process, or check that it has this configuration.

    Raises:
        ConfigError: s3dlio has another configuration.
    """
    wanted = _settings(options, os.environ)
    with _lock:
        differing = {_VARIABLES[name] for name in _chosen if _chosen[name] != wanted[name]}
        if differing:
            raise ConfigError(
                "s3+s3dlio is configured once in a process, and an earlier store has other "
                f"options: {', '.join(sorted(differing))}; use another process or another backend"
            )
        _chosen.update(wanted)
        fixed = {
            "S3DLIO_MAX_RETRY_ATTEMPTS": "1",  # kvio retries and counts the retries
            "S3DLIO_RT_THREADS": os.environ.get("S3DLIO_RT_THREADS", str(_cores())),
        }
        for name, value in {**wanted, **fixed}.items():
            if value is None:
                os.unsetenv(name)
            else:
                os.putenv(name, value)


def _restore() -> None:
    """Restore the AWS variables for other libraries, after s3dlio has read them."""
    with _lock:
        for name in _VARIABLES:
            if not name.startswith("AWS_"):
                continue
            value = os.environ.get(name)
            if value is None:
                os.unsetenv(name)
            else:
                os.putenv(name, value)


def _settings(options: S3Options, environ: Mapping[str, str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {name: environ.get(name) for name in _VARIABLES}
    if options.access_key is not None and options.secret_key is not None:
        token = options.session_token
        found |= {
            "AWS_ACCESS_KEY_ID": options.access_key.reveal(),
            "AWS_SECRET_ACCESS_KEY": options.secret_key.reveal(),
            "AWS_SESSION_TOKEN": None if token is None else token.reveal(),
        }
    return found | {
        "AWS_ENDPOINT_URL": options.endpoint_url,
        "AWS_ENDPOINT_URL_S3": options.endpoint_url,
        "AWS_REGION": options.region,
        "AWS_CA_BUNDLE": options.ca_file or found["AWS_CA_BUNDLE"],
        "S3DLIO_UNSIGNED_PAYLOAD": str(int(not options.signs_payload)),
        "S3DLIO_CONNECT_TIMEOUT_SECS": str(math.ceil(options.connect_timeout_s)),
        "S3DLIO_OPERATION_TIMEOUT_SECS": str(math.ceil(options.read_timeout_s)),
        "S3DLIO_POOL_MAX_IDLE_PER_HOST": str(options.connections),
    }


def _forget_lock() -> None:
    global _lock  # another thread may have held it at the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class S3dlioBackend(S3Backend):
    """Stores blocks in a bucket with s3dlio."""

    name = "s3+s3dlio"
    library: ClassVar[Connect] = S3dlioObjects
    traits = TRAITS
