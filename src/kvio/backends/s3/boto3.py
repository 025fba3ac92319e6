"""Store blocks in S3 with boto3: every option, but the most CPU time of the five libraries.

Requests are plain PUT and GET of one client, on the store's threads. The CRT transfers of boto3 are
not used: they go to AWS whatever the endpoint is (boto/boto3#4839). The CRC32C that kvio computes
anyway is sent for the server to verify, so nothing is hashed twice.
"""

from __future__ import annotations

import base64
import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import boto3
import urllib3
from boto3.session import Session
from botocore import exceptions as failures
from botocore.config import Config

from kvio.abc import RunAll
from kvio.backends.s3 import body, profiles
from kvio.backends.s3.backend import S3Backend
from kvio.backends.s3.client import Connect, GetResult, Head, Traits, read_nothing
from kvio.backends.s3.errors import ErrorKind, RequestFailed, error_kind, timed_out
from kvio.backends.s3.options import MAX_PARTS, S3Options
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
)

#: The first class that matches an exception decides its kind.
FAILURES: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (failures.NoCredentialsError, ErrorKind.NO_CREDENTIALS),
    (failures.PartialCredentialsError, ErrorKind.NO_CREDENTIALS),
    (failures.CredentialRetrievalError, ErrorKind.NO_CREDENTIALS),
    (failures.SSLError, ErrorKind.TLS),
    (failures.ConnectTimeoutError, ErrorKind.TIMEOUT),
    (failures.ReadTimeoutError, ErrorKind.TIMEOUT),
    (failures.ProxyConnectionError, ErrorKind.UNREACHABLE),
    (failures.EndpointConnectionError, ErrorKind.UNREACHABLE),
    (failures.ConnectionClosedError, ErrorKind.LOST),
    (failures.ResponseStreamingError, ErrorKind.LOST),
    (failures.IncompleteReadError, ErrorKind.LOST),
    (failures.FlexibleChecksumError, ErrorKind.CORRUPT),
    (failures.HTTPClientError, ErrorKind.LOST),
    # While botocore reads a body itself, it lets urllib3's exceptions through.
    (urllib3.exceptions.TimeoutError, ErrorKind.TIMEOUT),
    (urllib3.exceptions.HTTPError, ErrorKind.LOST),
)


#: The arguments of a request that begins an object.
_STORED_AS = {
    "sse": "ServerSideEncryption",
    "sse_kms_key_id": "SSEKMSKeyId",
    "storage_class": "StorageClass",
}


