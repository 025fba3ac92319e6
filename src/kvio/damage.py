"""Keys whose blocks a store found corrupt, so that a later ``keep`` write replaces them.

A ``keep`` write below ``durable`` checks only the length and trailer of an existing block: reading
every block before keeping it would cost as much as writing it. A corrupt payload with an intact
trailer would then never be replaced, and a cache that recomputes blocks it cannot read would
recompute it at every lookup. So a store remembers the keys it has found corrupt, and checks the
whole existing block of these.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kvio import buffers
from kvio.abc import Backend
from kvio.errors import KvioError
from kvio.types import BlockResult, Blocks, BlockStatus, Cancellation, IfExists, Parts, Receipt

#: About a megabyte of keys.
MAX_KEYS: Final = 4096


class DamagedKeys:
    """Keys that were found corrupt and not written since, at most `MAX_KEYS`.

    Thread-safe.

    Attributes:
        keys: the keys, oldest first; read-only.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.keys: dict[str, None] = dict.fromkeys(keys)
        self._lock = threading.Lock()

    def note(self, key: str) -> None:
        """Remember that the block of a key was found corrupt."""
        with self._lock:
            self.keys.pop(key, None)
            self.keys[key] = None
            if len(self.keys) > MAX_KEYS:
                del self.keys[next(iter(self.keys))]

    def note_results(self, results: Iterable[BlockResult]) -> None:
        """Remember the corrupt ones of a batch."""
        for result in results:
            if result.status is BlockStatus.CORRUPT:
                self.note(result.key)

    def forget(self, key: str) -> None:
        """Forget a key: it was written, or its block is intact."""
        with self._lock:
            self.keys.pop(key, None)

    def write_block(
        self,
        backend: Backend,
        key: str,
        parts: Parts,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt:
        """Write as `Backend.write_block`, but ``keep`` replaces a block that is still corrupt."""
        if key not in self.keys:
            return backend.write_block(key, parts, if_exists=if_exists, cancel=cancel)
        chosen = self.choose(backend, key, buffers.total_bytes(parts), if_exists, cancel)
        receipt = backend.write_block(key, parts, if_exists=chosen, cancel=cancel)
        self.forget(key)
        return receipt

    def choose(
        self,
        backend: Backend,
        key: str,
        nbytes: int,
        if_exists: IfExists,
        cancel: Cancellation | None,
    ) -> IfExists:
        """Return the ``if_exists`` of a write: ``replace`` if ``keep`` would keep a corrupt block.

        The block is checked first, because another process may have written it since, and a
        visible write must not replace an intact durable block.
        """
        if if_exists != "keep" or key not in self.keys or _may_stay(backend, key, nbytes, cancel):
            return if_exists
        return "replace"

    def choose_all(
        self, backend: Backend, blocks: Blocks, cancel: Cancellation | None
    ) -> list[int]:
        """Return which blocks of a ``keep`` batch must be written with ``replace``, by position.

        If a key occurs several times, only the first: the others then find an intact block.
        """
        first = {key: at for at, key in reversed(list(enumerate(blocks.keys))) if key in self.keys}
        return sorted(
            at
            for key, at in first.items()
            if self.choose(backend, key, blocks.sizes[at], "keep", cancel) == "replace"
        )


def _may_stay(backend: Backend, key: str, nbytes: int, cancel: Cancellation | None) -> bool:
    """Return whether a ``keep`` write may go on: the existing block is intact, or there is none.

    The payload is checked whatever the option ``verify`` is. Then the block is also read in the
    usual way: the check bypasses the page cache where it can, and the cached copy may be corrupt.
    """
    found = backend.verify_block(key, cancel=cancel)
    if not found.ok:
        return found.status is BlockStatus.MISSING
    try:
        got = backend.read_block_into(key, [buffers.aligned(nbytes)], cancel=cancel)
    except KvioError:
        return False
    return got == nbytes
