"""A checkpoint goes through a staging tier: nothing is published before its data is stored."""

from __future__ import annotations

from typing import Any

import pytest

import kvio

from .dcp import (
    ALONE,
    CheckpointException,
    Watched,
    cause_of,
    load,
    memory_store,
    raw,
    save,
    torch,
    zeros,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]

BASE = torch.arange(100, dtype=torch.float32)


class Staged:
    """A receipt of a staging tier: nothing is stored until somebody waits."""

    def __init__(self, store: Any, key: str, data: bytes) -> None:
        self._store, self._key, self._data = store, key, data
        self.level = kvio.Level.ACCEPTED

    def wait(self, level: Any = "durable", timeout: Any = None) -> Any:  # noqa: ARG002
        return self._store.write_block(self._key, self._data, if_exists="replace")


class StagingStore(Watched):
    """A store that gives such receipts."""

    def write_block(self, key: str, data: Any, *, if_exists: Any = "keep") -> Any:  # noqa: ARG002
        self._before_write(key)
        parts = data if isinstance(data, list) else [data]
        joined = b"".join(bytes(p) if isinstance(p, bytes | memoryview) else raw(p) for p in parts)
        return Staged(self._store, key, joined)


def test_a_staging_store_is_waited_for_before_the_manifest() -> None:
    """Where writes are only accepted, data is waited for before the manifest is written."""
    with memory_store() as store:

        def look(key: str) -> None:
            if key.endswith("/manifest"):
                assert sum("rank-" in each for each in store.list_keys("run/")) == 3

        state = dict.fromkeys("abc", BASE)
        save(StagingStore(store, look), state, block_bytes=1)
        loaded = load(store, zeros(state))

    assert all(raw(tensor) == raw(BASE) for tensor in loaded.values())


@pytest.mark.parametrize("elements", [100, 1 << 20])
def test_over_the_staging_tier(elements: int) -> None:
    """A checkpoint, larger than the tier or not, goes through it and is stored after save."""
    whole, none = torch.arange(elements, dtype=torch.float32), torch.zeros(elements)
    with memory_store() as store, kvio.stage(store, capacity="2MiB") as tier:
        save(tier, {"a": whole, "b": BASE, "n": 1}, block_bytes=1)
        loaded = load(store, {"a": none.clone(), "b": torch.zeros(100), "n": 0})
        through = load(tier, {"a": none.clone(), "b": torch.zeros(100), "n": 0})

    assert torch.equal(loaded["a"], whole)
    assert torch.equal(through["a"], whole)
    assert raw(loaded["b"]) == raw(through["b"]) == raw(BASE)


def test_a_failed_save_leaves_nothing_in_the_staging_tier() -> None:
    """What a failed save staged is discarded, so that the tier has its room again."""
    with memory_store() as store, kvio.stage(store, capacity="2MiB") as tier:
        tier.pause()
        with pytest.raises(CheckpointException) as caught:
            save(tier, {"a": BASE, "b": BASE}, block_bytes=1, level="durable")
        staged = tier.stats().staged_blocks
        tier.resume()
        tier.barrier()
        left = list(tier.list_keys())

    assert isinstance(cause_of(caught), kvio.UnsupportedError)
    assert (staged, left) == (0, [])
