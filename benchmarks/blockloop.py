"""Drives the C loop of baselines/blockloop.c: built here, loaded into this process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.ground import LEAVES, file_name, leaf_number

DIRECT: Final = 1
DURABLE: Final = 2
LINK_BY_PROC: Final = 4
LOOK: Final = 8

SOURCE: Final = Path(__file__).parent / "baselines" / "blockloop.c"
COMPILER: Final = os.environ.get("CC", "cc")
FLAGS: Final = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


class _Block(ctypes.Structure):
    """``struct block`` of the C source."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("ns", ctypes.c_int64),
        ("dirfd", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )


class Blocks:
    """An array of blocks for the C loop, and the memory it points to."""

    def __init__(self, array: Any, holds: Sequence[object]) -> None:
        self.array = array
        self._holds = holds

    def seconds_each(self) -> list[float]:
        """Give what each block took in the last run."""
        return [block.ns / 1e9 for block in self.array]


class BlockLoop:
    """The C loop in the directories of a kvio store, which it opens beforehand.

    It writes into the very directories kvio writes into: ext4 looks for a free inode in the group
    of the parent directory, and two fan-outs in two groups differ by more than what is measured.
    """

    def __init__(self, root: Path, *, link_by_proc: bool = False) -> None:
        self._flags = LINK_BY_PROC if link_by_proc else 0
        self._library = _library()
        self._fds = [os.open(root / leaf, os.O_RDONLY | os.O_DIRECTORY) for leaf in LEAVES]

    def prepare(self, keys: Sequence[str], buffers: Sequence[Any]) -> Blocks:
        """Lay out blocks, each where kvio would put its key."""
        array = (_Block * len(keys))()
        pieces = [memoryview(buffer).cast("B") for buffer in buffers]
        holds = [(ctypes.c_char * len(piece)).from_buffer(piece) for piece in pieces]
        for block, key, hold, piece in zip(array, keys, holds, pieces, strict=True):
            block.name = file_name(key).encode()
            block.base = ctypes.addressof(hold)
            block.nbytes = len(piece)
            block.dirfd = self._fds[leaf_number(key)]
        return Blocks(array, holds)

    def write(self, blocks: Blocks, *, threads: int = 1, flags: int = 0) -> float:
        """Write every block and give the seconds it took."""
        return self._run(self._library.blockloop_write, blocks, threads, flags)

    def read(self, blocks: Blocks, *, threads: int = 1, flags: int = 0) -> float:
        """Read every block into its buffer and give the seconds it took."""
        return self._run(self._library.blockloop_read, blocks, threads, flags)

    def close(self) -> None:
        """Close the directories."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _run(self, function: Any, blocks: Blocks, threads: int, flags: int) -> float:
        address, count = ctypes.addressof(blocks.array), len(blocks.array)
        ns = function(address, count, threads, self._flags | flags)
        if ns < 0:
            raise OSError(-ns, f"the C loop failed: {os.strerror(-ns)}")
        return float(ns) / 1e9


@cache
def _library() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "blockloop.so"
        subprocess.run((COMPILER, *FLAGS, "-o", target, SOURCE), check=True)
        library = ctypes.CDLL(str(target))
    for function in (library.blockloop_write, library.blockloop_read):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
        function.restype = ctypes.c_int64
    return library
