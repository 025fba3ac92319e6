"""S3 through s3dlio: a Rust client on its own runtime, one configuration in a process.

s3dlio reads where to go, and as whom, from the environment of the process, once, and keeps it: a
second store that wants another endpoint, other credentials or timeouts is refused. The variables
are set where native code sees them, and not in `os.environ`, and those that are not s3dlio's alone
only until its first request. What s3dlio was used for before kvio cannot be found out, and would
stay.

Bodies are read in place, so a block goes out with one copy (payload and trailer joined) or, where
it is one piece, with none; what comes in is copied once from the library's buffer. A GET tells
neither length nor ETag: see `kvio.s3.lengths`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import s3dlio

from kvio.abc import RunAll
from kvio.errors import ConfigError
from kvio.s3 import body, lengths
from kvio.s3.backend import S3Backend
from kvio.s3.bounded import Bounded
from kvio.s3.conditions import Condition, Refused, condition_of
from kvio.s3.objects import Connect, Got, Head, Ignored, Traits
from kvio.s3.options import MAX_PARTS, S3Options
from kvio.types import Cancellation, Parts

T = TypeVar("T")

TRAITS = Traits(
    conditional=False,
    checks_upload="none",  # "sha256" where payloads are signed
    after_fork="refuse",
    bounded=True,  # by S3dlioObjects
    ignores=(
        Ignored("tls_verify", "it always checks the server's certificate; give ca_file"),
        Ignored("conditional", "it sends no If-None-Match", ("trust",)),
        Ignored("addressing", "it always puts the bucket in the path", ("virtual",)),
    ),
)

#: Parts of one block that are under way at once: each is a buffer of part_bytes.
_PARTS_IN_FLIGHT: Final = 8
#: Asked for when a store is opened. Nothing is ever stored there.
_NOTHING: Final = ".kvio-nothing"

#: How s3dlio names what a server answered; of a HEAD it knows the status alone.
_SERVICE_ERROR: Final = re.compile(
    r"service error: (?:unhandled error \()?(\w+)(?: \(|\))|not deleted: \S+: (\w+) \("
)
_STATUS: Final = re.compile(r" — HTTP (\d{3}) ")
#: In this order: the first phrase found says what a failure means. Each has a space, as no key has.
FAILURES: Final[tuple[tuple[str, Condition], ...]] = (
    ("Missing AWS_ACCESS_KEY_ID or", Condition.NO_CREDENTIALS),
    ("request timed out after", Condition.TIMEOUT),
    ("minimum throughput was specified", Condition.TIMEOUT),
    ("invalid peer certificate", Condition.TLS),
    ("received fatal alert", Condition.TLS),
    ("received corrupt message", Condition.TLS),
    ("Connection refused", Condition.UNREACHABLE),
    ("dns error", Condition.UNREACHABLE),
    ("operation timed out", Condition.TIMEOUT),
    ("deadline has elapsed", Condition.TIMEOUT),
    ("client error (Connect)", Condition.UNREACHABLE),
    ("client error (SendRequest)", Condition.LOST),
    ("streaming error: ", Condition.LOST),
    ("dispatch failure", Condition.LOST),
    (": response error", Condition.LOST),  # a list that was cut off
)


class _Unlimited:
    """One bucket through s3dlio, which has one client for the whole process.

    Its timeout ends before the body of an answer: one that comes for ever is waited for.
    """

    def __init__(self, options: S3Options) -> None:
        _configure(options)
        self._bucket = options.bucket
        self._part_bytes = options.part_bytes
        self._in_flight = min(_PARTS_IN_FLIGHT, options.connections)
        self.traits = replace(TRAITS, checks_upload="sha256") if options.signs_payload else TRAITS

    def check_bucket(self) -> None:
        """Ask for an object that is not there: the answer tells whether the bucket is."""
        try:
            self._get(_NOTHING, 0, 1)
        except Refused as refused:
            if refused.condition is not Condition.MISSING:
                raise
        finally:
            _restore()

    def put(
        self,
        name: str,
        parts: Parts,
        *,
        crc32c: int | None,
        only_new: bool,
        run_all: RunAll,
        cancel: Cancellation | None = None,  # it is not left behind
    ) -> None:
        """Store an object; see `kvio.s3.bounded.Fetching`."""
        if only_new:
            raise Refused(Condition.UNSUPPORTED, "s3dlio sends no If-None-Match")
        if body.total_bytes(parts) > self._part_bytes:
            self._put_in_parts(name, parts)
            return
        whole = parts[0] if len(parts) == 1 else body.join(parts)
        _ask(lambda: s3dlio.put_bytes(self._uri(name), whole))

    def _put_in_parts(self, name: str, parts: Parts) -> None:
        total = body.total_bytes(parts)
        step = max(self._part_bytes, -(-total // MAX_PARTS))
        writer = _ask(
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
                with _ask(partial(writer.reserve, stop - start)) as room:
                    nbytes = body.scatter(body.cut(parts, start, stop), [room])
                _ask(partial(writer.commit, nbytes))
            _ask(writer.close)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it may have given up by itself
                writer.abort()
            raise

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts from an object; see `kvio.s3.objects.Objects`."""
        pieces, total, etag = self.fetch(name, start, stop, body.total_bytes(parts))
        return Got(body.scatter(pieces, parts), total, etag)

    def fetch(
        self, name: str, start: int, stop: int | None, room: int
    ) -> tuple[Sequence[Any], int, str | None]:
        """Get an object's bytes in the library's buffer; see `kvio.s3.bounded.Fetching`."""
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

    def _get(self, name: str, start: int, nbytes: int) -> list[memoryview]:
        # A range, where get() would make a HEAD first and take whatever there is.
        answer = _ask(lambda: s3dlio.get_range(self._uri(name), start, nbytes))
        found = memoryview(answer)
        if len(found) > nbytes:
            raise Refused(Condition.UNSUPPORTED, "the server ignores ranges")
        return [found]

    def head(self, name: str) -> Head:
        """Ask for an object's length."""
        found = _ask(lambda: s3dlio.stat(self._uri(name)))
        changed = found["last_modified"]
        mtime_ns = changed and int(datetime.fromisoformat(changed).timestamp()) * 10**9
        return Head(int(found["size"]), mtime_ns, found["etag"])

    def delete(self, name: str) -> None:
        """Remove an object."""
        _ask(lambda: s3dlio.delete(self._uri(name)))

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield names; s3dlio collects all pages first, 1000 names a request."""
        pattern = f"{prefix}**" if prefix else ""  # no prefix of kvio's has a character of globs
        names = _ask(lambda: s3dlio.list(self._uri(pattern), recursive=True))
        skip = len(self._uri(""))
        for name in names:
            yield name[skip:]

    def close(self) -> None:
        """Leave the process's one client to itself: s3dlio has no way to close it."""

    def _uri(self, name: str) -> str:
        return f"s3://{self._bucket}/{name}"


