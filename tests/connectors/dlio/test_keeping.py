"""Blocks that are kept for an epoch: each is read once, within a budget."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvio

from .running import needs_dlio

pytestmark = needs_dlio

_BLOCKS = {f"k{number}": bytes([number]) * 1000 for number in range(8)}


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from kvio.connectors.dlio import blocks

    with kvio.open_store("memory://") as store:
        for key, content in _BLOCKS.items():
            store.write_block(key, content)
        monkeypatch.setattr(blocks, "data_store", lambda: store)
        yield


class _Reading:
    """Counts the blocks that were decoded."""

    def __init__(self, max_bytes: int) -> None:
        from kvio.connectors.dlio.keeping import KeptBlocks

        self.decoded: list[str] = []
        self.kept = KeptBlocks(max_bytes=max_bytes, decode=self._decode)

    def _decode(self, key: str, block: memoryview) -> bytes:
        self.decoded.append(key)
        return bytes(block)

    def use(self, key: str) -> None:
        with self.kept.opened(key) as content:
            assert content == _BLOCKS[key]


@pytest.mark.usefixtures("_store")
def test_each_block_is_read_once_where_all_fit() -> None:
    """Whatever the order, also by several threads at once."""
    reading = _Reading(8000)
    wanted = [key for key in _BLOCKS for _ in range(20)]
    random.Random(1).shuffle(wanted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(reading.use, wanted))

    assert sorted(reading.decoded) == sorted(_BLOCKS)


@pytest.mark.usefixtures("_store")
def test_the_block_that_was_used_longest_ago_is_evicted() -> None:
    """Two fit: a third takes the place of the one that was not used again."""
    reading = _Reading(2000)
    for key in ("k0", "k1", "k0", "k2", "k0", "k1"):
        reading.use(key)

    assert reading.decoded == ["k0", "k1", "k2", "k1"]


@pytest.mark.usefixtures("_store")
def test_a_block_in_use_is_not_evicted() -> None:
    """Its memory would be another block's before the sample is taken."""
    reading = _Reading(1000)
    with reading.kept.opened("k0") as first:
        reading.use("k1")
        reading.use("k2")
        assert first == _BLOCKS["k0"]
        reading.use("k0")

    assert reading.decoded == ["k0", "k1", "k2"]


@pytest.mark.usefixtures("_store")
def test_a_block_that_could_not_be_read_is_tried_again() -> None:
    """Each time with its error."""
    reading = _Reading(1000)
    for _ in range(2):
        with pytest.raises(kvio.BlockNotFoundError), reading.kept.opened("missing"):
            pass
    reading.use("k0")

    assert reading.decoded == ["k0"]
