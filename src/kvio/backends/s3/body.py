"""Slice, join and checksum bytes in several buffers, and end them with the trailer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvio import _native
from kvio.core.buffers import total_bytes as total_bytes
from kvio.errors import CorruptBlockError
from kvio.format import (
    TRAILER_BYTES,
    Trailer,
    TrailerError,
    key_hash,
    pack_trailer,
    unpack_trailer,
)
from kvio.types import KiB, Parts

#: `BodyFile.read` returns at least this many bytes, except at the end.
PIECE_NBYTES: Final = 256 * KiB


def cut(parts: Parts, start: int, stop: int) -> list[memoryview]:
    """Return views of bytes *start* to *stop* of the concatenated parts, without a copy."""
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
    """Copy the buffers that a library returned into the parts; return the bytes that fitted."""
    if len(pieces) == 1 and parts and len(pieces[0]) <= len(parts[0]):
        nbytes = len(pieces[0])
        parts[0][:nbytes] = pieces[0]
        return nbytes
    done = 0
    for buffer in pieces:
        piece: memoryview = memoryview(buffer)
        at = 0
        for target in cut(parts, done, done + len(piece)):
            target[:] = piece[at : at + len(target)]
            at += len(target)
        done += at
    return done


def join(parts: Parts) -> bytes:
    """Return the parts joined into one ``bytes``; a single ``bytes`` object is not copied."""
    if len(parts) == 1:
        owner = parts[0].obj
        if type(owner) is bytes and len(owner) == len(parts[0]):
            return owner
    return b"".join(parts)


def ranges(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) ranges of *step* bytes that cover [0, nbytes)."""
    for start in range(0, nbytes, step):
        yield start, min(nbytes, start + step)


def crc32c(parts: Parts, value: int = 0) -> int:
    """Return the CRC32C of the parts, continued from *value*."""
    for part in parts:
        value = _native.crc32c(part, value)
    return value


class BodyFile:
    """A request body as a file object, so that a client sends it in pieces without joining it.

    urllib3 sends ``bytes`` with one ``sendall``, which must finish within the connect timeout. A
    slow connection exceeds it even while data flows. With a file, the timeout applies per piece.
    """

    def __init__(self, parts: Parts, limit_s: float) -> None:
        self._parts = parts
        self._total = total_bytes(parts)
        self._at = 0
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def read(self, nbytes: int = -1) -> bytes | memoryview:
        """Return the next max(*nbytes*, `PIECE_NBYTES`) bytes, or b"" at the end.

        Raises:
            TimeoutError: more than the limit has passed since the request began.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the body was not sent within {self._limit_s:g} s")
        most = self._total if nbytes < 0 else max(nbytes, PIECE_NBYTES)
        start, self._at = self._at, min(self._total, self._at + most)
        pieces = cut(self._parts, start, self._at)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position of the next read and return it."""
        self._at = offset + (0, self._at, self._total)[whence]
        return self._at

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at


# --------------------------------------------------------------------------------------------------
# Make and validate the trailer that ends every object of ``layout=block``.


NBYTES: Final = TRAILER_BYTES


def make(namespace: str, key: str, nbytes: int, checksum: int | None) -> bytes:
    """Return the trailer of a block."""
    trailer = Trailer(nbytes, checksum, key_hash(namespace, key))
    return pack_trailer(trailer, _native.crc32c)


def parse(end: bytes, *, total: int, namespace: str, key: str) -> Trailer:
    """Parse the last bytes of an object of *total* bytes.

    Raises:
        CorruptBlockError: they are no valid trailer of a block of this key.
    """
    try:
        return unpack_trailer(
            end,
            stored_nbytes=total,
            expected_key_hash=key_hash(namespace, key),
            crc32c=_native.crc32c,
        )
    except TrailerError as exc:
        raise CorruptBlockError(f"block {key!r} is corrupt: {exc}", key=key) from None


def check_payload(trailer: Trailer, payload: Parts, key: str) -> None:
    """Compare a whole payload with the checksum in its trailer.

    Raises:
        CorruptBlockError: the checksums differ.
    """
    if trailer.checksum is not None and crc32c(payload) != trailer.checksum:
        raise CorruptBlockError(
            f"block {key!r} is corrupt: the payload's checksum is wrong", key=key
        )
