"""S3 through boto3: every option, and the most processor time of the five libraries.

Requests are plain PUT and GET of one client: the CRT transfers of boto3 go to AWS whatever the
endpoint says (boto/boto3#4839), and the threads are the store's own. Nothing is hashed twice: the
CRC32C that kvio has computed anyway is sent for the server to check.
"""

from __future__ import annotations

import base64
import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import boto3
import urllib3
from boto3.session import Session
from botocore import exceptions as failures
from botocore.config import Config

from kvio.abc import RunAll
from kvio.errors import ConfigError
from kvio.s3 import body
from kvio.s3.backend import S3Backend
from kvio.s3.bounded import Overseer
from kvio.s3.conditions import Condition, Refused, condition_of, timed_out
from kvio.s3.objects import Connect, Got, Head, Traits
from kvio.s3.options import MAX_PARTS, S3Options
from kvio.types import Parts

T = TypeVar("T")

TRAITS = Traits(conditional=True, checks_upload="crc32c", after_fork="reopen", bounded=True)

#: In this order: the first that fits says what a failure means.
FAILURES: tuple[tuple[type[Exception], Condition], ...] = (
    (failures.NoCredentialsError, Condition.NO_CREDENTIALS),
    (failures.PartialCredentialsError, Condition.NO_CREDENTIALS),
    (failures.CredentialRetrievalError, Condition.NO_CREDENTIALS),
    (failures.SSLError, Condition.TLS),
    (failures.ConnectTimeoutError, Condition.TIMEOUT),
    (failures.ReadTimeoutError, Condition.TIMEOUT),
    (failures.ProxyConnectionError, Condition.UNREACHABLE),
    (failures.EndpointConnectionError, Condition.UNREACHABLE),
    (failures.ConnectionClosedError, Condition.LOST),
    (failures.ResponseStreamingError, Condition.LOST),
    (failures.IncompleteReadError, Condition.LOST),
    (failures.FlexibleChecksumError, Condition.CORRUPT),
    (failures.HTTPClientError, Condition.LOST),
    # Bodies that botocore reads itself, of errors too, come with the errors of what it uses.
    (urllib3.exceptions.TimeoutError, Condition.TIMEOUT),
    (urllib3.exceptions.HTTPError, Condition.LOST),
)


