"""The contenders as one rank runs them: memory, a tier, a store, files by system calls.

`Rank` is the worker process; it gets a `JobSpec` for every trial.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import quote

import numpy as np

import kvio
from benchmarks.harness.page_cache import touched_memory
from benchmarks.harness.workers import Answer, wait_readable
from kvio import MiB, UnsupportedError

#: What is timed, as tables and plots name it, in their order.
ACCEPT: Final = "accept"
WRITE: Final = "write"
DRAIN: Final = "drain"
READ: Final = "read"
OPERATIONS: Final = (WRITE, ACCEPT, DRAIN, READ)

#: The floor of accept and of reads.
MEMCPY: Final = "memcpy"
#: Tiers by name: the backend behind and its durability.
TIERS: Final = {
    "tier tmpfile": ("posix-tmpfile", "visible"),
    "tier tmpfile durable": ("posix-tmpfile", "durable"),
    "tier direct": ("posix-direct", "visible"),
    "tier direct durable": ("posix-direct", "durable"),
    "daemon direct durable": ("posix-direct", "durable"),
}
#: The tier that all ranks share: the memory and the drains of a `kvio stage-daemon`.
DAEMON: Final = "daemon direct durable"
#: The same backends, written directly.
STORES: Final = {
    "posix-tmpfile": ("posix-tmpfile", "visible"),
    "posix-tmpfile durable": ("posix-tmpfile", "durable"),
    "posix-direct": ("posix-direct", "visible"),
    "posix-direct durable": ("posix-direct", "durable"),
}
PAGE_CACHE: Final = "write(2)"
#: Files by system calls.
FILES: Final = (PAGE_CACHE, "write(2) fsync", "O_DIRECT fdatasync")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (MEMCPY, *TIERS, *STORES, *FILES)
#: Those whose bytes survive a power cut as soon as they say that they are done.
SAFE: Final = frozenset(
    {
        *(name for name, (_, level) in {**TIERS, **STORES}.items() if level == "durable"),
        *FILES[1:],
    }
)

_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_SEED: Final = 20260105
_DAEMON_COMMAND: Final = (sys.executable, "-c", "from kvio.cli import main; main()", "stage-daemon")
_DAEMON_TIMEOUT_S: Final = 60.0


def store_of(tier: str) -> str:
    """Return the contender that writes a tier's backend directly."""
    return next(name for name, same in STORES.items() if same == TIERS[tier])


def url_of(kind: tuple[str, str], root: str, *, checksum: bool) -> str:
    """Return the URL of a store of a backend and durability."""
    backend, durability = kind
    options = "" if checksum else "&checksum=none&verify=length"
    return f"{backend}://{quote(root)}?durability={durability}{options}"


