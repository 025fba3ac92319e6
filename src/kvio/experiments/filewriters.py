"""Who writes files in the tmpfile experiment: a C++ program that is compiled here, and kvio."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np

import kvio
from kvio import MiB, UnsupportedError
from kvio.errors import storage_error
from kvio.experiments.measure import time_calls
from kvio.types import Durability

SOURCE: Final = Path("benchmarks", "baselines", "filewriter.cpp")
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-pthread")
_NO_TMPFILE: Final = "open O_TMPFILE"


@dataclass(frozen=True, slots=True)
class FileWriter:
    """One way to write a file and to make its name appear.

    Attributes:
        writer: ``ofstream``, ``fwrite`` or ``write``.
        call_bytes: handed over in one call; 0: the whole file.
        publish: ``rename`` or ``tmpfile``.
    """

    writer: str
    call_bytes: int
    publish: str

    @property
    def name(self) -> str:
        """Tell it from others in tables."""
        size = f" {self.call_bytes // MiB} MiB" if self.call_bytes else " whole"
        return f"{self.writer}{size if self.writer == 'write' else ''}, {self.publish}"


#: Every baseline by name; streams and stdio have a buffer of 1 MiB and get 1 MiB a call.
BASELINES: Final = {
    each.name: each
    for writer, call_bytes in (
        *(("ofstream", MiB), ("fwrite", MiB)),
        *(("write", MiB), ("write", 4 * MiB), ("write", 0)),
    )
    for publish in ("rename", "tmpfile")
    for each in (FileWriter(writer, call_bytes, publish),)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What writing a turn's files took.

    Attributes:
        latencies_s: from opening a file until it is closed, each.
        steps_ns: of these, opening and writing, syncing, publishing, where they are told apart.
        modes, reasons: of kvio's receipts.
    """

    wall_s: float
    latencies_s: list[float]
    steps_ns: dict[str, list[int]] = field(default_factory=dict)
    modes: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Case:
    """So many files at the same time, one a thread; *sync* is ``none`` or ``durable``."""

    threads: int
    file_bytes: int
    sync: str

    def __str__(self) -> str:
        return f"{self.subject}, {self.operation}"

    @property
    def subject(self) -> str:
        """Name the number of threads."""
        return f"{self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def operation(self) -> str:
        """Name the way to sync."""
        return "no sync" if self.sync == "none" else self.sync


