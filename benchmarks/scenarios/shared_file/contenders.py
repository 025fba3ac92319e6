"""The contenders as one process runs them: kvio's shared files, its stores, os.pwrite and C.

`Rank` is the worker process; it gets a `JobSpec` for every trial.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias
from urllib.parse import quote

import numpy as np

import kvio
from benchmarks.harness.plot import size_text
from benchmarks.harness.workers import Answer
from kvio import ConfigError, KvioError, MiB, StorageError, UnsupportedError

#: Errors of open(2) on a file system without direct I/O.
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
#: Whole cells of a shared file, so that none is read twice.
READ_BYTES: Final = 16 * MiB
_SEED: Final = 20261121
#: Random bytes are made in pieces of this size, that caches hold.
_STEP: Final = 8 * MiB
#: The C program.
SOURCE: Final = Path(__file__).resolve().parents[2] / "baselines" / "pwrites.c"
_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-pthread")

#: What is timed, as tables and plots name it, in their order.
WRITE: Final = "write"
DURABLE: Final = "durable"
OPERATIONS: Final = (WRITE, DURABLE)

#: How writers run at the same time.
PROCESSES: Final = "processes"
THREADS: Final = "threads"
KINDS: Final = (PROCESSES, THREADS)

#: Who makes the calls.
Caller: TypeAlias = Literal["kvio", "store", "python", "C", "ior"]


class Contender(NamedTuple):
    """One way to write.

    Attributes:
        way: who makes the calls.
        mode: of a shared file, the policy of a store, or by hand ``buffered`` or ``direct``.
        separate: each writer has a file of its own.
    """

    way: Caller
    mode: str
    separate: bool = False
    checksum: bool = True
    preallocate: bool = True

    @property
    def direct(self) -> bool:
        """It bypasses the page cache for certain."""
        return self.mode in ("direct", "posix-direct")


#: The contenders that claims are about.
SHARED_DIRECT: Final = "shared direct"
SHARED_BARE: Final = "shared direct, no checksum"
SHARED_HOLE: Final = "shared direct, not preallocated"
FILES_DIRECT: Final = "files direct"
C_DIRECT: Final = "C direct"
C_FILES: Final = "C direct, files"
IOR: Final = ("ior buffered", "ior direct")
#: Every contender, in the order of tables.
CONTENDERS: Final = {
    "shared buffered": Contender("kvio", "buffered"),
    SHARED_DIRECT: Contender("kvio", "direct"),
    SHARED_BARE: Contender("kvio", "direct", checksum=False),
    SHARED_HOLE: Contender("kvio", "direct", preallocate=False),
    "shared hybrid": Contender("kvio", "hybrid"),
    FILES_DIRECT: Contender("kvio", "direct", separate=True),
    "files posix-tmpfile": Contender("store", "posix-tmpfile", separate=True),
    "files posix-direct": Contender("store", "posix-direct", separate=True),
    "python buffered": Contender("python", "buffered"),
    "python buffered, not preallocated": Contender("python", "buffered", preallocate=False),
    "python direct": Contender("python", "direct"),
    "python direct, not preallocated": Contender("python", "direct", preallocate=False),
    "C buffered": Contender("C", "buffered"),
    C_DIRECT: Contender("C", "direct"),
    C_FILES: Contender("C", "direct", separate=True),
    IOR[0]: Contender("ior", "buffered", preallocate=False),
    IOR[1]: Contender("ior", "direct", preallocate=False),
}


class Shape(NamedTuple):
    """What each writer writes, in IOR's terms: in every segment a block, transfer by transfer."""

    name: str
    block_bytes: int
    transfer_bytes: int
    segments: int


