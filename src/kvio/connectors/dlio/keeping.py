"""Keep decoded blocks of several samples for an epoch, so that shuffling reads each block once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvio.connectors.dlio import blocks


@dataclass(slots=True)
class _Kept:
    """A block, read under its lock; it is evicted only while no thread uses it."""

    rereader: blocks.Rereader
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    nbytes: int | None = None
    content: Any = None


class KeptBlocks:
    """Keeps the blocks that were used last, within a number of bytes.

    A block that alone is larger is read for each use. Thread-safe: threads that want one block at
    the same time wait for one read.
    """

    def __init__(self, *, max_bytes: int, decode: Callable[[str, memoryview], Any]) -> None:
        self._max_bytes = max_bytes
        self._decode = decode
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._nbytes = 0
        self._spare: list[blocks.Rereader] = []

    @contextmanager
    def opened(self, key: str) -> Iterator[Any]:
        """Yield the decoded content of a block, which is not evicted until the end.

        Raises:
            BlockNotFoundError, StorageError, CorruptBlockError: it could not be read or decoded.
        """
        one = self._take(key)
        try:
            with one.lock:
                if one.nbytes is None:
                    self._read(key, one)
            yield one.content
        finally:
            self._release(key, one)

    def _take(self, key: str) -> _Kept:
        with self._lock:
            one = self._kept.get(key)
            if one is None:
                reader = self._spare.pop() if self._spare else blocks.Rereader()
                one = self._kept[key] = _Kept(reader)
            self._kept.move_to_end(key)
            one.users += 1
            return one

    def _read(self, key: str, one: _Kept) -> None:
        block = one.rereader.read(key)
        one.content = self._decode(key, block)
        one.nbytes = len(block)
        with self._lock:
            self._nbytes += one.nbytes

    def _release(self, key: str, one: _Kept) -> None:
        with self._lock:
            one.users -= 1
            if one.nbytes is None and not one.users:  # it could not be read
                self._evict(key)
            for other in [name for name, kept in self._kept.items() if not kept.users]:
                if self._nbytes <= self._max_bytes:
                    break
                self._evict(other)

    def _evict(self, key: str) -> None:
        one = self._kept.pop(key)
        self._nbytes -= one.nbytes or 0
        self._spare.append(one.rereader)
        one.content = None
