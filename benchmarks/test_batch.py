"""Batches of small blocks, prefix look-ups, and durable batches."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Final

import pytest

import kvio

COUNT: Final = 1000
SIZES: Final = tuple(4 * kvio.KiB << step for step in range(5))

OpenStore = Callable[..., kvio.Store]


def blocks(count: int) -> list[bytes]:
    return [os.urandom(SIZES[number % len(SIZES)]) for number in range(count)]


def test_write_batch(benchmark: Any, open_store: OpenStore) -> None:
    """A thousand blocks of 4 to 64 KiB in one call, each time under new keys."""
    store, data, rounds = open_store("posix-tmpfile"), blocks(COUNT), itertools.count()

    def fresh() -> tuple[tuple[list[tuple[str, bytes]]], dict[str, Any]]:
        first = next(rounds)
        return ([(f"{first}/{i}", block) for i, block in enumerate(data)],), {}

    results = benchmark.pedantic(store.write_blocks, setup=fresh, rounds=10)

    assert all(result.ok for result in results)
    assert store.read_block(results[-1].key) == data[-1]


def test_read_batch(benchmark: Any, open_store: OpenStore) -> None:
    """The same blocks back, from the page cache."""
    store, data = open_store("posix-tmpfile"), blocks(COUNT)
    store.write_blocks((f"b/{i}", block) for i, block in enumerate(data))
    out = [bytearray(len(block)) for block in data]
    items = [(f"b/{i}", room) for i, room in enumerate(out)]

    results = benchmark(store.read_blocks_into, items)

    assert all(result.ok for result in results)
    assert out == data


def test_count_leading(benchmark: Any, open_store: OpenStore) -> None:
    """How many of a thousand keys are present, the last one missing."""
    store = open_store("posix-tmpfile")
    store.write_blocks((f"p/{i}", b"x" * 4096) for i in range(COUNT - 1))
    keys = [f"p/{i}" for i in range(COUNT)]

    present = benchmark(store.count_leading, keys)

    assert present == COUNT - 1


def test_durable_batch(benchmark: Any, open_store: OpenStore) -> None:
    """Sixteen blocks of 1 MiB that survive a loss of power, in one call."""
    try:
        store = open_store("posix-tmpfile", durability="durable")
    except kvio.UnsupportedError as exc:
        pytest.skip(f"durable writes are missing here: {exc}")
    items = [(f"d/{i}", os.urandom(kvio.MiB)) for i in range(16)]

    results = benchmark.pedantic(store.write_blocks, (items,), {"if_exists": "replace"}, rounds=5)

    assert {result.receipt.level for result in results} == {kvio.Level.DURABLE}
