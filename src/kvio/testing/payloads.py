"""Bytes to store, memory to read into, and a checksum that shares no code with kvio."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvio.types import KiB, MiB

#: Around alignments, pages and the default limits of POSIX calls; the last is no multiple of any.
SIZES: Final = (
    *(0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097),
    *(64 * KiB - 1, 64 * KiB, 64 * KiB + 1, MiB - 1, MiB, MiB + 1),
)
LARGE_SIZES: Final = (4 * MiB - 1, 4 * MiB, 4 * MiB + 1, 9 * MiB + 5)

_POOL_BYTES: Final = 16 * MiB
_GUARD: Final = b"\xa5" * 64


@lru_cache(maxsize=1)
def _pool() -> memoryview:
    return memoryview(random.Random(20240229).randbytes(_POOL_BYTES))  # noqa: S311


def payload(nbytes: int, seed: int = 0) -> bytes:
    """Return *nbytes* random bytes; the same for the same *seed*, others for another."""
    start = seed * 4099 % (_POOL_BYTES - nbytes + 1)
    return bytes(_pool()[start : start + nbytes])


def cut(data: bytes, lengths: Sequence[int]) -> list[memoryview]:
    """Split bytes into pieces of the given lengths; the rest is the last piece."""
    view = memoryview(data)
    pieces, at = [], 0
    for length in lengths:
        pieces.append(view[at : at + length])
        at += length
    return [*pieces, view[at:]]


class Guarded:
    """Memory to read into, surrounded by bytes that must not change.

    *misalign* moves the writable part off any alignment.
    """

    def __init__(self, nbytes: int, *, misalign: int = 0) -> None:
        self._before = _GUARD + _GUARD[:misalign]
        self.memory = bytearray(self._before + bytes(nbytes) + _GUARD)
        self.view = memoryview(self.memory)[len(self._before) : len(self._before) + nbytes]

    def intact(self) -> bool:
        """Return whether the bytes around the view are unchanged."""
        begins = self.memory.startswith(self._before)
        return begins and self.memory[len(self._before) + len(self.view) :] == _GUARD


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    """Compute a CRC32C (RFC 3720, appendix B.4) byte by byte; about 10 MB/s."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF
