"""Read indexed_binary: a sample is a range of a block, located by two index blocks."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from kvio.connectors.dlio import blocks
from kvio.errors import CorruptBlockError

#: Suffixes of the index blocks with the offsets and the sizes.
_OFFSETS, _SIZES = ".off.idx", ".sz.idx"
_NUMBER: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The offsets and sizes of the samples in one block."""

    key: str
    offsets: Any
    sizes: Any

    def read(self, number: int) -> memoryview:
        """Read one sample, a range of the block.

        Raises:
            CorruptBlockError: the index or the block has no such sample.
            BlockNotFoundError, StorageError: the read failed; the error names the block.
        """
        if number >= len(self.offsets):
            raise CorruptBlockError(
                f"block {self.key + _OFFSETS!r} has {len(self.offsets)} samples, not {number + 1}",
                key=self.key + _OFFSETS,
            )
        offset, nbytes = int(self.offsets[number]), int(self.sizes[number])
        try:
            found = blocks.read_sample(self.key, offset=offset, nbytes=nbytes)
        except ValueError as exc:  # the offset is beyond the block's end or the offset type
            raise self._short(offset, nbytes) from exc
        if len(found) != nbytes:
            raise self._short(offset, nbytes)
        return found

    def _short(self, offset: int, nbytes: int) -> CorruptBlockError:
        return CorruptBlockError(
            f"block {self.key!r} does not have the {nbytes} bytes at {offset} given by its index",
            key=self.key,
        )


class Indexes:
    """A cache of indexes; each is read once, also with several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}
        self._found: dict[str, Index] = {}

    def of(self, key: str) -> Index:
        """Return the index of a block.

        Raises:
            CorruptBlockError: its two index blocks are inconsistent.
            BlockNotFoundError, StorageError: a read failed; the error names the index block.
        """
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            if key not in self._found:
                self._found[key] = _read(key)
            return self._found[key]

    def renew_locks(self) -> None:
        """Replace the locks in a forked child: other threads may have held them at the fork."""
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
    """Return the indexes shared by the readers of a dataset; they are freed with the last reader.

    kvio's loader creates new readers for every epoch, so an index is read once per epoch.
    """
    with _sharing:
        return _shared.setdefault(dataset, Indexes())


def _after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()
    for indexes in _shared.values():
        indexes.renew_locks()


os.register_at_fork(after_in_child=_after_fork)
