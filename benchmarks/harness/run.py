"""A run of a scenario: trials in shuffled rounds within limits, and what is left of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from benchmarks.harness import judging
from benchmarks.harness.filesystems import fresh_file_system
from benchmarks.harness.judging import Claim
from benchmarks.harness.machine import (
    FileSystem,
    creates_slowly,
    describe_file_system,
    describe_machine,
    runnable_tasks,
)
from benchmarks.harness.measure import Sample, Summary, summarise
from benchmarks.harness.plot import Draw, draw_bars, size_text
from benchmarks.harness.record import Record, present
from benchmarks.harness.table import Table
from kvio import ConfigError, MiB, UnsupportedError

Case = TypeVar("Case")
#: Makes the tables of a run from its summaries and samples.
Tables: TypeAlias = Callable[[Sequence[Summary], Sequence[Sample]], Sequence[Table]]

_TERMINATED: Final = 128 + signal.SIGTERM
#: Other programs' runnable tasks per processor, on average, from which on nothing is decided.
_BUSY: Final = 0.5
_SLOW_CREATION: Final = (
    "this ext4 has no journal: for minutes after a deletion every creation of a file takes 400 to "
    "1,000 us, by any program; --loop ext4 measures on one with a journal, as root"
)
_MIN_IMAGE_BYTES: Final = 2048 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a scenario runs and how much it may take.

    Attributes:
        root: the directory to measure in; nothing is left there.
        results: the folder for JSON, Markdown and PNG; None: one below ``results/``.
        budget_s: no round starts that would end later, and no trial starts later: a run ends one
            trial after it at the latest.
        max_bytes: payload bytes that one trial writes, at most; at least one block is taken.
        max_rounds: rounds at most.
        loop: ``ext4`` or ``xfs``: measure on a fresh file system of this kind, in an image file
            below *root*; needs root. None: measure in *root* itself.
    """

    root: Path
    results: Path | None = None
    budget_s: float = 60.0
    max_bytes: int = 160 * MiB
    max_rounds: int = 15
    loop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is compared, and what is claimed of it.

    Attributes:
        name: of the command and of the files with results.
        title: of the tables and the plot.
        reference: the contender whose speed the tables' ratios are divided by.
        contenders: all, in the order of tables.
        claims: each gets a verdict.
    """

    name: str
    title: str
    reference: str
    contenders: Sequence[str]
    claims: Sequence[Claim] = ()


class Progress:
    """Shows on standard error what is being done, and how long the run has taken.

    One line that changes on a terminal, a line per step elsewhere.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._live = sys.stderr.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, step: str) -> None:
        """Show the step that begins now."""
        line = f"[{self.elapsed_s:5.0f} s] {step}"
        sys.stderr.write(f"\r\033[K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the changing line."""
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


class Run:
    """Takes trials, keeps their samples on disk as they come, and presents them at the end.

    Args:
        scenario: what is run.
        limits: where, and how much of it.
        options: of this run, for the record.

    Attributes:
        samples: what the trials yielded.
        left_out: contenders that cannot take part, and why.
        findings: how many results there are that are no samples.
        failed: trials that were lost or found a wrong byte, a line each; exit status 1.
        file_system: what is measured; scenarios without a directory set their own.
        folder: where results go.
    """

    def __init__(
        self, scenario: Scenario, limits: Limits, options: Mapping[str, Any] | None = None
    ) -> None:
        self.scenario = scenario
        self.limits = limits
        self.options: dict[str, Any] = {
            **{k: str(v) if isinstance(v, Path) else v for k, v in asdict(limits).items()},
            **(options or {}),
        }
        self.progress = Progress()
        self.samples: list[Sample] = []
        self.left_out: dict[str, str] = {}
        self.findings = 0
        self.failed: list[str] = []
        self.file_system: FileSystem | None = None
        self.machine = describe_machine()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        own = Path("results") / f"{scenario.name}-{stamp}-{os.getpid()}"
        self.folder = limits.results or own
        self._creates_slowly = False
        self._ended_by = ""
        self._not_reached: list[str] = []
        self._runnable: list[int] = []

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """Lend an empty directory to measure in; its file system is what is recorded.

        Raises:
            ConfigError: there is no such directory.
            UnsupportedError: the file system cannot be made here.
        """
        with workplace(self.limits) as base:
            # Named by what the user gave: the directory inside is gone when the record is read.
            self.file_system = replace(describe_file_system(base), path=str(self.limits.root))
            self._creates_slowly = creates_slowly(base)
            if self._creates_slowly:
                sys.stderr.write(f"warning: {self.limits.root}: {_SLOW_CREATION}\n")
            yield base

    # ---- trials ----

    def take_trials(
        self,
        cases: Sequence[Case],
        contenders: Sequence[str],
        trial: Callable[[Case, str, int], Iterable[Sample]],
        takes_part: Callable[[Case, str], bool] = lambda _case, _name: True,
    ) -> None:
        """Let every contender take its trial at every case in which it *takes_part*, by rounds.

        Each round begins with another contender, and the others follow in random order, the same
        in every run, so that none always follows the same one. A contender whose trial raises
        `UnsupportedError` takes no more. Ctrl-C and SIGTERM end the trials, not the run.
        """
        try:
            self._take_rounds(cases, contenders, trial, takes_part)
        except KeyboardInterrupt:
            self._ended_by = "Ctrl-C"
        except SystemExit as exc:
            if exc.code != _TERMINATED:
                raise
            self._ended_by = "SIGTERM"
        finally:
            self.progress.end()

    def _take_rounds(
        self,
        cases: Sequence[Case],
        contenders: Sequence[str],
        trial: Callable[[Case, str, int], Iterable[Sample]],
        takes_part: Callable[[Case, str], bool],
    ) -> None:
        slowest_s: dict[str, float] = {}
        for index in range(self.limits.max_rounds):
            for case in cases:
                start = self.progress.elapsed_s
                if index and start + slowest_s[str(case)] > self.limits.budget_s:
                    return
                for name in _order(contenders, index):
                    if name in self.left_out or not takes_part(case, name):
                        continue
                    if self.progress.elapsed_s > self.limits.budget_s and self.samples:
                        self._not_reached.append(f"{case}, {name}")
                    else:
                        self._take_trial(case, name, index, trial)
                took = self.progress.elapsed_s - start
                slowest_s[str(case)] = max(took, slowest_s.get(str(case), 0.0))
            if self._not_reached:
                return

    def _take_trial(
        self,
        case: Case,
        name: str,
        index: int,
        trial: Callable[[Case, str, int], Iterable[Sample]],
    ) -> None:
        self.progress.say(f"round {index + 1}, {case}, {name}")
        self._runnable.append(runnable_tasks() - 1)  # this process is one of them
        try:
            for sample in trial(case, name, index):
                self.samples.append(sample)
                self._append(sample)
        except UnsupportedError as exc:
            self.left_out[name] = str(exc)

    # ---- what is kept while it runs ----

    @property
    def _journal(self) -> Path:
        return self.folder / f"{self.scenario.name}.samples.jsonl"

    def _append(self, sample: Sample) -> None:
        """Write a sample down, so that a run that is killed loses none that was taken."""
        line = json.dumps(asdict(sample)) + "\n"
        if len(self.samples) == 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            head = {
                "experiment": self.scenario.name,
                "title": self.scenario.title,
                "reference": self.scenario.reference,
                "machine": asdict(self.machine),
                "file_system": asdict(self._measured_on()),
                "options": self.options,
            }
            self._journal.write_text(json.dumps(head, default=str) + "\n" + line)
        else:
            with self._journal.open("a") as file:
                file.write(line)

    def _measured_on(self) -> FileSystem:
        if self.file_system is None:
            self.file_system = describe_file_system(self.limits.root)
        return self.file_system

    # ---- the end ----

    @property
    def load(self) -> float:
        """Other programs' runnable tasks per processor, the mean of one look before each trial."""
        if not self._runnable:
            return 0.0
        return sum(self._runnable) / len(self._runnable) / self.machine.processors_usable

    def notes(self) -> list[str]:
        """Return what a reader must know beside the numbers."""
        notes = [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        if self._ended_by:
            notes.append(f"INTERRUPTED by {self._ended_by}: rounds are missing")
        if self._not_reached:
            count, budget = len(self._not_reached), self.limits.budget_s
            notes.append(
                f"NOT REACHED within {budget:g} s: {count} of the first round's trials, from "
                f"{self._not_reached[0]} on; give more --budget, or fewer cases or contenders"
            )
        if self.load > _BUSY:
            notes.append(
                f"BUSY: other programs had {self.load:.1f} runnable tasks per processor on "
                "average: nothing is decided"
            )
        if self.file_system is not None and self.file_system.is_memory:
            notes.append(
                f"NOT COMPARABLE: {self.file_system.kind} is memory; nothing reached a disk"
            )
        if self._creates_slowly:
            notes.append(f"SLOW CREATION: {_SLOW_CREATION}")
        broken = dict.fromkeys(
            f"BYTES DIFFER: {s.contender}, {s.subject}, {s.operation}"
            for s in self.samples
            if s.intact is False
        )
        return notes + list(broken) + self.failed

    def status(self) -> int:
        """Return the exit status.

        1 if a byte differed or a trial was lost, 130 after Ctrl-C, 143 after SIGTERM, 2 without any
        sample, else 0.
        """
        if self.failed or any(sample.intact is False for sample in self.samples):
            return 1
        if self._ended_by:
            return 130 if self._ended_by == "Ctrl-C" else _TERMINATED
        return 0 if self.samples or self.findings else 2

    def finish(
        self,
        notes: Sequence[str],
        tables: Tables,
        draw: Draw | None = draw_bars,
        *,
        details: Tables | None = None,
        conclusions: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> int:
        """Judge what was measured, print and write it, and return the exit status.

        Args:
            notes: how it was measured.
            tables: makes the tables that are printed.
            draw: makes the plot; None: there is none.
            details: makes tables that are written, not printed.
            conclusions: sentences that end what is printed, before those of claims.
            more: what only this scenario's JSON has.
        """
        scenario, file_system = self.scenario, self._measured_on()
        notes = [*notes, *self.notes()]
        if not (self.samples or self.findings):
            sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
            return self.status()
        busy = self.load > _BUSY
        judged = judging.judge(scenario.claims, self.samples, busy=busy)
        summaries = summarise(self.samples, scenario.reference, scenario.contenders)
        record = Record(
            experiment=scenario.name,
            title=scenario.title,
            machine=replace(self.machine, load_of_others=round(self.load, 2)),
            file_system=file_system,
            options=self.options,
            notes=notes,
            conclusions=[*conclusions, *judging.sentences(scenario.claims, judged)],
            samples=self.samples,
            summaries=summaries,
            claims=[judging.as_json(one) for one in judged],
            more=more or {},
        )
        written = [*details(summaries, self.samples)] if details else []
        written += [judging.table(judged)] if judged else []
        present(record, tables(summaries, self.samples), self.folder, draw, details=written)
        self._journal.unlink(missing_ok=True)
        return self.status()


def _order(contenders: Sequence[str], index: int) -> list[str]:
    first = contenders[index % len(contenders)]
    others = [name for name in contenders if name != first]
    random.Random(index).shuffle(others)
    return [first, *others]


def check_names(kind: str, names: Sequence[object], known: Iterable[object]) -> None:
    """Refuse a selection that is empty, has a name twice, or has one that is not known.

    Raises:
        ConfigError: says which.
    """
    there = list(known)
    listed = ", ".join(map(str, there))
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigError(f"unknown {kind} {unknown[0]!r}; known: {listed}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{kind}: give at least one, and each once; known: {listed}")


def check_least(least: int = 1, **values: int) -> None:
    """Refuse numbers below *least*.

    Raises:
        ConfigError: names the first.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")


def check_room(root: Path, disk_bytes: int, memory_bytes: int = 0) -> None:
    """Refuse a run that needs more than there is.

    Raises:
        ConfigError: there is no such directory, or too little space or memory; says how much.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: no such directory")
    free = shutil.disk_usage(root).free
    if free < disk_bytes:
        raise ConfigError(
            f"{root}: the run needs {size_text(disk_bytes)}, {size_text(free)} are free; "
            "give less --max-bytes"
        )
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if available < memory_bytes:
        raise ConfigError(
            f"a trial needs {size_text(memory_bytes)} of memory, {size_text(available)} are "
            "available; give less --max-bytes"
        )


@contextmanager
def workplace(limits: Limits) -> Iterator[Path]:
    """Lend an empty directory to measure in, and remove it.

    It is hidden below the root, or the root of a fresh file system in an image file there.

    Raises:
        ConfigError: there is no such directory.
        UnsupportedError: the file system cannot be made here.
    """
    if not limits.root.is_dir():
        raise ConfigError(f"{limits.root}: no such directory")
    with tempfile.TemporaryDirectory(prefix=".kvio-experiment-", dir=limits.root) as base:
        if limits.loop is None:
            yield Path(base)
        else:
            nbytes = max(_MIN_IMAGE_BYTES, 16 * limits.max_bytes)
            with fresh_file_system(limits.loop, Path(base), nbytes) as root:
                yield root


@contextmanager
def fresh_directory(base: Path) -> Iterator[Path]:
    """Lend a fresh directory, then remove it and wait until the disk knows."""
    root = Path(tempfile.mkdtemp(dir=base))
    try:
        yield root
    finally:
        shutil.rmtree(root)
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
