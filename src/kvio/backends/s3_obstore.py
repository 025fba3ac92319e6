"""S3 through obstore: Rust, the least processor time of the five libraries.

A body goes to the library as the list of its pieces, without a join of ours. What comes back is
one buffer of the library's, copied once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from kvio.abc import RunAll
from kvio.errors import ConfigError
from kvio.s3 import body
from kvio.s3.backend import S3Backend
from kvio.s3.conditions import Condition, Refused, condition_of
from kvio.s3.objects import UNKNOWN, Connect, Got, Head, Traits
from kvio.s3.options import MAX_PARTS, S3Options
from kvio.types import KiB, Parts

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

T = TypeVar("T")

_FAILURES: Final = (BaseError, FileNotFoundError)
TRAITS = Traits(conditional=True, checks_upload="none", after_fork="refuse", bounded=True)

_KINDS: Final[tuple[tuple[type[Exception], Condition], ...]] = (
    (AlreadyExistsError, Condition.EXISTS),
    (PreconditionError, Condition.EXISTS),
    (PermissionDeniedError, Condition.DENIED),
    (UnauthenticatedError, Condition.DENIED),
    (NotFoundError, Condition.MISSING),
    (FileNotFoundError, Condition.MISSING),
)
#: What the library's texts mean where its exceptions do not tell; the first that is found. Each
#: has a character that no key, bucket or host has, since these stand in the texts too.
_TEXTS: Final = (
    ('"bytes 0--1/0"', Condition.RANGE),  # so MinIO says that an object is empty
    ("redirect without LOCATION", Condition.ELSEWHERE),
    ("non-partial response when range requested", Condition.UNSUPPORTED),
    ("Failed to get credentials", Condition.NO_CREDENTIALS),
    ("loading credential", Condition.NO_CREDENTIALS),
    ("InvalidCertificate(", Condition.TLS),
    ("invalid peer certificate:", Condition.TLS),
    ("InvalidMessage(", Condition.TLS),
    ("AlertReceived(", Condition.TLS),
    ("kind: Timeout", Condition.TIMEOUT),
    ("source: TimedOut", Condition.TIMEOUT),
    ("operation timed out", Condition.TIMEOUT),
    ("deadline has elapsed", Condition.TIMEOUT),
    ("dns error", Condition.UNREACHABLE),
    ("tcp connect error", Condition.UNREACHABLE),
    ("kind: Connect,", Condition.UNREACHABLE),
    ("request or response body error", Condition.LOST),
    ("error decoding response body", Condition.LOST),
    ("error sending request", Condition.LOST),
)
#: Where the library asks for credentials last of all.
_INSTANCE: Final = "http://169.254.169.254/latest/"
#: Any of these in the environment keeps it from asking there.
_SOURCES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_STATUS: Final = re.compile(r"status(?: code)?:? (\d{3})")
_CODE: Final = re.compile(r"(?:<Code>|\(code: )(\w+)")
_PART_CONCURRENCY: Final = 4
#: No limit: a year. Without a number the library takes 30 s.
_LONGEST_S: Final = 365 * 24 * 3600.0
#: Up to here one copy costs less than handing over a list.
_JOINED_NBYTES: Final = 256 * KiB


class ObstoreObjects:
    """One bucket through one obstore client."""

    traits: ClassVar[Traits] = TRAITS

    def __init__(self, options: S3Options) -> None:
        self._part_bytes = options.part_bytes
        self._prefix = options.prefix or None
        self._may_sign = _finds_credentials(options)
        self._store = _store(options)

    def check_bucket(self) -> None:
        """Ask for one name of the prefix; that of a bucket that is missing fails."""
        if not self._may_sign:
            raise Refused(Condition.NO_CREDENTIALS, "none in the options or the environment")
        try:
            _ask(lambda: next(iter(self._store.list(self._prefix, chunk_size=1)), None))
        except Refused as refused:
            if refused.condition is Condition.MISSING:
                raise Refused(Condition.NO_BUCKET, refused.detail) from refused
            raise

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store an object; see `kvio.s3.objects.Objects`."""
        total = body.total_bytes(parts)
        if total <= self._part_bytes or only_new:
            small = total <= _JOINED_NBYTES
            data = body.join(parts) if small else [part for part in parts if len(part)]
            mode: Literal["create", "overwrite"] = "create" if only_new else "overwrite"
            try:
                self._store.put(name, data, mode=mode, use_multipart=False)
            except _FAILURES as exc:
                raise _refused(exc) from exc
            return
        _ask(
            lambda: self._store.put(
                name,
                [part for part in parts if len(part)],
                use_multipart=True,
                chunk_size=max(self._part_bytes, -(-total // MAX_PARTS)),
                max_concurrency=_PART_CONCURRENCY,
            )
        )

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts from an object; see `kvio.s3.objects.Objects`."""
        if start == 0 and stop is None:
            return self._get_whole(name, parts)
        if stop is not None and not described:
            return self._get_range(name, parts, start, stop)

        def get() -> Got:
            answer = self._store.get(name, options=_range(start, stop))
            meta, (first, last) = answer.meta, answer.range
            if first != start:
                raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
            if stop is None and last - first > body.total_bytes(parts):
                return Got(0, meta["size"], meta["e_tag"])
            got = body.scatter([answer.buffer()], parts)
            if got != last - first:
                raise Refused(Condition.LOST, f"{got} of {last - first} bytes came")
            return Got(got, meta["size"], meta["e_tag"])

        return _ask(get)

    def _get_whole(self, name: str, parts: Parts) -> Got:
        """Get all there is; its description is left where it is, which is a tenth of the cost."""
        try:
            answer = self._store.get(name)
            total = answer.range[1]
            if total > body.total_bytes(parts):
                return Got(0, total)
            got = body.scatter([answer.buffer()], parts)
        except _FAILURES as exc:
            raise _refused(exc) from exc
        if got != total:
            raise Refused(Condition.LOST, f"{got} of {total} bytes came")
        return Got(got, total)

    def _get_range(self, name: str, parts: Parts, start: int, stop: int) -> Got:
        try:
            found = self._store.get_range(name, start=start, end=stop)
        except _FAILURES as exc:
            raise _refused(exc) from exc
        return Got(body.scatter([found], parts), UNKNOWN)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the end of an object; see `kvio.s3.objects.Objects`."""

        def get() -> tuple[bytes, Got]:
            answer = self._store.get(name, options={"range": {"suffix": nbytes}})
            first, last = answer.range
            if last - first > nbytes:
                raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
            end = bytes(answer.buffer())
            meta = answer.meta
            changed = int(meta["last_modified"].timestamp()) * 10**9
            return end[-nbytes:], Got(len(end), meta["size"], meta["e_tag"], changed)

        try:
            return _ask(get)
        except Refused as refused:
            # An empty object has no range; versitygw answers with the whole of it.
            whole = refused.condition is Condition.UNSUPPORTED
            if refused.condition is not Condition.RANGE and not (
                whole and self.head(name).nbytes == 0
            ):
                raise
        return b"", Got(0, 0)

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        meta = _ask(lambda: self._store.head(name))
        mtime_ns = int(meta["last_modified"].timestamp()) * 10**9
        return Head(meta["size"], mtime_ns, meta["e_tag"])

    def delete(self, name: str) -> None:
        """Remove an object."""
        _ask(lambda: self._store.delete(name))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names, page by page; the library lists whole path segments alone."""
        folder = prefix.rpartition("/")[0]
        pages = iter(self._store.list(folder or None))
        while (page := _ask(lambda: next(pages, None))) is not None:
            names = (entry["path"] for entry in page)
            yield from (name for name in names if name.startswith(prefix))

    def close(self) -> None:
        """Give back the client; its connections go with it."""
        del self._store


def _ask(request: Callable[[], T]) -> T:
    try:
        return request()
    except _FAILURES as exc:
        raise _refused(exc) from exc


def _refused(exc: Exception) -> Refused:
    text = str(exc)
    detail = text.partition("\n")[0][:300]
    if _INSTANCE in text:
        return Refused(Condition.NO_CREDENTIALS, detail)
    code, status = _CODE.search(text), _STATUS.search(text)
    if code or status:
        found = condition_of(int(status[1]) if status else None, code[1] if code else "")
        if found is not Condition.OTHER:
            return Refused(found, detail)
    kind = next((c for kind, c in _KINDS if isinstance(exc, kind)), None)
    words = next((c for words, c in _TEXTS if words in text), Condition.OTHER)
    return Refused(kind or words, detail)


def _range(start: int, stop: int | None) -> Any:
    if stop is not None:
        return {"range": (start, stop)}
    return {"range": {"offset": start}} if start else {}


def _finds_credentials(options: S3Options) -> bool:
    """Tell whether there is anything to sign with; only of AWS an instance asks for it."""
    if options.access_key is not None or any(map(os.environ.get, _SOURCES)):
        return True
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    return options.endpoint_url is None and not disabled


def _credentials(options: S3Options) -> S3Credential:
    """Give the credentials of the options, for ever."""
    if options.access_key is None or options.secret_key is None:
        raise AssertionError("unreachable")
    return {
        "access_key_id": options.access_key.reveal(),
        "secret_access_key": options.secret_key.reveal(),
        "token": options.session_token.reveal() if options.session_token is not None else None,
        "expires_at": None,
    }


def _store(options: S3Options) -> S3Store:
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
    # The environment completes what is given: its token would be sent with another's key, and its
    # AWS_ENDPOINT_URL_S3 goes before `endpoint`.
    given: dict[str, Any] = {}
    if options.access_key is not None:
        given["credential_provider"] = partial(_credentials, options)
        given["skip_signature"] = False
    if options.endpoint_url is not None:
        given["endpoint"] = given["aws_endpoint_url_s3"] = options.endpoint_url
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
        raise ConfigError(f"obstore makes no client: {exc}") from None


class ObstoreBackend(S3Backend):
    """Blocks in a bucket, by obstore."""

    name = "s3+obstore"
    library: ClassVar[Connect] = ObstoreObjects
    traits = TRAITS
