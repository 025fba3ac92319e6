"""Counting blocks in every process of a rank, so that none is lost with a worker."""

from __future__ import annotations

import atexit
import itertools
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from kvio.connectors.dlio import scratch

#: The directory in which a rank and its workers, forked or spawned, leave their counts.
VARIABLE: Final = "KVIO_DLIO_COUNTS"


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks that went one way, their bytes, and when the first began and the last ended.

    Attributes:
        window_ns: both, by the clock of the system (`time.time_ns`), which hosts share.
    """

    blocks: int = 0
    nbytes: int = 0
    window_ns: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def seconds(self) -> float:
        """How long that took, with whatever else was done in between."""
        begun, ended = self.window_ns or (0, 0)
        return (ended - begun) / 1e9

    def __add__(self, other: Moved) -> Moved:
        windows = [one.window_ns for one in (self, other) if one.window_ns is not None]
        begun, ended = zip(*windows, strict=True) if windows else ((), ())
        window = (min(begun), max(ended)) if windows else None
        return Moved(self.blocks + other.blocks, self.nbytes + other.nbytes, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What went through kvio, by phase and direction."""

    writes: Moved = Moved()
    reads: Moved = Moved()
    checkpoint_writes: Moved = Moved()
    checkpoint_reads: Moved = Moved()

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})


_NAMES: Final = tuple(one.name for one in fields(Counts))
#: Of every name: blocks, bytes, and when the first began and the last ended.
_RECORD: Final = struct.Struct(f"={4 * len(_NAMES)}Q")


class Tally:
    """The counts of one process, in a file that outlives it."""

    def __init__(self, directory: str) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._now = {name: [0, 0, 0, 0] for name in _NAMES}
        fd, _ = tempfile.mkstemp(prefix=f"{self.pid}-", dir=directory)
        try:
            os.ftruncate(fd, _RECORD.size)
            self._memory = mmap.mmap(fd, _RECORD.size)
        finally:
            os.close(fd)

    def add(self, name: str, nbytes: int, *, begun_ns: int) -> None:
        """Count one block that ends now."""
        with self._lock:
            blocks, before, begun, _ = self._now[name]
            first = min(begun, begun_ns) if blocks else begun_ns
            self._now[name] = [blocks + 1, before + nbytes, first, time.time_ns()]
            _RECORD.pack_into(self._memory, 0, *itertools.chain(*self._now.values()))


_tally: Tally | None = None
_making = threading.Lock()
#: Directories of counts, and the processes that made them.
_begun: list[tuple[str, int]] = []


def begin() -> None:
    """Start counting for this rank; processes it makes from now on count into the same."""
    if VARIABLE in os.environ and os.path.isdir(os.environ[VARIABLE]):
        return
    directory = scratch.make("counts")
    os.environ[VARIABLE] = directory
    _begun.append((directory, os.getpid()))
    atexit.register(end)


def end() -> None:
    """Remove what this process, not one that it made, began; where `atexit` will not be asked."""
    for directory, pid in _begun:
        if os.getpid() == pid:
            shutil.rmtree(directory, ignore_errors=True)


def add(name: str, nbytes: int, *, begun_ns: int) -> None:
    """Count one block of this process, of a name as in `Counts`, that ends now."""
    global _tally
    tally = _tally
    if tally is None or tally.pid != os.getpid():
        with _making:
            if _tally is None or _tally.pid != os.getpid():
                begin()
                _tally = Tally(os.environ[VARIABLE])
            tally = _tally
    tally.add(name, nbytes, begun_ns=begun_ns)


def _after_fork() -> None:
    global _making  # another thread of the parent may have held it
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


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
            found += _counts_of(_RECORD.unpack(record))
    return found


def _counts_of(numbers: Sequence[int]) -> Counts:
    each = zip(*[iter(numbers)] * 4, strict=True)
    return Counts(
        **{
            name: Moved(blocks, nbytes, (begun, ended) if blocks else None)
            for name, (blocks, nbytes, begun, ended) in zip(_NAMES, each, strict=True)
        }
    )
