"""The log of a disk: its records, and images that they are applied to."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

from tests.faults.blocks import kernel

_MAGIC: Final = 0x474F4C4B
_HEADER: Final = struct.Struct("<IIQQ")
_CHUNK: Final = 1 << 16


class Kind(IntEnum):
    """What a record is about."""

    WRITE = 1
    FLUSH = 2
    MARK = 3
    DISCARD = 4
    FAILED_WRITE = 5
    FAILED_FLUSH = 6


#: What changes the image.
CHANGES: Final = (Kind.WRITE, Kind.DISCARD)


class Record(NamedTuple):
    """One thing that happened to the disk; only writes and marks have *data*."""

    kind: Kind
    offset: int
    nbytes: int
    data: memoryview

    @property
    def mark(self) -> Any:
        """What a mark says."""
        return json.loads(bytes(self.data))


def read_log(path: str) -> list[Record]:
    """Return all records, in the order in which the disk saw them."""
    with open(path, "rb") as file:
        log = memoryview(file.read())
    records, at = [], 0
    while at < len(log):
        magic, kind, offset, nbytes = _HEADER.unpack_from(log, at)
        assert magic == _MAGIC, f"no record at byte {at}"
        at += _HEADER.size
        stored = nbytes if kind in (Kind.WRITE, Kind.MARK) else 0
        records.append(Record(Kind(kind), offset, nbytes, log[at : at + stored]))
        at += stored
    return records


def _chunks_with_data(fd: int, nbytes: int) -> list[int]:
    """List the pieces of a file that are no holes."""
    found: set[int] = set()
    at = 0
    while at < nbytes:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                break
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.update(range(start // _CHUNK, -(-at // _CHUNK)))
    return sorted(found)


class Image:
    """A disk's bytes in memory, which knows where they are not zeros."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = mmap.mmap(-1, nbytes)
        self._view = memoryview(self._bytes)
        self._used: set[int] = set()

    @classmethod
    def of_file(cls, path: str) -> Image:
        """Read an image; the zeros of its file cost nothing."""
        image, zeros = cls(os.path.getsize(path)), bytes(_CHUNK)
        with open(path, "rb", buffering=0) as file:
            for number in _chunks_with_data(file.fileno(), image.nbytes):
                file.seek(number * _CHUNK)
                chunk = file.read(_CHUNK)
                if chunk != zeros[: len(chunk)]:
                    image._view[number * _CHUNK : number * _CHUNK + len(chunk)] = chunk
                    image._used.add(number)
        return image

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return some of the bytes."""
        return bytes(self._view[offset : offset + nbytes])

    def apply(self, record: Record) -> None:
        """Do to the image what was done to the disk."""
        end = record.offset + record.nbytes
        if record.kind is Kind.WRITE:
            self._view[record.offset : end] = record.data
            self._used.update(range(record.offset // _CHUNK, -(-end // _CHUNK)))
        elif record.kind is Kind.DISCARD:
            for number in range(record.offset // _CHUNK, -(-end // _CHUNK)):
                if number in self._used:
                    start, stop = (
                        max(record.offset, number * _CHUNK),
                        min(end, (number + 1) * _CHUNK),
                    )
                    self._view[start:stop] = bytes(stop - start)

    def same_as(self, other: Image) -> bool:
        """Compare bytes."""
        used = self._used | other._used
        pieces = [slice(number * _CHUNK, (number + 1) * _CHUNK) for number in used]
        return all(self._view[piece] == other._view[piece] for piece in pieces)

    def write_to(self, fd: int) -> None:
        """Make a file the same, in place."""
        kernel.punch(fd, 0, self.nbytes)
        for start, stop in self._extents():
            os.pwrite(fd, self._view[start:stop], start)

    def _extents(self) -> list[tuple[int, int]]:
        extents: list[tuple[int, int]] = []
        for number in sorted(self._used):
            start, stop = number * _CHUNK, min((number + 1) * _CHUNK, self.nbytes)
            if extents and extents[-1][1] == start:
                extents[-1] = extents[-1][0], stop
            else:
                extents.append((start, stop))
        return extents

    def close(self) -> None:
        """Release the memory."""
        self._view.release()
        self._bytes.close()


def apply_to_file(fd: int, record: Record) -> None:
    """Do to a file what was done to the disk."""
    if record.kind is Kind.WRITE:
        os.pwrite(fd, record.data, record.offset)
    elif record.kind is Kind.DISCARD:
        kernel.punch(fd, record.offset, record.nbytes)