class Boto3Objects:
    """One bucket, accessed with one boto3 client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._stored_as: dict[str, Any] = options.named(_STORED_AS)
        self._client = _client(options)
        self._request_timeout_s = options.request_timeout_s
        self._watchdog = Watchdog(options.request_timeout_s)

    def check_bucket(self, name: str) -> None:
        """Fail unless the bucket exists and is accessible."""
        read_nothing(self, name)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, if_none_match: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.backends.s3.client.Objects`."""
        if body.total_bytes(parts) > self._part_bytes:
            self._put_in_parts(name, parts, if_none_match=if_none_match, run_all=run_all)
            return
        extra = self._stored_as | _checksum(crc32c) | _if_none_match(if_none_match)
        answer = self._call(self._client.put_object, Key=name, Body=self._body(parts), **extra)
        _field(answer, "ETag")

    def _body(self, parts: Parts) -> bytes | body.BodyFile:
        if body.total_bytes(parts) <= body.PIECE_NBYTES:
            return body.join(parts)
        return body.BodyFile(parts, self._request_timeout_s)

    def _put_in_parts(
        self, name: str, parts: Parts, *, if_none_match: bool, run_all: RunAll
    ) -> None:
        total = body.total_bytes(parts)
        step = max(self._part_bytes, -(-total // MAX_PARTS))
        begun = self._call(
            self._client.create_multipart_upload,
            Key=name,
            ChecksumAlgorithm="CRC32C",
            **self._stored_as,
        )
        upload: dict[str, Any] = {"Key": name, "UploadId": _field(begun, "UploadId")}

        def send(number: int, start: int, stop: int) -> dict[str, Any]:
            pieces = body.cut(parts, start, stop)
            extra = _checksum(body.crc32c(pieces))
            answer = self._call(
                self._client.upload_part,
                **upload,
                PartNumber=number,
                Body=self._body(pieces),
                **extra,
            )
            return {"PartNumber": number, "ETag": _field(answer, "ETag"), **extra}

        try:
            sent = run_all(
                [
                    partial(send, number, start, stop)
                    for number, (start, stop) in enumerate(body.ranges(total, step), 1)
                ]
            )
            self._call(
                self._client.complete_multipart_upload,
                **upload,
                MultipartUpload={"Parts": sent},
                **_if_none_match(if_none_match),
            )
        except BaseException:
            with contextlib.suppress(RequestFailed):
                self._call(self._client.abort_multipart_upload, **upload)
            raise

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, with_metadata: bool = True
    ) -> GetResult:
        """Read an object into the parts; see `kvio.backends.s3.client.Objects`."""
        whole = start == 0 and stop is None
        wanted: dict[str, Any] = (
            {} if whole else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        )
        return self._call(partial(self._get, parts, start, whole), Key=name, **wanted)

    def _get(self, parts: Parts, start: int, whole: bool, **request: Any) -> GetResult:  # noqa: FBT001
        answer = self._client.get_object(**request)
        with contextlib.closing(answer["Body"]) as stream:
            length, total = int(_field(answer, "ContentLength")), _total(answer)
            etag = _field(answer, "ETag")
            if not whole and "ContentRange" not in answer:
                raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
            if whole and length > body.total_bytes(parts):
                return GetResult(0, total, etag)
            got = 0
            with self._watchdog.watch(_shutdown(stream)):
                for part in body.cut(parts, 0, length):
                    got += _fill(part, stream)
        if got != length:
            raise RequestFailed(ErrorKind.LOST, f"received {got} of {length} bytes")
        return GetResult(got, total, etag)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last bytes of an object; see `kvio.backends.s3.client.Objects`."""

        def get(**request: Any) -> tuple[bytes, GetResult]:
            answer = self._client.get_object(**request)
            with contextlib.closing(answer["Body"]) as stream:
                if int(_field(answer, "ContentLength")) > nbytes:
                    raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
                with self._watchdog.watch(_shutdown(stream)):
                    end = bytes(stream.read())
            got = GetResult(len(end), _total(answer), _field(answer, "ETag"), _changed(answer))
            return end[-nbytes:], got

        try:
            return self._call(get, Key=name, Range=f"bytes=-{nbytes}")
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.RANGE:
                raise
        return b"", GetResult(0, 0)  # an empty object has no valid range

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        answer = self._call(self._client.head_object, Key=name)
        return Head(int(_field(answer, "ContentLength")), _changed(answer), _field(answer, "ETag"))

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._call(self._client.delete_object, Key=name)

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete objects with one request."""
        wanted = {"Objects": [{"Key": name} for name in names]}
        answer = self._call(self._client.delete_objects, Delete=wanted)
        for error in answer.get("Errors", ()):
            code = str(error.get("Code", ""))
            raise RequestFailed(error_kind(None, code), f"{code}: {error.get('Message', '')}")
        if {one["Key"] for one in answer.get("Deleted", ())} != set(names):
            raise RequestFailed(ErrorKind.LOST, "the answer does not name what was deleted")

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page."""
        after: dict[str, Any] = {}
        while True:
            page = self._call(self._client.list_objects_v2, Prefix=prefix, **after)
            _field(page, "IsTruncated")  # without a body the page would be empty
            yield from (entry["Key"] for entry in page.get("Contents", ()))
            if not page["IsTruncated"]:
                return
            after = {"ContinuationToken": _field(page, "NextContinuationToken")}

    def close(self) -> None:
        """Close all connections."""
        self._watchdog.close()
        self._client.close()

    def _call(self, request: Callable[..., T], **arguments: Any) -> T:
        try:
            return request(Bucket=self._bucket, **arguments)
        except failures.ClientError as exc:
            raise _failure(exc) from exc
        except (failures.BotoCoreError, urllib3.exceptions.HTTPError) as exc:
            kind = _error_kind(exc)
            _forget_request(exc)
            if isinstance(exc, failures.CredentialRetrievalError):  # it repeats what was printed
                raise RequestFailed(kind, type(exc).__name__) from None
            raise RequestFailed(kind, str(exc)) from exc


def _error_kind(exc: Exception) -> ErrorKind:
    cause = getattr(exc, "kwargs", {}).get("error", exc)  # botocore wraps urllib3's exception
    if isinstance(cause, Exception) and timed_out(cause):
        return ErrorKind.TIMEOUT
    return next((kind for cls, kind in FAILURES if isinstance(exc, cls)), ErrorKind.OTHER)


def _forget_request(exc: Exception) -> None:
    """Remove the request from an error: its headers contain the session token."""
    for name in ("request", "response"):
        if hasattr(exc, name):
            setattr(exc, name, None)
    getattr(exc, "kwargs", {}).pop("request", None)


def _client(options: S3Options) -> Any:
    credentials = {}
    if options.access_key is not None and options.secret_key is not None:
        credentials = {
            "aws_access_key_id": options.access_key.reveal(),
            "aws_secret_access_key": options.secret_key.reveal(),
            "aws_session_token": options.session_token and options.session_token.reveal(),
        }
    config = Config(
        s3={
            "addressing_style": "path" if options.path_style else "virtual",
            "payload_signing_enabled": options.signs_payload,
        },
        max_pool_connections=options.connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
    )
    why = ""
    try:
        client = Session().client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region,
            verify=options.ca_file or options.tls_verify,
            config=config,
            **credentials,
        )
    except profiles.failures() as exc:
        why = profiles.reason(exc)
    if why:  # outside: what is raised inside keeps the other error, and what that has
        raise ConfigError(f"boto3 {boto3.__version__} cannot create a client: {why}")
    # "Expect: 100-continue" costs a round trip; bodies here are too small to be worth it.
    client.meta.events.register("before-send.s3", _remove_expect)
    client.meta.events.register("before-call.s3", _disable_redirects)
    return client


def _remove_expect(request: Any, **_: Any) -> None:
    if "Expect" in request.headers:
        del request.headers["Expect"]


def _disable_redirects(params: dict[str, Any], **_: Any) -> None:
    """Mark the request as already redirected, so that boto3 does not follow another redirect."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _shutdown(stream: Any) -> Callable[[], None] | None:
    """Return the function that aborts a response from another thread; needs urllib3 2.3."""
    return getattr(getattr(stream, "_raw_stream", None), "shutdown", None)


def _if_none_match(if_none_match: bool) -> dict[str, Any]:  # noqa: FBT001
    return {"IfNoneMatch": "*"} if if_none_match else {}


def _checksum(crc32c: int | None) -> dict[str, Any]:
    if crc32c is None:
        return {}
    return {"ChecksumCRC32C": base64.b64encode(struct.pack(">I", crc32c)).decode("ascii")}


def _field(answer: Mapping[str, Any], name: str) -> Any:
    """Return a field of an answer that every answer of its kind has.

    Python's HTTP client takes the end of a connection for the end of the headers.
    """
    if name not in answer:
        raise RequestFailed(ErrorKind.LOST, f"the answer ended before its {name}")
    return answer[name]


def _changed(answer: Mapping[str, Any]) -> int:
    return int(_field(answer, "LastModified").timestamp()) * 10**9


def _total(answer: dict[str, Any]) -> int:
    """Return the object's length from ``bytes 0-63/1000``, or else the Content-Length."""
    content_range = answer.get("ContentRange", "")
    return int(content_range.rpartition("/")[2] or _field(answer, "ContentLength"))


def _fill(part: memoryview, stream: Any) -> int:
    got = 0
    while got < len(part):
        n = stream.readinto(part[got:])
        if not n:
            break
        got += n
    return got


def _failure(exc: failures.ClientError) -> RequestFailed:
    answer = cast(dict[str, Any], exc.response)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    error = answer.get("Error", {})
    code, message = str(error.get("Code", "")), error.get("Message", "")
    return RequestFailed(error_kind(status, code), f"{status} {code}: {message}")


class Boto3Backend(S3Backend):
    """Stores blocks in a bucket with boto3."""

    name = "s3+boto3"
    library: ClassVar[Connect] = Boto3Objects
    traits = TRAITS

    @classmethod
    def default_io_threads(cls) -> int:
        """Return 16: beyond that Python's lock costs a fourth more CPU time, and no time is won."""
        return 16
