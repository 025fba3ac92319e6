"""A run of an experiment: turns within limits, and what they measured."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvio import MiB, UnsupportedError
from kvio.experiments.measure import Sample
from kvio.experiments.progress import Progress

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an experiment runs and how much it may take.

    Attributes:
        root: the directory to measure in; nothing is left there.
        results: the folder for JSON, Markdown and PNG; None: one below ``results/``.
        budget_s: no round begins that would end later than this; the first always runs.
        max_bytes: payload bytes that one turn writes, at most; at least one block is taken.
        max_rounds: rounds at most.
    """

    root: Path
    results: Path | None = None
    budget_s: float = 60.0
    max_bytes: int = 160 * MiB
    max_rounds: int = 15


@dataclass(slots=True)
class Run:
    """Takes turns and keeps what they measured, so that an interruption loses nothing.

    Attributes:
        samples: what the turns yielded.
        left_out: contenders that this medium cannot run, and why.
        interrupted: Ctrl-C ended it early.
    """

    budget_s: float
    max_rounds: int
    progress: Progress = field(default_factory=Progress)
    samples: list[Sample] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def take_turns(
        self,
        cases: Sequence[Case],
        contenders: Sequence[str],
        turn: Callable[[Case, str, int], Iterable[Sample]],
    ) -> None:
        """Let every contender take its turn at every case, round by round.

        Each round begins with another contender, and the others follow in random order, the same
        in every run, so that none always follows the same one. A contender whose turn raises
        `UnsupportedError` takes no more.
        """
        try:
            self._take_turns(cases, contenders, turn)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.progress.end()

    def _take_turns(
        self,
        cases: Sequence[Case],
        contenders: Sequence[str],
        turn: Callable[[Case, str, int], Iterable[Sample]],
    ) -> None:
        slowest_s: dict[str, float] = {}
        for index in range(self.max_rounds):
            for case in cases:
                start = self.progress.elapsed_s
                if index and start + slowest_s[str(case)] > self.budget_s:
                    return
                for name in _order(contenders, index):
                    if name not in self.left_out:
                        self._take_turn(case, name, index, turn)
                took = self.progress.elapsed_s - start
                slowest_s[str(case)] = max(took, slowest_s.get(str(case), 0.0))

    def _take_turn(
        self,
        case: Case,
        name: str,
        index: int,
        turn: Callable[[Case, str, int], Iterable[Sample]],
    ) -> None:
        self.progress.say(f"round {index + 1}, {case}, {name}")
        try:
            for sample in turn(case, name, index):
                self.samples.append(sample)
        except UnsupportedError as exc:
            self.left_out[name] = str(exc)

    def notes(self) -> list[str]:
        """Say what a reader must know beside the numbers."""
        notes = [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        if self.interrupted:
            notes.append("INTERRUPTED: rounds are missing")
        broken = dict.fromkeys(
            f"BYTES DIFFER: {s.contender}, {s.subject}, {s.operation}"
            for s in self.samples
            if s.intact is False
        )
        return notes + list(broken)

    def status(self) -> int:
        """Give the exit status: 1 if a byte differed, 130 after Ctrl-C, 2 without any sample."""
        if any(sample.intact is False for sample in self.samples):
            return 1
        if self.interrupted:
            return 130
        return 0 if self.samples else 2


def _order(contenders: Sequence[str], index: int) -> list[str]:
    first = contenders[index % len(contenders)]
    others = [name for name in contenders if name != first]
    random.Random(index).shuffle(others)  # noqa: S311  # not secret
    return [first, *others]


@contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """Lend a hidden directory below *root* and remove it."""
    with tempfile.TemporaryDirectory(prefix=".kvio-experiment-", dir=root) as base:
        yield Path(base)


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
