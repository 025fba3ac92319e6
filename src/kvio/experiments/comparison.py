"""The rounds of a comparison: every contender in turn writes, reads hot and reads cold.

Synchronising, filling and emptying the page cache and comparing every byte happen outside what is
timed. Rounds are interleaved, each time with another contender first, so that a machine that
slows down slows all of them down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvio import UnsupportedError
from kvio.experiments import page_cache
from kvio.experiments.blocks import Arena, Block, is_same
from kvio.experiments.contenders import Entry
from kvio.experiments.measure import COLD, HOT, WRITE, Sample, Timed, time_calls
from kvio.experiments.run import Run, fresh_directory
from kvio.experiments.shapes import ModelShape
from kvio.types import Durability

_SEED: Final = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared with what, and how much of it.

    Attributes:
        base: the directory to make stores in; each is removed after its turn.
        max_bytes: payload bytes of one contender's turn; at least one block is taken.
    """

    base: Path
    shapes: Sequence[ModelShape]
    entries: Sequence[Entry]
    tokens: int
    max_bytes: int
    threads: int
    durability: Durability

    def blocks_of(self, shape: ModelShape) -> int:
        """Count the blocks of one turn."""
        return max(1, min(64, self.max_bytes // shape.block_nbytes(self.tokens)))

    def arena_nbytes(self) -> int:
        """Count the bytes of the largest turn."""
        return max(self.blocks_of(s) * s.block_nbytes(self.tokens) for s in self.shapes)


class Comparison:
    """What a plan's turns do; each yields a sample an operation."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._source, self._target = Arena(plan.arena_nbytes()), Arena(plan.arena_nbytes())
        self._source.fill_random(_SEED)
        self._entries = {entry.name: entry for entry in plan.entries}

    def run(self, run: Run) -> None:
        """Take turns until the budget or the number of rounds is reached."""
        run.take_turns(self.plan.shapes, list(self._entries), self._turn)

    def _turn(self, shape: ModelShape, name: str, index: int) -> Iterator[Sample]:
        plan = self.plan
        cut = partial(
            Arena.cut,
            blocks=plan.blocks_of(shape),
            pieces=shape.pieces(),
            piece_nbytes=shape.piece_nbytes(plan.tokens),
        )
        with fresh_directory(plan.base) as root:
            try:
                yield from self._take_turn(
                    self._entries[name], shape, index, cut(self._source), cut(self._target), root
                )
            except UnsupportedError as exc:
                raise UnsupportedError(str(exc).replace(str(plan.base), "…")) from exc

    def _take_turn(
        self,
        entry: Entry,
        shape: ModelShape,
        index: int,
        blocks: list[Block],
        copies: list[Block],
        root: Path,
    ) -> Iterator[Sample]:
        plan = self.plan
        sample = partial(
            Sample,
            subject=shape.name,
            block_nbytes=shape.block_nbytes(plan.tokens),
            contender=entry.name,
            checksum=entry.checksum,
            round=index,
        )
        with closing(entry.open(root, plan.durability)) as contender:
            writes = [partial(contender.write, block.key, block.pieces) for block in blocks]
            timed = time_calls(writes, plan.threads)
            yield sample(
                operation=WRITE,
                wall_s=timed.wall_s,
                latencies_s=timed.latencies_s,
                modes=dict(Counter(taken.mode for taken in timed.results)),
                reasons=list(dict.fromkeys(taken.reason for taken in timed.results)),
            )
            for operation in (HOT, COLD):
                page_cache.drop(root)
                if operation == HOT:
                    page_cache.warm(root)
                self._target.wipe()
                cached = page_cache.cached_fraction(root)
                before = contender.modes()
                reads = [partial(contender.read, copy.key, copy.pieces) for copy in copies]
                got = time_calls(reads, plan.threads)
                yield sample(
                    operation=operation,
                    wall_s=got.wall_s,
                    latencies_s=got.latencies_s,
                    modes=dict(contender.modes() - before),
                    cached_before=cached,
                    intact=_intact(blocks, copies, got),
                )


def _intact(blocks: list[Block], copies: list[Block], timed: Timed[int]) -> bool:
    nbytes = sum(piece.nbytes for piece in blocks[0].pieces)
    whole = all(got == nbytes for got in timed.results)
    return whole and all(map(is_same, blocks, copies))
