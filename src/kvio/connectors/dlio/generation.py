"""Store what DLIO's generators make: data that they hand over, and files that they write.

Some generators open the path that the storage names, others hand over bytes, and which do depends
on the release of DLIO. Both work here: the path is below a staging directory.
"""

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

from kvio.connectors.dlio import blocks, counts
from kvio.connectors.dlio.settings import key_of
from kvio.connectors.dlio.storage import KvioStorage
from kvio.errors import ConfigError, KvioError, StorageError, UnsupportedError

#: Defaults without write_threads: the number of threads, and the time to store a file from which
#: they are used. Waking a thread and waiting for the GIL take about a millisecond.
_THREADS: Final = 2
_MIN_THREADED_S: Final = 2e-3


class StagingStorage(KvioStorage):
    """Returns a path to write for each key, and stores the file when the next path is requested.

    A generator that writes files requests a path after it has written the file before. In a store
    of files the path is on its file system, and the file itself becomes the block. Elsewhere, and
    with `Settings.staging_dir`, files are copied: while a generator writes the next file, up to
    `Settings.write_threads` files are stored in the background, unless storing is fast. Data that
    a generator hands over with such a path is stored at once.
    """

    def __init__(self, namespace: str, framework: object = None) -> None:
        super().__init__(namespace, framework)
        settings = blocks.settings()
        self._made = contextlib.ExitStack()
        self._moves = settings.staging_dir is None and blocks.samples_are_files()
        if self._moves:
            scratch = self._made.enter_context(blocks.data_store().scratch_dir())
            self._directory = str(scratch)
        else:
            self._directory = _make_directory(settings.staging_parent())
            self._made.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self.generating = ""
        self._folder = self._directory
        self._folders = {self._directory}
        self._storing: deque[Future[float]] = deque()
        self._at_a_time = settings.write_threads or _THREADS
        self._chooses = settings.write_threads is None
        self._took_s = _MIN_THREADED_S
        self._pool = ThreadPoolExecutor(self._at_a_time, thread_name_prefix="kvio-dlio-staging")

    def get_uri(self, id: object) -> str:  # noqa: A002  # DLIO's name
        """Start storing the staged files, and return the path of a file to write."""
        self._store_all(self._folder, sorted(os.listdir(self._folder)))
        self._wait(under_way=self._at_a_time)
        self.generating = key_of(id)
        path = os.path.join(self._directory, self.generating)
        self._folder = os.path.dirname(path)
        if self._folder not in self._folders:
            os.makedirs(self._folder, exist_ok=True)
            self._folders.add(self._folder)
        return path

    def put_data(
        self,
        id: object,  # noqa: A002  # DLIO's name
        data: Any,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        """Store data under the key of a path from `get_uri`."""
        key = str(id).removeprefix(f"{self._directory}/")
        super().put_data(key, data, offset, length)

    def commit(self) -> None:
        """Store every staged file under its key, and remove it.

        Raises:
            StorageError: a block could not be stored; the error names it.
        """
        for folder, _, names in os.walk(self._directory):
            self._store_all(folder, sorted(names))
        self._wait(under_way=0)

    def discard(self) -> None:
        """Remove the directory and all files in it."""
        self._pool.shutdown(cancel_futures=True)
        self._made.close()

    def _store_all(self, folder: str, names: Sequence[str]) -> None:
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                continue
            key = path.removeprefix(f"{self._directory}/")
            if self._moves:
                blocks.move_sample(key, path)
                continue
            held = open(path, "rb", buffering=0)  # noqa: SIM115  # `_store` closes it
            os.unlink(path)
            if self._chooses and self._took_s < _MIN_THREADED_S:
                self._took_s = _store(held, key)
            else:
                self._storing.append(self._pool.submit(_store, held, key))

    def _wait(self, *, under_way: int) -> None:
        while len(self._storing) > under_way:
            self._took_s = self._storing.popleft().result()


def _make_directory(parent: str) -> str:
    try:
        return counts.make("staging", parent=parent)
    except OSError as exc:
        raise ConfigError(f"cannot create a staging directory in {parent!r}: {exc}") from exc


def _store(file: FileIO, key: str) -> float:
    """Store a file and return the seconds that this took."""
    begun = time.perf_counter()
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            blocks.write_sample(key, b"")
            return time.perf_counter() - begun
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            blocks.write_sample(key, memory)
        finally:
            with contextlib.suppress(BufferError):  # an error's traceback still refers to it
                memory.close()
    return time.perf_counter() - begun


class StagedGenerator:
    """Wraps a generator of DLIO: its files go to a staging directory, its data to blocks."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def generate(self) -> None:
        """Generate and store every file; remove staged files on failure.

        Raises:
            UnsupportedError: all ranks would write one file together.
            StorageError: a block could not be staged or stored; the error names it.
        """
        _refuse_shared_files(self._generator)
        args = self._generator._args  # noqa: SLF001  # DLIO has no public access to its options
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
            f"DLIO writes {files} indexed_binary files with MPI-IO, each by all "
            f"{generator.comm_size} ranks together, but kvio stores whole files: generate more "
            "files than ranks"
        )
