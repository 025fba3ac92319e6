"""Compares ways to write a new file and make its name appear: streams, stdio, write(2) and kvio.

Every turn a number of threads write one fresh file each, all at the same time, and publish it: by
renaming a named temporary, or by linking an O_TMPFILE. Without and with durability.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvio
from kvio import ConfigError, GiB, MiB, UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.filewriters import (
    BASELINES,
    Baseline,
    Blocks,
    Case,
    Contender,
    Source,
    compile_program,
)
from kvio.experiments.machine import FileSystem, describe_file_system, describe_machine
from kvio.experiments.measure import Sample, Summary, summarise
from kvio.experiments.plot import size_text
from kvio.experiments.record import Record, present
from kvio.experiments.run import Limits, Run, workplace
from kvio.experiments.table import Table

BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (*BASELINES, *BACKENDS)
REFERENCE: Final = "write 1 MiB, rename"
SYNCS: Final = ("none", "durable")
#: Of a file, in the change proposal that this goes on from.
DEFAULT_FILE_BYTES: Final = 50 * MiB

_ROUNDS_WANTED: Final = 3
#: What turns get done a second with all that is around them, on a small machine.
_BYTES_PER_S: Final = 250 * MiB
_SEED: Final = 20260103
_HEADINGS: Final = (
    "threads", "file size", "contender", "MB/s", "range", "p50 ms", "p99 ms", "publish us",
    "x write+rename", "cached after", "dirty MiB before",
)  # fmt: skip
_RIGHT: Final = frozenset(_HEADINGS) - {"contender"}


def run(
    limits: Limits,
    *,
    threads: Sequence[int] = (1, 4, 16, 64),
    file_bytes: int | None = None,
    syncs: Sequence[str] = SYNCS,
    contenders: Sequence[str] | None = None,
) -> int:
    """Run the experiment, print its tables and write them down.

    Args:
        limits: where, and how much of it.
        threads: how many write at the same time, a case each.
        file_bytes: of each file; less where all of a turn exceed ``limits.max_bytes``.
            Default: 50 MiB, and also less where ``limits.budget_s`` is short.
        syncs: of `SYNCS`.
        contenders: of `CONTENDERS`; None: all.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        StorageError: the medium failed.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    _check(limits, threads, file_bytes, syncs, names)
    turn_bytes = limits.max_bytes
    if file_bytes is None:
        turns = len(threads) * len(syncs) * len(names) * _ROUNDS_WANTED
        turn_bytes = min(turn_bytes, int(limits.budget_s / turns * _BYTES_PER_S))
    wanted = file_bytes or DEFAULT_FILE_BYTES
    cases = [
        Case(count, _file_bytes(wanted, count, turn_bytes), sync)
        for count, sync in product(threads, syncs)
    ]
    file_system = describe_file_system(limits.root)
    needed = 2 * max(case.threads * case.file_bytes for case in cases)
    if file_system.free_bytes < needed:
        raise ConfigError(f"{file_system.path}: less than {needed / GiB:.1f} GiB are free")
    measured, turns_taken = _measure(limits, cases, names)
    options = {
        **{name: str(value) for name, value in asdict(limits).items()},
        "file_bytes": file_bytes,
        "turn_bytes": turn_bytes,
        "cases": [asdict(case) for case in cases],
        "contenders": names,
        "seed": _SEED,
        "compiled_by": measured.compiled_by,
    }
    notes = [*_notes(wanted, turn_bytes, cases, file_system), *measured.notes, *turns_taken.notes()]
    if turns_taken.samples:
        _present(turns_taken.samples, file_system, options, notes, limits.results)
    else:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
    return turns_taken.status()


def _check(
    limits: Limits,
    threads: Sequence[int],
    file_bytes: int | None,
    syncs: Sequence[str],
    names: Sequence[str],
) -> None:
    if not limits.root.is_dir():
        raise ConfigError(f"{limits.root}: no such directory")
    least = [("max_bytes", limits.max_bytes), ("max_rounds", limits.max_rounds)]
    least += [("threads", count) for count in threads]
    least += [] if file_bytes is None else [("file_bytes", file_bytes)]
    for name, value in least:
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    chosen: list[tuple[str, Sequence[object], Sequence[object]]] = [
        ("threads", threads, threads),
        ("sync", syncs, SYNCS),
        ("contender", names, CONTENDERS),
    ]
    for kind, wanted, known in chosen:
        unknown = [one for one in wanted if one not in known]
        if unknown:
            raise ConfigError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(map(str, known))}")
        if not wanted or len(set(wanted)) < len(wanted):
            raise ConfigError(f"{kind}: give at least one, and each once")


