"""Compute the blocks that a workload must write and read from its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

#: Formats with two index files per file, in which a sample is a range of the file.
INDEXED: Final = frozenset({"indexed_binary", "mmap_indexed_binary"})
_INDEXES: Final = 2


class Read(NamedTuple):
    """One block to read: the number of its file, and the samples used from it."""

    file: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over a dataset: an epoch of training, or an evaluation."""

    files: int
    samples_per_file: int
    batch: int
    ranks: int
    max_steps: int | None = None

    @property
    def steps(self) -> int:
        """Return the batches per rank; samples that fill no batch are dropped, as in DLIO."""
        found = self.files * self.samples_per_file // (self.batch * self.ranks)
        return found if self.max_steps is None else min(found, self.max_steps)

    def order(self, rank: int, *, shuffle_seed: Sequence[int] | None = None) -> list[Read]:
        """Return a rank's reads in order: its share of the samples, shuffled as in DLIO.

        Consecutive samples of one file are one read.
        """
        share = self.files * self.samples_per_file // self.ranks
        first = rank % self.ranks * share  # 0 if every rank has files of its own
        samples = np.arange(first, first + share)
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
    """The parameters of a DLIO run that determine its blocks.

    Attributes:
        ranks: the number of ranks that share the files.
        generated: files that all ranks together generate.
    """

    ranks: int
    files: int
    eval_files: int
    samples_per_file: int
    batch: int
    eval_batch: int
    epochs: int
    format: str = "npz"
    generated: int = 0
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
        """Return one epoch."""
        return Pass(
            files=self.files,
            samples_per_file=self.samples_per_file,
            batch=self.batch,
            ranks=self.ranks,
            max_steps=self.max_steps,
        )

    @property
    def evaluation(self) -> Pass:
        """Return one evaluation."""
        return Pass(
            files=self.eval_files,
            samples_per_file=self.samples_per_file,
            batch=self.eval_batch,
            ranks=self.ranks,
        )

    def shuffle_seed(self, epoch: int) -> tuple[int, ...] | None:
        """Return the seed for the order of an epoch; None: it is not shuffled."""
        if not self.shuffle:
            return None
        return (self.seed, epoch) if self.seed_change_epoch else (self.seed,)

    def writes(self) -> int:
        """Return the number of blocks that all ranks together generate."""
        return self.generated * (1 + _INDEXES) if self.format in INDEXED else self.generated

    def reads(self, rank: int) -> int:
        """Return the number of blocks that a rank reads.

        In an indexed format every sample is a read, and a file's indexes are read once per pass.
        """
        return sum(self._blocks(order, indexes=_INDEXES) for order in self._passes(rank))

    @property
    def keeps_blocks(self) -> bool:
        """Return whether kvio's loader keeps blocks: shuffled samples of one block come apart."""
        return self.shuffle and self.samples_per_file > 1 and self.format not in INDEXED

    def fewest_reads(self, rank: int) -> int:
        """Return the minimum of blocks that a rank reads, if it keeps all blocks of an epoch."""
        if not self.keeps_blocks:
            return self.reads(rank)
        return sum(len({read.file for read in order}) for order in self._passes(rank))

    def least_reads(self, rank: int) -> int:
        """Return the minimum of blocks that a rank reads, if readers keep the indexes."""
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
    """The checkpoints of a rank and the files of each.

    Attributes:
        written, read: checkpoints of a run that does nothing else; its other attributes are 0.
        files_each: files of this rank in a checkpoint.
    """

    epochs: int
    steps_per_epoch: int
    after_epoch: int = 1
    epochs_between: int = 1
    steps_between: int = -1
    written: int = 0
    read: int = 0
    files_each: int = 1

    def writes(self) -> int:
        """Return the number of files that a rank writes."""
        return (self._times() + self.written) * self.files_each

    def reads(self) -> int:
        """Return the number of files that a rank reads."""
        return self.read * self.files_each

    def _times(self) -> int:
        if self.steps_between >= 0:
            each = self.steps_per_epoch // self.steps_between if self.steps_between else 0
            return each * self.epochs
        if not 1 <= self.after_epoch <= self.epochs:
            return 0
        if self.epochs_between < 1:
            return 1
        return 1 + (self.epochs - self.after_epoch) // self.epochs_between


