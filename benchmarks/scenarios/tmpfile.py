"""Write a new file and make its name appear: by streams, stdio, write(2) and kvio.

In every trial several threads write one fresh file each, all at the same time, and publish it: by
renaming a named temporary, or by linking an O_TMPFILE. Without and with durability. After the
change proposal "Better tmp file handling" (llm-d-kv-cache #600).
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, Protocol

import numpy as np

import kvio
from benchmarks.harness import columns, page_cache
from benchmarks.harness.columns import Column, number, table_of
from benchmarks.harness.intervals import least_rounds
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary, time_calls
from benchmarks.harness.plot import size_text
from benchmarks.harness.run import Limits, Run, Scenario, check_least, check_names, check_room
from benchmarks.harness.table import Table
from kvio import MiB, UnsupportedError
from kvio.errors import storage_error
from kvio.types import Durability

SOURCE: Final = Path(__file__).resolve().parents[1] / "baselines" / "filewriter.cpp"
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-pthread")
_NO_TMPFILE: Final = "open O_TMPFILE"

SYNCS: Final = ("none", "durable")
#: Of a file, in the change proposal.
DEFAULT_FILE_BYTES: Final = 50 * MiB
#: What trials get done in a second with all that is around them, on a small machine.
_BYTES_PER_S: Final = 250 * MiB
_SEED: Final = 20260103


@dataclass(frozen=True, slots=True)
class FileWriter:
    """One way to write a file and to make its name appear.

    Attributes:
        writer: ``ofstream``, ``fwrite`` or ``write``.
        call_bytes: passed in one call; 0: the whole file.
        publish: ``rename`` or ``tmpfile``.
    """

    writer: str
    call_bytes: int
    publish: str

    @property
    def name(self) -> str:
        """Return its name in tables."""
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


BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (*BASELINES, *BACKENDS)
REFERENCE: Final = "write 1 MiB, rename"


def _publish_ns(sample: Sample) -> float | None:
    """Return the median time to publish one file, where it is measured apart."""
    found = sample.facts.get("publish_ns")
    return statistics.median(found) if found else None


_BY_BOTH: Final = ("rename", "tmpfile")
SCENARIO: Final = Scenario(
    name="tmpfile",
    title="New files, one per thread at the same time: written and published",
    reference=REFERENCE,
    contenders=CONTENDERS,
    claims=(
        Claim(
            text="files of several MiB are written faster without a user-space buffer (proposal)",
            pairs=[
                (f"write 1 MiB, {publish}", f"{stream}, {publish}")
                for stream in ("ofstream", "fwrite")
                for publish in _BY_BOTH
            ],
            at_least=1.0,
            operations=["no sync"],
            where=lambda sample: sample.block_nbytes >= 4 * MiB,
        ),
        Claim(
            text="write(2) in 1 MiB calls is no step back from the C++ stream (proposal)",
            pairs=[(f"write 1 MiB, {publish}", f"ofstream, {publish}") for publish in _BY_BOTH],
            at_least=0.97,
        ),
        Claim(
            text="O_TMPFILE makes offloading faster than a named temporary (proposal)",
            pairs=[
                (f"{writer}, tmpfile", f"{writer}, rename")
                for writer in dict.fromkeys(name.rpartition(", ")[0] for name in BASELINES)
            ],
            at_least=1.0,
        ),
        Claim(
            text="publishing takes no longer by linkat than by rename (time)",
            pairs=[("write 1 MiB, tmpfile", "write 1 MiB, rename")],
            at_most=1.0,
            value=_publish_ns,
        ),
        Claim(
            text="posix-tmpfile is as fast as the C++ program with the same calls",
            pairs=[("posix-tmpfile", "write whole, tmpfile")],
            at_least=0.95,
        ),
    ),
)


def run(
    limits: Limits,
    *,
    threads: Sequence[int] = (1, 4, 16, 64),
    file_bytes: int | None = None,
    syncs: Sequence[str] = SYNCS,
    contenders: Sequence[str] | None = None,
) -> int:
    """Run the scenario, print its tables and write them down.

    Args:
        limits: where, and how much of it.
        threads: how many write at the same time, a case each.
        file_bytes: of each file; less where all of a trial exceed ``limits.max_bytes``.
            Default: 50 MiB, and also less where ``limits.budget_s`` is short.
        syncs: of `SYNCS`.
        contenders: of `CONTENDERS`; None: all.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        StorageError: the file system failed.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    check_names("contender", names, CONTENDERS)
    check_names("sync", syncs, SYNCS)
    check_names("threads", threads, threads)
    check_least(max_bytes=limits.max_bytes, max_rounds=limits.max_rounds, threads=min(threads))
    trial_bytes = limits.max_bytes
    if file_bytes is None:
        trials = len(threads) * len(syncs) * len(names) * least_rounds()
        trial_bytes = min(trial_bytes, int(limits.budget_s / trials * _BYTES_PER_S))
    else:
        check_least(file_bytes=file_bytes)
    wanted = file_bytes or DEFAULT_FILE_BYTES
    cases = [
        Case(count, _file_bytes(wanted, count, trial_bytes), sync)
        for count, sync in product(threads, syncs)
    ]
    check_room(limits.root, 2 * max(case.threads * case.file_bytes for case in cases))
    this = Run(
        SCENARIO,
        limits,
        {
            "file_bytes": file_bytes,
            "trial_bytes": trial_bytes,
            "cases": [asdict(case) for case in cases],
            "contenders": names,
            "seed": _SEED,
        },
    )
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvio-")))
        base = stack.enter_context(this.workplace())
        trials_of = _Trials(base, cases, names, programs / "filewriter", stack)
        if trials_of.names:
            this.take_trials(cases, trials_of.names, trials_of.take)
        notes = [*_notes(wanted, trial_bytes, cases), *trials_of.notes]
        return this.finish(notes, _tables)


