"""Bytes in several pieces: cut, joined, checksummed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvio import _native
from kvio.buffers import total_bytes as total_bytes
from kvio.types import KiB, Parts

#: What `Pieces` gives at least of a body at once.
PIECE_NBYTES: Final = 256 * KiB


def cut(parts: Parts, start: int, stop: int) -> list[memoryview]:
    """Give the pieces that hold bytes *start* to *stop* of the whole; nothing is copied."""
    pieces = []
    for part in parts:
        piece = part[max(0, start) : max(0, stop)]
        if len(piece):
            pieces.append(piece)
        start -= len(part)
        stop -= len(part)
        if stop <= 0:
            break
    return pieces


def scatter(pieces: Sequence[Any], parts: Parts) -> int:
    """Copy what a library answered into the parts, as far as it fits, and count it."""
    if len(pieces) == 1 and parts and len(pieces[0]) <= len(parts[0]):
        nbytes = len(pieces[0])
        parts[0][:nbytes] = pieces[0]
        return nbytes
    done = 0
    for answered in pieces:
        piece: memoryview = memoryview(answered)
        at = 0
        for target in cut(parts, done, done + len(piece)):
            target[:] = piece[at : at + len(target)]
            at += len(target)
        done += at
    return done


def join(parts: Parts) -> bytes:
    """Copy the pieces into one; a caller's own ``bytes`` are taken as they are."""
    if len(parts) == 1:
        owner = parts[0].obj
        if type(owner) is bytes and len(owner) == len(parts[0]):
            return owner
    return b"".join(parts)


def ranges(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [0, nbytes) into (start, stop)."""
    for start in range(0, nbytes, step):
        yield start, min(nbytes, start + step)


def crc32c(parts: Parts, value: int = 0) -> int:
    """Continue a CRC32C over the pieces."""
    for part in parts:
        value = _native.crc32c(part, value)
    return value


class Pieces:
    """A body as a file that a client sends piece by piece; the parts are not joined.

    urllib3 sends ``bytes`` by one call, which must end in the time that a connection may take to
    be made: a slow line breaks it, however well the bytes flow. Of a file each piece has that time.
    """

    def __init__(self, parts: Parts, limit_s: float) -> None:
        self._parts = parts
        self._total = total_bytes(parts)
        self._at = 0
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def read(self, nbytes: int = -1) -> bytes | memoryview:
        """Give the next *nbytes*, or `PIECE_NBYTES` if that is more; nothing at the end.

        Raises:
            TimeoutError: the body has been under way for longer than its limit.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the body was not taken within {self._limit_s:g} s")
        most = self._total if nbytes < 0 else max(nbytes, PIECE_NBYTES)
        start, self._at = self._at, min(self._total, self._at + most)
        pieces = cut(self._parts, start, self._at)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go on elsewhere."""
        self._at = offset + (0, self._at, self._total)[whence]
        return self._at

    def tell(self) -> int:
        """Say where the next piece begins."""
        return self._at
