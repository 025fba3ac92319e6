"""A store and a staging tier are `BlockStore`s: code that takes one works on either."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvio


def _exercise(blocks: kvio.BlockStore) -> None:
    """Call every method, with no more than the protocol promises."""
    with blocks:
        receipt = blocks.write_block("a/1", b"one")
        assert (receipt.key, receipt.nbytes) == ("a/1", 3)
        results = blocks.write_blocks([("a/2", b"two"), ("b/1", b"three")])
        assert [(result.key, result.ok, result.error) for result in results] == [
            ("a/2", True, None),
            ("b/1", True, None),
        ]
        assert all(result.receipt is not None for result in results)
        with pytest.raises(kvio.BlockExistsError):
            blocks.write_block("a/1", b"one", if_exists="error")
        blocks.flush(timeout=60)

        out = bytearray(3)
        assert bytes(blocks.read_block("b/1", offset=1, nbytes=2, timeout=60)) == b"hr"
        assert blocks.read_block_into("a/1", out) == 3
        assert blocks.submit_write("c/1", b"four").result(60).nbytes == 4
        assert blocks.submit_read_into("a/1", out).result(60) == 3
        assert blocks.capabilities.atomic_write
        assert [r.ok for r in blocks.delete_blocks(["c/1", "c/2"])] == [True, False]
        assert [result.ok for result in blocks.read_blocks_into([("a/2", out)])] == [True]
        assert out == b"two"
        assert blocks.stat_block("a/1").nbytes == 3
        assert (blocks.contains("a/1"), blocks.contains("c")) == (True, False)
        assert blocks.count_leading(["a/1", "a/2", "c", "b/1"]) == 2
        assert sorted(blocks.list_keys("a/")) == ["a/1", "a/2"]
        assert blocks.verify_block("b/1").ok
        assert [result.ok for result in blocks.drop_cache(["a/1", "a/2"])] == [True, True]
        assert blocks.path_of("a/1").read_bytes()[:3] == b"one"
        assert (blocks.delete_block("a/1"), blocks.delete_block("a/1")) == (True, False)


def _store(root: Path) -> kvio.BlockStore:
    return kvio.open_store("posix-tmpfile", root=root, create=True)


def _tier(root: Path) -> kvio.BlockStore:
    store = kvio.open_store("posix-tmpfile", root=root, create=True)
    return kvio.stage(store, "1MiB", close_store=True)


@pytest.mark.parametrize("make", [_store, _tier])
def test_code_for_a_block_store_works(
    make: Callable[[Path], kvio.BlockStore], tmp_path: Path
) -> None:
    """On a store and on a staging tier."""
    _exercise(make(tmp_path / "root"))


def _methods() -> Iterator[str]:
    for name, member in vars(kvio.BlockStore).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name


@pytest.mark.parametrize("name", list(_methods()))
def test_parameters_have_one_name_everywhere(name: str) -> None:
    """Beside them a class may have its own, with defaults."""
    wanted = inspect.signature(getattr(kvio.BlockStore, name)).parameters
    for kind in (kvio.Store, kvio.StagingTier):
        own = inspect.signature(getattr(kind, name)).parameters
        assert [(p.name, p.kind) for p in own.values() if p.name in wanted] == [
            (p.name, p.kind) for p in wanted.values()
        ], kind
        extra = [p for p in own.values() if p.name not in wanted]
        assert all(p.default is not inspect.Parameter.empty for p in extra), kind
        for p in wanted.values():
            if p.default not in (inspect.Parameter.empty, ...):
                assert own[p.name].default == p.default, (kind, p.name)


def test_the_default_of_if_exists_is_the_class_s_own() -> None:
    """As the docstring of the protocol says, and why."""
    for kind, default in ((kvio.Store, "keep"), (kvio.StagingTier, "replace")):
        for name in ("write_block", "write_blocks", "submit_write"):
            assert inspect.signature(getattr(kind, name)).parameters["if_exists"].default == default
