"""Install kvio into DLIO by wrapping two factories and the benchmark; only this file patches DLIO.

DLIO's ``StorageFactory.get_storage`` has no extension point and raises an error for
``storage_type: parallel_fs``, and the generators of 2.0.0 open paths themselves.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any, Final

from dlio_benchmark.common.enumerations import StorageType
from dlio_benchmark.data_generator.generator_factory import GeneratorFactory
from dlio_benchmark.storage.storage_factory import StorageFactory
from dlio_benchmark.utils.config import ConfigArguments

from kvio.connectors.dlio.benchmark import watched
from kvio.connectors.dlio.generation import StagedGenerator
from kvio.connectors.dlio.storage import KvioStorage
from kvio.connectors.dlio.versions import Release, check_signature, identify
from kvio.errors import UnsupportedError

_BENCHMARK: Final = "DLIOBenchmark"
_installed = False


def install() -> None:
    """Install kvio into DLIO, once per process.

    Raises:
        UnsupportedError: this version of DLIO is unknown.
    """
    global _installed
    if _installed:
        return
    release = identify(importlib.metadata.version("dlio_benchmark"), ConfigArguments)
    if not hasattr(StorageType, "PARALLEL_FS"):
        raise UnsupportedError("this DLIO has no storage type parallel_fs, which kvio implements")
    check_signature("get_storage", StorageFactory.get_storage)
    check_signature("get_generator", GeneratorFactory.get_generator)
    programs = _programs()
    _wrap_storage()
    _wrap_generators(release)
    for program in programs:
        setattr(program, _BENCHMARK, watched(getattr(program, _BENCHMARK), release))
    _installed = True


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


def _wrap_generators(release: Release) -> None:
    original = GeneratorFactory.get_generator

    def get_generator(type: Any) -> Any:  # noqa: A002  # DLIO's name
        generator = original(type)
        if not isinstance(generator.storage, KvioStorage) or str(type) in release.put_data_formats:
            return generator
        if str(type) == "tfrecord":
            _disable_tfrecord_index(sys.modules[generator.__class__.__module__])
        return StagedGenerator(generator)

    GeneratorFactory.get_generator = staticmethod(get_generator)


def _disable_tfrecord_index(module: ModuleType) -> None:
    """Keep the generator from running DALI's tfrecord2idx on a staged path.

    Only DALI reads its output, and without DALI the program is missing.
    """
    if hasattr(module, "call"):
        module.call = _no_program  # type: ignore[attr-defined]  # was `subprocess.call`


def _no_program(command: object) -> int:
    """Return the exit status of success."""
    del command
    return 0