# --------------------------------------------------------------------------------------------------
# Convert DLIO's arguments to a `Workload` and `Checkpoints`.


def generated_files(args: Any) -> int:
    """Return the number of files to generate, before DLIO puts what it found in its place."""
    return int(args.num_files_train) + max(0, int(args.num_files_eval))


def workload_of(args: Any, *, generated: int = 0) -> Workload:
    """Return the workload of DLIO's parsed options.

    Some releases give every rank the list of its own files (``files_pre_sharded``): then the rank
    shares them with no other.
    """
    own_files = bool(getattr(args, "files_pre_sharded", False))
    return Workload(
        ranks=1 if own_files else args.comm_size,
        files=args.num_files_train,
        eval_files=args.num_files_eval,
        samples_per_file=args.num_samples_per_file,
        batch=args.batch_size,
        eval_batch=args.batch_size_eval,
        epochs=args.epochs,
        format=str(args.format),
        generated=generated if args.generate_data else 0,
        train=not (args.generate_only or getattr(args, "checkpoint_only", False)),
        evaluate=bool(args.do_eval),
        max_steps=args.total_training_steps if args.total_training_steps > 0 else None,
        eval_after_epoch=args.eval_after_epoch,
        epochs_between_evals=args.epochs_between_evals,
        shuffle=str(args.sample_shuffle) != "off",
        seed=args.seed,
        seed_change_epoch=bool(args.seed_change_epoch),
    )


def checkpoints_of(args: Any, workload: Workload, mechanism: Any) -> Checkpoints:
    """Return the checkpoints that DLIO makes this rank write and read by a mechanism."""
    only = bool(getattr(args, "checkpoint_only", False))
    reads = only and not getattr(args, "checkpoint_recovery_rank_shift", False)
    return Checkpoints(
        epochs=workload.epochs if args.do_checkpoint and workload.train else 0,
        steps_per_epoch=workload.training.steps,
        after_epoch=args.checkpoint_after_epoch,
        epochs_between=args.epochs_between_checkpoints,
        steps_between=args.steps_between_checkpoints,
        written=args.num_checkpoints_write if only else 0,
        read=args.num_checkpoints_read if reads else 0,
        files_each=files_each(args, mechanism),
    )


def files_each(args: Any, mechanism: Any) -> int:
    """Return the number of this rank's files in a checkpoint, by the rules of the release.

    In 2.0.0 every layer is a file; later releases save the layers of a rank together unless they
    are sharded by stages of a pipeline.
    """
    if not hasattr(mechanism, "rank_to_checkpoint"):
        return _files_each_in_2_0_0(args)
    if mechanism.rank_to_checkpoint != args.my_rank:
        return 0
    files = int(bool(mechanism.model_state)) + int(bool(mechanism.optimization_state))
    if not mechanism.layer_state:
        return files
    if not 0 < args.zero_stage < 3:  # ZeRO's stages 1 and 2
        return files + 1
    if mechanism.data_parallelism_rank != 0 or args.num_layers <= 0:
        return files
    first, last = mechanism.get_layer_index()
    return files + (last - first + 1 if args.pipeline_parallelism > 1 else 1)


def _files_each_in_2_0_0(args: Any) -> int:
    rank = args.my_rank
    if str(args.checkpoint_type) == "rank_zero" and rank != 0:
        return 0
    files = int(args.model_size > 0) + int(len(args.optimization_groups) > 0)
    has_layers = any(size > 0 for size in args.layer_parameters) and args.num_layers > 0
    if has_layers and rank % args.pipeline_parallelism == 0:
        files += args.num_layers
        files += args.tensor_parallelism if args.tensor_parallelism > 1 else 0
    return files