#: IOR's parameters and the others of the paper, which has half a gigabyte a process.
SHAPES: Final = {
    "ior": Shape("ior", 32 * MiB, MiB, 8),
    "custom": Shape("custom", 512 * MiB, 4 * MiB, 1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """So many writers write *segments* blocks each.

    Attributes:
        kind: ``processes`` or ``threads``.
        placement: ``map_by/order``; empty: writers run where the kernel puts them.
    """

    shape: str
    kind: str
    writers: int
    block_bytes: int
    transfer_bytes: int
    segments: int
    placement: str = ""

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.transfer_bytes)}"

    @property
    def subject(self) -> str:
        """Name the writers and what they write."""
        noun = {PROCESSES: "process", THREADS: "thread"}[self.kind]
        ending = ("es" if self.kind == PROCESSES else "s") if self.writers > 1 else ""
        placement = f", {self.placement}" if self.placement else ""
        return f"{self.writers} {noun}{ending}, {self.shape}{placement}"

    @property
    def writer_bytes(self) -> int:
        """Count what one writer writes."""
        return self.segments * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Count what all write."""
        return self.writers * self.writer_bytes

    @classmethod
    def within(
        cls, max_bytes: int, shape: Shape, *, kind: str, writers: int, placement: str = ""
    ) -> Self:
        """Scale a shape down to what a trial may write: shorter blocks, then fewer segments."""
        share, transfer = max_bytes // writers, shape.transfer_bytes
        segments = max(1, min(shape.segments, share // transfer))
        block = max(1, min(shape.block_bytes, share // segments) // transfer) * transfer
        return cls(shape.name, kind, writers, block, transfer, segments, placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a process prepares for a trial.

    Attributes:
        root: an empty directory for the trial's files.
        case: its fields.
        writers: the numbers of the writers that run in this process.
        cpus: where each of these may run; None: anywhere.
        program: the compiled C program; empty: there is none.
    """

    contender: str
    root: str
    case: dict[str, Any]
    writers: list[int]
    cpus: list[list[int] | None]
    program: str

    @property
    def wanted(self) -> Contender:
        """Look the contender up."""
        return CONTENDERS[self.contender]

    @property
    def first(self) -> bool:
        """This process makes the file and seals it."""
        return 0 in self.writers


class Transfer(NamedTuple):
    """One call: where its bytes go in the file, and where they are among the writer's own."""

    offset: int
    source: int
    nbytes: int


def transfers(case: Case, writer: int, *, separate: bool) -> Iterator[Transfer]:
    """List a writer's calls in order.

    Writers' blocks alternate in the shared file, segment by segment; in a file of one's own they
    lie one after the other.
    """
    for start, source in blocks(case, writer, separate=separate):
        for at in range(0, case.block_bytes, case.transfer_bytes):
            yield Transfer(start + at, source + at, case.transfer_bytes)


def blocks(case: Case, writer: int, *, separate: bool) -> Iterator[tuple[int, int]]:
    """Yield where each of a writer's blocks begins: in the file, and among its own bytes."""
    for segment in range(case.segments):
        number = segment if separate else segment * case.writers + writer
        yield number * case.block_bytes, segment * case.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a trial took in one process; times by the machine's monotonic clock.

    Attributes:
        started_s, ended_s: of each of its writers, the end being that of the last call.
        synced_s: when all of them had synced.
        latencies_s: every call of all its writers.
        user_s, system_s: CPU time of the process from start to synced.
    """

    started_s: list[float]
    ended_s: list[float]
    synced_s: float
    latencies_s: list[float]
    user_s: float
    system_s: float


# ---- writers that begin at the same moment ----


def pin(cpus: Sequence[int] | None) -> None:
    """Keep the calling thread, and what it begins, on these CPUs."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def wait_until(at_s: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    if (pause_s := at_s - time.monotonic()) > 0:
        time.sleep(pause_s)


def run_writers(
    writers: Sequence[Callable[[], list[float]]],
    cpus: Sequence[Sequence[int] | None],
    sync: Callable[[], object],
    at_s: float,
) -> Window:
    """Let each writer do all its calls from *at_s* on, a thread each where there are several.

    Args:
        writers: each returns how long its calls took.
        cpus: of each.
        sync: called once, when all have ended.
        at_s: by the monotonic clock.
    """
    work = [_Work(*one) for one in zip(writers, cpus, strict=True)]
    if len(work) == 1:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        work[0].run(at_s)
    else:
        threads = [threading.Thread(target=one.run, args=(at_s,)) for one in work]
        for thread in threads:
            thread.start()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for thread in threads:
            thread.join()
    for one in work:
        if one.failure is not None:
            raise one.failure
    sync()
    synced_s, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    return Window(
        started_s=[one.started_s for one in work],
        ended_s=[one.ended_s for one in work],
        synced_s=synced_s,
        latencies_s=[seconds for one in work for seconds in one.latencies_s],
        user_s=after.ru_utime - usage.ru_utime,
        system_s=after.ru_stime - usage.ru_stime,
    )


