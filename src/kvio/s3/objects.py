"""What a library's file gives: objects by name, each verb one blocking call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from kvio.abc import RunAll
from kvio.s3.options import S3Options
from kvio.types import Parts


class Ignored(NamedTuple):
    """An option that a library cannot honour: some of its *values*, or all but the default."""

    option: str
    why: str
    values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a library can do, always in the positive.

    Attributes:
        conditional: sends If-None-Match, for one request and for parts, so that a server that
            honours it decides who was first.
        checks_upload: the server compares the body with a checksum the library sends: CRC32C,
            SHA-256 (where the payload is signed), or nothing.
        after_fork: a child may open anew (``reopen``), or must not use the library (``refuse``).
        bounded: its own timeouts hold; else calls are given up by kvio after request_timeout_s.
        ignores: options that it cannot honour.
    """

    conditional: bool
    checks_upload: Literal["crc32c", "sha256", "none"]
    after_fork: Literal["reopen", "refuse"]
    bounded: bool
    ignores: tuple[Ignored, ...] = ()


#: The length of an object of which only a range is known.
UNKNOWN: Final = -1


class Got(NamedTuple):
    """An answer to a read: bytes filled in, the object's length, its ETag and time if known."""

    nbytes: int
    total: int
    etag: str | None = None
    mtime_ns: int | None = None


class Head(NamedTuple):
    """What a server says of an object: length, time in nanoseconds since 1970, ETag."""

    nbytes: int
    mtime_ns: int | None
    etag: str | None


class Objects(Protocol):
    """One bucket through one library; thread-safe.

    Every method makes its requests once, with no retry of the library's own, and raises
    `kvio.s3.conditions.Refused` when one fails. Names are whole object names.

    A library's class is made from `S3Options`, which makes no request, and raises `ConfigError` for
    an option that the library cannot honour.
    """

    @property
    def traits(self) -> Traits:
        """What the library can do."""

    def check_bucket(self) -> None:
        """Make one request that tells whether the bucket is there and may be used."""

    def put(
        self, name: str, parts: Parts, *, crc32c: int | None, only_new: bool, run_all: RunAll
    ) -> None:
        """Store the joined parts.

        Larger bodies than ``part_bytes`` go in parts, side by side by *run_all* where the library
        leaves that to its user, and what was stored of them is given up when one fails. *crc32c*
        of the whole body is sent for the server to check, where the library can. With *only_new*
        an object that stands there is `Condition.EXISTS`.
        """

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, described: bool = True
    ) -> Got:
        """Fill the parts with the object's bytes from *start* to before *stop* or its end.

        Unless it is to be *described*, a range may say nothing else of the object.

        At most as many as fit the parts; an answer that ends early is `Condition.LOST`. A
        *start* at or beyond the end is `Condition.RANGE`, but of an empty object read from 0.
        """

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, Got]:
        """Fetch the last bytes of an object, fewer where it is shorter."""

    def head(self, name: str) -> Head:
        """Ask for an object's length without its bytes."""

    def delete(self, name: str) -> None:
        """Remove an object; none being there is no failure."""

    def list_names(self, prefix: str) -> Iterator[str]:
        """Yield the names that start with *prefix*, page by page."""

    def close(self) -> None:
        """Give back connections."""


#: How a library's client is made.
Connect: TypeAlias = Callable[[S3Options], Objects]