def steps_of(contender: str) -> tuple[str, ...]:
    """Return the operations of a contender's trial, in their order."""
    if contender == MEMCPY:
        return ACCEPT, READ, WRITE
    if contender in TIERS:
        return ACCEPT, READ, DRAIN, WRITE
    if contender in STORES:
        return DRAIN, WRITE
    return (WRITE, READ) if contender == PAGE_CACHE else (WRITE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a rank prepares for a trial.

    Attributes:
        root: of the store, or of files.
        tag: starts every key; no other trial has it.
        drain_threads: of a tier, and of the writes that its drain is compared with.
        checksum: of kvio's blocks, staged and stored.
        socket: where a daemon listens, for the contender that has one.
    """

    contender: str
    root: str
    tag: str
    rank: int
    nbytes: int
    count: int
    drain_threads: int
    checksum: bool
    socket: str | None = None

    def key(self, operation: str, index: int) -> str:
        """Name a block; no two ranks, trials and operations have the same."""
        return f"{self.tag}/{operation}/{self.rank:04d}/{index:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one operation took in one rank.

    Attributes:
        start_s, end_s: by the machine's monotonic clock; the end is that of the last call.
        settled_s: when all was as safe as the contender makes it.
        latencies_s: each call; of a drain, the time until its barrier for every block.
        cpu_s: of this process, all its threads, from start to settled.
    """

    start_s: float
    end_s: float
    settled_s: float
    latencies_s: list[float]
    cpu_s: float


# ---- how each contender stores blocks ----


class Contender(Protocol):
    """Stores blocks in one way; blocks are named by their number."""

    def warm_up(self, key: str, data: memoryview) -> None:
        """Do once what only the first call does: start threads, make directories."""

    def write(self, key: str, data: memoryview) -> None:
        """Make one call, as an application would."""

    def settle(self) -> None:
        """Wait until all is as safe as this makes it."""

    def hold(self) -> None:
        """Begin no drains."""

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        """Have what `drain` needs."""

    def drain(self) -> None:
        """Store what is staged, or write blocks directly with the same concurrency."""

    def read(self, key: str, out: memoryview) -> None:
        """Read a block from where it was put."""

    def read_stored(self, key: str, out: memoryview) -> None:
        """Read a block from where it ended up."""

    def close(self) -> None:
        """Release what is held."""


def open_contender(spec: JobSpec) -> Contender:
    """Open a contender.

    Raises:
        UnsupportedError: the file system cannot do it.
    """
    if spec.contender == MEMCPY:
        return _Memory(spec)
    if spec.contender in TIERS:
        return _Tier(spec)
    return _Direct(spec) if spec.contender in STORES else _Files(spec)


class _Idle:
    """Steps for which most contenders have nothing to do."""

    def warm_up(self, key: str, data: memoryview) -> None:
        pass

    def settle(self) -> None:
        pass

    def hold(self) -> None:
        pass

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        pass

    def drain(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class _Memory(_Idle):
    """The C library's memcpy, by way of a view's assignment."""

    def __init__(self, spec: JobSpec) -> None:
        self._nbytes = spec.nbytes
        self._memory = touched_memory(spec.count * spec.nbytes)

    def write(self, key: str, data: memoryview) -> None:
        at = int(key[-5:]) * self._nbytes
        self._memory[at : at + self._nbytes] = data

    def read(self, key: str, out: memoryview) -> None:
        at = int(key[-5:]) * self._nbytes
        out[:] = self._memory[at : at + self._nbytes]

    read_stored = read


class _Tier:
    """A tier that holds a trial's blocks, over a store."""

    def __init__(self, spec: JobSpec) -> None:
        self._store = _open_store(spec, TIERS[spec.contender])
        try:
            self._tier = kvio.stage(
                self._store,
                capacity=spec.count * spec.nbytes,
                drain_threads=spec.drain_threads,
                checksum=spec.checksum,
                close_store=True,
                populate=True,
                daemon=spec.socket,
            )
        except BaseException:
            self._store.close()
            raise

    def warm_up(self, key: str, data: memoryview) -> None:
        self.write(key, data)
        self.settle()

    def write(self, key: str, data: memoryview) -> None:
        self._tier.write_block(key, data)

    def settle(self) -> None:
        self._tier.barrier()

    def hold(self) -> None:
        self._tier.pause()

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        pass

    def drain(self) -> None:
        self._tier.resume()
        self._tier.barrier()

    def read(self, key: str, out: memoryview) -> None:
        self._tier.read_block_into(key, out)

    def read_stored(self, key: str, out: memoryview) -> None:
        self._tier.read_block_into(key, out, consistency="backend")

    def close(self) -> None:
        self._tier.close()


class _Direct(_Idle):
    """A store without a tier."""

    def __init__(self, spec: JobSpec) -> None:
        self._store = _open_store(spec, STORES[spec.contender])
        self._count = spec.drain_threads
        self._threads: Threads | None = None

    def warm_up(self, key: str, data: memoryview) -> None:
        self.write(key, data)

    def write(self, key: str, data: memoryview) -> None:
        self._store.write_block(key, data, if_exists="replace")  # as tiers do

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        calls = list(zip(keys, pieces, strict=True))
        self._threads = Threads(lambda index: self.write(*calls[index]), len(calls), self._count)

    def drain(self) -> None:
        assert self._threads is not None
        self._threads.run()

    def read(self, key: str, out: memoryview) -> None:
        self._store.read_block_into(key, out)

    read_stored = read

    def close(self) -> None:
        self._store.close()


class Threads:
    """Threads that wait for the start, and then share calls that are numbered."""

    def __init__(self, call: Callable[[int], None], count: int, threads: int) -> None:
        self._call = call
        self._numbers = iter(range(count))
        self._gate = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self) -> None:
        """Make all calls."""
        self._gate.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _work(self) -> None:
        self._gate.wait()
        try:
            for index in self._numbers:
                self._call(index)
        except Exception as exc:  # noqa: BLE001  # run() raises it
            self._failures.append(exc)


class _Files(_Idle):
    """One file per block by system calls, under its name from the start."""

    def __init__(self, spec: JobSpec) -> None:
        self._root = spec.root
        self._flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._sync: Callable[[int], Any] | None = None
        if spec.contender != PAGE_CACHE:
            self._sync = os.fsync if spec.contender == FILES[1] else os.fdatasync
        if spec.contender == FILES[2]:
            self._flags |= os.O_DIRECT
            self._probe(spec.key("probe", 0))

    def _probe(self, key: str) -> None:
        """Check that the file system supports it, before the clock."""
        try:
            os.close(os.open(self._path(key), self._flags, 0o600))
        except OSError as exc:
            if exc.errno in _REFUSED:
                raise UnsupportedError(f"O_DIRECT: {exc.strerror}") from exc
            raise

    def write(self, key: str, data: memoryview) -> None:
        fd = os.open(self._path(key), self._flags, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            if self._sync is not None:
                self._sync(fd)
        finally:
            os.close(fd)

    def read(self, key: str, out: memoryview) -> None:
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while out and (got := os.readv(fd, [out])):
                out = out[got:]
        finally:
            os.close(fd)

    read_stored = read

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key.replace("/", "-"))


def _open_store(spec: JobSpec, kind: tuple[str, str]) -> kvio.Store:
    return kvio.open_store(url_of(kind, spec.root, checksum=spec.checksum))


# ---- the worker process ----


class Rank:
    """What a process keeps between trials: its bytes, and memory to read them to."""

    def __init__(self) -> None:
        self._source = self._target = memoryview(b"")
        self._contender: Contender | None = None
        self._spec: JobSpec | None = None

    def open(self, job: dict[str, Any]) -> Answer:
        """Prepare a trial from the fields of its `JobSpec`."""
        self.close()
        spec = self._spec = JobSpec(**job)
        nbytes = spec.count * spec.nbytes
        if len(self._source) != nbytes:
            self._source = self._target = memoryview(b"")  # before there is other memory
            self._source, self._target = touched_memory(nbytes), touched_memory(nbytes)
            words = np.frombuffer(self._source, np.uint64)
            random = np.random.default_rng((_SEED, spec.rank))
            words[:] = random.integers(0, 1 << 64, len(words), np.uint64)
        self._contender = open_contender(spec)
        self._contender.warm_up(spec.key("warm", 0), self._source[: min(spec.nbytes, MiB)])
        return {}

    def ready(self, operation: str) -> Answer:
        """Prepare an operation."""
        spec, contender = self._trial()
        if operation == ACCEPT:
            contender.hold()
        elif operation == READ:
            self._wipe()
        elif operation == DRAIN:
            contender.prepare_drain(self._keys(spec, operation), self._pieces(self._source))
        return {}

    def go(self, operation: str, at_s: float) -> Answer:
        """Run an operation from *at_s* of the monotonic clock on; return its `Window`."""
        spec, contender = self._trial()
        keys = self._keys(spec, operation)
        read = operation == READ
        pieces = self._pieces(self._target if read else self._source)
        call = contender.read if read else contender.write
        calls = [partial(call, key, piece) for key, piece in zip(keys, pieces, strict=True)]
        if (pause_s := at_s - time.monotonic()) > 0:
            time.sleep(pause_s)
        cpu, start = time.process_time(), time.monotonic()
        if operation == DRAIN:
            contender.drain()
            end = settled = time.monotonic()
            latencies = [end - start] * len(calls)
        else:
            latencies = _timed(calls)
            end = settled = time.monotonic()
            if operation not in (ACCEPT, READ):
                contender.settle()
                settled = time.monotonic()
        return asdict(
            Window(
                start_s=start,
                end_s=end,
                settled_s=settled,
                latencies_s=latencies,
                cpu_s=time.process_time() - cpu,
            )
        )

    def check(self, operation: str) -> Answer:
        """Compare what was read, or read what was stored; staged bytes are read by READ."""
        spec, contender = self._trial()
        if operation == ACCEPT:
            return {"intact": None}
        if operation != READ:
            self._wipe()
            pieces = self._pieces(self._target)
            for key, out in zip(self._keys(spec, operation), pieces, strict=True):
                contender.read_stored(key, out)
        same = np.array_equal(
            np.frombuffer(self._source, np.uint64), np.frombuffer(self._target, np.uint64)
        )
        return {"intact": bool(same)}

    def close(self) -> Answer:
        """End the trial."""
        contender, self._contender = self._contender, None
        if contender is not None:
            contender.close()
        return {}

    def _trial(self) -> tuple[JobSpec, Contender]:
        assert self._spec is not None
        assert self._contender is not None
        return self._spec, self._contender

    def _keys(self, spec: JobSpec, operation: str) -> list[str]:
        """Name the blocks of an operation: what was accepted is what is read and drained."""
        written = operation
        if spec.contender not in STORES and operation in (READ, DRAIN):
            written = WRITE if spec.contender == PAGE_CACHE else ACCEPT
        return [spec.key(written, index) for index in range(spec.count)]

    def _pieces(self, memory: memoryview) -> list[memoryview]:
        spec, _ = self._trial()
        return [memory[at : at + spec.nbytes] for at in range(0, len(memory), spec.nbytes)]

    def _wipe(self) -> None:
        np.frombuffer(self._target, np.uint64)[:] = 0


def _timed(calls: list[Any]) -> list[float]:
    clock, latencies = time.perf_counter, []
    for call in calls:
        start = clock()
        call()
        latencies.append(clock() - start)
    return latencies


# ---- the drain daemon ----


@dataclass(frozen=True, slots=True)
class Daemon:
    """A `kvio stage-daemon` that listens at *socket*."""

    socket: str
    pid: int

    def cpu_s(self) -> float:
        """Read what it has used so far, in steps of a clock tick: proc_pid_stat(5)."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(url: str, *, capacity_bytes: int, drain_threads: int) -> Iterator[Daemon]:
    """Run a daemon for a store meanwhile, with its memory populated.

    Raises:
        UnsupportedError: it does not start; says why.
    """
    with tempfile.TemporaryDirectory(prefix="kvio-") as folder, tempfile.TemporaryFile() as stderr:
        socket = os.path.join(folder, "s")
        options = ("--capacity", str(capacity_bytes), "--drain-threads", str(drain_threads))
        process = subprocess.Popen(
            (*_DAEMON_COMMAND, url, "--socket", socket, *options, "--populate"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            process_group=0,  # Ctrl-C is for the process that keeps the results
        )
        assert process.stdout is not None
        try:
            ready = wait_readable(process.stdout, _DAEMON_TIMEOUT_S)
            if not (ready and process.stdout.readline()):
                process.kill()
                stderr.seek(0)
                words = stderr.read().decode(errors="replace").strip().splitlines()
                raise UnsupportedError(f"no daemon: {(words or ['it printed nothing'])[-1]}")
            yield Daemon(socket, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_DAEMON_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
