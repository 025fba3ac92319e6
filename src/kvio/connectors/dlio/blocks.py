"""Open the stores of a run, and read and write its blocks while counting them."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import kvio
from kvio.connectors.dlio import counts
from kvio.connectors.dlio.settings import VARIABLE, Settings, configured
from kvio.errors import BlockSizeError, ConfigError
from kvio.filesystem.permissions import umask
from kvio.types import KiB
from kvio.url import locate

_SMALLEST: Final = 64 * KiB
_FILES: Final = frozenset({"posix-tmpfile", "posix-direct", "hybrid"})
_opening = threading.Lock()


def settings() -> Settings:
    """Return the settings of this run.

    Raises:
        ConfigError: no store is configured.
    """
    found = configured()
    if found is None:
        raise ConfigError(
            "DLIO on kvio: no store is configured; add +kvio=BACKEND kvio.root=DIRECTORY to the "
            "command, or set KVIO_DLIO to a store's URL"
        )
    return found


def data_store() -> kvio.Store:
    """Return the store of the samples, opened once per process."""
    return _data_store(os.environ.get(VARIABLE, ""))


def samples_are_files() -> bool:
    """Return whether a sample is a file below the root of its store."""
    return locate(settings().data).scheme in _FILES


def checkpoint_store() -> kvio.Store:
    """Return the store of the checkpoints."""
    return _checkpoint_store(os.environ.get(VARIABLE, ""))


@functools.cache  # by the variable that holds the settings: a store is asked for at every sample
def _data_store(_text: str) -> kvio.Store:
    run = settings()
    return _store(run.data, {**run.options, **_permissions(run, run.data)})


@functools.cache
def _checkpoint_store(_text: str) -> kvio.Store:
    run = settings()
    if run.checkpoint is None:
        return data_store()
    return _store(run.checkpoint, _permissions(run, run.checkpoint))


def _permissions(run: Settings, url: str) -> dict[str, Any]:
    """Return the options of a store for the permissions of files, by default those of the umask.

    A store of blocks is private by default, but a dataset is for other programs and users too.
    """
    named = {
        "file_mode": run.file_mode,
        "dir_mode": run.dir_mode,
        "group": run.group,
    }
    given = {name: str(value) for name, value in named.items() if value is not None}
    parsed = locate(url)
    if parsed.host or parsed.scheme not in _FILES:
        return given  # which the backend refuses
    mask = umask()
    left = {"file_mode": f"{0o600 | 0o666 & ~mask:o}", "dir_mode": f"{0o700 | 0o777 & ~mask:o}"}
    named_elsewhere = {*parsed.options, *(run.options if url == run.data else ())}
    return {name: value for name, value in left.items() if name not in named_elsewhere} | given


def _store(url: str, options: Mapping[str, Any]) -> kvio.Store:
    with _opening:
        return _open(url, tuple(sorted(options.items())))


@functools.cache
def _open(url: str, options: tuple[tuple[str, Any], ...]) -> kvio.Store:
    given, parsed = dict(options), locate(url)
    if "layout" not in parsed.options:
        given.setdefault("layout", "plain")
    plain = given.get("layout", parsed.options.get("layout")) == "plain"
    if plain and parsed.scheme in _FILES and "checksum" not in parsed.options:
        given.setdefault("checksum", "none")  # there is no place for one in a plain file
    store = kvio.open_store(url, options=given)
    atexit.register(store.close)
    return store


def _after_fork() -> None:
    global _opening  # another thread may have held it at the fork
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def write_sample(key: str, data: Any) -> None:
    """Store a sample; replace an existing one, like a file."""
    store, begun_ns = data_store(), time.time_ns()
    receipt = store.write_block(key, data, if_exists="replace")
    counts.add("writes", receipt.nbytes, begun_ns=begun_ns)


def move_sample(key: str, path: str) -> None:
    """Store a file as a sample, without a copy where the store can; the path is free afterwards."""
    store, begun_ns = data_store(), time.time_ns()
    receipt = store.write_file(key, path, move=True, if_exists="replace")
    counts.add("writes", receipt.nbytes, begun_ns=begun_ns)


def read_sample(key: str, *, offset: int = 0, nbytes: int | None = None) -> memoryview:
    """Read a sample, or a range of it."""
    store, begun_ns = data_store(), time.time_ns()
    block = store.read_block(key, offset=offset, nbytes=nbytes)
    counts.add("reads", len(block), begun_ns=begun_ns)
    return block


class Rereader:
    """Reads samples into one buffer that it reuses, since a new buffer costs as much as a read.

    Each `read` overwrites the result of the one before. Not thread-safe.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def read(self, key: str) -> memoryview:
        """Read a whole sample."""
        store, begun_ns = data_store(), time.time_ns()
        while True:
            try:
                got = store.read_block_into(key, self._memory) if len(self._memory) else None
            except BlockSizeError:
                got = None
            if got is not None:
                counts.add("reads", got, begun_ns=begun_ns)
                return self._memory[:got]
            nbytes = store.stat_block(key).nbytes
            self._memory = kvio.aligned_buffer(max(_SMALLEST, nbytes + nbytes // 8))


def write_checkpoint(key: str, data: Any) -> None:
    """Store one file of a checkpoint with the durability of its store."""
    store, begun_ns = checkpoint_store(), time.time_ns()
    receipt = store.write_block(key, data, if_exists="replace")
    counts.add("checkpoint_writes", receipt.nbytes, begun_ns=begun_ns)


def read_checkpoint(key: str) -> memoryview:
    """Read one file of a checkpoint."""
    store, begun_ns = checkpoint_store(), time.time_ns()
    block = store.read_block(key)
    counts.add("checkpoint_reads", len(block), begun_ns=begun_ns)
    return block
