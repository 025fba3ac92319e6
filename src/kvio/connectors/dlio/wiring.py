"""Install kvio into DLIO by wrapping two factories and the benchmark; only this file patches DLIO.

DLIO's ``StorageFactory.get_storage`` has no extension point and raises an error for
``storage_type: parallel_fs``, and some generators open paths themselves.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.common.enumerations import StorageType
from dlio_benchmark.data_generator.generator_factory import GeneratorFactory
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.reader_factory import ReaderFactory
from dlio_benchmark.reader.reader_handler import FormatReader
from dlio_benchmark.storage.storage_factory import StorageFactory
from dlio_benchmark.utils.config import ConfigArguments

from kvio.connectors.dlio import interfaces
from kvio.connectors.dlio.benchmark import watched
from kvio.connectors.dlio.checkpoints import NumpyCheckpointing
from kvio.connectors.dlio.generation import StagedGenerator
from kvio.connectors.dlio.loader import KvioLoader
from kvio.connectors.dlio.readers import KvioReader
from kvio.connectors.dlio.storage import KvioStorage
from kvio.errors import UnsupportedError

_BENCHMARK: Final = "DLIOBenchmark"
_installed = False


def install() -> None:
    """Install kvio into DLIO, once per process.

    Raises:
        UnsupportedError: this DLIO lacks an interface that kvio needs.
    """
    global _installed
    if _installed:
        return
    _check_interfaces()
    programs = _programs()
    _wrap_storage()
    _wrap_generators()
    for program in programs:
        setattr(program, _BENCHMARK, watched(getattr(program, _BENCHMARK)))
    _installed = True


def _check_interfaces() -> None:
    if not hasattr(StorageType, "PARALLEL_FS"):
        raise UnsupportedError(
            "kvio does not know this DLIO: it lacks the storage type parallel_fs"
        )
    for name, found in {
        "StorageFactory.get_storage": StorageFactory.get_storage,
        "GeneratorFactory.get_generator": GeneratorFactory.get_generator,
        "ReaderFactory.get_reader": ReaderFactory.get_reader,
        "BaseDataLoader": BaseDataLoader,
        "FormatReader": FormatReader,
        "BaseCheckpointing": BaseCheckpointing,
    }.items():
        interfaces.check_parameters(name, found)
    for kind in (KvioStorage, KvioLoader, KvioReader, NumpyCheckpointing):
        interfaces.check_implemented(kind)
    interfaces.check_options(ConfigArguments)


def _programs() -> list[ModuleType]:
    """Return the modules of the running command: that of ``dlio_benchmark`` or ``__main__``."""
    loaded = [sys.modules.get(name) for name in ("dlio_benchmark.main", "__main__")]
    found = [module for module in loaded if module is not None and hasattr(module, _BENCHMARK)]
    if not found:
        raise UnsupportedError("DLIOBenchmark is not running: start DLIO with dlio_benchmark")
    return found


def _wrap_storage() -> None:
    original = StorageFactory.get_storage

    def get_storage(storage_type: Any, namespace: str, framework: object = None) -> Any:
        if storage_type == StorageType.PARALLEL_FS:
            return KvioStorage(namespace, framework)
        return original(storage_type, namespace, framework)

    StorageFactory.get_storage = staticmethod(get_storage)


def _wrap_generators() -> None:
    original = GeneratorFactory.get_generator

    def get_generator(type: Any) -> Any:  # noqa: A002  # DLIO's name
        generator = original(type)
        if not isinstance(generator.storage, KvioStorage):
            return generator
        if str(type) == "tfrecord":
            _disable_tfrecord_index(generator)
        return StagedGenerator(generator)

    GeneratorFactory.get_generator = staticmethod(get_generator)


def _disable_tfrecord_index(generator: Any) -> None:
    """Keep the generator from making DALI's index of a staged file.

    Only DALI reads it. Some releases run DALI's program, which is missing without DALI, others
    write the index with TensorFlow.
    """
    module = sys.modules[generator.__class__.__module__]
    if hasattr(module, "call"):
        module.call = _do_nothing  # type: ignore[attr-defined]  # was `subprocess.call`
    if hasattr(generator, "create_index_file"):
        generator.create_index_file = _do_nothing


def _do_nothing(*_: object) -> int:
    """Return the exit status of success."""
    return 0
