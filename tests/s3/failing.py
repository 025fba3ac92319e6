"""Stores over a server that misbehaves, and what comes of each verb there."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias

import pytest

import kvio
from kvio import MiB
from kvio.backends.s3 import body
from kvio.backends.s3.errors import ERRORS, ErrorKind
from kvio.registry import load_backend
from tests.s3.faults import WRITES, Request, Response, fault_of
from tests.s3.faulty import FaultyServer, Seen
from tests.s3.libraries import open_s3, require

#: Verbs that look at the end of an object first.
_BY_TRAILER: Final = ("read a range", "stat")
BUCKET: Final = "bucket"
PREFIX: Final = "p"
SMALL: Final = bytes(range(250)) * 20
#: Two parts, the first as small as S3 lets it be.
PART_BYTES: Final = 5 * MiB
LARGE: Final = bytes(range(256)) * (PART_BYTES // 256 + 800)
#: Nothing that works takes so long; what hangs is cancelled after it, where need be sooner. With
#: the hasty ones a busy machine may fail to open a store.
PATIENT: Final = {"connect_timeout_s": 20.0, "read_timeout_s": 20.0, "request_timeout_s": 60.0}
HASTY: Final = {"connect_timeout_s": 1.0, "read_timeout_s": 1.0, "request_timeout_s": 1.6}
BRISK: Final = {"connect_timeout_s": 3.0, "read_timeout_s": 3.0, "request_timeout_s": 4.0}

Verb: TypeAlias = Callable[[kvio.Store, str], object]

# What a library does unlike the others, whatever its settings. One that is not named makes one
# request an attempt, and reports everything.

#: Requests that it makes of one that fails, before it says so ...
REQUESTS_PER_ATTEMPT: Final = {"s3+torch": 2}  # its least: with 1 it makes its default, 4
#: ... in a way that it takes for passing.
ASKED_AGAIN: Final = frozenset(
    {"e500", "e500once", "e503", "e503once", "reset", "resetmid", "resetsend", "trunc", "cuthead"}
    | {"completeerror", "put-e500", "part-e500", "complete-e500"}
    | {"expired"}  # it hopes to find new credentials
    | {"wrongrange"}
)
#: A part that failed may come to this as well: a write into an upload that has ended does not say
#: why it did.
ENDS_UNTOLD: Final = {"s3+torch": ErrorKind.LOST}
#: It says that an upload failed while its own request to give it up is still under way.
GIVES_UP_LATER: Final = ("s3+torch",)
#: Requests of which the smallest write consists.
REQUESTS_PER_WRITE: Final = {"s3+torch": 3}
#: Its GET reports no length: a HEAD comes after each range, and before the end of an object.
HEADS: Final = ("s3+s3dlio", "s3+torch")
#: What a library's own words do not report: it is taken for another condition.
TELLS_LESS: Final[Mapping[tuple[str, str, str], ErrorKind]] = {
    # A list that cannot be parsed is a server's failure to botocore.
    ("s3+boto3", "trunc", "list"): ErrorKind.BUSY,
    # HEAD has no body: it says less of a bucket that is missing, and more of an impossible range.
    **{(name, "no-bucket", verb): ErrorKind.MISSING for name in HEADS for verb in _BY_TRAILER},
    **{(name, "e416", verb): ErrorKind.RANGE for name in HEADS for verb in _BY_TRAILER},
    **{("s3+s3dlio", "expired", verb): ErrorKind.OTHER for verb in _BY_TRAILER},
    # It takes every 400 to a HEAD for 403.
    **{("s3+torch", "expired", verb): ErrorKind.DENIED for verb in ("delete", "read in parallel")},
    # It takes no answer to a range that is not one, even where the whole was wanted.
    ("s3+torch", "wrongrange", "read"): ErrorKind.UNSUPPORTED,
    # Its smallest write is an upload in parts.
    ("s3+torch", "completeerror", "write"): ErrorKind.BUSY,
}


def registered(library: str) -> None:
    """Skip the running test where a library is not installed, or kvio has no backend for it."""
    require(library)
    if not entry_points(group="kvio.backends", name=library):
        pytest.skip(f"kvio registers no backend {library!r}")
    if library == "s3+s3dlio" and "KVIO_TEST_ALONE" not in os.environ:
        pytest.skip("s3dlio knows one server in a process: see test_failures_alone.py")


def honoured(library: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out options that a library cannot honour: it has others to the same end."""
    ignored = {one.option for one in load_backend(library).traits.unsupported_options}  # type: ignore[attr-defined]
    return {name: value for name, value in options.items() if name not in ignored}


def open_faulty(
    library: str,
    server: FaultyServer,
    options: Mapping[str, Any] | None = None,
    *,
    prefix: str = PREFIX,
    timeout: float | None = None,
) -> kvio.Store:
    """Open a store on a server that misbehaves; no request is made again, and nothing probed."""
    registered(library)
    settings = {
        "part_bytes": PART_BYTES,
        "retries": 0,
        "retry_s": 0.0,
        "conditional": "trust",
        **PATIENT,
    }
    return open_s3(
        library,
        server.endpoint,
        BUCKET,
        prefix=prefix,
        options=honoured(library, {**settings, **(options or {})}),
        timeout=timeout,
    )


