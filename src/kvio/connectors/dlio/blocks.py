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
from kvio.connectors.dlio.settings import Settings, configured
from kvio.errors import BlockSizeError, ConfigError
from kvio.types import KiB

_SMALLEST: Final = 64 * KiB
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
    run = settings()
    return _store(run.data, tuple(sorted(run.options.items())))


def checkpoint_store() -> kvio.Store:
    """Return the store of the checkpoints."""
    run = settings()
    return data_store() if run.checkpoint is None else _store(run.checkpoint, ())


def _store(url: str, options: tuple[tuple[str, Any], ...]) -> kvio.Store:
    with _opening:
        return _open(url, options)


@functools.cache
def _open(url: str, options: tuple[tuple[str, Any], ...]) -> kvio.Store:
    given: Mapping[str, Any] = dict(options)
    store = kvio.open_store(url, layout="plain", options=given)
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
