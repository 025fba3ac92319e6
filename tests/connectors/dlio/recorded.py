"""The interfaces of DLIO's later versions, as they were read, made as modules in a directory.

Only what kvio touches: argonne-lcf/dlio_benchmark e1919d7 and mlcommons/DLIO_local_changes f6796ed
(storage_handler.py, storage_factory.py, generator_factory.py, config.py, main.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

_ENUMERATIONS: Final = """
from enum import Enum

class StorageType(Enum):
    LOCAL_FS = 'local_fs'
    PARALLEL_FS = 'parallel_fs'
    S3 = 's3'
    AISTORE = 'aistore'

class MetadataType(Enum):
    FILE = 'file'
    DIRECTORY = 'directory'

class NamespaceType(Enum):
    FLAT = 'flat'

class FormatType(Enum):
    NPZ = 'npz'
    INDEXED_BINARY = 'indexed_binary'

    def __str__(self):
        return self.value

class DatasetType(Enum):
    TRAIN = 'train'

class DataLoaderType(Enum):
    PYTORCH = 'pytorch'
"""
_HANDLER: Final = """
from abc import ABC, abstractmethod

class Namespace:
    def __init__(self, name, type):
        self.name, self.type = name, type

class DataStorage(ABC):
    def __init__(self, framework=None):
        self.framework = framework

    @abstractmethod
    def get_uri(self, id): ...
    @abstractmethod
    def create_namespace(self, exist_ok=False): ...
    @abstractmethod
    def get_namespace(self): ...
    @abstractmethod
    def create_node(self, id, exist_ok=False): ...
    @abstractmethod
    def get_node(self, id): ...
    @abstractmethod
    def walk_node(self, id, use_pattern=False): ...
    @abstractmethod
    def delete_node(self, id): ...
    def put_data(self, id, data, offset=None, length=None): ...
    def get_data(self, id, data, offset=None, length=None): ...
    def isfile(self, id): ...
    def islocalfs(self):
        return False
"""
_FACTORY: Final = """
from dlio_benchmark.common.enumerations import StorageType

class StorageFactory:
    @staticmethod
    def get_storage(storage_type, namespace, framework=None):
        if storage_type == StorageType.LOCAL_FS:
            return 'stock'
        raise Exception('EC1001')
"""
_GENERATORS: Final = """
import io
from types import SimpleNamespace
from dlio_benchmark.common.enumerations import FormatType, StorageType
from dlio_benchmark.storage.storage_factory import StorageFactory

class Generator:
    num_files_train, num_files_eval, comm_size = 2, 0, 1

    def __init__(self, type):
        self.format = type
        self._args = SimpleNamespace(storage_root='root')
        self.storage = StorageFactory().get_storage(StorageType.PARALLEL_FS, 'root', None)

    def generate(self):
        for name in ('data/a', 'data/b'):
            if self.format is FormatType.NPZ:
                assert not self.storage.islocalfs()
                self.storage.put_data(name, io.BytesIO(name.encode()))
            else:
                with open(self.storage.get_uri(name), 'wb') as file:
                    file.write(name.encode())

class GeneratorFactory:
    @staticmethod
    def get_generator(type):
        return Generator(type)
"""
_ABSTRACT: Final = """
from abc import ABC

class {name}(ABC):
    def __init__(self, *arguments):
        pass
"""
_CONFIG: Final = """
class ConfigArguments:
    record_length_bytes = 65536
    storage_options = None
    {more}
"""
_UTILITY: Final = """
class DLIOMPI:
    @staticmethod
    def get_instance():
        return DLIOMPI()
    def rank(self):
        return 0
    def size(self):
        return 1
"""
_MAIN: Final = """
class DLIOBenchmark:
    pass
"""
_READERS: Final = """
class ReaderFactory:
    @staticmethod
    def get_reader(type, dataset_type, thread_index, epoch_number): ...
"""


def record(directory: Path, *, version: str, fork: bool) -> None:
    """Write the modules of a version, and its distribution's metadata."""
    modules = {
        "common/enumerations": _ENUMERATIONS,
        "storage/storage_handler": _HANDLER,
        "storage/storage_factory": _FACTORY,
        "data_generator/generator_factory": _GENERATORS,
        "data_loader/base_data_loader": _ABSTRACT.format(name="BaseDataLoader"),
        "checkpointing/base_checkpointing": _ABSTRACT.format(name="BaseCheckpointing"),
        "reader/reader_handler": _ABSTRACT.format(name="FormatReader"),
        "reader/reader_factory": _READERS,
        "utils/config": _CONFIG.format(more="storage_library = None" if fork else ""),
        "utils/utility": _UTILITY,
        "main": _MAIN,
    }
    for name, text in modules.items():
        path = directory / "dlio_benchmark" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in {path.parent, directory / "dlio_benchmark"}:
            (package / "__init__.py").touch()  # or a DLIO that is installed would come first
        path.write_text(text)
    omegaconf = directory / "omegaconf.py"
    omegaconf.write_text("OmegaConf = None\n")  # imported, and not needed for what is tested here
    metadata = directory / f"dlio_benchmark-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: dlio_benchmark\nVersion: {version}\n"
    )


def run_on(directory: Path, store: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where the recorded modules are DLIO, wired to a store."""
    start = """
        import io, kvio, dlio_benchmark.main
        from dlio_benchmark.common.enumerations import FormatType, MetadataType, StorageType
        from dlio_benchmark.data_generator.generator_factory import GeneratorFactory
        from dlio_benchmark.storage.storage_factory import StorageFactory
        from kvio.connectors.dlio import counts
        from kvio.connectors.dlio.wiring import install
        install()
        storage = StorageFactory().get_storage(StorageType.PARALLEL_FS, 'root', None)
    """
    paths = [str(directory), *(path for path in sys.path if path)]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    given |= {"KVIO_DLIO": f"posix-tmpfile://{store}"}
    command = [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)