class HealingServer(FaultyServer):
    """Misbehaves for each thing as often as a library asks in one attempt; then it serves well."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library
        self._met: Counter[tuple[str, ...]] = Counter()

    def _fault_of(self, request: Request) -> str:
        fault = fault_of(request)
        part = request.query.get("partNumber", "")
        where = request.key or request.query.get("prefix", "")
        asked = (request.operation, where, request.headers.get("range", ""), part)
        with self._lock:
            self._met[asked] += 1
            return fault if self._met[asked] <= requests_per_attempt(self._library, fault) else ""


class ForgetfulServer(FaultyServer):
    """Carries out every write, and hangs up instead of saying so."""

    def _respond(self, request: Request, fault: str) -> Response:
        response = super()._respond(request, fault)
        if request.operation in WRITES and response.status < 300:
            raise ConnectionAbortedError("the answer is lost")
        return response


def retries_made(store: kvio.Store) -> int:
    """Count the requests that kvio made again."""
    counted: int = store._backend.retries_made  # type: ignore[attr-defined,unused-ignore]
    return counted


def stored(key: str, data: bytes) -> bytes:
    """Make the object that holds a block."""
    return data + body.make("", key, len(data), body.crc32c([memoryview(data)]))


def place(server: FaultyServer, key: str, data: bytes) -> None:
    """Put a good block on the server, whatever its key says."""
    server.put(BUCKET, f"{PREFIX}/{key}", stored(key, data))


def look(server: FaultyServer, key: str) -> bytes | None:
    """Fetch what is visible under a key, whatever the key says."""
    return server.get(BUCKET, f"{PREFIX}/{key}")


def _read(store: kvio.Store, key: str) -> object:
    out = bytearray(len(SMALL))
    return store.read_block_into(key, out) == len(out) and bytes(out) == SMALL


def _read_range(store: kvio.Store, key: str) -> object:
    out = bytearray(500)
    return store.read_block_into(key, out, offset=10) == 500 and bytes(out) == SMALL[10:510]


def _read_parallel(store: kvio.Store, key: str) -> object:
    out = bytearray(len(LARGE))
    return store.read_block_into(key, out) == len(out) and bytes(out) == LARGE


#: Verbs by name; each gives a true value where all went well.
VERBS: Final[Mapping[str, Verb]] = {
    "write": lambda store, key: store.write_block(key, SMALL, if_exists="replace"),
    "write in parts": lambda store, key: store.write_block(key, LARGE, if_exists="replace"),
    "read": _read,
    "read in parallel": _read_parallel,
    "read a range": _read_range,
    "stat": lambda store, key: store.stat_block(key).nbytes == len(SMALL),
    "delete": lambda store, key: store.delete_block(key),
    "list": lambda store, key: key in store.list_keys(key.rpartition("/")[0] + "/"),
}
READING: Final = ("read", "read in parallel", "read a range", "stat")
#: Words that some verbs do not meet.
HEADED: Final = ("flip", "trunc")
ONE_REQUEST: Final = ("write", "read", "stat", "list")


def key_of(word: str, verb: str) -> str:
    """Name the block that a verb uses to meet a fault; a listing meets it by its prefix."""
    return f"{word}/{verb.replace(' ', '-')}/block"


def prepare(server: FaultyServer, word: str, verbs: Iterable[str] = VERBS) -> None:
    """Place the blocks that the verbs read."""
    for verb in verbs:
        if not verb.startswith("write"):
            place(server, key_of(word, verb), LARGE if verb == "read in parallel" else SMALL)


def attempt(store: kvio.Store, word: str, verb: str) -> str:
    """Return the outcome of a verb: ``good``, ``bad bytes``, or the error and its errno."""
    try:
        return "good" if VERBS[verb](store, key_of(word, verb)) else "bad"
    except kvio.KvioError as error:
        return described(error)


def attempt_all(store: kvio.Store, word: str, verbs: Iterable[str] = VERBS) -> dict[str, str]:
    """Try all verbs at once: what hangs, hangs together."""
    names = list(verbs)
    with ThreadPoolExecutor(len(VERBS)) as pool:
        return dict(
            zip(names, pool.map(functools.partial(attempt, store, word), names), strict=True)
        )


def described(error: kvio.KvioError) -> str:
    """Name an error, and its errno if it has one."""
    number = getattr(error, "errno", None)
    return type(error).__name__ + (f" {errno.errorcode[number]}" if number else "")


def error_of(kind: ErrorKind | None) -> str:
    """Name the error of a condition as the table of conditions says; None is no failure."""
    if kind is None:
        return "good"
    return described(ERRORS[kind]("text", "key", "backend"))


def unfinished(server: FaultyServer, library: str) -> list[str]:
    """Name the uploads that were neither completed nor aborted, once a library had time to."""
    turn, deadline = threading.Event(), time.monotonic() + 10.0
    while library in GIVES_UP_LATER and server.uploads(BUCKET) and time.monotonic() < deadline:
        turn.wait(0.02)
    return server.uploads(BUCKET)


def requests_per_attempt(library: str, word: str) -> int:
    """Return how many requests a library makes of one that fails, before it says so."""
    return REQUESTS_PER_ATTEMPT.get(library, 1) if word in ASKED_AGAIN else 1


def asked_too_often(server: FaultyServer, library: str, word: str) -> list[str]:
    """Name the requests for objects that were made again, but for parts of uploads."""
    asked = Counter(
        f"{seen.operation} {seen.key} {seen.range or ''}"
        for seen in server.requests
        if seen.operation != "UploadPart" and seen.key and not _tells_length(library, seen)
    )
    limit = requests_per_attempt(library, word)
    return [request for request, times in asked.items() if times > limit]


def _tells_length(library: str, seen: Seen) -> bool:
    return library in HEADS and (seen.operation, seen.status) == ("HeadObject", 200)
