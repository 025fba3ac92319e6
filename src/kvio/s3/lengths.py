"""Whole answers from libraries that give an object's bytes and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvio.s3.conditions import Condition, Refused
from kvio.s3.objects import UNKNOWN, Got, Head

#: Get at most so many bytes (second) from an offset (first) on.
Get: TypeAlias = Callable[[int, int], Sequence[Any]]

#: How often an object may be replaced while its bytes and its length are asked for.
_ATTEMPTS: Final = 4


def fetch(
    get: Get, head: Callable[[], Head], start: int, stop: int | None, room: int
) -> tuple[Sequence[Any], int, str | None]:
    """Get buffers, the object's length, and its ETag if known, as `bounded.Fetching` says.

    An answer that is shorter than what was asked for shows where the object ends. A range that came
    whole says nothing of it, and nothing more is asked. Else a HEAD follows.

    Raises:
        Refused: a request failed, or the object was replaced between two.
    """
    wanted = room + 1 if stop is None else min(stop - start, room)
    for attempt in range(_ATTEMPTS):
        try:
            pieces = get(start, wanted) if wanted else ()
            break
        except Refused as refused:
            if refused.condition is not Condition.RANGE or start:
                raise
            standing = head()  # an empty object has no range
            if not standing.nbytes:
                return (), 0, standing.etag
            if attempt == _ATTEMPTS - 1:  # else it was empty a moment ago
                raise
    got = sum(map(len, pieces))
    if got < wanted:
        return pieces, start + got, None
    if stop is not None and got == stop - start:
        return pieces, UNKNOWN, None
    standing = head()
    if standing.nbytes < start + got:
        raise Refused(Condition.CONFLICT, "the object was replaced while it was read")
    return () if stop is None else pieces, standing.nbytes, standing.etag


def end(get: Get, head: Callable[[], Head], nbytes: int) -> tuple[bytes, Got]:
    """Get an object's last bytes.

    Raises:
        Refused: a request failed, or the object was replaced again and again.
    """
    for _ in range(_ATTEMPTS):
        standing = head()
        start = max(0, standing.nbytes - nbytes)
        wanted = standing.nbytes - start
        if not wanted:
            return b"", Got(0, standing.nbytes, standing.etag, standing.mtime_ns)
        try:
            found = b"".join(get(start, wanted + 1))  # one more shows that it is longer by now
        except Refused as refused:
            if refused.condition is not Condition.RANGE:
                raise
            continue  # it is shorter by now
        if len(found) == wanted:
            return found, Got(wanted, standing.nbytes, standing.etag, standing.mtime_ns)
        if len(found) < wanted and head() == standing:  # not replaced: the answer is short
            return found, Got(len(found), standing.nbytes, standing.etag, standing.mtime_ns)
    raise Refused(Condition.CONFLICT, "the object was replaced while its end was read")
