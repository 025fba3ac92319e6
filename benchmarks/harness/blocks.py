"""KV blocks as an engine holds them: pieces of each layer in memory of that layer's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import kvio

Piece: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


@dataclass(frozen=True, slots=True)
class Block:
    """A key and the pieces that make the block, in order."""

    key: str
    pieces: list[Piece]


class Arena:
    """Page-aligned memory that is cut into blocks of one shape after the other.

    Piece *p* of all blocks lies side by side, as K or V of one layer does in an engine's cache,
    so the pieces of one block are far apart.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes: Piece = np.frombuffer(kvio.aligned_buffer(nbytes), np.uint8)

    def fill_random(self, seed: int) -> None:
        """Fill it with numbers that no file system can compress."""
        words = self._bytes[: len(self._bytes) // 8 * 8].view(np.uint64)
        words[:] = np.random.default_rng(seed).integers(0, 1 << 64, len(words), np.uint64)

    def memory(self, nbytes: int) -> memoryview:
        """View its first bytes."""
        return self._bytes[:nbytes].data

    def wipe(self) -> None:
        """Fill it with zeros, so that what a read leaves out shows."""
        self._bytes[:] = 0

    def cut(self, *, blocks: int, pieces: int, piece_nbytes: int) -> list[Block]:
        """Return so many blocks of so many pieces each.

        Raises:
            ValueError: the arena is too small.
        """
        used = self._bytes[: blocks * pieces * piece_nbytes]
        grid = used.reshape(pieces, blocks, piece_nbytes)
        return [
            Block(f"block-{index:04d}", [grid[piece, index] for piece in range(pieces)])
            for index in range(blocks)
        ]


def is_same(left: Block, right: Block) -> bool:
    """Compare every byte."""
    return all(
        np.array_equal(mine, other) for mine, other in zip(left.pieces, right.pieces, strict=True)
    )
