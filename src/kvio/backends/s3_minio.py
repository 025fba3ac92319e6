"""S3 through minio: pure Python over urllib3, half the processor time of boto3.

Two things go through the HTTP client that minio lets its user give: If-None-Match, for which
``put_object`` has no argument, and the retries, of which there are none here. Bodies are signed
with SHA-256 over http and hashed with MD5 over TLS, whatever one asks for.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
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
from minio.error import InvalidResponseError, S3Error, ServerError
from urllib3 import exceptions as failures

from kvio.abc import RunAll
from kvio.errors import ConfigError
from kvio.s3 import body
from kvio.s3.backend import S3Backend
from kvio.s3.bounded import Overseer
from kvio.s3.conditions import Condition, Refused, condition_of, timed_out
from kvio.s3.objects import Connect, Got, Head, Ignored, Traits
from kvio.s3.options import MAX_PARTS, MIN_PART_BYTES, S3Options
from kvio.types import Parts

T = TypeVar("T")

TRAITS = Traits(
    conditional=True,
    checks_upload="crc32c",
    after_fork="reopen",
    bounded=True,
    ignores=(Ignored("payload_signing", "it signs bodies over http, and none over TLS"),),
)

#: In this order: the first that fits says what a failure means.
FAILURES: Final[tuple[tuple[type[Exception], Condition], ...]] = (
    (failures.SSLError, Condition.TLS),
    (failures.NewConnectionError, Condition.UNREACHABLE),
    (failures.TimeoutError, Condition.TIMEOUT),
    (failures.ProtocolError, Condition.LOST),
    (failures.HTTPError, Condition.LOST),
    (ET.ParseError, Condition.LOST),  # an answer that was cut off is no XML
)
#: Minio uploads the parts of one object by so many threads of its own.
_PART_THREADS: Final = 4


class MinioObjects:
    """One bucket through one minio client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._prefix = options.name_prefix
        self._part_bytes = options.part_bytes
        self._limit = Overseer(options.request_timeout_s)
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
            raise ConfigError(f"minio makes no client: {exc}") from None
        style: Any = self._client  # its methods have no annotations
        if options.path_style:
            style.disable_virtual_style_endpoint()
        else:
            style.enable_virtual_style_endpoint()

    def check_bucket(self) -> None:
        """Ask for the bucket."""
        try:
            self._provider.retrieve()
        except ValueError as exc:
            raise Refused(Condition.NO_CREDENTIALS, str(exc)) from None
        try:
            there = _ask(lambda: self._client.bucket_exists(self._bucket))
        except Refused as refused:
            if refused.condition is not Condition.OTHER:
                raise
            next(self.list_names(self._prefix), None)  # unlike HEAD, it says why it is refused
            raise
        if not there:
            raise Refused(Condition.NO_BUCKET, self._bucket)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.s3.objects.Objects`."""
        total = body.total_bytes(parts)
        one = total <= self._part_bytes
        part_bytes = max(self._part_bytes, -(-total // MAX_PARTS))
        with self._pool.only_new(only_new):
            _ask(
                lambda: self._client.put_object(
                    self._bucket,
                    name,
                    cast(BinaryIO, _Body(parts)),
                    total,
                    metadata=_checksum(crc32c) if one else None,
                    part_size=max(total, MIN_PART_BYTES) if one else part_bytes,
                    num_parallel_uploads=_PART_THREADS,
                )
            )

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts from an object; see `kvio.s3.objects.Objects`."""
        whole = start == 0 and stop is None
        last = "" if stop is None else str(stop - 1)
        headers = {} if whole else {"Range": f"bytes={start}-{last}"}

        def get() -> Got:
            with self._answer(name, headers) as answer:
                length, total = int(answer.headers["Content-Length"]), _total(answer)
                room, etag = body.total_bytes(parts), answer.headers.get("ETag")
                if whole and length > room:
                    return Got(0, total, etag)
                if not whole and ("Content-Range" not in answer.headers or length > room):
                    raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
                with self._limit.watch(getattr(answer, "shutdown", None)):
                    got = body.scatter([answer.read(cache_content=False)], parts)
            if got != length:
                raise Refused(Condition.LOST, f"{got} of {length} bytes came")
            return Got(got, total, etag)

        return _ask(get)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the end of an object; see `kvio.s3.objects.Objects`."""

        def get() -> tuple[bytes, Got]:
            with self._answer(name, {"Range": f"bytes=-{nbytes}"}) as answer:
                if int(answer.headers["Content-Length"]) > nbytes:
                    raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
                with self._limit.watch(getattr(answer, "shutdown", None)):
                    end = answer.read(cache_content=False)
                etag, changed = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
                return end[-nbytes:], Got(len(end), _total(answer), etag, _when(changed))

        try:
            return _ask(get)
        except Refused as refused:
            if refused.condition is not Condition.RANGE:
                raise
        return b"", Got(0, 0)  # an empty object has no range

    @contextlib.contextmanager
    def _answer(self, name: str, headers: dict[str, Any]) -> Iterator[Any]:
        answer = self._client.get_object(self._bucket, name, request_headers=headers)
        try:
            yield answer
        finally:
            answer.close()
            answer.release_conn()

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        stat = _ask(lambda: self._client.stat_object(self._bucket, name))
        mtime_ns = int(stat.last_modified.timestamp()) * 10**9 if stat.last_modified else None
        return Head(int(stat.size or 0), mtime_ns, stat.etag and f'"{stat.etag}"')

    def delete(self, name: str) -> None:
        """Remove an object."""
        _ask(lambda: self._client.remove_object(self._bucket, name))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names; minio asks for the pages."""
        found = iter(self._client.list_objects(self._bucket, prefix=prefix, recursive=True))
        while (entry := _ask(lambda: next(found, None))) is not None:
            if entry.object_name is not None:
                yield entry.object_name

    def close(self) -> None:
        """Close all connections."""
        self._limit.close()
        self._pool.clear()


class _Pool(urllib3.PoolManager):
    """Connections that send If-None-Match with what publishes an object, where they are told to.

    The header is not among those that are signed, and need not be. A body is sent piece by piece,
    and given up after *limit_s*.
    """

    def __init__(self, limit_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._limit_s = limit_s
        self._mine = threading.local()

    @contextlib.contextmanager
    def only_new(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001  # the one thing it is told
        """Send the header from this thread meanwhile."""
        self._mine.only_new = wanted
        try:
            yield
        finally:
            self._mine.only_new = False

    def urlopen(self, method: str, url: str, redirect: bool = True, **request: Any) -> Any:  # type: ignore[override]  # noqa: FBT001
        """Make a request."""
        publishes = (method == "PUT" and "partNumber=" not in url) or "uploadId=" in url
        if publishes and method != "DELETE" and getattr(self._mine, "only_new", False):
            request["headers"] = {**request["headers"], "If-None-Match": "*"}
        if len(whole := request.get("body") or b"") > body.PIECE_NBYTES:
            request["body"] = body.Pieces([memoryview(whole)], self._limit_s)
        answer = super().urlopen(method, url, redirect, **request)
        completes = method == "POST" and "uploadId=" in url
        if completes and answer.status == 200 and b"<Error>" in answer.data:
            answer.status = 500  # S3 may say 200 before it knows, and minio goes by that
        return answer


class _Body(io.RawIOBase):
    """Parts as minio reads them: each time exactly what it will send, in one piece."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._at = 0

    def read(self, nbytes: int = -1) -> bytes:
        """Join the next bytes."""
        total = body.total_bytes(self._parts)
        stop = total if nbytes < 0 else min(total, self._at + nbytes)
        piece = body.join(body.cut(self._parts, self._at, stop))
        self._at = stop
        return piece


def _ask(request: Callable[[], T]) -> T:
    try:
        return request()
    except S3Error as exc:
        status, code = exc.response.status, exc.code or ""
        raise Refused(condition_of(status, code), f"{status} {code}: {exc.message}") from exc
    except ServerError as exc:
        raise Refused(condition_of(exc.status_code), str(exc)) from exc
    except InvalidResponseError as exc:
        told = re.search(r"\b[1-5]\d\d\b", str(exc))
        raise Refused(condition_of(int(told[0]) if told else None), str(exc)) from exc
    except tuple(kind for kind, _ in FAILURES) as exc:
        condition = next(c for kind, c in FAILURES if isinstance(exc, kind))
        raise Refused(Condition.TIMEOUT if timed_out(exc) else condition, str(exc)) from exc


def _checksum(crc32c: int | None) -> dict[str, Any] | None:
    if crc32c is None:
        return None
    value = base64.b64encode(struct.pack(">I", crc32c)).decode("ascii")
    return {"x-amz-checksum-crc32c": value}


def _when(changed: str | None) -> int | None:
    """Read the time of a header in nanoseconds since 1970; None: it says none."""
    if changed is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parsedate_to_datetime(changed).timestamp()) * 10**9
    return None


def _total(answer: Any) -> int:
    """Read the object's length from ``bytes 0-63/1000``, or the answer's own length."""
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
    """Blocks in a bucket, by minio."""

    name = "s3+minio"
    library: ClassVar[Connect] = MinioObjects
    traits = TRAITS