class S3dlioObjects(Bounded):
    """The same, where what is fetched comes in time or is given up."""

    def __init__(self, options: S3Options) -> None:
        super().__init__(_Unlimited(options), options)

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store the joined parts; s3dlio's own timeout ends it, without the cost of a thread."""
        self._inner.put(name, parts, crc32c=crc32c, only_new=only_new, run_all=run_all)


def _ask(request: Callable[[], T]) -> T:
    try:
        return request()
    except RuntimeError as exc:
        raise refused_of(str(exc)) from exc


def refused_of(text: str) -> Refused:
    """Say what s3dlio's words mean."""
    answered = _SERVICE_ERROR.search(text)
    if answered is not None:
        code = answered[1] or answered[2]
        status = _STATUS.search(text)
        known = 404 if code == "NotFound" else _STATUS_OF_CODE.get(code)
        return Refused(condition_of(int(status[1]) if status else known, code), text)
    condition = next((c for phrase, c in FAILURES if phrase in text), Condition.OTHER)
    return Refused(condition, text)


#: Codes that only their status tells, which s3dlio leaves out.
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

#: Variables that kvio sets for s3dlio, and the options they stand for.
_MEANING: Final = {
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
_hangs_here = False


def _configure(options: S3Options) -> None:
    """Configure s3dlio for the process, or see that it is configured so.

    Raises:
        ConfigError: it is configured otherwise, or cannot be.
    """
    if _hangs_here:
        raise ConfigError(
            "s3+s3dlio does not survive a fork, and was in use before this one: start children "
            "with multiprocessing's 'spawn' or 'forkserver'"
        )
    wanted = _settings(options, os.environ)
    with _lock:
        differing = {_MEANING[name] for name in _chosen if _chosen[name] != wanted[name]}
        if differing:
            raise ConfigError(
                "s3+s3dlio is configured once in a process, and an earlier store has other "
                f"options: {', '.join(sorted(differing))}; use a process of its own or another "
                "backend"
            )
        _chosen.update(wanted)
        fixed = {
            "S3DLIO_MAX_RETRY_ATTEMPTS": "1",  # retries are kvio's to make and to count
            "S3DLIO_RT_THREADS": os.environ.get("S3DLIO_RT_THREADS", str(_cores())),
        }
        for name, value in {**wanted, **fixed}.items():
            if value is None:
                os.unsetenv(name)
            else:
                os.putenv(name, value)


def _restore() -> None:
    """Undo what `_configure` set and other libraries read too; s3dlio has read it by now."""
    with _lock:
        for name in _MEANING:
            if not name.startswith("AWS_"):
                continue
            value = os.environ.get(name)
            if value is None:
                os.unsetenv(name)
            else:
                os.putenv(name, value)


def _settings(options: S3Options, environ: Mapping[str, str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {name: environ.get(name) for name in _MEANING}
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


def _after_fork() -> None:
    """Find s3dlio's runtime gone, if it had been started: all calls would wait for its threads."""
    global _hangs_here, _lock
    _hangs_here = bool(_chosen)
    _lock = threading.Lock()  # it may have been held


os.register_at_fork(after_in_child=_after_fork)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class S3dlioBackend(S3Backend):
    """Blocks in a bucket, by s3dlio."""

    name = "s3+s3dlio"
    library: ClassVar[Connect] = S3dlioObjects
    traits = TRAITS
