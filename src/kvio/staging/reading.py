"""Read-your-writes: staged blocks are read from the tier, all others from the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvio import _native
from kvio.core import buffers, reads
from kvio.core.buffers import Data
from kvio.core.store import Store
from kvio.errors import (
    BlockNotFoundError,
    BlockSizeError,
    ConfigError,
    CorruptBlockError,
    out_of_memory,
)
from kvio.staging.draining import cut
from kvio.staging.ledger import Ledger
from kvio.staging.pending import Entry
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Cancellation,
    MiB,
    Parts,
    check_key,
    check_keys,
)

if TYPE_CHECKING:
    from kvio.staging.memory import StagingMemory

#: ``tier``: staged blocks first. ``backend``: stored blocks only.
Consistency: TypeAlias = Literal["tier", "backend"]

_CHUNK_BYTES = 64 * MiB


class StagedReads:
    """Reads of a tier; staged bytes are pinned while they are copied."""

    def __init__(self, ledger: Ledger, memory: StagingMemory, store: Store) -> None:
        self._ledger = ledger
        self._memory = memory
        self._store = store

    @contextmanager
    def _pinned(self, key: str, consistency: str) -> Iterator[Entry | None]:
        if consistency not in ("tier", "backend"):
            raise ConfigError(f"consistency must be 'tier' or 'backend', not {consistency!r}")
        if consistency == "backend":
            yield None
            return
        with self._ledger.lock:
            entry = self._ledger.pin_locked(key)
        try:
            yield entry
        finally:
            if entry is not None:
                self._ledger.unpin((entry,))

    def read_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int,
        nbytes: int | None,
        timeout: float | None,
        consistency: str,
    ) -> int:
        """Read as `Store.read_block_into` does."""
        parts = reads.target(key, out, offset, nbytes)
        with self._pinned(key, consistency) as entry:
            if entry is not None:
                return self._fetch(entry, parts, offset, nbytes)
        return self._store.read_block_into(
            key, parts, offset=offset, nbytes=nbytes, timeout=timeout
        )

    def read(
        self,
        key: str,
        *,
        offset: int,
        nbytes: int | None,
        timeout: float | None,
        consistency: str,
    ) -> memoryview:
        """Read as `Store.read_block` does."""
        check_key(key)
        reads.check_range(offset, nbytes)
        with self._pinned(key, consistency) as entry:
            if entry is not None:
                return self._read_fresh(entry, offset, nbytes)
        return self._store.read_block(key, offset=offset, nbytes=nbytes, timeout=timeout)

    def _read_fresh(self, entry: Entry, offset: int, nbytes: int | None) -> memoryview:
        rest = max(0, entry.nbytes - offset)
        wanted = rest if nbytes is None else min(nbytes, rest)
        try:
            view = buffers.aligned(wanted)
            self._fetch(entry, [view], offset, nbytes)
        except MemoryError as exc:
            raise out_of_memory(exc, entry.key, wanted) from exc
        return view

    def _fetch(self, entry: Entry, parts: Parts, offset: int, nbytes: int | None) -> int:
        rest, room = entry.nbytes - offset, buffers.total_bytes(parts)
        if rest < 0:
            raise BlockSizeError(f"offset {offset} lies beyond block {entry.key!r}", key=entry.key)
        if nbytes is None and not offset and rest > room:
            text = f"block {entry.key!r} has {rest} bytes, the buffer {room}"
            raise BlockSizeError(text, key=entry.key)
        wanted = min(rest, room if nbytes is None else nbytes)
        if wanted < room:
            parts = next(cut(parts, [wanted]))
        return self._memory.fetch(entry.spans, parts, offset) if wanted else 0

    def read_block_into(
        self,
        key: str,
        parts: list[memoryview],
        *,
        offset: int,
        nbytes: int | None,
        cancel: Cancellation | None,  # noqa: ARG002  # the caller's memory is not filled after it
    ) -> int:
        """Read as a backend does: `kvio.core.reads.into` takes either."""
        return self.read_into(
            key, parts, offset=offset, nbytes=nbytes, timeout=None, consistency="tier"
        )

    def read_batch(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None, cancel: Cancellation
    ) -> list[BlockResult]:
        """Read as `Store.read_blocks_into` does, and end early if *cancel* is requested."""
        wanted = [(key, buffers.as_parts(out, writable=True)) for key, out in items]
        check_keys([key for key, _ in wanted])
        with self._ledger.lock:
            entries = [self._ledger.pin_locked(key) for key, _ in wanted]
        try:
            rest = [item for item, entry in zip(wanted, entries, strict=True) if entry is None]
            asked = iter(self._store._read_batch(rest, timeout, cancel) if rest else ())  # noqa: SLF001
            return [
                next(asked) if entry is None else self._read_one(entry, parts)
                for (_, parts), entry in zip(wanted, entries, strict=True)
            ]
        finally:
            self._ledger.unpin([entry for entry in entries if entry is not None])

    def _read_one(self, entry: Entry, parts: Parts) -> BlockResult:
        try:
            got = self._fetch(entry, parts, 0, None)
        except BlockSizeError as exc:
            return BlockResult(entry.key, BlockStatus.FAILED, 0, exc)
        short = got < buffers.total_bytes(parts)
        return BlockResult(entry.key, BlockStatus.SHORT if short else BlockStatus.OK, got)

    def stat(self, key: str, *, timeout: float | None, consistency: str) -> BlockStat:
        """Return the facts about a block as `Store.stat_block` does."""
        check_key(key)
        with self._pinned(key, consistency) as entry:
            if entry is not None:
                one = entry.receipt
                return BlockStat(key, one.nbytes, one.checksum, one.nbytes, entry.written_ns)
        return self._store.stat_block(key, timeout=timeout)

    def contains(self, key: str, *, timeout: float | None, consistency: str) -> bool:
        """Return as `Store.contains` does."""
        check_key(key)
        with self._pinned(key, consistency) as entry:
            return entry is not None or self._store.contains(key, timeout=timeout)

    def verify(self, key: str, *, timeout: float | None, consistency: str) -> BlockResult:
        """Check as `Store.verify_block` does: staged bytes against their checksum."""
        check_key(key)
        with self._pinned(key, consistency) as entry:
            if entry is not None:
                return self._verify_staged(entry)
        return self._store.verify_block(key, timeout=timeout)

    def _verify_staged(self, entry: Entry) -> BlockResult:
        key, expected = entry.key, entry.receipt.checksum
        with self._memory.lend(entry.spans) as parts:
            if expected in (None, checksum_of(parts)):
                return BlockResult(key, BlockStatus.OK, entry.nbytes)
        error = CorruptBlockError(f"block {key!r} is corrupt in staging memory", key=key)
        return BlockResult(key, BlockStatus.CORRUPT, 0, error)

    def count_leading(self, keys: Iterable[str], *, timeout: float | None) -> int:
        """Count as `Store.count_leading` does, in one call of the store."""
        wanted = list(keys)
        check_keys(wanted)
        with self._ledger.lock:
            newest = self._ledger.key_queues.newest
            unstaged = [at for at, key in enumerate(wanted) if newest(key) is None]
        if not unstaged:
            return len(wanted)
        there = self._store.count_leading([wanted[at] for at in unstaged], timeout=timeout)
        return unstaged[there] if there < len(unstaged) else len(wanted)

    def list(self, prefix: str, *, timeout: float | None, consistency: str) -> Iterator[str]:
        """List as `Store.list_keys` does, staged keys first."""
        staged: set[str] = set()
        if consistency != "backend":
            with self._ledger.lock:
                staged.update(self._ledger.key_queues.keys(prefix))
            yield from staged
        for key in self._store.list_keys(prefix, timeout=timeout):
            if key not in staged:
                yield key

    def note_damage(self, key: str) -> None:
        """Make the store check the whole block before a ``keep`` write keeps it."""
        self._store._damaged.note(key)  # noqa: SLF001  # the store sees ranges alone

    def stored_checksum(self, key: str, nbytes: int, *, timeout: float | None) -> int | None:
        """Sum what the store gives back for a block; None: it has another length.

        In pieces, of which a file-system store checks only the trailer: the sum is ours.
        """
        try:
            if self._store.stat_block(key, timeout=timeout).nbytes != nbytes:
                return None
        except BlockNotFoundError:
            return None
        crc = 0
        for at in range(0, nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, nbytes - at)
            piece = self._store.read_block(key, offset=at, nbytes=size, timeout=timeout)
            if len(piece) != size:
                return None
            crc = _native.crc32c(piece, crc)
        return crc


def checksum_of(parts: Sequence[memoryview]) -> int:
    """Return the CRC32C of flat views, one after the other."""
    crc = 0
    for part in parts:
        crc = _native.crc32c(part, crc)
    return crc
