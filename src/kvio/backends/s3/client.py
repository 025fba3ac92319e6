"""Define what a library's file implements: blocking operations on named objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from kvio.abc import RunAll
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.types import Parts


class UnsupportedOption(NamedTuple):
    """An option that a library does not support: some of its *values*, or all but the default."""

    option: str
    reason: str
    values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a library supports.

    Attributes:
        conditional: it sends If-None-Match, so that a server that supports the header lets only
            one of several writers succeed.
        checks_upload: the checksum that the library sends and the server verifies: CRC32C,
            SHA-256 (where the payload is signed), or none.
        after_fork: a child may connect again (``reopen``) or must not use the library (``refuse``).
        timeouts: what limits a request to request_timeout_s: the library (with `Watchdog` where
            it only has a timeout per read); or kvio runs it in another thread and abandons it
            with that thread (``abandon``), or only so when it reads (``abandon reads``).
        conditional_parts: it sends If-None-Match to complete a multipart upload too.
        empty_objects: it sends an empty object in a way that every server takes.
        unsupported_options: options that it does not support.
    """

    conditional: bool
    checks_upload: Literal["crc32c", "sha256", "none"]
    after_fork: Literal["reopen", "refuse"]
    timeouts: Literal["library", "abandon reads", "abandon"]
    conditional_parts: bool = False
    empty_objects: bool = True
    unsupported_options: tuple[UnsupportedOption, ...] = ()


#: Names in one DeleteObjects request: the limit of S3.
MAX_DELETED: Final = 1000
#: The length of an object that a range request did not report.
UNKNOWN: Final = -1


class GetResult(NamedTuple):
    """The result of a read: bytes delivered, the object's length, its ETag and time if known."""

    nbytes: int
    total: int
    etag: str | None = None
    mtime_ns: int | None = None


class Head(NamedTuple):
    """The metadata of an object: length, time in nanoseconds since 1970, ETag."""

    nbytes: int
    mtime_ns: int | None
    etag: str | None


class Objects(Protocol):
    """One bucket, accessed with one library; thread-safe.

    Every method makes each request once, without the library's retries, and raises
    `kvio.backends.s3.errors.RequestFailed` when one fails. Names are complete object names.

    The constructor takes `S3Options`. It makes no request and raises `ConfigError` for an option
    that the library does not support.
    """

    @property
    def traits(self) -> Traits:
        """Return what the library supports."""

    def check_bucket(self, name: str) -> None:
        """Fail unless the bucket exists and is accessible; *name*: an object that never exists."""

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, if_none_match: bool, run_all: RunAll
    ) -> None:
        """Store the joined parts.

        Bodies larger than ``part_bytes`` are sent as a multipart upload, which is aborted when a
        part fails. Parts are sent in parallel, with *run_all* if the library has no threads.
        *crc32c* of the whole body is sent for the server to verify, if the library can. With
        *if_none_match*, an existing object is `ErrorKind.EXISTS`; a library without
        `Traits.conditional_parts` then sends one request.
        """

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, with_metadata: bool = True
    ) -> GetResult:
        """Read the object's bytes [*start*, *stop*), or to its end, into the parts.

        Reads at most as many bytes as fit. A truncated response is `ErrorKind.LOST`. A *start* at
        or beyond the end is `ErrorKind.RANGE`, except for 0 in an empty object. Without
        *with_metadata*, the result of a range may lack the length and the ETag.
        """

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last *nbytes* bytes of an object, or all of a shorter object."""

    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""

    def delete(self, name: str) -> None:
        """Delete an object; do nothing if there is none."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete up to `MAX_DELETED` objects; after an error, some of them may be there still."""

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield the names that start with *prefix*, page by page."""

    def close(self) -> None:
        """Close the connections."""


def read_nothing(objects: Objects, name: str) -> None:
    """Read an object that never exists: the error shows whether the bucket exists."""
    try:
        objects.get_into(name, [memoryview(bytearray(1))], 0, 1)
    except RequestFailed as failed:
        if failed.kind is not ErrorKind.MISSING:
            raise


#: Creates a library's client.
Connect: TypeAlias = Callable[[S3Options], Objects]
