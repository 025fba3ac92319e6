"""Single calls and batches of kvio, beside a C loop that makes the system calls alone, and fio.

What each call of the public interface costs above the system calls that it needs: one block through
the page cache, a batch, direct I/O, a durable batch, a drain, the import and the memory of a queue.
The C loop (`baselines/blockloop.c`) writes into the same directories from the same memory: openat
O_TMPFILE, pwritev, linkat, close; openat, fstat, preadv, close; it times itself.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeAlias

import kvio
from benchmarks.harness import columns
from benchmarks.harness.columns import Column, table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Panel, Point, draw_panels, size_text
from benchmarks.harness.run import Limits, Run, Scenario, check_names, check_room
from benchmarks.harness.table import Table
from benchmarks.harness.workers import module_command
from kvio import GiB, KiB, MiB, UnsupportedError
from kvio._native import cached_fraction, drop_cache
from kvio.format import key_hash

#: Does one round of a contender; returns what each call took, in seconds.
Contender: TypeAlias = Callable[[], list[float]]

SINGLE: Final = "one call"
BATCH: Final = "batch"
DIRECT: Final = "direct"
DURABLE: Final = "durable"
DRAIN: Final = "drain"
PROCESS: Final = "process"
PARTS: Final = (SINGLE, BATCH, DIRECT, DURABLE, DRAIN, PROCESS)

OURS: Final = "kvio"
CHECKED: Final = "kvio, checksum on"
UNALIGNED: Final = "kvio, unaligned"
HUGE: Final = "kvio, huge pages"
ONE_BY_ONE: Final = "kvio, one by one"
LOOP: Final = "C loop"
LOOKING: Final = "C loop, checks the name first"
FIO: Final = "fio"
THREADS: Final = "threads of one's own"
IMPORT: Final = "import kvio"
QUEUE: Final = "2 GiB through a queue of 256 MiB"
CONTENDERS: Final = (
    *(OURS, CHECKED, UNALIGNED, HUGE, ONE_BY_ONE, LOOP, LOOKING, FIO, THREADS, IMPORT, QUEUE),
)
WRITE: Final = "write"
READ: Final = "read"

_SINGLE_SIZES: Final = (4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB)
_BATCH_SIZES: Final = (4 * KiB, 8 * KiB, 16 * KiB, 32 * KiB, 64 * KiB)
_DIRECT_SIZES: Final = (MiB, 4 * MiB, 16 * MiB)
_SHIFT: Final = 576
_SMALL: Final = 64 * KiB


def _call_s(sample: Sample) -> float:
    """Return the median time of a call; of a batch, its time."""
    return statistics.median(sample.latencies_s)


def _where(part: str, test: Callable[[int], bool] = lambda _: True) -> Callable[[Sample], bool]:
    return lambda s: s.subject.startswith(part) and test(s.block_nbytes)


def _fact(name: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.facts.get(name)


SCENARIO: Final = Scenario(
    name="calls",
    title="Single calls and batches beside a C loop and fio",
    reference=LOOP,
    contenders=CONTENDERS,
    claims=(
        *(
            Claim(
                text=f"a {verb} of {what} takes little more than the C loop's (time)",
                pairs=[(OURS, LOOP)],
                at_most=most,
                operations=[verb],
                where=_where(SINGLE, test),
                value=_call_s,
            )
            for verb, what, most, test in (
                (WRITE, "4 and 64 KiB", 1.5, lambda n: n <= _SMALL),
                (READ, "4 KiB", 1.5, lambda n: n == 4 * KiB),
                (READ, "64 KiB", 1.35, lambda n: n == _SMALL),
                (WRITE, "1 MiB and more", 1.1, lambda n: n > _SMALL),
                (READ, "1 MiB and more", 1.1, lambda n: n > _SMALL),
            )
        ),
        Claim(
            text="a checksum adds little to a call of 1 MiB and more (time)",
            pairs=[(CHECKED, OURS)],
            at_most=1.1,
            where=_where(SINGLE, lambda n: n > _SMALL),
            value=_call_s,
        ),
        Claim(
            text="a batch of 1,000 small blocks is as fast as the C loop's threads (time)",
            pairs=[(OURS, LOOP)],
            at_most=1.15,
            where=_where(BATCH),
            value=_call_s,
        ),
        Claim(
            text="direct I/O is as fast as fio and the C loop",
            pairs=[(OURS, FIO), (OURS, LOOP)],
            at_least=0.95,
            where=_where(DIRECT),
        ),
        Claim(
            text="direct I/O from unaligned memory is nearly as fast",
            pairs=[(UNALIGNED, OURS)],
            at_least=0.9,
            where=_where(DIRECT),
        ),
        Claim(
            text="a durable batch is faster than durable calls one by one",
            pairs=[(OURS, ONE_BY_ONE)],
            at_least=1.5,
            where=_where(DURABLE),
        ),
        Claim(
            text="a drain is as fast as threads that write directly",
            pairs=[(OURS, THREADS)],
            at_least=0.95,
            where=_where(DRAIN),
        ),
        Claim(
            text="import kvio adds at most 100 ms to a process (seconds)",
            pairs=[(IMPORT, "")],
            at_most=0.1,
            value=_fact("import_s"),
        ),
        Claim(
            text="2 GiB through a queue of 256 MiB take at most 328 MiB of memory (MiB)",
            pairs=[(QUEUE, "")],
            at_most=328,
            value=_fact("peak_mib"),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of a part at one size.

    Attributes:
        subject: the part, and how many threads or calls at once.
        nbytes: of a block; of a mixed batch, the mean.
    """

    part: str
    subject: str
    nbytes: int
    operation: str
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.nbytes)}, {self.operation}"


