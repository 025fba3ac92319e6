"""The storage tier of the KV-cache benchmark, over a store or a staging tier."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

import kvio
from kvio.types import is_key

#: Entries lie below it in a store, which may have other blocks too.
PREFIX: Final = "kv-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The seconds one call took: in all, in the store, and in this process around it."""

    total: float
    device: float
    host: float


@dataclass(slots=True, kw_only=True)
class Counts:
    """What went through a backend. The program counts no failure, and goes on.

    Attributes:
        missing: reads of keys that were not there, or no longer.
        failed: reads, writes and deletions that the store could not do.
        first_failure: what the first of them said.
    """

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    deleted_blocks: int = 0
    missing: int = 0
    failed: int = 0
    first_failure: str = ""


@dataclass(frozen=True, slots=True)
class _Array:
    """How bytes were an array; None: they were none."""

    nbytes: int
    shape: tuple[int, ...] | None
    dtype: Any


class KvioBackend:
    """Entries of the KV-cache benchmark as blocks of a `kvio.BlockStore`.

    It has the methods of the program's ``StorageBackend``, and like its ``NVMeBackend`` empties
    its place when it is made, keeps shapes in memory, and reads cold.

    Args:
        store: where entries go; it stays the caller's to close.
        cold_reads: drop an entry from the page cache before each read.
        timing: the class of what calls return, as the program's ``IOTiming``.

    Attributes:
        counts: what went through it.
        metadata: by key, the ``shape``, ``dtype`` and ``size`` in bytes of every entry.
        base_path: the directory of a file-system store; other stores lack the attribute, and the
            program then takes their capacity for unlimited.
    """

    def __init__(
        self,
        store: kvio.BlockStore,
        *,
        cold_reads: bool = True,
        timing: Callable[..., Any] = Timing,
    ) -> None:
        self._store = store
        self._cold_reads = cold_reads
        self._timing = timing
        self._arrays: dict[str, _Array] = {}
        self._writing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.counts = Counts()
        if (root := _root_of(store)) is not None:
            self.base_path = root
        self.clear()

    @property
    def metadata(self) -> dict[str, dict[str, Any]]:
        """What an entry was, by its key."""
        return {
            key: {"shape": one.shape, "dtype": str(one.dtype), "size": one.nbytes}
            for key, one in self._arrays.copy().items()
        }

    @property
    def nbytes(self) -> int:
        """The sum of the sizes of all entries."""
        return sum(one.nbytes for one in self._arrays.copy().values())

    def write(self, key: str, data: Any) -> Any:
        """Store an array or a buffer as a block, with the durability of the store."""
        start = time.perf_counter()
        array = _describe(data)
        if array.shape is not None:
            data = np.ascontiguousarray(data)  # a copy only where the array has gaps
        with self._turn(key):  # or the shape of one write could stand with the bytes of another
            before = time.perf_counter()
            receipt = self._run(
                lambda: self._store.write_block(block_key(key), data, if_exists="replace")
            )
            after = time.perf_counter()
            self._arrays[key] = array
        with self._lock:
            self.counts.written_blocks += 1
            self.counts.written_bytes += array.nbytes
        in_memory = receipt.level is kvio.Level.ACCEPTED  # a tier copied it; no device was asked
        return self._timed(start, 0.0 if in_memory else after - before)

    def read(self, key: str) -> tuple[Any, Any]:
        """Return the array that was written, or a memoryview of its bytes if it was a buffer.

        The storage fills the memory that is returned: there is no copy. It may be written to.

        Raises:
            KeyError: there is no such entry.
            kvio.KvioError: it cannot be read.
        """
        start = time.perf_counter()
        name, array = block_key(key), self._arrays.get(key)
        if array is None:
            raise self._missing(key)
        if self._cold_reads:
            self._run(lambda: self._store.drop_cache([name]))
        out = kvio.aligned_buffer(array.nbytes)
        before = time.perf_counter()
        try:
            got = self._run(lambda: self._store.read_block_into(name, out))
        except kvio.BlockNotFoundError:
            raise self._missing(key) from None
        after = time.perf_counter()
        if got != array.nbytes:
            self._failed(f"entry {key!r} has {got} bytes of {array.nbytes}")
            raise kvio.BlockSizeError(f"entry {key!r} has {got} bytes of {array.nbytes}", key=name)
        with self._lock:
            self.counts.read_blocks += 1
            self.counts.read_bytes += got
        data: Any = out
        if array.shape is not None:
            data = np.frombuffer(out, np.uint8).view(array.dtype).reshape(array.shape)
        return data, self._timed(start, after - before)

    def delete(self, key: str) -> None:
        """Remove an entry; nothing happens if there is none."""
        self._arrays.pop(key, None)
        if self._run(lambda: self._store.delete_block(block_key(key))):
            with self._lock:
                self.counts.deleted_blocks += 1

    def clear(self) -> None:
        """Remove every entry, also those that an earlier run left in the store."""
        self._arrays.clear()
        for name in list(self._store.list_keys(f"{PREFIX}/")):
            self._store.delete_block(name)

    def _timed(self, start: float, device: float) -> Any:
        total = time.perf_counter() - start
        return self._timing(total=total, device=device, host=total - device)

    def _turn(self, key: str) -> threading.Lock:
        with self._lock:
            return self._writing.setdefault(key, threading.Lock())

    def _missing(self, key: str) -> KeyError:
        with self._lock:
            self.counts.missing += 1
        return KeyError(f"key {key} not found in kvio")

    def _run(self, call: Callable[[], Any]) -> Any:
        """Make a call of the store, and count it if it fails."""
        try:
            return call()
        except kvio.BlockNotFoundError:
            raise
        except (kvio.KvioError, TypeError) as exc:
            self._failed(f"{type(exc).__name__}: {exc}")
            raise

    def _failed(self, text: str) -> None:
        with self._lock:
            self.counts.failed += 1
            self.counts.first_failure = self.counts.first_failure or text


def block_key(key: str) -> str:
    """Return the key of the block of an entry, whatever characters the program's key has."""
    name = f"{PREFIX}/{key}"
    if is_key(name) and not key.startswith("hashed/"):
        return name
    return f"{PREFIX}/hashed/{hashlib.sha256(key.encode()).hexdigest()}"


def _describe(data: Any) -> _Array:
    if isinstance(data, np.ndarray):
        return _Array(data.nbytes, data.shape, data.dtype)
    return _Array(memoryview(data).nbytes, None, np.dtype(np.uint8))


def _root_of(store: kvio.BlockStore) -> Path | None:
    """Return the directory of a file-system store, or of the one behind a tier."""
    below = store.store if isinstance(store, kvio.StagingTier) else store
    if not isinstance(below, kvio.Store) or below.url.host:
        return None
    root = below.url.path or str(below.url.options.get("root") or "")
    return Path(root) if os.path.isdir(root) else None
