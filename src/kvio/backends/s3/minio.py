"""Store blocks in S3 with minio: pure Python over urllib3, half the CPU time of boto3.

A custom HTTP client adds If-None-Match, for which ``put_object`` has no argument, and disables
retries. minio always hashes bodies: with SHA-256 over http, with MD5 over TLS.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, ClassVar, Final, TypeVar, cast
from xml.etree import ElementTree as ET

import urllib3
from minio import Minio
from minio.credentials.providers import (
    AWSConfigProvider,
    ChainedProvider,
    EnvAWSProvider,
    IamAwsProvider,
    Provider,
    StaticProvider,
)
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, S3Error, ServerError
from urllib3 import exceptions as failures

from kvio.abc import RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.backend import S3Backend
from kvio.backends.s3.client import (
    Connect,
    GetResult,
    Head,
    Traits,
    UnsupportedOption,
    read_nothing,
)
from kvio.backends.s3.errors import ErrorKind, RequestFailed, error_kind, timed_out
from kvio.backends.s3.options import MAX_PARTS, MIN_PART_BYTES, PARTS_AT_ONCE, S3Options
from kvio.backends.s3.timeouts import Watchdog
from kvio.errors import ConfigError
from kvio.types import Parts

T = TypeVar("T")

TRAITS = Traits(
    conditional=True,
    conditional_parts=True,
    checks_upload="crc32c",
    after_fork="reopen",
    timeouts="library",
    unsupported_options=(
        UnsupportedOption("payload_signing", "minio signs bodies over http, and never over TLS"),
    ),
)

#: The first class that matches an exception decides its kind.
FAILURES: Final[tuple[tuple[type[Exception], ErrorKind], ...]] = (
    (failures.SSLError, ErrorKind.TLS),
    (failures.NewConnectionError, ErrorKind.UNREACHABLE),
    (failures.TimeoutError, ErrorKind.TIMEOUT),
    (failures.ProtocolError, ErrorKind.LOST),
    (failures.HTTPError, ErrorKind.LOST),
    (ET.ParseError, ErrorKind.LOST),  # a truncated response is invalid XML
)


#: The headers of a request that begins an object.
_STORED_AS: Final = {
    "sse": "x-amz-server-side-encryption",
    "sse_kms_key_id": "x-amz-server-side-encryption-aws-kms-key-id",
    "storage_class": "x-amz-storage-class",
}


class MinioObjects:
    """One bucket, accessed with one minio client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._stored_as = options.named(_STORED_AS)
        self._watchdog = Watchdog(options.request_timeout_s)
        self._pool = _Pool(
            options.request_timeout_s,
            maxsize=options.connections,
            timeout=urllib3.Timeout(connect=options.connect_timeout_s, read=options.read_timeout_s),
            retries=False,
            cert_reqs="CERT_REQUIRED" if options.tls_verify else "CERT_NONE",
            ca_certs=options.ca_file,
        )
        self._provider = _provider(options)
        try:
            self._client = Minio(
                options.host or f"s3.{options.region}.amazonaws.com",
                secure=options.tls,
                region=options.region,
                http_client=self._pool,
                credentials=self._provider,
            )
        except ValueError as exc:
            raise ConfigError(f"minio cannot create a client: {exc}") from None
        style: Any = self._client  # its methods have no annotations
        if options.path_style:
            style.disable_virtual_style_endpoint()
        else:
            style.enable_virtual_style_endpoint()

    def check_bucket(self, name: str) -> None:
        """Fail unless the bucket exists and is accessible."""
        try:
            self._provider.retrieve()
        except ValueError as exc:
            raise RequestFailed(ErrorKind.NO_CREDENTIALS, str(exc)) from None
        read_nothing(self, name)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, if_none_match: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.backends.s3.client.Objects`."""
        total = body.total_bytes(parts)
        one = total <= self._part_bytes
        part_bytes = max(self._part_bytes, -(-total // MAX_PARTS))
        with self._pool.if_none_match(if_none_match):
            _call(
                lambda: self._client.put_object(
                    self._bucket,
                    name,
                    cast(BinaryIO, _Body(parts)),
                    total,
                    metadata={**self._stored_as, **(_checksum(crc32c) if one else {})},
                    part_size=max(total, MIN_PART_BYTES) if one else part_bytes,
                    num_parallel_uploads=PARTS_AT_ONCE,
                )
            )

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, with_metadata: bool = True
    ) -> GetResult:
        """Read an object into the parts; see `kvio.backends.s3.client.Objects`."""
        whole = start == 0 and stop is None
        last = "" if stop is None else str(stop - 1)
        headers = {} if whole else {"Range": f"bytes={start}-{last}"}

        def get() -> GetResult:
            with self._answer(name, headers) as answer:
                length, total = int(answer.headers["Content-Length"]), _total(answer)
                room, etag = body.total_bytes(parts), answer.headers.get("ETag")
                if whole and length > room:
                    return GetResult(0, total, etag)
                if not whole and ("Content-Range" not in answer.headers or length > room):
                    raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
                with self._watchdog.watch(getattr(answer, "shutdown", None)):
                    got = body.scatter([answer.read(cache_content=False)], parts)
            if got != length:
                raise RequestFailed(ErrorKind.LOST, f"received {got} of {length} bytes")
            return GetResult(got, total, etag)

        return _call(get)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last bytes of an object; see `kvio.backends.s3.client.Objects`."""

        def get() -> tuple[bytes, GetResult]:
            with self._answer(name, {"Range": f"bytes=-{nbytes}"}) as answer:
                if int(answer.headers["Content-Length"]) > nbytes:
                    raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
                with self._watchdog.watch(getattr(answer, "shutdown", None)):
                    end = answer.read(cache_content=False)
                etag, changed = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
                return end[-nbytes:], GetResult(len(end), _total(answer), etag, _when(changed))

        try:
            return _call(get)
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.RANGE:
                raise
        return b"", GetResult(0, 0)  # an empty object has no valid range

    @contextlib.contextmanager
    def _answer(self, name: str, headers: dict[str, Any]) -> Iterator[Any]:
        answer = self._client.get_object(self._bucket, name, request_headers=headers)
        try:
            yield answer
        finally:
            answer.close()
            answer.release_conn()

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        stat = _call(lambda: self._client.stat_object(self._bucket, name))
        if "Content-Length" not in (stat.metadata or {}):
            raise RequestFailed(ErrorKind.LOST, "the answer ended inside its headers")
        mtime_ns = int(stat.last_modified.timestamp()) * 10**9 if stat.last_modified else None
        return Head(int(stat.size or 0), mtime_ns, stat.etag and f'"{stat.etag}"')

    def delete(self, name: str) -> None:
        """Delete an object."""
        _call(lambda: self._client.remove_object(self._bucket, name))

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete objects with one request."""
        wanted = map(DeleteObject, names)
        for error in _call(lambda: list(self._client.remove_objects(self._bucket, wanted))):
            raise RequestFailed(error_kind(None, error.code), f"{error.code}: {error.message}")

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names; minio requests the pages."""
        found = iter(self._client.list_objects(self._bucket, prefix=prefix, recursive=True))
        while (entry := _call(lambda: next(found, None))) is not None:
            if entry.object_name is not None:
                yield entry.object_name

    def close(self) -> None:
        """Close all connections."""
        self._watchdog.close()
        self._pool.clear()


class _Pool(urllib3.PoolManager):
    """A connection pool that adds If-None-Match to the request that publishes an object.

    The header is not signed and need not be. A body is sent in pieces and aborted after *limit_s*.
    """

    def __init__(self, limit_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._limit_s = limit_s
        self._local = threading.local()

    @contextlib.contextmanager
    def if_none_match(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001  # the only argument
        """Add the header to this thread's requests within the with-block."""
        self._local.if_none_match = wanted
        try:
            yield
        finally:
            self._local.if_none_match = False

    def urlopen(self, method: str, url: str, redirect: bool = True, **request: Any) -> Any:  # type: ignore[override]  # noqa: FBT001
        """Make a request."""
        publishes = (method == "PUT" and "partNumber=" not in url) or "uploadId=" in url
        if publishes and method != "DELETE" and getattr(self._local, "if_none_match", False):
            request["headers"] = {**request["headers"], "If-None-Match": "*"}
        if len(whole := request.get("body") or b"") > body.PIECE_NBYTES:
            request["body"] = body.BodyFile([memoryview(whole)], self._limit_s)
        answer = super().urlopen(method, url, redirect, **request)
        _check_headers(method, answer)
        completes = method == "POST" and "uploadId=" in url
        if completes and answer.status == 200 and b"<Error>" in answer.data:
            answer.status = 500  # S3 may send 200 before the outcome; minio checks only that
        return answer


def _check_headers(method: str, answer: Any) -> None:
    """Raise if an answer ended inside its headers: Python's HTTP client takes that for their end.

    An object that is written has an ETag, and what is read a length or chunks; only a bucket is
    looked at without either.
    """
    wanted = {"PUT": ("ETag",), "HEAD": ()}.get(method, ("Content-Length", "Transfer-Encoding"))
    cut = bool(wanted) and not any(name in answer.headers for name in wanted)
    if answer.status in (200, 206) and cut:
        answer.close()
        raise failures.ProtocolError("the answer ended inside its headers")


class _Body(io.RawIOBase):
    """A body as a file object; each read returns exactly the bytes asked for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._at = 0

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes."""
        total = body.total_bytes(self._parts)
        stop = total if nbytes < 0 else min(total, self._at + nbytes)
        piece = body.join(body.cut(self._parts, self._at, stop))
        self._at = stop
        return piece


def _call(request: Callable[[], T]) -> T:
    try:
        return request()
    except S3Error as exc:
        status, code = exc.response.status, exc.code or ""
        raise RequestFailed(error_kind(status, code), f"{status} {code}: {exc.message}") from exc
    except ServerError as exc:
        raise RequestFailed(error_kind(exc.status_code), str(exc)) from exc
    except InvalidResponseError as exc:
        found = re.search(r"\b[1-5]\d\d\b", str(exc))
        raise RequestFailed(error_kind(int(found[0]) if found else None), str(exc)) from exc
    except tuple(cls for cls, _ in FAILURES) as exc:
        kind = next(kind for cls, kind in FAILURES if isinstance(exc, cls))
        raise RequestFailed(ErrorKind.TIMEOUT if timed_out(exc) else kind, str(exc)) from exc


def _checksum(crc32c: int | None) -> dict[str, Any]:
    if crc32c is None:
        return {}
    value = base64.b64encode(struct.pack(">I", crc32c)).decode("ascii")
    return {"x-amz-checksum-crc32c": value}


def _when(changed: str | None) -> int | None:
    """Parse the time of a header to nanoseconds since 1970; return None if it is invalid."""
    if changed is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parsedate_to_datetime(changed).timestamp()) * 10**9
    return None


def _total(answer: Any) -> int:
    """Return the object's length from ``bytes 0-63/1000``, or else the Content-Length."""
    content_range = answer.headers.get("Content-Range", "")
    return int(content_range.rpartition("/")[2] or answer.headers["Content-Length"])


def _provider(options: S3Options) -> Provider:
    if options.access_key is not None and options.secret_key is not None:
        token = options.session_token
        return StaticProvider(
            options.access_key.reveal(),
            options.secret_key.reveal(),
            token.reveal() if token is not None else None,
        )
    chain: list[Provider] = [EnvAWSProvider(), AWSConfigProvider()]
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    instance = options.endpoint_url is None and not disabled
    if instance or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        chain.append(IamAwsProvider())
    return ChainedProvider(chain)


class MinioBackend(S3Backend):
    """Stores blocks in a bucket with minio."""

    name = "s3+minio"
    library: ClassVar[Connect] = MinioObjects
    traits = TRAITS