class Boto3Objects:
    """One bucket through one boto3 client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._bucket = options.bucket
        self._prefix = options.name_prefix
        self._part_bytes = options.part_bytes
        self._client = _client(options)
        self._request_timeout_s = options.request_timeout_s
        self._limit = Overseer(options.request_timeout_s)

    def check_bucket(self) -> None:
        """Ask for one name of the prefix: unlike HEAD, a refusal has a text that says why."""
        self._ask(self._client.list_objects_v2, Prefix=self._prefix, MaxKeys=1)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.s3.objects.Objects`."""
        if body.total_bytes(parts) > self._part_bytes:
            self._put_in_parts(name, parts, only_new=only_new, run_all=run_all)
            return
        extra = _checksum(crc32c) | _only_new(only_new)
        self._ask(self._client.put_object, Key=name, Body=self._body(parts), **extra)

    def _body(self, parts: Parts) -> bytes | body.Pieces:
        if body.total_bytes(parts) <= body.PIECE_NBYTES:
            return body.join(parts)
        return body.Pieces(parts, self._request_timeout_s)

    def _put_in_parts(self, name: str, parts: Parts, *, only_new: bool, run_all: RunAll) -> None:
        total = body.total_bytes(parts)
        step = max(self._part_bytes, -(-total // MAX_PARTS))
        begun = self._ask(
            self._client.create_multipart_upload, Key=name, ChecksumAlgorithm="CRC32C"
        )
        upload: dict[str, Any] = {"Key": name, "UploadId": begun["UploadId"]}

        def send(number: int, start: int, stop: int) -> dict[str, Any]:
            pieces = body.cut(parts, start, stop)
            extra = _checksum(body.crc32c(pieces))
            answer = self._ask(
                self._client.upload_part,
                **upload,
                PartNumber=number,
                Body=self._body(pieces),
                **extra,
            )
            return {"PartNumber": number, "ETag": answer["ETag"], **extra}

        try:
            sent = run_all(
                [
                    partial(send, number, start, stop)
                    for number, (start, stop) in enumerate(body.ranges(total, step), 1)
                ]
            )
            self._ask(
                self._client.complete_multipart_upload,
                **upload,
                MultipartUpload={"Parts": sent},
                **_only_new(only_new),
            )
        except BaseException:
            with contextlib.suppress(Refused):
                self._ask(self._client.abort_multipart_upload, **upload)
            raise

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts from an object; see `kvio.s3.objects.Objects`."""
        whole = start == 0 and stop is None
        wanted: dict[str, Any] = (
            {} if whole else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        )
        return self._ask(partial(self._get, parts, start, whole), Key=name, **wanted)

    def _get(self, parts: Parts, start: int, whole: bool, **request: Any) -> Got:  # noqa: FBT001
        answer = self._client.get_object(**request)
        with contextlib.closing(answer["Body"]) as stream:
            length, total = int(answer["ContentLength"]), _total(answer)
            if not whole and "ContentRange" not in answer:
                raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
            if whole and length > body.total_bytes(parts):
                return Got(0, total, answer["ETag"])
            got = 0
            with self._limit.watch(_shutdown(stream)):
                for part in body.cut(parts, 0, length):
                    got += _fill(part, stream)
        if got != length:
            raise Refused(Condition.LOST, f"{got} of {length} bytes came")
        return Got(got, total, answer["ETag"])

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the end of an object; see `kvio.s3.objects.Objects`."""

        def get(**request: Any) -> tuple[bytes, Got]:
            answer = self._client.get_object(**request)
            with contextlib.closing(answer["Body"]) as stream:
                if int(answer["ContentLength"]) > nbytes:
                    raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
                with self._limit.watch(_shutdown(stream)):
                    end = bytes(stream.read())
            got = Got(len(end), _total(answer), answer["ETag"], _changed(answer))
            return end[-nbytes:], got

        try:
            return self._ask(get, Key=name, Range=f"bytes=-{nbytes}")
        except Refused as refused:
            if refused.condition is not Condition.RANGE:
                raise
        return b"", Got(0, 0)  # an empty object has no range

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        answer = self._ask(self._client.head_object, Key=name)
        return Head(int(answer["ContentLength"]), _changed(answer), answer["ETag"])

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._ask(self._client.delete_object, Key=name)

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page."""
        after: dict[str, Any] = {}
        while True:
            page = self._ask(self._client.list_objects_v2, Prefix=prefix, **after)
            yield from (entry["Key"] for entry in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            after = {"ContinuationToken": page["NextContinuationToken"]}

    def close(self) -> None:
        """Close all connections."""
        self._limit.close()
        self._client.close()

    def _ask(self, request: Callable[..., T], **arguments: Any) -> T:
        try:
            return request(Bucket=self._bucket, **arguments)
        except failures.ClientError as exc:
            raise _refused(exc) from exc
        except (failures.BotoCoreError, urllib3.exceptions.HTTPError) as exc:
            condition = _condition_of(exc)
            _forget_request(exc)
            raise Refused(condition, str(exc)) from exc


def _condition_of(exc: Exception) -> Condition:
    told = getattr(exc, "kwargs", {}).get("error", exc)  # botocore's own have urllib3's
    if isinstance(told, Exception) and timed_out(told):
        return Condition.TIMEOUT
    return next((c for kind, c in FAILURES if isinstance(exc, kind)), Condition.OTHER)


def _forget_request(exc: Exception) -> None:
    """Take from an error the request that it is about: its headers have the session token."""
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
    try:
        client = Session().client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region,
            verify=options.ca_file or options.tls_verify,
            config=config,
            **credentials,
        )
    except (ValueError, failures.BotoCoreError) as exc:
        raise ConfigError(f"boto3 {boto3.__version__} makes no client: {exc}") from None
    # A server that waits before it takes a body costs a round trip: nothing here is that large.
    client.meta.events.register("before-send.s3", _send_at_once)
    client.meta.events.register("before-call.s3", _ask_nowhere_else)
    return client


def _send_at_once(request: Any, **_: Any) -> None:
    if "Expect" in request.headers:
        del request.headers["Expect"]


def _ask_nowhere_else(params: dict[str, Any], **_: Any) -> None:
    """Say that the request was redirected once: boto3 does so, by requests of its own, no more."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _shutdown(stream: Any) -> Callable[[], None] | None:
    """Find what ends an answer from another thread; urllib3 has it from 2.3 on."""
    return getattr(getattr(stream, "_raw_stream", None), "shutdown", None)


def _only_new(only_new: bool) -> dict[str, Any]:  # noqa: FBT001
    return {"IfNoneMatch": "*"} if only_new else {}


def _checksum(crc32c: int | None) -> dict[str, Any]:
    if crc32c is None:
        return {}
    return {"ChecksumCRC32C": base64.b64encode(struct.pack(">I", crc32c)).decode("ascii")}


def _changed(answer: Mapping[str, Any]) -> int:
    return int(answer["LastModified"].timestamp()) * 10**9


def _total(answer: dict[str, Any]) -> int:
    """Read the object's length from ``bytes 0-63/1000``, or the answer's own length."""
    content_range = answer.get("ContentRange", "")
    return int(content_range.rpartition("/")[2] or answer["ContentLength"])


def _fill(part: memoryview, stream: Any) -> int:
    got = 0
    while got < len(part):
        n = stream.readinto(part[got:])
        if not n:
            break
        got += n
    return got


def _refused(exc: failures.ClientError) -> Refused:
    answer = cast(dict[str, Any], exc.response)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    error = answer.get("Error", {})
    code, message = str(error.get("Code", "")), error.get("Message", "")
    return Refused(condition_of(status, code), f"{status} {code}: {message}")


class Boto3Backend(S3Backend):
    """Blocks in a bucket, by boto3."""

    name = "s3+boto3"
    library: ClassVar[Connect] = Boto3Objects
    traits = TRAITS