class _Work:
    """One writer and what it took."""

    def __init__(self, call: Callable[[], list[float]], cpus: Sequence[int] | None) -> None:
        self._call, self._cpus = call, cpus
        self.started_s = self.ended_s = 0.0
        self.latencies_s: list[float] = []
        self.failure: Exception | None = None

    def run(self, at_s: float) -> None:
        try:
            pin(self._cpus)
            wait_until(at_s)
            self.started_s = time.monotonic()
            self.latencies_s = self._call()
            self.ended_s = time.monotonic()
        except Exception as exc:  # noqa: BLE001  # run() raises it
            self.failure = exc


# ---- how each contender writes ----


class Way:
    """Writes the bytes of this process's writers, which lie one after the other in *source*."""

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        self.spec, self.wanted = spec, spec.wanted
        self.case = Case(**spec.case)
        self.source = source

    def create(self) -> None:
        """Create the file that all writers share, before the clock; in the first process alone."""

    def open(self) -> None:
        """Open what writing needs."""
        raise NotImplementedError

    def go(self, at_s: float) -> Window:
        """Write and sync from *at_s* on."""
        calls = [partial(self._write, writer) for writer in self.spec.writers]
        return run_writers(calls, self.spec.cpus, self._sync, at_s)

    def _write(self, writer: int) -> list[float]:
        """Make all calls of a writer; return how long each took."""
        raise NotImplementedError

    def _sync(self) -> None:
        """Make durable what all writers of this process wrote."""

    def seal(self) -> kvio.Receipt | None:
        """Publish what all processes wrote; in the first one alone; None: there is no such step."""
        return None

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        """Read back from a file that a writer wrote."""
        read_file(self.path(writer), offset, out)

    def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError

    def transfers(self, writer: int) -> list[tuple[Transfer, memoryview]]:
        """List a writer's calls, each with its bytes."""
        own = self.spec.writers.index(writer) * self.case.writer_bytes
        return [
            (call, self.source[own + call.source :][: call.nbytes])
            for call in transfers(self.case, writer, separate=self.wanted.separate)
        ]

    def path(self, writer: int) -> str:
        """Name the file that a writer writes."""
        name = f"own-{writer:04d}" if self.wanted.separate else "shared"
        return os.path.join(self.spec.root, name)


def open_way(spec: JobSpec, source: memoryview) -> Way:
    """Choose the way of a contender."""
    if spec.wanted.way == "kvio":
        return _Files(spec, source) if spec.wanted.separate else _Shared(spec, source)
    if spec.wanted.way == "store":
        return _Blocks(spec, source)
    return _Program(spec, source) if spec.wanted.way == "C" else _Plain(spec, source)


def _create(path: str, spec: JobSpec, *, nbytes: int, writers: int) -> kvio.SharedFile:
    wanted, case = spec.wanted, Case(**spec.case)
    mode = {"buffered": "buffered", "direct": "direct", "hybrid": "hybrid"}[wanted.mode]
    try:
        return kvio.SharedFile.create(
            path,
            nbytes,
            writers=writers,
            mode=mode,
            checksum=wanted.checksum,
            preallocate=wanted.preallocate,
            stripe_bytes=case.block_bytes if writers > 1 and case.segments > 1 else 0,
        )
    except ConfigError as exc:  # no direct I/O, or nothing durable
        raise UnsupportedError(str(exc)) from exc