class Source:
    """The bytes that every contender writes: in this process's memory and as a file in memory."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.fd = os.memfd_create("kvio-source", os.MFD_CLOEXEC)
        done = 0
        while done < len(memory):
            done += os.write(self.fd, memory[done:])

    def pieces(self, case: Case) -> list[memoryview]:
        """Cut the bytes of each file."""
        size = case.file_bytes
        return [self.memory[i * size : (i + 1) * size] for i in range(case.threads)]

    def close(self) -> None:
        """Forget the file."""
        os.close(self.fd)


class Contender(Protocol):
    """Writes the files of a turn and looks at them afterwards."""

    def write(self, source: Source, tag: str, case: Case) -> Written:
        """Write one file a thread, named after *tag*."""

    def is_intact(self, source: Source, tag: str, case: Case) -> bool:
        """Tell whether each file holds exactly its bytes."""

    def close(self) -> None:
        """Give back what is held."""


def compile_program(target: Path) -> list[str]:
    """Compile the program to *target* and give the command line that did it.

    The source is looked for in each directory from the current one up, then from this package's
    own up; the compiler is ``$CXX``, or else the first that is installed.

    Raises:
        UnsupportedError: there is no source or no compiler, or it fails; says which.
    """
    command = [*_compiler(), *_FLAGS, "-o", str(target), str(_source())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise UnsupportedError(f"{command[0]} fails: {first}")
    return command


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in chosen[:1] or _COMPILERS:
        if path := shutil.which(name):
            return [path, *chosen[1:]]
    if chosen:
        raise UnsupportedError(f"no C++ compiler: $CXX is {chosen[0]!r}, which cannot be run")
    raise UnsupportedError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is in $PATH")


def _source() -> Path:
    for directory in _above(Path.cwd(), Path(__file__).resolve()):
        if (directory / SOURCE).is_file():
            return directory / SOURCE
    raise UnsupportedError(f"no {SOURCE} here or above, nor above the kvio package")


def _above(*places: Path) -> Iterator[Path]:
    for place in places:
        yield from (place, *place.parents)


class Baseline:
    """Writes files by the compiled program, all into one directory."""

    def __init__(self, program: Path, which: FileWriter, root: Path) -> None:
        self._program = program
        self._which = which
        self._root = root

    def write(self, source: Source, tag: str, case: Case) -> Written:
        """Run the program once.

        Raises:
            UnsupportedError: there is no O_TMPFILE here.
            StorageError: a step failed.
        """
        which = self._which
        files = (str(case.threads), str(case.file_bytes))
        done = subprocess.run(
            (
                *(self._program, self._root, tag, *files),
                *(which.writer, str(which.call_bytes), which.publish, case.sync),
            ),
            stdin=source.fd,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise _error(done)
        return _parse(done.stdout)

    def is_intact(self, source: Source, tag: str, case: Case) -> bool:
        """Tell whether exactly these files came up, with exactly these bytes."""
        names = _names(tag, case)
        ours = (name for name in os.listdir(self._root) if name.lstrip(".").startswith(f"{tag}-"))
        out = kvio.aligned_buffer(case.file_bytes + 1)
        return sorted(ours) == sorted(names) and all(
            _holds(self._root / name, piece, out)
            for name, piece in zip(names, source.pieces(case), strict=True)
        )

    def close(self) -> None:
        """Hold nothing."""


class Blocks:
    """Writes blocks into one kvio store, without checksums.

    Raises:
        UnsupportedError: the medium cannot do it.
    """

    def __init__(self, backend: str, root: Path, sync: str) -> None:
        durability: Durability = "durable" if sync == "durable" else "visible"
        options = {"checksum": "none", "verify": "length"}
        if durability == "visible":  # a durable store makes every directory when it opens
            with suppress(UnsupportedError):
                kvio.open_store(backend, root=root, durability="durable").close()
        self._store = kvio.open_store(backend, root=root, durability=durability, options=options)

    def write(self, source: Source, tag: str, case: Case) -> Written:
        """Make one call a block, from as many threads."""
        calls = [
            partial(self._store.write_block, key, piece)
            for key, piece in zip(_names(tag, case), source.pieces(case), strict=True)
        ]
        timed = time_calls(calls, case.threads)
        return Written(
            wall_s=timed.wall_s,
            latencies_s=timed.latencies_s,
            modes=Counter(str(receipt.mode) for receipt in timed.results),
            reasons=list(dict.fromkeys(receipt.reason for receipt in timed.results)),
        )

    def is_intact(self, source: Source, tag: str, case: Case) -> bool:
        """Read every block and compare."""
        out = kvio.aligned_buffer(case.file_bytes)
        return all(
            self._store.read_block_into(key, out) == len(piece) and _same(out, piece)
            for key, piece in zip(_names(tag, case), source.pieces(case), strict=True)
        )

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _names(tag: str, case: Case) -> list[str]:
    return [f"{tag}-{index:04d}" for index in range(case.threads)]


def _holds(path: Path, expected: memoryview, out: memoryview) -> bool:
    with open(path, "rb", buffering=0) as file:
        done = 0
        while got := file.readinto(out[done:]):
            done += got
    return done == len(expected) and _same(out[:done], expected)


def _same(left: memoryview, right: memoryview) -> bool:
    return np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))


def _parse(said: str) -> Written:
    files: list[list[int]] = []
    wall_ns = 0
    for line in said.splitlines():
        kind, *numbers = line.split()
        if kind == "wall":
            wall_ns = int(numbers[0])
        else:
            files.append([int(number) for number in numbers])
    written, synced, published, total = (list(column) for column in zip(*files, strict=True))
    return Written(
        wall_s=wall_ns / 1e9,
        latencies_s=[ns / 1e9 for ns in total],
        steps_ns={"write_ns": written, "sync_ns": synced, "publish_ns": published},
    )


def _error(done: subprocess.CompletedProcess[str]) -> Exception:
    kind, number, step = (*done.stdout.strip().split(" ", 2), "", "")[:3]
    if kind != "error":
        return kvio.StorageError(f"the file writer died: exit status {done.returncode}")
    if step == _NO_TMPFILE:
        return UnsupportedError(f"no usable O_TMPFILE: {os.strerror(int(number))}")
    return storage_error(int(number), f"the file writer's {step}")
