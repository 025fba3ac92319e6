"""Counting blocks in every process of a rank, so that none is lost with a worker."""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import struct
import tempfile
import threading
from dataclasses import dataclass, fields
from typing import Final

from kvio.connectors.dlio import scratch

#: The directory in which a rank and its workers, forked or spawned, leave their counts.
VARIABLE: Final = "KVIO_DLIO_COUNTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What went through kvio: blocks and bytes, by phase and direction."""

    writes: int = 0
    bytes_written: int = 0
    reads: int = 0
    bytes_read: int = 0
    checkpoint_writes: int = 0
    checkpoint_bytes_written: int = 0
    checkpoint_reads: int = 0
    checkpoint_bytes_read: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(_values(self), _values(other), strict=True)
        return Counts(**dict(zip(_NAMES, map(sum, pairs), strict=True)))


_NAMES: Final = tuple(one.name for one in fields(Counts))
_RECORD: Final = struct.Struct(f"={len(_NAMES)}Q")


def _values(counts: Counts) -> tuple[int, ...]:
    return tuple(getattr(counts, name) for name in _NAMES)


class Tally:
    """The counts of one process, in a file that outlives it."""

    def __init__(self, directory: str) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._now = dict.fromkeys(_NAMES, 0)
        fd, _ = tempfile.mkstemp(prefix=f"{self.pid}-", dir=directory)
        try:
            os.ftruncate(fd, _RECORD.size)
            self._memory = mmap.mmap(fd, _RECORD.size)
        finally:
            os.close(fd)

    def add(self, blocks: str, nbytes_name: str, nbytes: int) -> None:
        """Count one block and its bytes."""
        with self._lock:
            self._now[blocks] += 1
            self._now[nbytes_name] += nbytes
            _RECORD.pack_into(self._memory, 0, *self._now.values())


_tally: Tally | None = None
_making = threading.Lock()


def begin() -> None:
    """Start counting for this rank; processes it makes from now on count into the same."""
    if VARIABLE in os.environ and os.path.isdir(os.environ[VARIABLE]):
        return
    directory = scratch.make("counts")
    os.environ[VARIABLE] = directory
    atexit.register(_end, directory, os.getpid())


def _end(directory: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


def add(blocks: str, nbytes_name: str, nbytes: int) -> None:
    """Count one block of this process."""
    global _tally
    tally = _tally
    if tally is None or tally.pid != os.getpid():
        with _making:
            if _tally is None or _tally.pid != os.getpid():
                begin()
                _tally = Tally(os.environ[VARIABLE])
            tally = _tally
    tally.add(blocks, nbytes_name, nbytes)


def total() -> Counts:
    """Sum what this rank and its workers counted, those that have died included."""
    found = Counts()
    directory = os.environ.get(VARIABLE)
    if directory is None:
        return found
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), "rb") as file:
            record = file.read()
        if len(record) == _RECORD.size:
            found += Counts(**dict(zip(_NAMES, _RECORD.unpack(record), strict=True)))
    return found
