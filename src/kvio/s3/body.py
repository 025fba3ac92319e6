"""Bytes in several pieces: cut, joined, checksummed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvio import _native
from kvio.buffers import total_bytes as total_bytes
from kvio.types import Parts


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
