"""Memory for bodies: big anonymous mappings on huge pages, cut up, and cut pieces used again.

A fresh ``bytearray`` an object costs a zeroing in Python, a page fault every 4 KiB and a zeroing
in the kernel; a piece that held an earlier body costs nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import defaultdict
from typing import Final

_ARENA_BYTES: Final = 64 << 20
_PAGE_BYTES: Final = 4 << 10
_HUGE_PAGE_BYTES: Final = 2 << 20


class Block:
    """The bytes of one body or part.

    Its memory is used again when nothing refers to the block: who sends *view* holds the block.
    """

    __slots__ = ("_arena", "_home", "_offset", "view")

    def __init__(self, home: Memory, arena: mmap.mmap, offset: int, nbytes: int) -> None:
        self._home = home
        self._arena = arena
        self._offset = offset
        self.view = memoryview(arena)[offset : offset + nbytes]

    def __len__(self) -> int:
        return len(self.view)

    def __del__(self) -> None:
        self._home.give_back(self._arena, self._offset, len(self.view))


class Zeros:
    """A body whose bytes were dropped: as many zeros, from pages that are not there."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view)


class Memory:
    """Where bodies lie; thread-safe.

    Args:
        keep_free_bytes: how much of what is free stays resident; more is given to the kernel.
        reserve_bytes: how much is made resident now, for bodies of up to 32 MiB: what the first
            touch of memory costs, a virtual machine's above all, is no part of a measurement.
    """

    def __init__(self, *, keep_free_bytes: int = 1 << 30, reserve_bytes: int = 0) -> None:
        self._keep_free_bytes = max(keep_free_bytes, reserve_bytes)
        self._reserve = [_touched() for _ in range(-(-reserve_bytes // _ARENA_BYTES))]
        self._free: dict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
        self._free_bytes = 0
        self._arena = self._reserve.pop() if self._reserve else _mapping(_ARENA_BYTES)
        self._used = 0
        self._zeros = memoryview(b"")
        # Collecting garbage may free a block while this thread is in here: hence re-entrant.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Block:
        """Return memory for *nbytes*; what it holds is not said."""
        size = _piece_bytes(nbytes)
        with self._lock:
            free = self._free[size]
            if free:
                arena, offset = free.pop()
                self._free_bytes -= size
            else:
                arena, offset = self._cut(size)
        return Block(self, arena, offset, nbytes)

    def give_back(self, arena: mmap.mmap, offset: int, nbytes: int) -> None:
        """Take back the memory of a block."""
        size = _piece_bytes(nbytes)
        with self._lock:
            if self._free_bytes >= self._keep_free_bytes:
                arena.madvise(mmap.MADV_DONTNEED, offset, size)
            self._free[size].append((arena, offset))
            self._free_bytes += size

    def zeros(self, nbytes: int) -> Zeros:
        """Return *nbytes* zeros that take no memory."""
        with self._lock:
            if len(self._zeros) < nbytes:
                self._zeros = memoryview(_mapping(1 << nbytes.bit_length())).toreadonly()
            return Zeros(self._zeros[:nbytes])

    def _cut(self, size: int) -> tuple[mmap.mmap, int]:
        if size > _ARENA_BYTES // 2:
            return _mapping(size), 0
        if self._used + size > _ARENA_BYTES:
            self._arena = self._reserve.pop() if self._reserve else _mapping(_ARENA_BYTES)
            self._used = 0
        offset = self._used
        self._used += size
        return self._arena, offset


def _mapping(nbytes: int) -> mmap.mmap:
    arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def _touched() -> mmap.mmap:
    arena = _mapping(_ARENA_BYTES)
    arena[::_PAGE_BYTES] = bytes(_ARENA_BYTES // _PAGE_BYTES)
    return arena


def _piece_bytes(nbytes: int) -> int:
    """Round up to an eighth of the power of two below, and to pages: at most 12.5 % unused."""
    step = max(_PAGE_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return max(step, -(-nbytes // step) * step)
