"""What DLIO is told: a workload in its own words, the same for every contender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvio import KiB
from kvio.experiments.dlio.order import Case, Load, has_torch

#: Where samples and checkpoints are, below a directory or a prefix.
DATA: Final = "data"
CHECKPOINTS: Final = "checkpoints"
_KVIO: Final = "kvio.connectors.dlio"
_LAYERS: Final = 8
#: Of a checkpoint, in parts of one size: a model of two, an optimizer of three, and the layers.
_PARTS: Final = 2 + 3 + _LAYERS


def of_case(case: Case, load: Load) -> list[str]:
    """Give the options that say what is generated, read and saved."""
    workload = case.workload
    part = load.max_bytes // load.epochs // case.ranks // _PARTS
    saved = part if workload.saves else 0
    return [
        "workload=unet3d_a100",
        *_set(
            {
                "model": workload.name,
                "dataset.format": workload.format,
                "dataset.num_files_train": case.files(load),
                "dataset.num_samples_per_file": 1,
                "dataset.record_length": workload.record_nbytes,
                "dataset.record_length_stdev": 0,
                # What DLIO hands to the training in the place of every sample.
                "dataset.record_length_resize": 64 * KiB,
                "reader.batch_size": workload.batch,
                "reader.read_threads": load.read_threads,
                "train.epochs": load.epochs,
                "train.computation_time": load.compute_s,
                "checkpoint.type": "all_ranks",
                "checkpoint.checkpoint_after_epoch": 1,
                "checkpoint.epochs_between_checkpoints": 1,
                "checkpoint.model_size": 2 * saved,
                "checkpoint.optimization_groups": f"[{saved}]" if saved else "[]",
                "checkpoint.num_layers": _LAYERS,
                "checkpoint.layer_parameters": f"[{saved}]",
            }
        ),
    ]


def of_phase(*, generate: bool, train: bool, save: bool = False) -> list[str]:
    """Give the options that say what a run does."""
    return _set(
        {
            "workflow.generate_data": generate,
            "workflow.train": train,
            "workflow.checkpoint": save,
        }
    )


def of_stock(root: str, *, own_loader: bool) -> list[str]:
    """Give the options of DLIO's own storage in a directory."""
    given = {
        "dataset.data_folder": quoted(f"{root}/{DATA}"),
        "checkpoint.checkpoint_folder": quoted(f"{root}/{CHECKPOINTS}"),
    }
    if not own_loader:
        given["reader.data_loader_classname"] = f"{_KVIO}.loader.KvioLoader"
        given["reader.data_loader_sampler"] = "iterative"
    if not has_torch():
        given["checkpoint.checkpoint_mechanism_classname"] = (
            "kvio.experiments.dlio.plain.PlainCheckpointing"
        )
    return _set(given)


def of_kvio(backend: str, root: str, store: Mapping[str, str], *, own_loader: bool) -> list[str]:
    """Give the options of kvio's storage: a directory, or a bucket with a prefix."""
    given = {"dataset.data_folder": DATA, "checkpoint.checkpoint_folder": CHECKPOINTS}
    if own_loader:
        given["reader.data_loader_classname"] = "null"
    return [
        f"+kvio={backend}",
        f"kvio.root={quoted(root)}",
        *(f"+kvio.options.{name}={quoted(value)}" for name, value in store.items()),
        *_set(given),
    ]


def quoted(text: str) -> str:
    """Quote a value for Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _set(given: Mapping[str, object]) -> list[str]:
    return [f"++workload.{name}={value}" for name, value in given.items()]