class _Shared(Way):
    """One `kvio.SharedFile`: threads write by the handle that seals, processes by their own."""

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        super().__init__(spec, source)
        self._sealing: kvio.SharedFile | None = None
        self._own: kvio.SharedFile | None = None
        self._reading: kvio.SharedFile | None = None

    def create(self) -> None:
        case = self.case
        self._sealing = _create(
            self.path(0), self.spec, nbytes=case.total_bytes, writers=case.writers
        )

    def open(self) -> None:
        if len(self.spec.writers) == 1:
            [rank] = self.spec.writers
            self._own = kvio.SharedFile.open(self.path(rank), rank)

    def _write(self, writer: int) -> list[float]:
        file = self._own or self._sealing
        assert file is not None
        return _pwrites(file, self.transfers(writer))

    def _sync(self) -> None:
        if self._own is not None:
            self._own.close()

    def seal(self) -> kvio.Receipt | None:
        assert self._sealing is not None
        return self._sealing.seal()

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        if self._reading is None:
            self._reading = kvio.SharedFile.open(self.path(writer))
        self._reading.pread_into(out, offset)

    def close(self) -> None:
        for file in (self._own, self._reading, self._sealing):
            if file is not None:
                file.close()


class _Files(Way):
    """A `kvio.SharedFile` of its own for each writer."""

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        super().__init__(spec, source)
        self._files: dict[int, kvio.SharedFile] = {}

    def open(self) -> None:
        for writer in self.spec.writers:
            self._files[writer] = _create(
                self.path(writer), self.spec, nbytes=self.case.writer_bytes, writers=1
            )

    def _write(self, writer: int) -> list[float]:
        return _pwrites(self._files[writer], self.transfers(writer))

    def _sync(self) -> None:
        for file in self._files.values():
            file.seal()

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        self._files[writer].pread_into(out, offset)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _pwrites(file: kvio.SharedFile, calls: Sequence[tuple[Transfer, memoryview]]) -> list[float]:
    clock_s, latencies = time.perf_counter, []
    for call, piece in calls:
        start = clock_s()
        file.pwrite(piece, call.offset)
        latencies.append(clock_s() - start)
    return latencies


class _Blocks(Way):
    """A block a writer in one durable store: one call, whose time is shared out to transfers.

    A block is durable when its call returns: there is nothing to sync.
    """

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        super().__init__(spec, source)
        self._store: kvio.Store | None = None
        self._read: tuple[int, memoryview] | None = None

    def open(self) -> None:
        url = f"{self.wanted.mode}://{quote(self.spec.root)}?durability=durable"
        self._store = kvio.open_store(url)

    def _write(self, writer: int) -> list[float]:
        pieces = [piece for _, piece in self.transfers(writer)]
        assert self._store is not None
        start = time.perf_counter()
        self._store.write_block(f"own-{writer:04d}", pieces)
        return [(time.perf_counter() - start) / len(pieces)] * len(pieces)

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        assert self._store is not None
        if self._read is None or self._read[0] != writer:
            self._read = None  # before there is other memory
            self._read = writer, self._store.read_block(f"own-{writer:04d}")
        out[:] = self._read[1][offset : offset + len(out)]

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _Plain(Way):
    """os.pwrite, by a descriptor a process, and one fdatasync each."""

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        super().__init__(spec, source)
        self._fd = -1

    def create(self) -> None:
        make_file(self.path(0), self.case.total_bytes if self.wanted.preallocate else 0)

    def open(self) -> None:
        flags = os.O_DIRECT if self.wanted.direct else 0
        self._fd = open_file(self.path(0), os.O_WRONLY | flags)

    def _write(self, writer: int) -> list[float]:
        clock_s, fd, latencies = time.perf_counter, self._fd, []
        for call, piece in self.transfers(writer):
            start = clock_s()
            done = os.pwrite(fd, piece, call.offset)
            while done < len(piece):
                done += os.pwrite(fd, piece[done:], call.offset + done)
            latencies.append(clock_s() - start)
        return latencies

    def _sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _Program(Way):
    """The same calls by a compiled program, which gets the bytes before the clock."""

    def __init__(self, spec: JobSpec, source: memoryview) -> None:
        super().__init__(spec, source)
        self._program: Program | None = None

    def create(self) -> None:
        if not self.wanted.separate:
            make_file(self.path(0), self.case.total_bytes)

    def open(self) -> None:
        spec, case = self.spec, self.case
        if self.wanted.separate:
            for writer in spec.writers:
                make_file(self.path(writer), case.writer_bytes)
        writers = [
            (
                self.path(writer),
                [at for at, _ in blocks(case, writer, separate=self.wanted.separate)],
                cpus,
            )
            for writer, cpus in zip(spec.writers, spec.cpus, strict=True)
        ]
        self._program = Program(
            spec.program,
            writers,
            direct=self.wanted.direct,
            transfer_bytes=case.transfer_bytes,
            block_bytes=case.block_bytes,
        )
        self._program.load(self.source[: len(writers) * case.writer_bytes])

    def go(self, at_s: float) -> Window:
        assert self._program is not None
        return self._program.go(at_s)

    def close(self) -> None:
        if self._program is not None:
            self._program.close()


