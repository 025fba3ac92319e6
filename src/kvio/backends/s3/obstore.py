"""Store blocks in S3 with obstore: Rust, the least CPU time of the five libraries.

A body is passed to the library as a list of buffers, without joining them. A response is one
buffer of the library, copied once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from kvio.abc import RunAll
from kvio.backends.s3 import body, profiles
from kvio.backends.s3.backend import S3Backend
from kvio.backends.s3.client import UNKNOWN, Connect, GetResult, Head, Traits, read_nothing
from kvio.backends.s3.errors import ErrorKind, RequestFailed, error_kind
from kvio.backends.s3.options import MAX_PART_BYTES, MAX_PARTS, PARTS_AT_ONCE, S3Options
from kvio.errors import ConfigError
from kvio.types import KiB, Parts

if TYPE_CHECKING:
    from obstore import Attribute
    from obstore.store import ClientConfig, S3Credential

T = TypeVar("T")

_FAILURES: Final = (BaseError, FileNotFoundError)
TRAITS = Traits(conditional=True, checks_upload="none", after_fork="refuse", timeouts="library")

_KINDS: Final[tuple[tuple[type[Exception], ErrorKind], ...]] = (
    (AlreadyExistsError, ErrorKind.EXISTS),
    (PreconditionError, ErrorKind.EXISTS),
    (PermissionDeniedError, ErrorKind.DENIED),
    (UnauthenticatedError, ErrorKind.DENIED),
    (NotFoundError, ErrorKind.MISSING),
    (FileNotFoundError, ErrorKind.MISSING),
    (InvalidPathError, ErrorKind.NAME),
)
#: The kinds of errors that only their text distinguishes; the first match decides. Each phrase has
#: a character that no key, bucket or host name has, because the texts contain these too.
_TEXTS: Final = (
    ('"bytes 0--1/0"', ErrorKind.RANGE),  # MinIO's Content-Range of an empty object
    ("redirect without LOCATION", ErrorKind.ELSEWHERE),
    ("non-partial response when range requested", ErrorKind.UNSUPPORTED),
    ("Failed to get credentials", ErrorKind.NO_CREDENTIALS),
    ("loading credential", ErrorKind.NO_CREDENTIALS),
    ("InvalidCertificate(", ErrorKind.TLS),
    ("invalid peer certificate:", ErrorKind.TLS),
    ("InvalidMessage(", ErrorKind.TLS),
    ("AlertReceived(", ErrorKind.TLS),
    ("kind: Timeout", ErrorKind.TIMEOUT),
    ("source: TimedOut", ErrorKind.TIMEOUT),
    ("operation timed out", ErrorKind.TIMEOUT),
    ("deadline has elapsed", ErrorKind.TIMEOUT),
    ("dns error", ErrorKind.UNREACHABLE),
    ("tcp connect error", ErrorKind.UNREACHABLE),
    ("kind: Connect,", ErrorKind.UNREACHABLE),
    ("request or response body error", ErrorKind.LOST),
    ("error decoding response body", ErrorKind.LOST),
    ("error sending request", ErrorKind.LOST),
)
#: The library's last source of credentials: the metadata service of EC2.
_INSTANCE: Final = "http://169.254.169.254/latest/"
#: What the library says where the credentials that it was given a function for do not come.
_PROVIDER: Final = "External AWS credential provider"
#: If one of these environment variables is set, the library does not ask the metadata service.
_SOURCES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_STATUS: Final = re.compile(r"status(?: code)?:? (\d{3})")
_CODE: Final = re.compile(r"(?:<Code>|\(code: )(\w+)")
#: A listed object of this size, the least of a block, is taken to have the name that is listed.
_SURE_NBYTES: Final = body.NBYTES
#: Stands for "no limit": a year. Without a value the library uses 30 s.
_LONGEST_S: Final = 365 * 24 * 3600.0
#: Up to this size one copy costs less than passing a list.
_JOINED_NBYTES: Final = 256 * KiB


class ObstoreObjects:
    """One bucket, accessed with one obstore client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._part_bytes = options.part_bytes
        self._attributes: dict[Attribute, str] = {
            **options.named({"storage_class": "Storage-Class"})
        }
        self._profile: profiles.Credentials | None = None
        if not _names_credentials(options) and profiles.readable():
            self._profile = profiles.Credentials(aws=options.endpoint_url is None)
        self._may_sign = _finds_credentials(options)
        self._store = _store(options, self._profile)

    def check_bucket(self, name: str) -> None:
        """Fail unless the bucket exists and is accessible."""
        if self._profile is not None and self._profile.there():
            self._may_sign = True
        if not self._may_sign:
            raise RequestFailed(ErrorKind.NO_CREDENTIALS, "none in the options or the environment")
        read_nothing(self, name)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, if_none_match: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.backends.s3.client.Objects`."""
        total = body.total_bytes(parts)
        if if_none_match and total > MAX_PART_BYTES:
            raise RequestFailed(
                ErrorKind.UNSUPPORTED,
                "one request takes at most 5 GiB, and obstore completes no upload in parts on a "
                "condition: install boto3 or minio, which do, or write with if_exists='replace'",
            )
        if total <= self._part_bytes or if_none_match:
            small = total <= _JOINED_NBYTES
            data = body.join(parts) if small else [part for part in parts if len(part)]
            mode: Literal["create", "overwrite"] = "create" if if_none_match else "overwrite"
            try:
                self._store.put(
                    name, data, mode=mode, use_multipart=False, attributes=self._attributes
                )
            except _FAILURES as exc:
                raise _failure(exc) from exc
            return
        _call(
            lambda: self._store.put(
                name,
                [part for part in parts if len(part)],
                use_multipart=True,
                chunk_size=max(self._part_bytes, -(-total // MAX_PARTS)),
                max_concurrency=PARTS_AT_ONCE,
                attributes=self._attributes,
            )
        )

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, with_metadata: bool = True
    ) -> GetResult:
        """Read an object into the parts; see `kvio.backends.s3.client.Objects`."""
        if start == 0 and stop is None:
            return self._get_whole(name, parts)
        if stop is not None and not with_metadata:
            return self._get_range(name, parts, start, stop)

        def get() -> GetResult:
            answer = self._store.get(name, options=_range(start, stop))
            meta, (first, last) = answer.meta, answer.range
            if first != start:
                raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
            if stop is None and last - first > body.total_bytes(parts):
                return GetResult(0, meta["size"], meta["e_tag"])
            got = body.scatter([answer.buffer()], parts)
            if got != last - first:
                raise RequestFailed(ErrorKind.LOST, f"received {got} of {last - first} bytes")
            return GetResult(got, meta["size"], meta["e_tag"])

        return _call(get)

    def _get_whole(self, name: str, parts: Parts) -> GetResult:
        """Read a whole object; not asking for ``answer.meta`` saves a tenth of the cost."""
        try:
            answer = self._store.get(name)
            total = answer.range[1]
            if total > body.total_bytes(parts):
                return GetResult(0, total)
            got = body.scatter([answer.buffer()], parts)
        except _FAILURES as exc:
            raise _failure(exc) from exc
        if got != total:
            raise RequestFailed(ErrorKind.LOST, f"received {got} of {total} bytes")
        return GetResult(got, total)

    def _get_range(self, name: str, parts: Parts, start: int, stop: int) -> GetResult:
        try:
            found = self._store.get_range(name, start=start, end=stop)
        except _FAILURES as exc:
            raise _failure(exc) from exc
        return GetResult(body.scatter([found], parts), UNKNOWN)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last bytes of an object; see `kvio.backends.s3.client.Objects`."""

        def get() -> tuple[bytes, GetResult]:
            answer = self._store.get(name, options={"range": {"suffix": nbytes}})
            first, last = answer.range
            if last - first > nbytes:
                raise RequestFailed(ErrorKind.UNSUPPORTED, "the server ignores ranges")
            end = bytes(answer.buffer())
            meta = answer.meta
            changed = int(meta["last_modified"].timestamp()) * 10**9
            return end[-nbytes:], GetResult(len(end), meta["size"], meta["e_tag"], changed)

        try:
            return _call(get)
        except RequestFailed as failed:
            # An empty object has no valid range; versitygw returns the whole object.
            whole = failed.kind is ErrorKind.UNSUPPORTED
            if failed.kind is not ErrorKind.RANGE and not (whole and self.head(name).nbytes == 0):
                raise
        return b"", GetResult(0, 0)

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""
        meta = _call(lambda: self._store.head(name))
        mtime_ns = int(meta["last_modified"].timestamp()) * 10**9
        return Head(meta["size"], mtime_ns, meta["e_tag"])

    def delete(self, name: str) -> None:
        """Delete an object."""
        _call(lambda: self._store.delete(name))

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete objects with one request."""
        _call(lambda: self._store.delete(names))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page; the library only lists whole path segments.

        It lists the object ``dir/``, an empty folder to other programs, as ``dir``.

        Raises:
            RequestFailed: `ErrorKind.NAME` for a name with an empty segment or a control character.
        """
        folder = prefix.rpartition("/")[0]
        pages = iter(self._store.list(folder or None))
        while (page := _call(lambda: next(pages, None))) is not None:
            for entry in page:
                name = entry["path"]
                if name.startswith(prefix) and (entry["size"] >= _SURE_NBYTES or self._has(name)):
                    yield name

    def _has(self, name: str) -> bool:
        try:
            self.head(name)
        except RequestFailed as failed:
            if failed.kind is ErrorKind.MISSING:
                return False
            raise
        return True

    def close(self) -> None:
        """Free the client, which closes its connections."""
        del self._store


def _call(request: Callable[[], T]) -> T:
    try:
        return request()
    except _FAILURES as exc:
        raise _failure(exc) from exc


def _failure(exc: Exception) -> RequestFailed:
    text = str(exc)
    detail = text.partition("\n")[0][:300]
    if _INSTANCE in text or _PROVIDER in text:
        return RequestFailed(ErrorKind.NO_CREDENTIALS, detail)
    code, status = _CODE.search(text), _STATUS.search(text)
    if code or status:
        found = error_kind(int(status[1]) if status else None, code[1] if code else "")
        if found is not ErrorKind.OTHER:
            return RequestFailed(found, detail)
    kind = next((kind for cls, kind in _KINDS if isinstance(exc, cls)), None)
    words = next((kind for words, kind in _TEXTS if words in text), ErrorKind.OTHER)
    return RequestFailed(kind or words, detail)


def _range(start: int, stop: int | None) -> Any:
    if stop is not None:
        return {"range": (start, stop)}
    return {"range": {"offset": start}} if start else {}


def _names_credentials(options: S3Options) -> bool:
    """Return whether the options or the environment have credentials, or say where they are."""
    return options.access_key is not None or any(map(os.environ.get, _SOURCES))


def _finds_credentials(options: S3Options) -> bool:
    """Return whether credentials can be found; the metadata service is used for AWS only."""
    if _names_credentials(options):
        return True
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    return options.endpoint_url is None and not disabled


def _credentials(options: S3Options) -> S3Credential:
    """Return the credentials of the options, without an expiry time."""
    if options.access_key is None or options.secret_key is None:
        raise AssertionError("unreachable")
    return {
        "access_key_id": options.access_key.reveal(),
        "secret_access_key": options.secret_key.reveal(),
        "token": options.session_token.reveal() if options.session_token is not None else None,
        "expires_at": None,
    }


def _store(options: S3Options, profile: Callable[[], S3Credential] | None) -> S3Store:
    client: ClientConfig = {
        "allow_http": not options.tls,
        "allow_invalid_certificates": not options.tls_verify,
        "connect_timeout": f"{options.connect_timeout_s}s",
        "read_timeout": f"{options.read_timeout_s}s",
        "timeout": f"{min(options.request_timeout_s, _LONGEST_S)}s",
        "pool_max_idle_per_host": str(options.connections),
    }
    if options.ca_file is not None:
        client["root_certificate"] = Path(options.ca_file).read_bytes()
    # The library fills gaps from the environment: it would send the environment's session token
    # with the key of the options, and it prefers AWS_ENDPOINT_URL_S3 to `endpoint`.
    given: dict[str, Any] = {}
    if options.access_key is not None:
        given["credential_provider"] = partial(_credentials, options)
        given["skip_signature"] = False
    elif profile is not None:
        given["credential_provider"] = profile
    if options.endpoint_url is not None:
        given["endpoint"] = given["aws_endpoint_url_s3"] = options.endpoint_url
    given |= options.named({"sse": "server_side_encryption", "sse_kms_key_id": "sse_kms_key_id"})
    try:
        return S3Store(
            options.bucket,
            region=options.region,
            virtual_hosted_style_request=not options.path_style,
            unsigned_payload=not options.signs_payload,
            client_options=client,
            retry_config={"max_retries": 0},
            **given,
        )
    except (BaseError, ValueError) as exc:
        raise ConfigError(f"obstore cannot create a client: {exc}") from None


class ObstoreBackend(S3Backend):
    """Stores blocks in a bucket with obstore."""

    name = "s3+obstore"
    library: ClassVar[Connect] = ObstoreObjects
    traits = TRAITS
