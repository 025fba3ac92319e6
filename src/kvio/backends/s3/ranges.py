"""Access objects through a library that can only get ranges, without length and ETag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from kvio.backends.s3 import body
from kvio.backends.s3.client import UNKNOWN, GetResult, Head
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.types import Parts

#: Get at most (second argument) bytes from an offset (first argument).
Get: TypeAlias = Callable[[int, int], Sequence[Any]]

#: Attempts while the object is replaced between the GET and the HEAD.
_ATTEMPTS: Final = 4


class RangeObjects(ABC):
    """The reads of `kvio.backends.s3.client.Objects`, made of a library's ranges and HEADs."""

    @abstractmethod
    def get_range(self, name: str, start: int, nbytes: int) -> Sequence[Any]:
        """Return buffers of the library with at most *nbytes* bytes from *start*.

        Raises:
            RequestFailed: the request failed, or the server ignores ranges.
        """

    @abstractmethod
    def head(self, name: str) -> Head:
        """Return an object's length and metadata."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; do nothing if there is none."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete objects one by one: the libraries have no request for several."""
        for name in names:
            self.delete(name)

    def check_bucket(self, name: str) -> None:
        """Read an object that never exists: the error shows whether the bucket exists."""
        try:
            self.get_range(name, 0, 1)
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.MISSING:
                raise

    def fetch(
        self, name: str, start: int, stop: int | None, room: int
    ) -> tuple[Sequence[Any], int, str | None]:
        """Return an object's bytes in buffers of the library, its length, and its ETag if known.

        If *stop* is None and more than *room* bytes follow *start*, return no buffers.
        """
        get = partial(self.get_range, name)
        return _fetch(get, partial(self.head, name), start, stop, room)

    def get_into(
        self, name: str, parts: Parts, start: int, stop: int | None, *, with_metadata: bool = True
    ) -> GetResult:
        """Read an object into the parts; see `kvio.backends.s3.client.Objects`."""
        pieces, total, etag = self.fetch(name, start, stop, body.total_bytes(parts))
        return GetResult(body.scatter(pieces, parts), total, etag)

    def get_tail(self, name: str, nbytes: int) -> tuple[bytes, GetResult]:
        """Return the last bytes of an object; see `kvio.backends.s3.client.Objects`."""
        return _get_tail(partial(self.get_range, name), partial(self.head, name), nbytes)


def _fetch(
    get: Get, head: Callable[[], Head], start: int, stop: int | None, room: int
) -> tuple[Sequence[Any], int, str | None]:
    """Return buffers, the object's length, and its ETag if known; see `RangeObjects`.

    A response shorter than requested shows where the object ends. After a complete range the
    length is `UNKNOWN`. In all other cases a HEAD request follows.

    Raises:
        RequestFailed: a request failed, or the object was replaced between GET and HEAD.
    """
    wanted = room + 1 if stop is None else min(stop - start, room)
    for attempt in range(_ATTEMPTS):
        try:
            pieces = get(start, wanted) if wanted else ()
            break
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.RANGE or start:
                raise
            found = head()  # an empty object has no valid range
            if not found.nbytes:
                return (), 0, found.etag
            if attempt == _ATTEMPTS - 1:  # before, the object may just have been empty
                raise
    got = sum(map(len, pieces))
    if got < wanted:
        return pieces, start + got, None
    if stop is not None and got == stop - start:
        return pieces, UNKNOWN, None
    found = head()
    if found.nbytes < start + got:
        raise RequestFailed(ErrorKind.CONFLICT, "the object was replaced while it was read")
    return () if stop is None else pieces, found.nbytes, found.etag


def _get_tail(get: Get, head: Callable[[], Head], nbytes: int) -> tuple[bytes, GetResult]:
    """Return an object's last bytes.

    Raises:
        RequestFailed: a request failed, or the object was replaced during every attempt.
    """
    for _ in range(_ATTEMPTS):
        found = head()
        start = max(0, found.nbytes - nbytes)
        wanted = found.nbytes - start
        if not wanted:
            return b"", GetResult(0, found.nbytes, found.etag, found.mtime_ns)
        try:
            end = b"".join(get(start, wanted + 1))  # the extra byte shows that it has grown
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.RANGE:
                raise
            continue  # the object is shorter now
        if len(end) == wanted:
            return end, GetResult(wanted, found.nbytes, found.etag, found.mtime_ns)
        if len(end) < wanted and head() == found:  # not replaced: the response is truncated
            return end, GetResult(len(end), found.nbytes, found.etag, found.mtime_ns)
    raise RequestFailed(ErrorKind.CONFLICT, "the object was replaced while its end was read")
