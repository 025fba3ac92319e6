"""Blocks in this process's memory: the reference for every other backend, and a test double."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from kvio._native import crc32c
from kvio.abc import Backend, RawBlock
from kvio.core.buffers import scatter
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    ConfigError,
    CorruptBlockError,
    KvioError,
    StorageTimeoutError,
    UnsupportedError,
)
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    Durability,
    IfExists,
    IOMode,
    Layout,
    Level,
    Parts,
    Receipt,
    Verify,
    status_of,
)
from kvio.url import StoreURL, typed_options


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The options every backend has; ``layout`` changes nothing here."""

    durability: Durability = "visible"
    layout: Layout = "block"
    verify: Verify = "full"
    checksum: Literal["crc32c", "none"] = "crc32c"


@dataclass(frozen=True, slots=True)
class _Block:
    data: bytes
    checksum: int | None
    mtime_ns: int


class MemoryBackend(Backend):
    """A dictionary of blocks, gone with the process."""

    name = "memory"

    def __init__(self, options: MemoryOptions) -> None:
        if options.durability == "durable":
            raise UnsupportedError("durability='durable' in memory: nothing survives the process")
        self._checksum = options.checksum == "crc32c"
        self._verify = options.verify == "full"
        self._blocks: dict[str, _Block] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        if url.host or url.path.strip("/"):
            raise ConfigError("a memory store has no path: write memory://")
        return cls(typed_options(MemoryOptions, url.options))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            atomic_write=True,
            exclusive_create=True,
            raw_blocks=True,
            checksum=self._checksum,
            usable_after_fork=True,
            medium="memory",
        )

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        data = b"".join(parts)
        if cancel is not None and cancel.requested:  # the caller may have changed its memory
            raise StorageTimeoutError(f"the write of {key!r} was cancelled", key=key)
        block = _Block(data, crc32c(data) if self._checksum else None, time.time_ns())
        with self._lock:
            existing = self._blocks.get(key)
            if existing is not None and if_exists == "error":
                raise BlockExistsError(f"block {key!r} exists", key=key)
            keep = existing is not None and if_exists == "keep" and len(existing.data) == len(data)
            if existing is None or not keep:
                self._blocks[key] = existing = block
        reason = "there was an intact block of this length" if keep else "a copy in memory"
        checksum = existing.checksum
        return Receipt(key, len(data), checksum, Level.VISIBLE, IOMode.MEMORY, reason, keep)

    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        block = self._get(key)
        if self._verify:
            _check(key, block)
        data = memoryview(block.data)
        if offset > len(data):
            raise BlockSizeError(f"offset {offset} lies beyond block {key!r}", key=key)
        room = sum(map(len, parts))
        rest = data[offset:]
        if nbytes is None and not offset and len(rest) > room:
            raise BlockSizeError(f"block {key!r} has {len(rest)} bytes, the buffer {room}", key=key)
        rest = rest[: min(room, len(rest) if nbytes is None else nbytes)]
        scatter(rest, parts)
        return len(rest)

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        block = self._get(key)
        return BlockStat(key, len(block.data), block.checksum, len(block.data), block.mtime_ns)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        try:
            block = self._get(key)
            if payload:
                _check(key, block)
        except KvioError as exc:
            return BlockResult(key, status_of(exc), 0, exc)
        return BlockResult(key, BlockStatus.OK, len(block.data))

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        with self._lock:
            return self._blocks.pop(key, None) is not None

    def open_raw(self, key: str) -> RawBlock:
        return _RawMemory(self._blocks, key, self._get(key))

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            keys = [key for key in self._blocks if key.startswith(prefix)]
        return iter(keys)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def close(self) -> None:
        self._blocks.clear()

    def _get(self, key: str) -> _Block:
        with self._lock:
            block = self._blocks.get(key)
        if block is None:
            raise BlockNotFoundError(f"no block {key!r}", key=key)
        return block


class _RawMemory(RawBlock):
    """A block's payload, which is all there is of it."""

    placed = True

    def __init__(self, blocks: dict[str, _Block], key: str, block: _Block) -> None:
        self._blocks = blocks
        self._key = key
        self._block = block
        self.nbytes = len(block.data)

    def read_into(self, out: memoryview, offset: int) -> None:
        out[:] = self._block.data[offset : offset + len(out)]

    def is_current(self) -> bool:
        return self._blocks.get(self._key) is self._block


def _check(key: str, block: _Block) -> None:
    if block.checksum not in (None, crc32c(block.data)):
        raise CorruptBlockError(f"block {key!r} is corrupt in memory", key=key)