def cases_of(parts: Sequence[str]) -> list[Case]:
    """List what is measured, part by part."""
    mean = sum(_BATCH_SIZES) // len(_BATCH_SIZES)
    every = [
        *(
            Case(SINGLE, SINGLE, size, verb)
            for size, verb in itertools.product(_SINGLE_SIZES, (WRITE, READ))
        ),
        *(
            Case(BATCH, f"batch of 1,000, {n} thread{'s' * (n > 1)}", mean, verb, n)
            for n, verb in itertools.product((1, 2, 4), (WRITE, READ))
        ),
        *(
            Case(DIRECT, f"direct, {n} at once", size, verb, n)
            for n, size, verb in itertools.product((1, 4), _DIRECT_SIZES, (WRITE, READ))
        ),
        Case(DURABLE, "durable, 64 blocks", MiB, WRITE),
        Case(DRAIN, "drain, 128 blocks", MiB, WRITE, 2),
        Case(PROCESS, "process", 1, "start"),
    ]
    return [case for case in every if case.part in parts]


def takes_part(case: Case, name: str) -> bool:
    """Report whether a contender is measured in a case."""
    looking = (LOOKING,) if case.operation == WRITE else ()
    own: dict[str, Sequence[str]] = {
        SINGLE: (OURS, CHECKED, LOOP, *looking),
        BATCH: (OURS, CHECKED, LOOP, *looking),
        DIRECT: (OURS, CHECKED, UNALIGNED, HUGE, LOOP, FIO),
        DURABLE: (OURS, ONE_BY_ONE, LOOP),
        DRAIN: (OURS, THREADS),
        PROCESS: (IMPORT, QUEUE),
    }
    return name in own[case.part]


def run(limits: Limits, *, parts: Sequence[str] = PARTS) -> int:
    """Measure every part, and print, write and plot what was found.

    Args:
        limits: where, and how much; ``max_bytes`` is what a contender writes of one size.
        parts: of `PARTS`.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C.

    Raises:
        ConfigError: an unknown part, or too little space.
    """
    check_names("part", parts, PARTS)
    check_room(limits.root, 4 * limits.max_bytes, 8 * limits.max_bytes)
    cases = cases_of(parts)
    this = Run(SCENARIO, limits, {"parts": list(parts)})
    with this.workplace() as base, ExitStack() as stack:
        trials = _Trials(base, limits.max_bytes, stack)
        this.take_trials(cases, CONTENDERS, trials.take, takes_part)
        return this.finish([*_NOTES, *trials.notes], _tables, _draw)