def _file_bytes(wanted: int, threads: int, trial_bytes: int) -> int:
    """Return as much as fits into a trial, in whole MiB; 1 MiB always fits."""
    if wanted * threads <= trial_bytes:
        return wanted
    return min(wanted, max(1, trial_bytes // threads // MiB) * MiB)


# ---- contenders ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What writing a trial's files took.

    Attributes:
        latencies_s: from opening a file until it is closed, each.
        steps_ns: of these, opening and writing, syncing, publishing, where they are measured apart.
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
        """Close the file."""
        os.close(self.fd)


class Contender(Protocol):
    """Writes the files of a trial and checks them afterwards."""

    def write(self, source: Source, tag: str, case: Case) -> Written:
        """Write one file a thread, named after *tag*."""

    def is_intact(self, source: Source, tag: str, case: Case) -> bool:
        """Check that each file holds exactly its bytes."""

    def close(self) -> None:
        """Release what is held."""


def compile_program(target: Path) -> list[str]:
    """Compile the program to *target* and return the command line that did it.

    The compiler is ``$CXX``, or else the first that is installed.

    Raises:
        UnsupportedError: there is no compiler, or it fails; says which.
    """
    command = [*_compiler(), *_FLAGS, "-o", str(target), str(SOURCE)]
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
        """Check that exactly these files appeared, with exactly these bytes."""
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
        UnsupportedError: the file system cannot do it.
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


def _parse(printed: str) -> Written:
    files: list[list[int]] = []
    wall_ns = 0
    for line in printed.splitlines():
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


# ---- trials ----


class _Trials:
    """What the trials of a run share.

    Attributes:
        names: the contenders that can take part.
        notes: why others cannot.
    """

    def __init__(
        self,
        base: Path,
        cases: Sequence[Case],
        names: Sequence[str],
        program: Path,
        stack: ExitStack,
    ) -> None:
        self.names = list(names)
        self.notes: list[str] = []
        self._base = base
        self._program = program
        self._stack = stack
        self._opened: dict[tuple[str, str], tuple[Path, Contender] | None] = {}
        if not BASELINES.keys().isdisjoint(names):
            self._compile()
        self._source = Source(_noise(max(case.threads * case.file_bytes for case in cases)))
        stack.callback(self._source.close)

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Write, then compare every byte, then empty the files."""
        opened = self._open(name, case)
        if opened is None:
            return
        root, contender = opened
        tag = f"{case.threads}-{case.sync}-{index}"
        nbytes = case.threads * case.file_bytes
        page_cache.touch_memory(self._base / "scratch", self._source.memory[:nbytes])
        os.sync()  # what others left to be written back must not land on this trial
        dirty = dirty_kib()
        try:
            written = contender.write(self._source, tag, case)
        except UnsupportedError as exc:
            self._leave_out(name, case, exc)
            return
        cached = page_cache.cached_fraction(root)
        yield Sample(
            subject=case.subject,
            block_nbytes=case.file_bytes,
            contender=name,
            checksum=False,
            operation=case.operation,
            round=index,
            wall_s=written.wall_s,
            latencies_s=written.latencies_s,
            modes=dict(written.modes),
            reasons=written.reasons,
            intact=contender.is_intact(self._source, tag, case),
            facts={**written.steps_ns, "dirty_kib_before": dirty, "cached_after": cached},
        )
        _empty(root)

    def _compile(self) -> None:
        try:
            self.notes.append(f"compiled by {shlex.join(compile_program(self._program))}")
        except UnsupportedError as exc:
            self.names = [name for name in self.names if name not in BASELINES]
            self.notes.append(f"left out: ofstream, fwrite and write, all of them: {exc}")

    def _open(self, name: str, case: Case) -> tuple[Path, Contender] | None:
        """Open a contender once and for all trials; None where it cannot be."""
        key = (name, case.sync)
        if key not in self._opened:
            root = self._base / f"contender-{len(self._opened)}"
            root.mkdir(mode=0o700)
            try:
                self._opened[key] = root, self._new(name, root, case.sync)
            except UnsupportedError as exc:
                self._leave_out(name, case, exc)
        return self._opened[key]

    def _new(self, name: str, root: Path, sync: str) -> Contender:
        if name in BASELINES:
            return Baseline(self._program, BASELINES[name], root)
        store = Blocks(name, root, sync)
        self._stack.callback(store.close)
        return store

    def _leave_out(self, name: str, case: Case, why: UnsupportedError) -> None:
        self._opened[name, case.sync] = None
        reason = str(why).replace(str(self._base), "…")
        self.notes.append(f"left out: {name}, {case.operation}: {reason}")


def dirty_kib() -> int:
    """Read how much of the machine's page cache is still to be written to disks."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("Dirty", "Writeback"))


def _noise(nbytes: int) -> memoryview:
    memory = kvio.aligned_buffer(-(-nbytes // 8) * 8)
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.random.default_rng(_SEED).integers(0, 1 << 64, len(words), np.uint64)
    return memory[:nbytes]


def _empty(root: Path) -> None:
    """Free the files' space; they are removed at the very end.

    ext4 gives no inode out again for some minutes after it was deleted, and every creation steps
    over all of them (fs/ext4/ialloc.c, recently_deleted).
    """
    for directory, _, files in os.walk(root):
        for file in files:
            os.truncate(os.path.join(directory, file), 0)


def _notes(wanted: int, trial_bytes: int, cases: Sequence[Case]) -> list[str]:
    notes = [
        "ofstream and fwrite: a buffer of 1 MiB, passed 1 MiB per call; write: the size of a call. "
        "rename: a named temporary; tmpfile: O_TMPFILE and linkat by /proc/self/fd",
        "durable: fdatasync of the file before its name appears, fsync of the directory after",
        "kvio: Store.write_block from Python threads, without checksum, with fan-out directories "
        "and a trailer of 64 bytes; its publish step is not measured apart, and its MB/s include "
        "handing the calls to the threads",
        "a time is from opening a file until it is published and closed; the same random bytes on "
        "the same kind of memory for all; every byte compared after the clock",
        "before each trial memory is touched, so that no host has to find it, and all is written "
        "back (sync); 'dirty' is Dirty + Writeback of the whole machine then. Files are new, so "
        "none is cached before; 'cached after' is the share of their bytes in the page cache",
        "p99 by nearest rank: the slowest file where there were fewer than 100",
    ]
    sizes = {case.subject: size_text(case.file_bytes) for case in cases}
    if any(case.file_bytes < wanted for case in cases):
        told = ", ".join(f"{subject} {size}" for subject, size in sizes.items())
        notes.append(
            f"FILES ARE SMALLER than {size_text(wanted)}, so that a trial writes "
            f"{size_text(trial_bytes)} at most, but 1 MiB a thread at least: {told}"
        )
    return notes


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per way to sync."""
    headings: dict[str, Column] = {
        "threads": lambda s, _: s.subject.partition(" ")[0],
        "file size": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "MB/s": columns.SPEED,
        "range": columns.RANGE,
        "p50 ms": columns.P50_MS,
        "p99 ms": columns.P99_MS,
        "publish us": lambda _, own: number(_published_us(own), ".0f"),
        "x write+rename": columns.RATIO,
        "cached after": columns.fact("cached_after", ".0%"),
        "dirty MiB before": columns.fact("dirty_kib_before", ".1f", scale=1 / 1024),
    }
    return [
        table_of(operation, own, samples, headings)
        for operation in dict.fromkeys(one.operation for one in summaries)
        for own in [[one for one in summaries if one.operation == operation]]
    ]


def _published_us(samples: Sequence[Sample]) -> float | None:
    """Return the median over all files of all rounds."""
    found = [ns / 1e3 for sample in samples for ns in sample.facts.get("publish_ns", ())]
    return statistics.median(found) if found else None
