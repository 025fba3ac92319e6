"""Blocks that tell which write they are of, and whether they are whole."""

from __future__ import annotations

import struct
import zlib

KEYS = 5
_HEAD = struct.Struct("<QQI")


def block_of(key: str, number: int, nbytes: int) -> bytes:
    """Make the block of a write: a head, then bytes that only this key and number have."""
    seed = zlib.crc32(f"{key}#{number}".encode())
    return _HEAD.pack(number, nbytes, seed) + (seed.to_bytes(4) * (nbytes // 4 + 1))[:nbytes]


def number_of(key: str, block: memoryview | bytes) -> int:
    """Return the number of the write that a block is of; every byte must be that write's."""
    number, nbytes, _ = _HEAD.unpack_from(block)

    assert bytes(block) == block_of(key, number, nbytes), f"torn: {key} #{number}"
    return int(number)