def make_file(path: str, nbytes: int) -> None:
    """Make a file with all its blocks allocated; 0 bytes: none is."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def open_file(path: str, flags: int) -> int:
    """Open a file; what O_DIRECT is refused with is an `UnsupportedError`."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as exc:
        if flags & os.O_DIRECT and exc.errno in _REFUSED:
            raise UnsupportedError(f"O_DIRECT: {exc.strerror}") from exc
        raise


def read_file(path: str, offset: int, out: memoryview) -> None:
    """Fill *out* from a file, as far as it goes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while out and (got := os.preadv(fd, [out], offset)):
            out, offset = out[got:], offset + got
    finally:
        os.close(fd)


# ---- the C program ----


def compile_program(folder: Path) -> str:
    """Compile the program into *folder*, by ``$CC`` or the first compiler there is.

    Returns:
        The path of the program.

    Raises:
        UnsupportedError: there is no compiler, or it fails; says which.
    """
    target = folder / "pwrites"
    command = [*_compiler(), *_FLAGS, "-o", str(target), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise UnsupportedError(f"{command[0]} fails: {first}")
    return str(target)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for name in chosen[:1] or _COMPILERS:
        if path := shutil.which(name):
            return [path, *chosen[1:]]
    if chosen:
        raise UnsupportedError(f"no C compiler: $CC is {chosen[0]!r}, which cannot be run")
    raise UnsupportedError(f"no C compiler: none of {', '.join(_COMPILERS)} is in $PATH")


class Program:
    """One run of the program.

    Args:
        path: of the program.
        writers: the file, the offsets of the blocks, and the CPUs of each.
        direct: past the page cache.
        transfer_bytes: of one call.
        block_bytes: of a block, a multiple of it.
    """

    def __init__(
        self,
        path: str,
        writers: Sequence[tuple[str, Sequence[int], Sequence[int] | None]],
        *,
        direct: bool,
        transfer_bytes: int,
        block_bytes: int,
    ) -> None:
        segments = len(writers[0][1])
        words: list[object] = ["direct" if direct else "buffered", transfer_bytes, block_bytes]
        words += [segments, len(writers)]
        for name, offsets, cpus in writers:
            words += [name, "-" if cpus is None else ",".join(map(str, cpus)), *offsets]
        self._process = subprocess.Popen(
            [path, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def load(self, source: memoryview) -> None:
        """Pass it the bytes of all writers.

        Raises:
            UnsupportedError: the file cannot be opened this way.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last line says why
            self._process.stdin.write(source)
            self._process.stdin.flush()
        self._line("ready")

    def go(self, at_s: float) -> Window:
        """Let it write from *at_s* on, and wait for its output."""
        assert self._process.stdin is not None
        self._process.stdin.write(int(at_s * 1e9).to_bytes(8, sys.byteorder))
        self._process.stdin.close()
        rows: list[list[int]] = []
        while (words := self._line())[0] != "synced":
            rows.append([int(word) for word in words])
        synced, user, system = map(int, words[1:])
        return Window(
            started_s=[row[0] / 1e9 for row in rows],
            ended_s=[row[1] / 1e9 for row in rows],
            synced_s=synced / 1e9,
            latencies_s=[ns / 1e9 for row in rows for ns in row[2:]],
            user_s=user / 1e6,
            system_s=system / 1e6,
        )

    def _line(self, expected: str = "") -> list[str]:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().decode().split()
        if words[:1] == ["error"]:
            said = f"the C program's {' '.join(words[2:])}: {os.strerror(int(words[1]))}"
            refused = words[2] == "open" and int(words[1]) in _REFUSED
            raise UnsupportedError(said) if refused else StorageError(said)
        if not words or (expected and words[0] != expected):
            raise StorageError(f"the C program died: exit status {self._process.wait()}")
        return words

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