def _file_bytes(wanted: int, threads: int, turn_bytes: int) -> int:
    """Give as much as fits into a turn, in whole MiB; 1 MiB fits always."""
    if wanted * threads <= turn_bytes:
        return wanted
    return min(wanted, max(1, turn_bytes // threads // MiB) * MiB)


def _measure(limits: Limits, cases: Sequence[Case], names: Sequence[str]) -> tuple[_Turns, Run]:
    taken = Run(limits.budget_s, limits.max_rounds)
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvio-")))
        base = stack.enter_context(workplace(limits.root))
        turns = _Turns(base, cases, names, programs / "filewriter", stack)
        if turns.names:
            taken.take_turns(cases, turns.names, turns.take)
    return turns, taken


class _Turns:
    """What the turns of a run share.

    Attributes:
        names: the contenders that can take part.
        notes: why others cannot.
        compiled_by: the command line that made the baselines' program, or None.
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
        self.compiled_by: list[str] | None = None
        self._base = base
        self._program = program
        self._stack = stack
        self._opened: dict[tuple[str, str], tuple[Path, Contender] | None] = {}
        if not BASELINES.keys().isdisjoint(names):
            self._compile()
        self._source = Source(_noise(max(case.threads * case.file_bytes for case in cases)))
        stack.callback(self._source.close)

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Write, then look at every byte, then empty the files."""
        opened = self._open(name, case)
        if opened is None:
            return
        root, contender = opened
        tag = f"{case.threads}-{case.sync}-{index}"
        nbytes = case.threads * case.file_bytes
        page_cache.touch_memory(self._base / "scratch", self._source.memory[:nbytes])
        os.sync()  # what others left to be written back is not to land on this turn
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
            self.compiled_by = compile_program(self._program)
        except UnsupportedError as exc:
            self.names = [name for name in self.names if name not in BASELINES]
            self.notes.append(f"left out: ofstream, fwrite and write, all of them: {exc}")

    def _open(self, name: str, case: Case) -> tuple[Path, Contender] | None:
        """Open a contender once and for all turns; None where it cannot be."""
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


def _notes(
    wanted: int, turn_bytes: int, cases: Sequence[Case], file_system: FileSystem
) -> list[str]:
    notes = [
        "ofstream and fwrite: a buffer of 1 MiB, handed 1 MiB a call; write: the size of a call. "
        "rename: a named temporary; tmpfile: O_TMPFILE and linkat by /proc/self/fd",
        "durable: fdatasync of the file before its name appears, fsync of the directory after",
        "kvio: Store.write_block from Python threads, without checksum, with fan-out directories "
        "and a trailer of 64 bytes; its publish step is not told apart, and its MB/s include "
        "handing the calls to the threads",
        "a time is from opening a file until it is published and closed; the same random bytes on "
        "the same kind of memory for all; every byte compared after the clock",
        "before each turn memory is touched, so that no host has to find it, and all is written "
        "back (sync); 'dirty' is Dirty + Writeback of the whole machine then. Files are new, so "
        "none is cached before; 'cached after' is the share of their bytes in the page cache",
        "p99 by nearest rank: the slowest file where there were fewer than 100",
    ]
    sizes = {case.subject: size_text(case.file_bytes) for case in cases}
    if any(case.file_bytes < wanted for case in cases):
        told = ", ".join(f"{subject} {size}" for subject, size in sizes.items())
        notes.append(
            f"FILES ARE SMALLER than {size_text(wanted)}, so that a turn writes "
            f"{size_text(turn_bytes)} at most, but 1 MiB a thread at least: {told}"
        )
    if file_system.is_memory:
        notes.append(f"NOT COMPARABLE: {file_system.kind} is memory; nothing reached a disk")
    return notes


def _present(
    samples: Sequence[Sample],
    file_system: FileSystem,
    options: dict[str, Any],
    notes: list[str],
    results: Path | None,
) -> None:
    summaries = summarise(samples, REFERENCE, CONTENDERS)
    record = Record(
        experiment="tmpfile",
        title="New files, one a thread at the same time: written and published",
        machine=describe_machine(),
        file_system=file_system,
        options=options,
        notes=notes,
        samples=samples,
        summaries=summaries,
    )
    operations = dict.fromkeys(summary.operation for summary in summaries)
    tables = [
        _table(operation, [s for s in summaries if s.operation == operation], samples)
        for operation in operations
    ]
    present(record, tables, results)


def _table(operation: str, summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    subjects = list(dict.fromkeys(summary.subject for summary in summaries))
    names = [name for name in CONTENDERS if any(s.contender == name for s in summaries)]
    order = sorted(summaries, key=lambda s: (subjects.index(s.subject), names.index(s.contender)))
    ends = [i for i, (this, after) in enumerate(pairwise(order)) if this.subject != after.subject]
    return Table(
        title=operation,
        headings=_HEADINGS,
        rows=[_row(summary, _of(summary, samples)) for summary in order],
        right=_RIGHT,
        rule_after=frozenset(ends),
    )


def _of(summary: Summary, samples: Sequence[Sample]) -> list[Sample]:
    wanted = (summary.subject, summary.operation, summary.contender)
    return [s for s in samples if (s.subject, s.operation, s.contender) == wanted]


def _row(summary: Summary, samples: Sequence[Sample]) -> tuple[str, ...]:
    published = [ns / 1e3 for sample in samples for ns in sample.facts.get("publish_ns", ())]
    return (
        summary.subject.partition(" ")[0],
        size_text(summary.block_nbytes),
        summary.contender,
        f"{summary.bytes_per_s / 1e6:.0f}",
        f"{summary.slowest_bytes_per_s / 1e6:.0f}-{summary.fastest_bytes_per_s / 1e6:.0f}",
        f"{summary.p50_s * 1e3:.2f}",
        f"{summary.p99_s * 1e3:.2f}",
        _median(published, "{:.0f}".format),
        "" if summary.ratio is None else f"{summary.ratio:.2f}",
        _median((sample.facts["cached_after"] for sample in samples), "{:.0%}".format),
        _median((s.facts["dirty_kib_before"] / 1024 for s in samples), "{:.1f}".format),
    )


def _median(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return form(statistics.median(known)) if known else ""
