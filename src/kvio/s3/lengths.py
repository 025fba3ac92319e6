"""Find an object's length with libraries whose GET returns its bytes but no metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvio.s3.conditions import ErrorKind, RequestFailed
from kvio.s3.objects import UNKNOWN, GetResult, Head

#: Get at most (second argument) bytes from an offset (first argument).
Get: TypeAlias = Callable[[int, int], Sequence[Any]]

#: Attempts while the object is replaced between the GET and the HEAD.
_ATTEMPTS: Final = 4


def fetch(
    get: Get, head: Callable[[], Head], start: int, stop: int | None, room: int
) -> tuple[Sequence[Any], int, str | None]:
    """Return buffers, the object's length, and its ETag if known; see `bounded.BlockingObjects`.

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


def get_tail(get: Get, head: Callable[[], Head], nbytes: int) -> tuple[bytes, GetResult]:
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
