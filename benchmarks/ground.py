"""The ground the contenders run on: a fresh directory, its cache state, its writeback.

What a contender leaves behind must not land on the next one. Its files are truncated, which frees
their pages and space, and the file system is synced, both outside the timed part. Files are
deleted only at the very end: ext4 does not give an inode out again for some minutes after it was
deleted (fs/ext4/ialloc.c, recently_deleted) and every creation steps over all of them, which made
a creation of 20 us one of 500 us here.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import kvio
from kvio._native import cached_fraction, drop_cache
from kvio.format import key_hash

LEAVES: Final = tuple(f"{byte >> 4:x}/{byte & 15:x}" for byte in range(256))

_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_TOPDIR_FL: Final = 0x00020000


def leaf_number(key: str) -> int:
    """Tell which of `LEAVES` holds a key in ``layout=block`` (docs/format.md)."""
    return key_hash("", key)[0]


def file_name(key: str) -> str:
    """Give a key's file name in ``layout=block``."""
    return key.replace("/", "~")


def seeded_buffer(nbytes: int) -> memoryview:
    """Give memory from `kvio.aligned_buffer`, huge pages where it is large, full of noise."""
    return _fill(kvio.aligned_buffer(nbytes))


def plain_buffer(nbytes: int, *, misaligned_by: int = 0) -> memoryview:
    """Give memory as mmap(2) does, page-aligned or so many bytes beside it, full of noise.

    Huge pages make direct I/O faster, so contenders are only comparable on the same kind of pages;
    this is the kind that fio has.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = memoryview(mmap.mmap(-1, nbytes + misaligned_by, flags=flags))
    return _fill(whole[misaligned_by:])


def _fill(view: memoryview) -> memoryview:
    piece = os.urandom(min(len(view), 1 << 20))
    for at in range(0, len(view), len(piece)):
        view[at : at + len(piece)] = piece[: len(view) - at]
    return view


class Ground:
    """A temporary directory that stores are opened in, all over one root.

    Under ext4 its sub-directory goes to a block group of its own (``chattr +T`` on the parent, a
    random name), away from inodes that others deleted lately.
    """

    def __init__(self, parent: Path) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvio-bars-", dir=parent))
        _spread_children(self.base)
        self.root = self.scratch()
        self._fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._numbers = itertools.count()
        self._stores: list[kvio.Store] = []
        self.writeback_kib: list[tuple[int, int]] = []
        for leaf in LEAVES:
            (self.root / leaf).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._stores:
            store.close()
        os.close(self._fd)
        shutil.rmtree(self.base)

    def scratch(self) -> Path:
        """Make a directory for what creates and deletes many files, away from the root."""
        return Path(tempfile.mkdtemp(dir=self.base))

    def store(self, backend: str, *, io_threads: int | None = None, **options: Any) -> kvio.Store:
        """Open a store whose directories are all open already."""
        store = kvio.open_store(backend, root=self.root, io_threads=io_threads, options=options)
        self._stores.append(store)
        seen: dict[int, str] = {}
        for number in itertools.count():
            seen.setdefault(leaf_number(f"nobody/{number}"), f"nobody/{number}")
            if len(seen) == len(LEAVES):
                break
        for key in seen.values():
            store.contains(key)
        return store

    def keys(self, count: int) -> list[str]:
        """Give keys that were never used before."""
        first = next(self._numbers)
        return [f"bars/{first:06}/{number:06}" for number in range(count)]

    def path(self, key: str) -> Path:
        """Tell where a key's file lies."""
        return self.root / LEAVES[leaf_number(key)] / file_name(key)

    def retire(self, keys: Iterable[str]) -> None:
        """Empty the files of keys that are measured."""
        for key in keys:
            os.truncate(self.path(key), 0)

    def drop_cache(self, keys: Iterable[str]) -> float:
        """Make blocks cold, and give the share of them that the page cache still holds."""
        left = [0.0]
        for key in keys:
            fd = os.open(self.path(key), os.O_RDONLY)
            try:
                drop_cache(fd)
                left.append(cached_fraction(fd, os.fstat(fd).st_size) or 0.0)
            finally:
                os.close(fd)
        return max(left)

    def warm_cache(self, keys: Iterable[str]) -> float:
        """Make blocks hot, and give the share of them that the page cache holds."""
        held = [1.0]
        for key in keys:
            fd = os.open(self.path(key), os.O_RDONLY)
            try:
                while os.read(fd, 1 << 20):
                    pass
                held.append(cached_fraction(fd, os.fstat(fd).st_size) or 0.0)
            finally:
                os.close(fd)
        return min(held)

    def settle(self) -> None:
        """Write back whatever is dirty on this file system, and note what is left."""
        self.sync()
        self.writeback_kib.append(dirty_kib())

    def sync(self) -> None:
        """syncfs(2) of the file system."""
        if self._libc.syncfs(self._fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def dirty_kib() -> tuple[int, int]:
    """Read Dirty and Writeback from /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Dirty"].split()[0]), int(fields["Writeback"].split()[0])


def same_bytes(buffers: Sequence[memoryview], expected: Sequence[memoryview]) -> None:
    """Stop the benchmark if what was read is not what was written."""
    if any(a != b for a, b in zip(buffers, expected, strict=True)):
        raise AssertionError("a contender read bytes that were not written")


def _spread_children(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = array.array("l", [0])
        with suppress(OSError):  # no such flags on this file system
            fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
            flags[0] |= _FS_TOPDIR_FL
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags)
    finally:
        os.close(fd)
