"""The end of a run: a block too few or too many, on any rank, fails it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from .running import needs_dlio

pytestmark = needs_dlio

#: Two ranks, 8 files, 2 epochs, and 2 checkpoints of 2 files by rank 0.
_RUN = {
    "comm_size": 2,
    "num_files_train": 8,
    "num_files_eval": 0,
    "num_samples_per_file": 1,
    "batch_size": 1,
    "batch_size_eval": 1,
    "epochs": 2,
    "format": "npz",
    "seed": 1,
    "generate_data": True,
    "generate_only": False,
    "do_eval": False,
    "do_checkpoint": True,
    "total_training_steps": -1,
    "eval_after_epoch": 1,
    "epochs_between_evals": 1,
    "sample_shuffle": "seed",
    "seed_change_epoch": True,
    "checkpoint_type": "rank_zero",
    "checkpoint_after_epoch": 1,
    "epochs_between_checkpoints": 1,
    "steps_between_checkpoints": -1,
    "model_size": 1,
    "optimization_groups": [],
    "layer_parameters": [1],
    "num_layers": 1,
    "tensor_parallelism": 1,
    "pipeline_parallelism": 1,
}


def _check(*ranks: Sequence[int], kvios_loader: bool = True) -> None:
    from kvio.connectors.dlio import benchmark, counts, plan
    from kvio.connectors.dlio.checkpoints import NumpyCheckpointing
    from kvio.connectors.dlio.loader import KvioLoader

    classes: dict[str, Any] = {
        "data_loader_class": KvioLoader if kvios_loader else None,
        "checkpoint_mechanism_class": NumpyCheckpointing,
    }
    found = [
        counts.Counts(
            writes=counts.Moved(writes),
            reads=counts.Moved(reads),
            checkpoint_writes=counts.Moved(saved),
        )
        for writes, reads, saved in ranks
    ]
    args = [SimpleNamespace(**_RUN, **classes, my_rank=rank) for rank in range(2)]
    workload = plan.workload_of(args[0])
    benchmark.check_counts(
        args[0],
        found,
        generated=plan.generated_files(args[0]),
        checkpoints=[plan.checkpoints_of(one, workload, object()) for one in args],
    )


def test_what_was_planned_passes() -> None:
    """However the writes were shared."""
    _check((4, 8, 4), (4, 8, 0))
    _check((8, 8, 4), (0, 8, 0))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(4, 8, 4), (3, 8, 0)], "7 samples were written of 8"),
        ([(4, 8, 4), (5, 8, 0)], "9 samples were written of 8"),
        ([(4, 8, 4), (4, 7, 0)], "rank 1 read 7 samples of 8"),
        ([(4, 9, 4), (4, 8, 0)], "rank 0 read 9 samples of 8"),
        ([(4, 0, 4), (4, 0, 0)], "rank 0 read 0 samples of 8; rank 1 read 0 samples of 8"),
        ([(4, 8, 3), (4, 8, 0)], "rank 0 wrote 3 checkpoint files of 4"),
        ([(4, 8, 4), (4, 8, 1)], "rank 1 wrote 1 checkpoint files of 0"),
    ],
)
def test_a_difference_fails_with_the_rank_and_the_numbers(
    ranks: Sequence[Sequence[int]], said: str
) -> None:
    """One block is enough."""
    from kvio.connectors.dlio.settings import PlanError

    with pytest.raises(PlanError, match=said):
        _check(*ranks)


def test_dlios_loader_may_read_ahead_but_not_less() -> None:
    """Its workers fetch samples that no step takes."""
    from kvio.connectors.dlio.settings import PlanError

    _check((4, 11, 4), (4, 8, 0), kvios_loader=False)
    with pytest.raises(PlanError, match="rank 1 read 7"):
        _check((4, 11, 4), (4, 7, 0), kvios_loader=False)
