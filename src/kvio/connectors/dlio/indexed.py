"""indexed_binary: a sample is a range of a block, and two more blocks say where it lies."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from kvio.connectors.dlio import blocks
from kvio.errors import CorruptBlockError

#: A block of offsets and one of sizes stand beside that of the samples.
_OFFSETS, _SIZES = ".off.idx", ".sz.idx"
_NUMBER: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Where the samples of one block lie."""

    key: str
    offsets: Any
    sizes: Any

    def read(self, number: int) -> memoryview:
        """Read one sample, a range of the block.

        Raises:
            CorruptBlockError: the index has no such sample, or the block does not.
            BlockNotFoundError, StorageError: with the block's name.
        """
        if number >= len(self.offsets):
            raise CorruptBlockError(
                f"block {self.key + _OFFSETS!r} has {len(self.offsets)} samples, not {number + 1}",
                key=self.key + _OFFSETS,
            )
        offset, nbytes = int(self.offsets[number]), int(self.sizes[number])
        try:
            found = blocks.read_sample(self.key, offset=offset, nbytes=nbytes)
        except ValueError as exc:  # beyond the end of the block, or of what an offset can be
            raise self._short(offset, nbytes) from exc
        if len(found) != nbytes:
            raise self._short(offset, nbytes)
        return found

    def _short(self, offset: int, nbytes: int) -> CorruptBlockError:
        return CorruptBlockError(
            f"block {self.key!r} does not have the {nbytes} bytes at {offset} that its index says",
            key=self.key,
        )


class Indexes:
    """The indexes of blocks, each read once however many threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}
        self._found: dict[str, Index] = {}

    def of(self, key: str) -> Index:
        """Give the index of a block.

        Raises:
            CorruptBlockError: its two blocks disagree.
            BlockNotFoundError, StorageError: with the name of the index's block.
        """
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            if key not in self._found:
                self._found[key] = _read(key)
            return self._found[key]

    def renew_locks(self) -> None:
        """Let go in a forked child: other threads of the parent may have held the locks."""
        self._lock, self._reading = threading.Lock(), {}


def _read(key: str) -> Index:
    offsets, sizes = _numbers(key + _OFFSETS), _numbers(key + _SIZES)
    if len(offsets) != len(sizes):
        raise CorruptBlockError(
            f"block {key + _OFFSETS!r} has {len(offsets)} offsets for {len(sizes)} sizes",
            key=key + _OFFSETS,
        )
    return Index(key=key, offsets=offsets, sizes=sizes)


def _numbers(key: str) -> Any:
    block = blocks.read_sample(key)
    if len(block) % _NUMBER.itemsize:
        raise CorruptBlockError(f"block {key!r} ends within a number", key=key)
    return np.frombuffer(block, dtype=_NUMBER)


_sharing = threading.Lock()
_shared: WeakValueDictionary[str, Indexes] = WeakValueDictionary()


def shared(dataset: str) -> Indexes:
    """Give the indexes that the readers of a dataset share, and forget with the last of them.

    kvio's loader makes its readers anew for every epoch, so an index is read once an epoch.
    """
    with _sharing:
        return _shared.setdefault(dataset, Indexes())


def _after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()
    for indexes in _shared.values():
        indexes.renew_locks()


os.register_at_fork(after_in_child=_after_fork)
