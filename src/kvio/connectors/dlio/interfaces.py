"""Check that the installed DLIO has the interfaces that kvio wraps, implements and reads.

Releases are told by what they have, because their version numbers do not tell them: the release on
PyPI and argonne-lcf's main branch are both 2.0.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvio.errors import UnsupportedError

#: The parameters of what kvio wraps or derives from, by the name in messages.
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "StorageFactory.get_storage": ("storage_type", "namespace", "framework"),
    "GeneratorFactory.get_generator": ("type",),
    "ReaderFactory.get_reader": ("type", "dataset_type", "thread_index", "epoch_number"),
    "BaseDataLoader": ("format_type", "dataset_type", "epoch_number", "data_loader_type"),
    "FormatReader": ("dataset_type", "thread_index"),
    "BaseCheckpointing": ("ext",),
}
#: The options of a run that kvio reads; ``comm_size`` and ``my_rank`` come with the first instance.
OPTIONS: Final = frozenset(
    {
        *("batch_size", "batch_size_eval", "checkpoint_after_epoch", "checkpoint_folder"),
        *("checkpoint_mechanism_class", "checkpoint_type", "data_loader_class"),
        *(
            "data_loader_sampler",
            "do_checkpoint",
            "do_eval",
            "epochs",
            "epochs_between_checkpoints",
        ),
        *("epochs_between_evals", "eval_after_epoch", "file_list_eval", "file_list_train"),
        *("format", "generate_data", "generate_only", "layer_parameters", "model_size"),
        *("num_files_eval", "num_files_train", "num_layers", "num_samples_per_file"),
        *("optimization_groups", "pipeline_parallelism", "prefetch_size", "read_threads"),
        *("read_type", "reader_class", "sample_shuffle", "seed", "seed_change_epoch"),
        *("steps_between_checkpoints", "storage_root", "tensor_parallelism"),
        "total_training_steps",
    }
)
#: Modules of DLIO's readers by format, where a reader may count bytes instead of decoding.
_READERS: Final[Mapping[str, str]] = {
    "npz": "npz_reader",
    "npy": "npy_reader",
    "jpeg": "image_reader",
    "png": "image_reader",
    "hdf5": "hdf5_reader",
    "csv": "csv_reader",
}
_COUNTS_BYTES: Final = "_LocalFSIterableMixin"


def check_parameters(name: str, found: Callable[..., Any]) -> None:
    """Refuse a function or class of DLIO whose parameters are not the expected ones.

    Raises:
        UnsupportedError: they differ.
    """
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != _PARAMETERS[name]:
        raise UnsupportedError(
            f"kvio does not know this DLIO: {name} takes ({', '.join(parameters)}), "
            f"not ({', '.join(_PARAMETERS[name])})"
        )


def check_implemented(kind: type[Any]) -> None:
    """Refuse a DLIO that asks a class of kvio for methods which it does not have.

    Raises:
        UnsupportedError: with the names of the methods.
    """
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        base = kind.__mro__[1].__name__
        raise UnsupportedError(f"kvio does not know this DLIO: {base} needs {', '.join(missing)}")


def check_options(options: type[Any]) -> None:
    """Refuse a DLIO without the options that kvio reads; *options*: its ``ConfigArguments``.

    Raises:
        UnsupportedError: with the names of the options.
    """
    missing = sorted(OPTIONS.difference(dir(options), options.__dataclass_fields__))
    if missing:
        raise UnsupportedError(
            f"kvio does not know this DLIO: it has no option {', '.join(missing)}"
        )


def decodes(format_name: str) -> bool:
    """Return whether DLIO's own reader of a format decodes samples, or only counts their bytes.

    The readers of mlcommons/DLIO_local_changes count bytes, and its .jpeg files are no images.
    """
    if format_name not in _READERS:
        return True
    module = importlib.import_module(f"dlio_benchmark.reader.{_READERS[format_name]}")
    return not hasattr(module, _COUNTS_BYTES)
