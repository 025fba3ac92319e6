"""The page cache of a store's files: emptied, filled and looked at, outside what is timed.

The one module here that goes beyond the public interface, for what only a measurement wants.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvio import _native
from kvio.types import MiB


def drop(root: Path) -> None:
    """Write back and forget every file below *root*, so that the next read is cold."""
    for fd, _ in _opened(root):
        _native.drop_cache(fd)


def warm(root: Path) -> None:
    """Read every file below *root* through the page cache, so that the next read is hot."""
    buffer = bytearray(MiB)
    for fd, nbytes in _opened(root):
        for at in range(0, nbytes, MiB):
            os.preadv(fd, [buffer], at)


def cached_fraction(root: Path) -> float | None:
    """Return how much of the bytes below *root* is cached; None where the kernel does not say."""
    cached = total = 0.0
    for fd, nbytes in _opened(root):
        fraction = _native.cached_fraction(fd, nbytes)
        if fraction is None:
            return None
        cached += fraction * nbytes
        total += nbytes
    return cached / total if total else None


def touch_memory(scratch: Path, source: memoryview) -> None:
    """Leave more free memory than a turn takes that the host of a virtual machine has backed.

    Free pages are given back to the host, and writing to them again is ten times slower; whom that
    hits would be chance. Three times the turn's bytes were enough, once was not.
    """
    with open(scratch, "wb", buffering=0) as file, mmap.mmap(-1, len(source)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(source), mmap.PAGESIZE):
            memory[at] = 1
        for at in 3 * list(range(0, len(source), MiB)):
            file.write(source[at : at + MiB])
        file.truncate(0)


def _opened(root: Path) -> Iterator[tuple[int, int]]:
    for directory, _, names in os.walk(root):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                nbytes = os.fstat(fd).st_size
                if nbytes:
                    yield fd, nbytes
            finally:
                os.close(fd)


def touched_memory(nbytes: int) -> memoryview:
    """Return memory whose every page was touched: on huge pages where the kernel has some."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, nbytes, mmap.PAGESIZE):
        mapping[at] = 1
    return memoryview(mapping)
