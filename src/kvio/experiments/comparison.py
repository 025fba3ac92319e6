"""The rounds of a comparison: every contender in turn writes, reads hot and reads cold.

Synchronising, filling and emptying the page cache and comparing every byte happen outside what is
timed. Rounds are interleaved, each time with another contender first, so that a machine that
slows down slows all of them down.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from kvio import UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.blocks import Arena, Block, is_same
from kvio.experiments.contenders import Entry, Taken
from kvio.experiments.measure import Sample, Timed, time_calls
from kvio.experiments.progress import Progress
from kvio.experiments.shapes import ModelShape
from kvio.types import Durability

WRITE: Final = "write"
HOT: Final = "read, hot"
COLD: Final = "read, cold"
_SEED: Final = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared with what, and how much of it.

    Attributes:
        base: the directory to make stores in; each is removed after its turn.
        max_bytes: payload bytes of one contender's turn; at least one block is taken.
        budget_s: no new round begins that would end later than this; the first always runs.
    """

    base: Path
    shapes: Sequence[ModelShape]
    entries: Sequence[Entry]
    tokens: int
    max_bytes: int
    budget_s: float
    max_rounds: int
    threads: int
    durability: Durability

    def blocks_of(self, shape: ModelShape) -> int:
        """Count the blocks of one turn."""
        return max(1, min(64, self.max_bytes // shape.block_nbytes(self.tokens)))

    def arena_nbytes(self) -> int:
        """Count the bytes of the largest turn."""
        return max(self.blocks_of(s) * s.block_nbytes(self.tokens) for s in self.shapes)


@dataclass(slots=True)
class Comparison:
    """Runs a plan and keeps what it measured, so that an interruption loses nothing.

    Attributes:
        samples: one a contender, operation and round.
        left_out: contenders that this medium cannot run, and why.
    """

    plan: Plan
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Run rounds until the budget or the number of rounds is reached."""
        source, target = Arena(self.plan.arena_nbytes()), Arena(self.plan.arena_nbytes())
        source.fill_random(_SEED)
        slowest_s: dict[str, float] = {}
        for index in range(self.plan.max_rounds):
            for shape in self.plan.shapes:
                start = self.progress.elapsed_s
                if index and start + slowest_s[shape.name] > self.plan.budget_s:
                    return
                self._run_round(shape, index, source, target)
                took = self.progress.elapsed_s - start
                slowest_s[shape.name] = max(took, slowest_s.get(shape.name, 0.0))

    def _run_round(self, shape: ModelShape, index: int, source: Arena, target: Arena) -> None:
        plan = self.plan
        cut = partial(
            Arena.cut,
            blocks=plan.blocks_of(shape),
            pieces=shape.pieces(),
            piece_nbytes=shape.piece_nbytes(plan.tokens),
        )
        turn = index % len(plan.entries)
        for entry in (*plan.entries[turn:], *plan.entries[:turn]):
            if entry.name in self.left_out:
                continue
            self.progress.say(f"round {index + 1}, {shape.name}, {entry.name}")
            try:
                with _directory(plan.base) as root:
                    self._take_turn(entry, shape, index, cut(source), cut(target), target, root)
            except UnsupportedError as exc:
                self.left_out[entry.name] = str(exc).replace(str(plan.base), "…")

    def _take_turn(
        self,
        entry: Entry,
        shape: ModelShape,
        index: int,
        blocks: list[Block],
        copies: list[Block],
        target: Arena,
        root: Path,
    ) -> None:
        plan = self.plan
        with closing(entry.open(root, plan.durability)) as contender:
            keep = partial(self._keep, entry, shape, index)
            writes = [partial(contender.write, block.key, block.pieces) for block in blocks]
            timed = time_calls(writes, plan.threads)
            keep(WRITE, timed, Counter(taken.mode for taken in timed.results), _reasons(timed))
            for operation in (HOT, COLD):
                page_cache.drop(root)
                if operation == HOT:
                    page_cache.warm(root)
                target.wipe()
                cached = page_cache.cached_fraction(root)
                before = contender.modes()
                reads = [partial(contender.read, copy.key, copy.pieces) for copy in copies]
                got = time_calls(reads, plan.threads)
                modes = contender.modes() - before
                keep(operation, got, modes, [], cached=cached, intact=_intact(blocks, copies, got))

    def _keep(
        self,
        entry: Entry,
        shape: ModelShape,
        index: int,
        operation: str,
        timed: Timed[Taken] | Timed[int],
        modes: Counter[str],
        reasons: list[str],
        *,
        cached: float | None = None,
        intact: bool | None = None,
    ) -> None:
        self.samples.append(
            Sample(
                subject=shape.name,
                block_nbytes=shape.block_nbytes(self.plan.tokens),
                contender=entry.name,
                checksum=entry.checksum,
                operation=operation,
                round=index,
                wall_s=timed.wall_s,
                latencies_s=timed.latencies_s,
                modes=dict(modes),
                reasons=reasons,
                cached_before=cached,
                intact=intact,
            )
        )


def _reasons(timed: Timed[Taken]) -> list[str]:
    return list(dict.fromkeys(taken.reason for taken in timed.results))


def _intact(blocks: list[Block], copies: list[Block], timed: Timed[int]) -> bool:
    nbytes = sum(piece.nbytes for piece in blocks[0].pieces)
    whole = all(got == nbytes for got in timed.results)
    return whole and all(map(is_same, blocks, copies))


@contextmanager
def _directory(base: Path) -> Iterator[Path]:
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
