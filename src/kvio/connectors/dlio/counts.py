"""Count blocks in every process of a rank, also in workers that die."""

from __future__ import annotations

import atexit
import contextlib
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

_PREFIX: Final = "kvio-dlio-"


def make(purpose: str, *, parent: str | None = None) -> str:
    """Create a directory with this process's id in its name; first remove those of dead processes.

    Raises:
        OSError: the parent directory is not writable.
    """
    parent = tempfile.gettempdir() if parent is None else parent
    prefix = f"{_PREFIX}{purpose}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            owner = name.removeprefix(prefix).partition("-")[0]
            if name.startswith(prefix) and owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent)


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


#: The environment variable with the directory for the counts of a rank and all its workers.
VARIABLE: Final = "KVIO_DLIO_COUNTS"


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks of one direction, their bytes, and the time window of their transfers.

    Attributes:
        window_ns: start of the first and end of the last transfer, in `time.time_ns`, which is
            comparable between hosts.
    """

    blocks: int = 0
    nbytes: int = 0
    window_ns: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def seconds(self) -> float:
        """Return the length of the window, including other work within it."""
        begun, ended = self.window_ns or (0, 0)
        return (ended - begun) / 1e9

    def __add__(self, other: Moved) -> Moved:
        windows = [one.window_ns for one in (self, other) if one.window_ns is not None]
        begun, ended = zip(*windows, strict=True) if windows else ((), ())
        window = (min(begun), max(ended)) if windows else None
        return Moved(self.blocks + other.blocks, self.nbytes + other.nbytes, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The blocks that went through kvio, by phase and direction."""

    writes: Moved = Moved()
    reads: Moved = Moved()
    checkpoint_writes: Moved = Moved()
    checkpoint_reads: Moved = Moved()

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})


_NAMES: Final = tuple(one.name for one in fields(Counts))
#: For every name: blocks, bytes, start of the first and end of the last transfer.
_RECORD: Final = struct.Struct(f"={4 * len(_NAMES)}Q")


class IOCounters:
    """The counts of one process, in a file that outlives the process."""

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
        """Count one block whose transfer ends now."""
        with self._lock:
            blocks, before, begun, _ = self._now[name]
            first = min(begun, begun_ns) if blocks else begun_ns
            self._now[name] = [blocks + 1, before + nbytes, first, time.time_ns()]
            _RECORD.pack_into(self._memory, 0, *itertools.chain(*self._now.values()))


_counters: IOCounters | None = None
_creating = threading.Lock()
#: Directories of counts, and the processes that created them.
_begun: list[tuple[str, int]] = []


def begin() -> None:
    """Start counting for this rank and for processes that it starts from now on."""
    if VARIABLE in os.environ and os.path.isdir(os.environ[VARIABLE]):
        return
    directory = make("counts")
    os.environ[VARIABLE] = directory
    _begun.append((directory, os.getpid()))
    atexit.register(end)


def end() -> None:
    """Remove the directories that this process created; for exits that skip `atexit`."""
    for directory, pid in _begun:
        if os.getpid() == pid:
            shutil.rmtree(directory, ignore_errors=True)


def add(name: str, nbytes: int, *, begun_ns: int) -> None:
    """Count one block of this process whose transfer ends now; *name*: a field of `Counts`."""
    global _counters
    counters = _counters
    if counters is None or counters.pid != os.getpid():
        with _creating:
            if _counters is None or _counters.pid != os.getpid():
                begin()
                _counters = IOCounters(os.environ[VARIABLE])
            counters = _counters
    counters.add(name, nbytes, begun_ns=begun_ns)


def _after_fork() -> None:
    global _creating  # another thread may have held it at the fork
    _creating = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def total() -> Counts:
    """Return the sum of the counts of this rank and its workers, including dead ones."""
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
