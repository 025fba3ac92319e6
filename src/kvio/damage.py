"""Keys whose blocks a store found corrupt, so that the next write of them does not keep the damage.

A ``keep`` write below ``durable`` checks an existing block by its length and trailer alone: to read
every block before it is kept would cost what writing it costs. A payload that rotted beneath a
sound trailer would then stay for ever, and a cache that recomputes what it cannot read would
recompute it for ever. So a store remembers the keys that it has itself found corrupt, and checks
the existing blocks of these in full.
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
    """Keys that were found corrupt and not written since; of too many the oldest are forgotten.

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
        """Write a block as `Backend.write_block` does; ``keep`` replaces what is still damaged."""
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
        """Return what a write must ask for: ``replace`` where ``keep`` would keep the damage.

        The block is checked, not replaced at once: another process may have written it since, and
        a visible write must not take the place of an intact durable block.
        """
        if if_exists != "keep" or key not in self.keys or _may_stay(backend, key, nbytes, cancel):
            return if_exists
        return "replace"

    def choose_all(
        self, backend: Backend, blocks: Blocks, cancel: Cancellation | None
    ) -> list[int]:
        """Return which blocks of a ``keep`` batch must be written with ``replace``, by position.

        Of a key that comes several times, the first: the others then find an intact block.
        """
        first = {key: at for at, key in reversed(list(enumerate(blocks.keys))) if key in self.keys}
        return sorted(
            at
            for key, at in first.items()
            if self.choose(backend, key, blocks.sizes[at], "keep", cancel) == "replace"
        )


def _may_stay(backend: Backend, key: str, nbytes: int, cancel: Cancellation | None) -> bool:
    """Check whether a ``keep`` write may go on as usual: the block is intact, or there is none.

    The payload is checked whatever ``verify=`` asks of reads. Then the block is read as readers
    do: a check goes past the page cache where it can, and the damage may be in there.
    """
    found = backend.verify_block(key, cancel=cancel)
    if not found.ok:
        return found.status is BlockStatus.MISSING
    try:
        got = backend.read_block_into(key, [buffers.aligned(nbytes)], cancel=cancel)
    except KvioError:
        return False
    return got == nbytes
