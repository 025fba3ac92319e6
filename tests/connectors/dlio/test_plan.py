"""What a workload must write and read, from its numbers alone."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.connectors.dlio.plan import Checkpoints, Pass, Read, Workload

_PASSES = st.builds(
    Pass,
    files=st.integers(0, 40),
    samples_per_file=st.integers(1, 5),
    batch=st.integers(1, 6),
    ranks=st.integers(1, 5),
    max_steps=st.none() | st.integers(1, 10),
)

WORKLOAD = Workload(
    ranks=2,
    files=16,
    eval_files=0,
    samples_per_file=1,
    batch=2,
    eval_batch=1,
    epochs=2,
    generated=16,
)


@given(one=_PASSES, seed=st.none() | st.tuples(st.integers(0, 9)))
def test_ranks_take_no_sample_twice_and_all_as_many(one: Pass, seed: tuple[int] | None) -> None:
    """In an epoch every rank takes steps x batch samples, and no two of them the same one."""
    taken: Counter[tuple[int, int]] = Counter()
    for rank in range(one.ranks):
        order = one.order(rank, shuffle_seed=seed)
        samples = [(read.file, sample) for read in order for sample in read.samples]
        assert len(samples) == one.steps * one.batch
        taken.update(samples)

    assert set(taken.values()) <= {1}
    assert all(file < one.files and number < one.samples_per_file for file, number in taken)


def test_samples_of_one_file_in_a_row_are_one_read() -> None:
    """A block is read once for the samples that follow each other in it."""
    one = Pass(files=2, samples_per_file=3, batch=1, ranks=1, max_steps=5)

    assert one.order(0) == [Read(0, (0, 1, 2)), Read(1, (0, 1))]


def test_shuffling_draws_the_same_order_from_the_same_seed_and_another_from_another() -> None:
    """The order of an epoch can be drawn again, and differs from the next epoch's."""
    one = Pass(files=64, samples_per_file=1, batch=1, ranks=1)

    first = one.order(0, shuffle_seed=(1, 1))
    assert first == one.order(0, shuffle_seed=(1, 1))
    assert first != one.order(0, shuffle_seed=(1, 2))
    assert first != one.order(0)
    assert sorted(first) == one.order(0)


def test_a_plain_workload_writes_every_file_and_reads_each_once_an_epoch() -> None:
    """16 files, 2 ranks, 2 epochs: 16 writes together, 16 reads each."""
    assert WORKLOAD.writes() == 16
    assert [WORKLOAD.reads(rank) for rank in (0, 1)] == [16, 16]


def test_what_is_not_done_is_not_planned() -> None:
    """No generation: no writes; no training: no reads."""
    assert dataclasses.replace(WORKLOAD, generated=0).writes() == 0
    assert dataclasses.replace(WORKLOAD, train=False).reads(0) == 0


def test_an_indexed_file_is_three_blocks() -> None:
    """indexed_binary comes with two indexes a file."""
    assert dataclasses.replace(WORKLOAD, format="indexed_binary").writes() == 48


def test_an_indexed_sample_is_a_read_and_an_index_two_a_pass() -> None:
    """However samples are shuffled: each is a range, and each file's two indexes are read once."""
    indexed = dataclasses.replace(
        WORKLOAD, format="indexed_binary", files=4, samples_per_file=6, epochs=3
    )
    shuffled = dataclasses.replace(indexed, shuffle=True)

    assert [indexed.reads(rank) for rank in (0, 1)] == [3 * (12 + 2 * 2)] * 2
    assert [shuffled.least_reads(rank) for rank in (0, 1)] == [3 * 12] * 2
    files = [
        {read.file for read in shuffled.training.order(0, shuffle_seed=(0, epoch))}
        for epoch in (1, 2, 3)
    ]
    assert shuffled.reads(0) == sum(12 + 2 * len(numbers) for numbers in files)


def test_an_indexed_file_is_written_as_three_blocks() -> None:
    """Its samples, and two indexes; other formats have one block a file."""
    assert WORKLOAD.writes() == 16
    assert dataclasses.replace(WORKLOAD, format="indexed_binary").writes() == 3 * 16


def test_readers_that_keep_indexes_read_no_fewer_blocks_of_other_formats() -> None:
    """Only an indexed format has blocks that are read once for all epochs."""
    assert WORKLOAD.least_reads(1) == WORKLOAD.reads(1) == 16


def test_evaluations_come_when_they_are_due() -> None:
    """From the first epoch named, then every so many; each reads the validation files."""
    evaluated = dataclasses.replace(
        WORKLOAD,
        epochs=7,
        evaluate=True,
        eval_files=4,
        eval_after_epoch=2,
        epochs_between_evals=3,
    )

    assert list(evaluated.evaluated_epochs()) == [2, 5]
    assert evaluated.reads(0) == 7 * 8 + 2 * 2


@pytest.mark.parametrize(
    ("rule", "times"),
    [
        (Checkpoints(epochs=5, steps_per_epoch=9, after_epoch=5, epochs_between=2), 1),
        (Checkpoints(epochs=5, steps_per_epoch=9, after_epoch=1, epochs_between=2), 3),
        (Checkpoints(epochs=5, steps_per_epoch=9, after_epoch=6), 0),
        (Checkpoints(epochs=2, steps_per_epoch=9, steps_between=4), 4),
        (Checkpoints(epochs=2, steps_per_epoch=9, steps_between=0), 0),
        (Checkpoints(epochs=0, steps_per_epoch=9), 0),
    ],
)
def test_checkpoints_are_counted_as_dlio_takes_them(rule: Checkpoints, times: int) -> None:
    """By epochs, or by steps within each epoch."""
    assert rule.writes() == times
    assert dataclasses.replace(rule, files_each=3).writes() == 3 * times
