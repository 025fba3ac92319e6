"""What a workload must write and read, computed from its numbers alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

#: A file of these formats comes with two more, its indexes; a sample is a range of it.
INDEXED: Final = frozenset({"indexed_binary", "mmap_indexed_binary"})
_INDEXES: Final = 2


class Read(NamedTuple):
    """One block to read: the number of its file, and which of its samples are used."""

    file: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One way through a dataset: an epoch of training, or an evaluation."""

    files: int
    samples_per_file: int
    batch: int
    ranks: int
    max_steps: int | None = None

    @property
    def steps(self) -> int:
        """How many batches every rank takes; what fills none is left, as DLIO leaves it."""
        found = self.files * self.samples_per_file // (self.batch * self.ranks)
        return found if self.max_steps is None else min(found, self.max_steps)

    def order(self, rank: int, *, shuffle_seed: Sequence[int] | None = None) -> list[Read]:
        """List what a rank reads, in order: a share of its own, shuffled within, as DLIO does.

        Samples of one file that follow each other are one read.
        """
        share = self.files * self.samples_per_file // self.ranks
        samples = np.arange(rank * share, (rank + 1) * share)
        if shuffle_seed is not None:
            np.random.default_rng(list(shuffle_seed)).shuffle(samples)
        taken = samples[: self.steps * self.batch].tolist()
        runs = itertools.groupby(taken, key=lambda sample: sample // self.samples_per_file)
        return [
            Read(file, tuple(sample % self.samples_per_file for sample in run))
            for file, run in runs
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A DLIO run as far as its blocks are concerned."""

    ranks: int
    files: int
    eval_files: int
    samples_per_file: int
    batch: int
    eval_batch: int
    epochs: int
    format: str = "npz"
    generate: bool = False
    train: bool = True
    evaluate: bool = False
    max_steps: int | None = None
    eval_after_epoch: int = 1
    epochs_between_evals: int = 1
    shuffle: bool = False
    seed: int = 0
    seed_change_epoch: bool = True

    @property
    def training(self) -> Pass:
        """One epoch."""
        return Pass(
            files=self.files,
            samples_per_file=self.samples_per_file,
            batch=self.batch,
            ranks=self.ranks,
            max_steps=self.max_steps,
        )

    @property
    def evaluation(self) -> Pass:
        """One evaluation."""
        return Pass(
            files=self.eval_files,
            samples_per_file=self.samples_per_file,
            batch=self.eval_batch,
            ranks=self.ranks,
        )

    def shuffle_seed(self, epoch: int) -> tuple[int, ...] | None:
        """Give what the order of an epoch is drawn from; None: it is not shuffled."""
        if not self.shuffle:
            return None
        return (self.seed, epoch) if self.seed_change_epoch else (self.seed,)

    def writes(self) -> int:
        """Count the blocks that all ranks together generate."""
        if not self.generate:
            return 0
        files = self.files + max(0, self.eval_files)
        return files * (1 + _INDEXES) if self.format in INDEXED else files

    def reads(self, rank: int) -> int:
        """Count the blocks that a rank reads.

        Of an indexed format a sample is a read, and the indexes of a file are read once a pass.
        """
        return sum(self._blocks(order, indexes=_INDEXES) for order in self._passes(rank))

    def least_reads(self, rank: int) -> int:
        """Count the blocks that a rank reads at least, where readers keep indexes for later."""
        return sum(self._blocks(order, indexes=0) for order in self._passes(rank))

    def _passes(self, rank: int) -> Iterator[list[Read]]:
        if not self.train:
            return
        for epoch in range(1, self.epochs + 1):
            yield self.training.order(rank, shuffle_seed=self.shuffle_seed(epoch))
        for number, _ in enumerate(self.evaluated_epochs(), 1):
            yield self.evaluation.order(rank, shuffle_seed=self.shuffle_seed(number))

    def _blocks(self, order: Sequence[Read], *, indexes: int) -> int:
        if self.format not in INDEXED:
            return len(order)
        samples = sum(len(read.samples) for read in order)
        return samples + indexes * len({read.file for read in order})

    def evaluated_epochs(self) -> Iterator[int]:
        """Yield the epochs after which there is an evaluation."""
        due = self.eval_after_epoch
        for epoch in range(1, self.epochs + 1):
            if self.evaluate and epoch >= due:
                yield epoch
                due += self.epochs_between_evals


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """How often a rank checkpoints, and how many files each time: DLIO 2.0.0's rules."""

    epochs: int
    steps_per_epoch: int
    after_epoch: int = 1
    epochs_between: int = 1
    steps_between: int = -1
    files_each: int = 1

    def writes(self) -> int:
        """Count the files that a rank writes."""
        return self._times() * self.files_each

    def _times(self) -> int:
        if self.steps_between >= 0:
            each = self.steps_per_epoch // self.steps_between if self.steps_between else 0
            return each * self.epochs
        if not 1 <= self.after_epoch <= self.epochs:
            return 0
        if self.epochs_between < 1:
            return 1
        return 1 + (self.epochs - self.after_epoch) // self.epochs_between