# ---- the worker process ----


class Rank:
    """What a process keeps between trials: the bytes that its writers write."""

    def __init__(self) -> None:
        self._source = memoryview(b"")
        self._placed: list[Any] = []
        self._way: Way | None = None
        self._spec: JobSpec | None = None
        self._cpus = os.sched_getaffinity(0)
        self._warm = False

    def prepare(self, job: dict[str, Any]) -> Answer:
        """Get the bytes ready, and make the file in the first process."""
        self.close()
        spec = JobSpec(**job)
        case = Case(**spec.case)
        self._fill(spec, case.writer_bytes)
        self._warm_up(spec.root)
        self._spec, self._way = spec, open_way(spec, self._source)
        start = time.monotonic()
        if spec.first:
            self._way.create()
        return {"created_s": time.monotonic() - start}

    def _fill(self, spec: JobSpec, writer_bytes: int) -> None:
        """Have random bytes, of each writer on memory that its CPUs touched first."""
        need = len(spec.writers) * writer_bytes
        placed = [writer_bytes, spec.cpus] if any(spec.cpus) else []
        if len(self._source) >= need and self._placed == placed:
            return
        self._source = memoryview(b"")  # before there is other memory
        mapping = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        words = np.frombuffer(mapping, np.uint64)
        random = np.random.default_rng((_SEED, spec.writers[0]))
        for number, cpus in enumerate(spec.cpus):
            pin(cpus)
            for own in np.array_split(
                words[number * writer_bytes // 8 :][: writer_bytes // 8],
                -(-writer_bytes // _STEP),
            ):
                own[:] = random.integers(0, 1 << 64, len(own), np.uint64)
        pin(tuple(self._cpus))
        self._source, self._placed = memoryview(mapping), placed

    def _warm_up(self, root: str) -> None:
        """Do once what only the first call in a process does: load modules, and their tables."""
        if self._warm:
            return
        path = os.path.join(root, f"warm-{os.getpid()}")
        with contextlib.suppress(KvioError):  # what cannot be done is reported by the trial
            with kvio.SharedFile.create(path, MiB) as file:
                file.pwrite(self._source[:MiB], 0)
                file.seal()
            os.unlink(path)
        self._warm = True

    def open(self) -> Answer:
        """Open what writing needs."""
        self._trial()[1].open()
        return {}

    def go(self, at_s: float) -> Answer:
        """Write and sync from *at_s* of the monotonic clock on; return the `Window`."""
        return asdict(self._trial()[1].go(at_s))

    def seal(self) -> Answer:
        """Publish what all processes wrote; for the first one alone."""
        start, before = time.monotonic(), os.times()
        receipt = self._trial()[1].seal()
        took_s, after = time.monotonic() - start, os.times()
        return {
            "seal_s": None if receipt is None else took_s,
            "user_s": after.user - before.user,
            "system_s": after.system - before.system,
            "mode": "" if receipt is None else str(receipt.mode),
            "reason": "" if receipt is None else receipt.reason,
        }

    def check(self) -> Answer:
        """Read back what this process's writers wrote, and compare every byte."""
        spec, way = self._trial()
        case, separate = Case(**spec.case), spec.wanted.separate
        room = kvio.aligned_buffer(min(READ_BYTES, case.block_bytes))
        intact = True
        for number, writer in enumerate(spec.writers):
            own = self._source[number * case.writer_bytes : (number + 1) * case.writer_bytes]
            for start, source in blocks(case, writer, separate=separate):
                for at in range(0, case.block_bytes, len(room)):
                    out = room[: min(len(room), case.block_bytes - at)]
                    words = np.frombuffer(out, np.uint64)
                    way.read(writer, start + at, out)
                    wanted = np.frombuffer(own, np.uint64, len(words), source + at)
                    intact &= np.array_equal(words, wanted)
        return {"intact": bool(intact)}

    def _trial(self) -> tuple[JobSpec, Way]:
        assert self._spec is not None
        assert self._way is not None
        return self._spec, self._way

    def close(self) -> Answer:
        """End the trial; the process may run everywhere again."""
        way, self._way = self._way, None
        if way is not None:
            way.close()
        os.sched_setaffinity(0, self._cpus)
        return {}