_NOTES: Final = (
    "one call: one block per call through the page cache, the median call; read: hot. batch: one "
    "call of 1,000 blocks of 4 to 64 KiB, from as many threads as the C loop; direct: O_DIRECT, "
    "one call per block, or one batch of so many threads. A contender's first trial of a case is "
    "preceded by one that does not count",
    "C loop: the system calls of publishing and of reading alone, on the same memory, into the "
    "same directories; it neither checks for an existing block, nor hashes a key, nor reports a "
    "result. 'checks the name first' does the first of these, as kvio does",
    "fio: psync, one file per block, filesize = block size; it opens a final name, keeps all files "
    "in one directory and stores no trailer",
    "memory of direct I/O is of small pages for all, one buffer per thread, as fio has it; 'huge "
    "pages' is kvio.aligned_buffer",
    "every byte that is read is compared outside what is timed; files are emptied between trials, "
    "not deleted, and syncfs(2) runs between them",
    "drain: 128 staged blocks until the barrier, beside as many threads that write the same blocks "
    "directly; process: a child that imports kvio, and one that submits 2 GiB",
)


# ---- where it runs ----


class _Ground:
    """A root with all directories of a store, which stores and the C loop share."""

    LEAVES: Final = tuple(f"{byte >> 4:x}/{byte & 15:x}" for byte in range(256))

    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.root = base / "root"
        self._stack = stack
        self._numbers = itertools.count()
        for leaf in self.LEAVES:
            (self.root / leaf).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, self._fd)
        self._libc = ctypes.CDLL(None, use_errno=True)

    @staticmethod
    def leaf_number(key: str) -> int:
        """Return the index of the directory that holds a key in ``layout=block``."""
        return key_hash("", key)[0]

    @staticmethod
    def file_name(key: str) -> str:
        """Return a key's file name in ``layout=block``."""
        return key.replace("/", "~")

    def store(self, backend: str, *, io_threads: int | None = None, **options: Any) -> kvio.Store:
        """Open a store, with every directory open already."""
        store = kvio.open_store(backend, root=self.root, io_threads=io_threads, options=options)
        self._stack.callback(store.close)
        seen: dict[int, str] = {}
        for number in itertools.count():
            seen.setdefault(self.leaf_number(f"absent/{number}"), f"absent/{number}")
            if len(seen) == len(self.LEAVES):
                break
        for key in seen.values():
            store.contains(key)
        return store

    def keys(self, count: int) -> list[str]:
        """Return keys that were never used before."""
        first = next(self._numbers)
        return [f"calls/{first:06}/{number:06}" for number in range(count)]

    def retire(self, keys: Iterable[str]) -> None:
        """Empty the files of keys that were measured."""
        for key in keys:
            os.truncate(self.root / self.LEAVES[self.leaf_number(key)] / self.file_name(key), 0)

    def drop_cache(self, keys: Iterable[str]) -> float:
        """Write blocks back and forget them; return the largest share that stays in the cache."""
        left = [0.0]
        for key in keys:
            path = self.root / self.LEAVES[self.leaf_number(key)] / self.file_name(key)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                drop_cache(fd)
                left.append(cached_fraction(fd, os.fstat(fd).st_size) or 0.0)
            finally:
                os.close(fd)
        return max(left)

    def settle(self) -> None:
        """Write back all that is dirty on this file system: syncfs(2)."""
        if self._libc.syncfs(self._fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _noise(view: memoryview) -> memoryview:
    piece = os.urandom(min(len(view), MiB))
    for at in range(0, len(view), len(piece)):
        view[at : at + len(piece)] = piece[: len(view) - at]
    return view


def _huge(nbytes: int) -> memoryview:
    return _noise(kvio.aligned_buffer(nbytes))


def _plain(nbytes: int, shift: int = 0) -> memoryview:
    """Return memory as mmap(2) does: of small pages, as fio has it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _noise(memoryview(mmap.mmap(-1, nbytes + shift, flags=flags))[shift:])


def _direct_memory(contender: str, nbytes: int) -> memoryview:
    if contender == HUGE:
        return _huge(nbytes)
    return _plain(nbytes, _SHIFT if contender == UNALIGNED else 0)


# ---- the C loop and fio ----


_BLOCKLOOP: Final = Path(__file__).resolve().parents[1] / "baselines" / "blockloop.c"
_LOOP_FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")
_O_DIRECT, _O_DURABLE, _BY_PROC, _LOOK = 1, 2, 4, 8


class _Block(ctypes.Structure):
    """``struct block`` of the C source."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("ns", ctypes.c_int64),
        ("dirfd", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )


class _Loop:
    """The C loop in the directories of a kvio store, which it opens beforehand.

    It writes into the very directories kvio writes into: ext4 searches for a free inode in the
    group of the parent directory, and two sets of directories in two groups differ by more than
    what is measured.
    """

    def __init__(self, ground: _Ground, *, by_proc: bool) -> None:
        self._ground, self._flags = ground, _BY_PROC if by_proc else 0
        self._library = _library()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._fds = [os.open(ground.root / leaf, flags) for leaf in ground.LEAVES]

    def run(
        self, verb: str, keys: Sequence[str], buffers: Sequence[Any], threads: int, flags: int
    ) -> tuple[float, list[float]]:
        """Write or read every block; return the seconds of all and of each."""
        blocks = (_Block * len(keys))()
        pieces = [memoryview(buffer).cast("B") for buffer in buffers]
        held = [(ctypes.c_char * len(piece)).from_buffer(piece) for piece in pieces]
        for block, key, hold, piece in zip(blocks, keys, held, pieces, strict=True):
            block.name = self._ground.file_name(key).encode()
            block.base = ctypes.addressof(hold)
            block.nbytes = len(piece)
            block.dirfd = self._fds[self._ground.leaf_number(key)]
        function = getattr(self._library, f"blockloop_{verb}")
        ns = function(ctypes.addressof(blocks), len(blocks), threads, self._flags | flags)
        if ns < 0:
            raise OSError(-ns, f"the C loop failed: {os.strerror(-ns)}")
        return ns / 1e9, [block.ns / 1e9 for block in blocks]

    def close(self) -> None:
        """Close the directories."""
        for fd in self._fds:
            os.close(fd)


@cache
def _library() -> Any:
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "blockloop.so"
        command = (compiler, *_LOOP_FLAGS, "-o", str(target), str(_BLOCKLOOP))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UnsupportedError(f"no C compiler: {compiler} cannot be run") from None
        if done.returncode:
            first = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise UnsupportedError(f"{compiler} fails: {first}")
        library = ctypes.CDLL(str(target))
    for function in (library.blockloop_write, library.blockloop_read):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
        function.restype = ctypes.c_int64
    return library


_FIO_OPTIONS: Final = (
    *("--direct=1", "--ioengine=psync", "--thread", "--group_reporting", "--openfiles=1"),
    *("--file_service_type=sequential", "--fallocate=none", "--scramble_buffers=0"),
    *("--invalidate=0", "--output-format=json"),
)


def fio(directory: Path, name: str, verb: str, *, size: int, count: int, threads: int) -> float:
    """Write or read *count* files of *size* bytes by fio; return the seconds that it reports.

    Raises:
        UnsupportedError: it is not installed.
    """
    if shutil.which("fio") is None:
        raise UnsupportedError("not installed (Debian package fio)")
    command = (
        *("fio", f"--name={name}", f"--directory={directory}", f"--rw={verb}", f"--bs={size}"),
        *(f"--filesize={size}", f"--nrfiles={count // threads}", f"--numjobs={threads}"),
        *(f"--create_on_open={int(verb == WRITE)}", *_FIO_OPTIONS),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
    if figures["total_ios"] != count:
        raise RuntimeError(f"fio did {figures['total_ios']} transfers instead of {count}")
    return float(figures["io_bytes"] / figures["bw_bytes"])


# ---- trials ----


class _Result(NamedTuple):
    """What a trial took: in all, each call, and what else is known."""

    wall_s: float
    latencies_s: list[float]
    intact: bool | None = None
    facts: dict[str, Any] = {}  # noqa: RUF012  # never changed


class _Trials:
    """What the trials of a run share."""

    def __init__(self, base: Path, max_bytes: int, stack: ExitStack) -> None:
        self.notes: list[str] = []
        self._base, self._max_bytes, self._stack = base, max_bytes, stack
        self._made: _Ground | None = None
        self._stores: dict[tuple[object, ...], kvio.Store] = {}
        self._loop: _Loop | None = None
        self._prepared: dict[Case, Any] = {}
        self._unsupported: set[str] = set()
        self._warm: set[tuple[Case, str]] = set()

    @property
    def _ground(self) -> _Ground:
        if self._made is None:
            self._made = _Ground(self._base, self._stack)
        return self._made

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take one trial of a contender in a case in which it takes part."""
        if name in self._unsupported:
            return
        trial = self._trial(case, name)
        try:
            if (case, name) not in self._warm:  # stores, memory and the page cache of a case
                trial()
                self._warm.add((case, name))
            gc.collect()
            result = trial()
        except UnsupportedError as exc:
            self._unsupported.add(name)
            self.notes.append(f"left out: {name}: {exc}")
            return
        yield Sample(
            subject=case.subject,
            block_nbytes=case.nbytes,
            contender=name,
            checksum=name == CHECKED,
            operation=case.operation,
            round=index,
            wall_s=result.wall_s,
            latencies_s=result.latencies_s,
            intact=result.intact,
            facts=result.facts,
        )
        if self._made is not None:
            self._made.settle()

    def _trial(self, case: Case, name: str) -> Callable[[], _Result]:
        special: dict[str, Callable[[], _Result]] = {
            IMPORT: _import_kvio,
            QUEUE: lambda: _fill_queue(self._base),
            THREADS: self._threads,
        }
        if name in special:
            return special[name]
        if case.part == DRAIN:
            return self._drain
        return partial(self._write if case.operation == WRITE else self._read, case, name)

    # -- memory and stores of a case --

    def _sizes(self, case: Case) -> list[int]:
        if case.part == BATCH:
            count = max(2, min(1000, self._max_bytes // case.nbytes))
            return [_BATCH_SIZES[number % len(_BATCH_SIZES)] for number in range(count)]
        most = 64 if case.part != DIRECT else max(1, 64 * MiB // case.nbytes)
        count = max(2, min(most, self._max_bytes // case.nbytes))
        return [case.nbytes] * max(case.threads, count // case.threads * case.threads)

    def _memory(self, case: Case, name: str) -> list[memoryview]:
        """Return what each block is written from or read into, with the same bytes for all."""
        kind = {UNALIGNED: "unaligned", HUGE: "huge"}.get(name, "own")
        buffers: dict[str, list[memoryview]] = self._prepared.setdefault(case, {})
        if kind not in buffers:
            sizes = self._sizes(case)
            if case.part == DIRECT:  # one buffer per thread, as fio has it
                one = [_direct_memory(name, case.nbytes) for _ in range(case.threads)]
                buffers[kind] = list(itertools.islice(itertools.cycle(one), len(sizes)))
            else:
                buffers[kind] = [_huge(size) for size in sizes]
            first = next(iter(buffers.values()))
            for mine, theirs in zip(buffers[kind], first, strict=True):
                mine[:] = theirs
            if case.part == DIRECT:
                for mine in buffers[kind][1:]:
                    mine[:] = buffers[kind][0]
        return buffers[kind]

    def _store(self, case: Case, name: str) -> kvio.Store:
        backend = "posix-direct" if case.part == DIRECT else "posix-tmpfile"
        options: dict[str, Any] = {}
        if case.part == DURABLE:
            options = {"durability": "durable"}
        elif name != CHECKED:
            options = {"checksum": "none", "verify": "length"}
        key = (backend, case.threads, *options.items())
        if key not in self._stores:
            self._stores[key] = self._ground.store(backend, io_threads=case.threads, **options)
        return self._stores[key]

    def _c_loop(self, case: Case) -> _Loop:
        if self._loop is None:
            publish = self._store(case, OURS).capabilities.publish
            self._loop = _Loop(self._ground, by_proc="proc" in publish)
            self._stack.callback(self._loop.close)
        return self._loop

    # -- writes and reads --

    def _write(self, case: Case, name: str) -> _Result:
        data = self._memory(case, name)
        keys = self._ground.keys(len(data))
        result = self._written(case, name, keys, data)
        if name != FIO:
            self._ground.retire(keys)
        return result

    def _written(
        self, case: Case, name: str, keys: Sequence[str], data: Sequence[memoryview]
    ) -> _Result:
        if name in (LOOP, LOOKING):
            flags = {DIRECT: _O_DIRECT, DURABLE: _O_DURABLE}.get(case.part, 0)
            flags |= _LOOK if name == LOOKING else 0
            wall_s, each = self._c_loop(case).run(WRITE, keys, data, case.threads, flags)
            return _Result(wall_s, _shared(case, wall_s, each))
        if name == FIO:
            return self._fio(case, keys[0].replace("/", "-"), WRITE, len(keys))
        store = self._store(case, name)
        one_by_one = case.part == SINGLE or name == ONE_BY_ONE
        if one_by_one or (case.part == DIRECT and case.threads == 1):
            return _timed(
                [partial(store.write_block, k, d) for k, d in zip(keys, data, strict=True)]
            )
        start = perf_counter()
        results = store.write_blocks(list(zip(keys, data, strict=True)))
        wall_s = perf_counter() - start
        _check(results)
        return _Result(wall_s, _shared(case, wall_s, [0.0] * len(keys)))

    def _read(self, case: Case, name: str) -> _Result:
        if name == FIO:
            return self._fio(case, self._fio_written(case), READ, len(self._sizes(case)))
        data, keys = self._memory(case, OURS), self._stored(case)
        out = self._targets(case, name)
        if case.part == DIRECT:
            self._ground.drop_cache(keys)
        for one in out:
            one[:64] = bytes(64)
        if name == LOOP:
            flags = _O_DIRECT if case.part == DIRECT else 0
            wall_s, each = self._c_loop(case).run(READ, keys, out, case.threads, flags)
            result = _Result(wall_s, _shared(case, wall_s, each))
        else:
            result = self._read_by(case, self._store(case, name), keys, out)
        return result._replace(intact=all(a == b for a, b in zip(out, data, strict=True)))

    def _read_by(
        self, case: Case, store: kvio.Store, keys: Sequence[str], out: Sequence[memoryview]
    ) -> _Result:
        if case.part == SINGLE or (case.part == DIRECT and case.threads == 1):
            pairs = zip(keys, out, strict=True)
            return _timed([partial(store.read_block_into, key, one) for key, one in pairs])
        start = perf_counter()
        results = store.read_blocks_into(list(zip(keys, out, strict=True)))
        wall_s = perf_counter() - start
        _check(results)
        return _Result(wall_s, _shared(case, wall_s, [0.0] * len(keys)))

    def _stored(self, case: Case) -> list[str]:
        """Return keys whose blocks are there; written once."""
        prepared: dict[str, Any] = self._prepared.setdefault(case, {})
        if "keys" not in prepared:
            data = self._memory(case, OURS)
            keys = self._ground.keys(len(data))
            _check(self._store(case, CHECKED).write_blocks(list(zip(keys, data, strict=True))))
            prepared["keys"] = keys
        found: list[str] = prepared["keys"]
        return found

    def _targets(self, case: Case, name: str) -> list[memoryview]:
        """Return memory to read into: of its own for every block, or one buffer per thread."""
        prepared: dict[str, Any] = self._prepared.setdefault(case, {})
        kind = {UNALIGNED: "unaligned out", HUGE: "huge out"}.get(name, "out")
        if kind not in prepared:
            sizes = self._sizes(case)
            if case.part == DIRECT:
                one = [_direct_memory(name, case.nbytes) for _ in range(case.threads)]
                prepared[kind] = list(itertools.islice(itertools.cycle(one), len(sizes)))
            else:
                prepared[kind] = [_huge(size) for size in sizes]
        found: list[memoryview] = prepared[kind]
        return found

    def _fio(self, case: Case, name: str, verb: str, count: int) -> _Result:
        folder = self._base / "fio"
        folder.mkdir(exist_ok=True)
        wall_s = fio(folder, name, verb, size=case.nbytes, count=count, threads=case.threads)
        if verb == WRITE and name != f"read-{case.nbytes}-{case.threads}":
            for path in folder.glob(f"{name}.*"):
                os.truncate(path, 0)
        return _Result(wall_s, _shared(case, wall_s, [0.0] * count))

    def _fio_written(self, case: Case) -> str:
        prepared: dict[str, Any] = self._prepared.setdefault(case, {})
        name = f"read-{case.nbytes}-{case.threads}"
        if "fio" not in prepared:
            self._fio(case, name, WRITE, len(self._sizes(case)))
            prepared["fio"] = True
        return name

    # -- a drain beside threads --

    def _staged(self) -> tuple[kvio.Store, kvio.StagingTier, list[memoryview]]:
        prepared: dict[str, Any] = self._prepared.setdefault(_DRAIN_CASE, {})
        if "tier" not in prepared:
            folder = self._base / "drain"
            options = {"create": True}
            store = kvio.open_store("posix-tmpfile", root=folder, io_threads=2, options=options)
            self._stack.callback(store.close)
            tier = kvio.stage(store, 160 * MiB, drain_threads=2, populate=True)
            self._stack.callback(tier.close)
            source = _huge(128 * MiB)
            pieces = [source[at : at + MiB] for at in range(0, len(source), MiB)]
            prepared["tier"] = store, tier, pieces
        found: tuple[kvio.Store, kvio.StagingTier, list[memoryview]] = prepared["tier"]
        return found

    def _drain(self) -> _Result:
        store, tier, pieces = self._staged()
        keys = self._ground.keys(len(pieces))
        tier.pause()
        for key, piece in zip(keys, pieces, strict=True):
            tier.write_block(key, piece)
        start = perf_counter()
        tier.resume()
        tier.barrier("visible")
        wall_s = perf_counter() - start
        store.delete_blocks(keys)
        return _Result(wall_s, [wall_s / len(keys)] * len(keys))

    def _threads(self) -> _Result:
        store, _, pieces = self._staged()
        keys = self._ground.keys(len(pieces))

        def work(first: int) -> None:
            for number in range(first, len(keys), 2):
                store.write_block(keys[number], pieces[number])

        threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = perf_counter() - start
        store.delete_blocks(keys)
        return _Result(wall_s, [wall_s / len(keys)] * len(keys))


_DRAIN_CASE: Final = Case(DRAIN, "drain", MiB, WRITE)


def _shared(case: Case, wall_s: float, each: Sequence[float]) -> list[float]:
    """Return each call's time; of calls that ran at once, an equal share of the whole."""
    alone = case.part in (SINGLE, DURABLE) or (case.part == DIRECT and case.threads == 1)
    return list(each) if alone and any(each) else [wall_s / len(each)] * len(each)


def _timed(calls: Sequence[Callable[[], Any]]) -> _Result:
    latencies = []
    for call in calls:
        start = perf_counter()
        call()
        latencies.append(perf_counter() - start)
    return _Result(sum(latencies), latencies)


def _check(results: Iterable[kvio.BlockResult]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error


# ---- processes ----


_QUEUE_BYTES: Final = 256 * MiB
_QUEUED_BLOCK: Final = 4 * MiB
_QUEUED_TOTAL: Final = 2 * GiB


def _import_kvio() -> _Result:
    """Time a Python that imports kvio, and one that does nothing."""
    took = {}
    for name, code in (("import", "import kvio"), ("bare", "pass")):
        start = perf_counter()
        subprocess.run((sys.executable, "-c", code), check=True)
        took[name] = perf_counter() - start
    facts = {"import_s": took["import"] - took["bare"]}
    return _Result(took["import"], [took["import"]], facts=facts)


def _fill_queue(base: Path) -> _Result:
    """Submit far more than may be queued in a process of its own; return how far it grew."""
    with tempfile.TemporaryDirectory(dir=base) as folder:
        command = (*module_command("benchmarks.scenarios.calls"), folder)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    seconds = float(figures["seconds"])
    return _Result(seconds, [seconds], facts={"peak_mib": figures["grown_bytes"] / MiB})


def fill_queue(root: str) -> dict[str, float]:
    """Write fresh blocks by submit_write and return how far this process's memory grew.

    Keys are recycled, so that little of the disk is used; every block is fresh memory, so that what
    waits in the queue is what the process holds. All futures are kept to the end, as a caller may:
    a finished one must not hold on to its block.
    """
    pattern = bytes(range(256)) * (_QUEUED_BLOCK // 256)
    with kvio.open_store("posix-tmpfile", root=root, max_queued_bytes=_QUEUE_BYTES) as store:
        store.write_block("memory/warm", pattern, if_exists="replace")
        before, start, futures = _memory_bytes("VmRSS"), perf_counter(), []
        for number in range(_QUEUED_TOTAL // _QUEUED_BLOCK):
            if number % 32 == 0 and _memory_bytes("VmRSS") > 6 * _QUEUE_BYTES:
                break
            key, block = f"memory/{number % 64}", bytearray(pattern)
            futures.append(store.submit_write(key, block, if_exists="replace"))
        for future in futures:
            future.result()
        seconds = perf_counter() - start
    # ru_maxrss would start with the parent's, across exec.
    return {"seconds": seconds, "grown_bytes": _memory_bytes("VmHWM") - before}


def _memory_bytes(field: str) -> int:
    fields = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


# ---- what was found ----


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation: times of calls, and rates."""
    headings: dict[str, Column] = {
        "what": columns.SUBJECT,
        "block": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "us per call": lambda s, _: f"{s.p50_s * 1e6:.1f}",
        "MB/s": columns.SPEED,
        "range": columns.RANGE,
        "x C loop": columns.RATIO,
    }
    tables = [
        table_of(operation, own, samples, headings, left=("what", "contender"))
        for operation in (WRITE, READ)
        if (own := [s for s in summaries if s.operation == operation])
    ]
    processes = [s for s in summaries if s.operation == "start"]
    if processes:
        facts: dict[str, Column] = {
            "process": columns.CONTENDER,
            "rounds": columns.ROUNDS,
            "seconds": lambda s, _: f"{s.p50_s:.3f}",
            "import adds ms": columns.fact("import_s", ".0f", scale=1e3),
            "memory grows MiB": columns.fact("peak_mib", ".0f"),
        }
        tables.append(table_of("processes", processes, samples, facts, left=("process",)))
    return tables


def _draw(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw the time of a call by that of the C loop, for single calls and batches."""
    panels = []
    for operation in (WRITE, READ):
        own = [
            s for s in summaries if s.operation == operation and not _is(s, DIRECT, DURABLE, DRAIN)
        ]
        loops = {(s.subject, s.block_nbytes): s.p50_s for s in own if s.contender == LOOP}
        points: dict[str, list[Point]] = {}
        for one in own:
            loop_s = loops.get((one.subject, one.block_nbytes))
            if loop_s and one.contender != LOOP:
                label = f"{one.subject.removeprefix('batch of ')}\n{size_text(one.block_nbytes)}"
                ratio = one.p50_s / loop_s
                points.setdefault(one.contender, []).append(Point(label, ratio, ratio, ratio))
        if points:
            title = f"{operation}: time of a call, by the C loop's (1 is the floor)"
            panels.append(Panel(title=title, unit="times the C loop", points=points))
    return draw_panels(panels, **where) if panels else "no plot: there is nothing to draw"


def _is(summary: Summary, *parts: str) -> bool:
    return summary.subject.startswith(parts)


if __name__ == "__main__":
    print(json.dumps(fill_queue(sys.argv[-1])))
