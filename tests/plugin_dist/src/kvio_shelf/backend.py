"""Blocks in a dictionary shared by every store of the same shelf; the smallest honest backend."""

# ruff: noqa: ARG002  # an interface's arguments that a shelf has no use for
from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import kvio
from kvio.abc import Backend
from kvio.types import BlockResult, BlockStat, Cancellation, Capabilities, IfExists, Parts, Receipt
from kvio.url import StoreURL, typed_options

_LOCK = threading.Lock()
_SHELVES: dict[str, dict[str, bytes]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfOptions:
    """What every store has, and a colour."""

    durability: Literal["visible"] = "visible"
    colour: Literal["red", "blue"] = "red"


class ShelfBackend(Backend):
    """One shelf of this process."""

    name = "shelf"

    def __init__(self, shelf: str, options: ShelfOptions) -> None:
        self.options = options
        with _LOCK:
            self._blocks = _SHELVES.setdefault(shelf, {})

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        return cls(url.host + url.path, typed_options(ShelfOptions, url.options))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(atomic_write=True, exclusive_create=True, medium="a shelf")

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        data = b"".join(parts)
        with _LOCK:
            standing = self._blocks.get(key)
            if standing is not None and if_exists == "error":
                raise kvio.BlockExistsError(f"block {key!r} exists", key=key)
            existed = standing is not None and if_exists == "keep" and len(standing) == len(data)
            if not existed:
                self._blocks[key] = data
        level, mode = kvio.Level.VISIBLE, kvio.IOMode.MEMORY
        return Receipt(key, len(data), None, level, mode, "the only way", existed)

    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        data = self._get(key)
        room = sum(map(len, parts))
        if offset > len(data) or (not offset and nbytes is None and len(data) > room):
            raise kvio.BlockSizeError(f"block {key!r} does not fit", key=key)
        wanted = data[offset:][: room if nbytes is None else min(nbytes, room)]
        at = 0
        for part in parts:
            piece = wanted[at : at + len(part)]
            part[: len(piece)] = piece
            at += len(piece)
        return at

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        return BlockStat(key, len(self._get(key)), None, len(self._get(key)), None)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        try:
            return BlockResult(key, kvio.BlockStatus.OK, len(self._get(key)))
        except kvio.BlockNotFoundError as exc:
            return BlockResult(key, kvio.BlockStatus.MISSING, 0, exc)

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        with _LOCK:
            return self._blocks.pop(key, None) is not None

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with _LOCK:
            return iter([key for key in self._blocks if key.startswith(prefix)])

    def close(self) -> None:
        pass

    def _get(self, key: str) -> bytes:
        with _LOCK:
            data = self._blocks.get(key)
        if data is None:
            raise kvio.BlockNotFoundError(f"no block {key!r}", key=key)
        return data
