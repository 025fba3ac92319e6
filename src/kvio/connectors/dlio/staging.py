"""Generators that write files themselves write them to a directory; from there they are blocks."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Any, Final

from kvio.connectors.dlio import blocks, scratch
from kvio.connectors.dlio.names import key_of
from kvio.connectors.dlio.storage import KvioStorage
from kvio.errors import ConfigError, KvioError, StorageError, UnsupportedError

#: Where nothing is asked for: files stored at a time, and how long one must take for that. Waking a
#: thread and waiting for the interpreter take about a millisecond of a small file.
_THREADS: Final = 2
_WORTH_A_THREAD_S: Final = 2e-3


class StagingStorage(KvioStorage):
    """Names a file to write where a key is asked for, and stores it when the next one is.

    A generator asks for a name when it is done with the file before, and makes the next file while
    as many as `Settings.write_threads` are stored, unless storing one is too short to be shared.
    """

    def __init__(self, namespace: str, framework: object = None) -> None:
        super().__init__(namespace, framework)
        settings = blocks.settings()
        parent = settings.staging_parent()
        try:
            self._directory = scratch.make("staging", parent=parent)
        except OSError as exc:
            raise ConfigError(f"no staging directory can be made in {parent!r}: {exc}") from exc
        self.generating = ""
        self._folder = self._directory
        self._folders = {self._directory}
        self._storing: deque[Future[float]] = deque()
        self._at_a_time = settings.write_threads or _THREADS
        self._chooses = settings.write_threads is None
        self._took_s = _WORTH_A_THREAD_S
        self._pool = ThreadPoolExecutor(self._at_a_time, thread_name_prefix="kvio-dlio-staging")

    def get_uri(self, id: object) -> str:  # noqa: A002  # DLIO's name
        """Begin to store what is staged, and give the path of a file to write."""
        self._store_all(self._folder, sorted(os.listdir(self._folder)))
        self._wait(under_way=self._at_a_time)
        self.generating = key_of(id)
        path = os.path.join(self._directory, self.generating)
        self._folder = os.path.dirname(path)
        if self._folder not in self._folders:
            os.makedirs(self._folder, exist_ok=True)
            self._folders.add(self._folder)
        return path

    def islocalfs(self) -> bool:
        """Say that names are paths to open."""
        return True

    def commit(self) -> None:
        """Store every staged file under its key, and remove it.

        Raises:
            StorageError: with the name of the first block that could not be stored.
        """
        for folder, _, names in os.walk(self._directory):
            self._store_all(folder, sorted(names))
        self._wait(under_way=0)

    def discard(self) -> None:
        """Remove the directory and whatever it holds."""
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _store_all(self, folder: str, names: Sequence[str]) -> None:
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                continue
            held = open(path, "rb", buffering=0)  # noqa: SIM115  # `_store` closes it
            os.unlink(path)
            key = path.removeprefix(f"{self._directory}/")
            if self._chooses and self._took_s < _WORTH_A_THREAD_S:
                self._took_s = _store(held, key)
            else:
                self._storing.append(self._pool.submit(_store, held, key))

    def _wait(self, *, under_way: int) -> None:
        while len(self._storing) > under_way:
            self._took_s = self._storing.popleft().result()


def _store(file: FileIO, key: str) -> float:
    """Store a file, and tell how long that took."""
    begun = time.perf_counter()
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            blocks.write_sample(key, b"")
            return time.perf_counter() - begun
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            blocks.write_sample(key, memory)
        finally:
            with contextlib.suppress(BufferError):  # the traceback of an error still looks at it
                memory.close()
    return time.perf_counter() - begun


class StagedGenerator:
    """A generator of DLIO's that writes to a staging directory."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def generate(self) -> None:
        """Generate, and store every file; a failure leaves none of it staged.

        Raises:
            UnsupportedError: all ranks would write one file together.
            StorageError: with the name of the block that could not be staged or stored.
        """
        _refuse_shared_files(self._generator)
        args = self._generator._args  # noqa: SLF001  # DLIO's own way to its options
        storage = StagingStorage(args.storage_root)
        self._generator.storage = storage
        try:
            self._generator.generate()
            storage.commit()
        except OSError as exc:
            if isinstance(exc, KvioError):
                raise
            raise StorageError(
                f"block {storage.generating!r} could not be staged: {exc}", key=storage.generating
            ) from exc
        finally:
            storage.discard()


def _refuse_shared_files(generator: Any) -> None:
    files = generator.num_files_train + max(0, generator.num_files_eval)
    if "indexed_binary" in str(generator.format) and files <= generator.comm_size:
        raise UnsupportedError(
            f"DLIO writes {files} indexed_binary files by MPI-IO, all of {generator.comm_size} "
            "ranks one file: kvio stores whole files; ask for more files than ranks"
        )
