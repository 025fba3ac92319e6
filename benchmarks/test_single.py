"""One block at a time: write, read hot, read cold; by backend and size."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio._native import cached_fraction, drop_cache

BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
SIZES: Final = (4 * kvio.KiB, 64 * kvio.KiB, kvio.MiB, 16 * kvio.MiB)
KEYS: Final = 32

pytestmark = [
    pytest.mark.parametrize("size", SIZES, ids=lambda n: f"{n // kvio.KiB}KiB"),
    pytest.mark.parametrize("backend", BACKENDS),
]


def noise(nbytes: int) -> memoryview:
    block = kvio.aligned_buffer(nbytes)
    block[:] = os.urandom(nbytes)
    return block


def block_files(store: kvio.Store) -> list[Path]:
    root = Path(str(store.url.options["root"]))
    return [path for path in root.rglob("*") if path.is_file()]


def test_write(
    benchmark: Any, open_store: Callable[..., kvio.Store], backend: str, size: int
) -> None:
    """Replacing blocks under a ring of keys, so that the disk does not fill."""
    store, block = open_store(backend), noise(size)
    numbers = itertools.cycle(range(KEYS))

    receipt = benchmark(
        lambda: store.write_block(f"bench/{next(numbers)}", block, if_exists="replace")
    )

    assert store.read_block(receipt.key) == block
    benchmark.extra_info.update(mode=str(receipt.mode), medium=store.capabilities.medium)


def test_read_hot(
    benchmark: Any, open_store: Callable[..., kvio.Store], backend: str, size: int
) -> None:
    """Reading a block that is in the page cache."""
    store, block, out = open_store(backend), noise(size), kvio.aligned_buffer(size)
    store.write_block("bench/hot", block)
    (path,) = block_files(store)
    path.read_bytes()

    benchmark(store.read_block_into, "bench/hot", out)

    assert out == block
    benchmark.extra_info.update(modes=store.stats().modes, medium=store.capabilities.medium)


def test_read_cold(
    benchmark: Any, open_store: Callable[..., kvio.Store], backend: str, size: int
) -> None:
    """Reading a block that is not in the page cache."""
    store, block, out = open_store(backend), noise(size), kvio.aligned_buffer(size)
    store.write_block("bench/cold", block)
    (path,) = block_files(store)
    fd = os.open(path, os.O_RDONLY)
    left = []

    def forget() -> None:
        drop_cache(fd)
        left.append(cached_fraction(fd, os.fstat(fd).st_size))

    benchmark.pedantic(store.read_block_into, ("bench/cold", out), setup=forget, rounds=20)
    os.close(fd)

    assert out == block
    benchmark.extra_info.update(cached_before=max(x or 0.0 for x in left))
