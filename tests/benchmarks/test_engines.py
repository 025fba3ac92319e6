"""LMCache and NIXL are driven as their notes in the record say, where they are installed."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import numpy as np
import pytest

import kvio
from benchmarks.harness.blocks import Arena, Block, is_same
from benchmarks.scenarios.kv_offload import engines
from benchmarks.scenarios.kv_offload.engines import ENGINES
from benchmarks.scenarios.kv_offload.serving import Contender, Offloader

LMCACHE, NIXL = ENGINES
#: More blocks than NIXL is given at once, of pieces that are no multiple of anything.
BLOCKS, PIECES, PIECE_NBYTES = 20, 3, 4097
BLOCK_NBYTES = PIECES * PIECE_NBYTES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what they import


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LMCache have memory for three blocks a thread."""
    monkeypatch.setattr(engines, "STAGING_NBYTES", 64 * kvio.KiB)


@contextmanager
def _opened(engine: Contender, root: Path, durability: Any = "visible") -> Iterator[Offloader]:
    if why := engine.missing():
        pytest.skip(f"needs {engine.package}: {why}")
    with closing(engine.open(root, durability, 2)) as offloader:
        yield offloader


def _blocks() -> tuple[list[Block], list[Block]]:
    arenas = [Arena(BLOCKS * BLOCK_NBYTES) for _ in range(2)]
    arenas[0].fill_random(1)
    source, target = (
        arena.cut(blocks=BLOCKS, pieces=PIECES, piece_nbytes=PIECE_NBYTES) for arena in arenas
    )
    return source, target


def _items(blocks: list[Block]) -> list[tuple[str, list[Any]]]:
    return [(block.key, block.pieces) for block in blocks]


@contextmanager
def _no_file_above(nbytes: int) -> Iterator[None]:
    """Let the kernel refuse to make a file longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.name))
def test_what_was_offloaded_is_in_the_files_when_the_call_returns(
    engine: Contender, tmp_path: Path
) -> None:
    """A file a block with its pieces in order and nothing else; each comes back as it was."""
    source, target = _blocks()
    with _opened(engine, tmp_path) as offloader:
        offloader.offload(_items(source))
        files = [path.read_bytes() for path in tmp_path.iterdir()]
        loaded = offloader.load(_items(target))

    assert sorted(files) == sorted(np.concatenate(block.pieces).tobytes() for block in source)
    assert loaded == BLOCKS * BLOCK_NBYTES
    assert all(map(is_same, source, target))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.name))
def test_a_write_that_fails_is_reported_and_no_block_is_found(
    engine: Contender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StorageError`, though LMCache itself tells nobody; the next block is stored."""
    source, _ = _blocks()
    with _opened(engine, tmp_path) as offloader:
        with monkeypatch.context() as patch, _no_file_above(BLOCK_NBYTES - 1):
            patch.setattr(engines, "_PATIENCE_S", 1.0)
            with pytest.raises(kvio.StorageError):
                offloader.offload(_items(source[:1]))
        found = offloader.count_leading([source[0].key])
        offloader.offload(_items(source[1:2]))

        assert (found, offloader.count_leading([source[1].key])) == (0, 1)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.name))
def test_one_that_cannot_be_imported_is_left_out_by_name(
    engine: Contender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without the library that it needs is no reason to lose the other contenders."""
    for module in ("lmcache.utils", "nixl._api"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(kvio.UnsupportedError, match=f"{engine.package} cannot be imported"):
        engine.open(tmp_path, "visible", 1)


def test_lmcache_offers_nothing_durable(tmp_path: Path) -> None:
    """It has no way to synchronise, and says nothing of it."""
    with pytest.raises(kvio.UnsupportedError, match="never synchronises"):
        LMCACHE.open(tmp_path, "durable", 1)


def test_a_block_larger_than_the_memory_of_lmcache_is_refused(tmp_path: Path) -> None:
    """LMCache would wait for ever for memory that it does not have."""
    large = Arena(4 * 64 * kvio.KiB).cut(blocks=1, pieces=1, piece_nbytes=4 * 64 * kvio.KiB)

    with _opened(LMCACHE, tmp_path) as offloader, pytest.raises(kvio.UnsupportedError):
        offloader.offload(_items(large))


def test_lmcache_loads_nothing_of_a_lost_file(tmp_path: Path) -> None:
    """Its index still says that the block is there, so the load is what shows it."""
    source, target = _blocks()
    with _opened(LMCACHE, tmp_path) as offloader:
        offloader.offload(_items(source))
        next(tmp_path.iterdir()).unlink()

        assert offloader.count_leading([block.key for block in source]) == BLOCKS
        assert offloader.load(_items(target)) == (BLOCKS - 1) * BLOCK_NBYTES


@pytest.mark.parametrize(
    ("engine", "loaded"), [(LMCACHE, BLOCKS * BLOCK_NBYTES), (NIXL, 0)], ids=["LMCache", "NIXL"]
)
def test_lmcache_passes_short_files_and_nixl_does_not(
    engine: Contender, loaded: int, tmp_path: Path
) -> None:
    """What the notes say of them; it is why a run compares all bytes."""
    source, target = _blocks()
    with _opened(engine, tmp_path) as offloader:
        offloader.offload(_items(source))
        for path in tmp_path.iterdir():
            os.truncate(path, BLOCK_NBYTES - 1)

        assert offloader.load(_items(target)) == loaded


def test_nixl_takes_pieces_that_have_memory_of_their_own(tmp_path: Path) -> None:
    """As an engine has whose layers are allocated apart."""
    pieces = [np.full(100 + index, index, np.uint8) for index in range(5)]
    copies = [np.zeros_like(piece) for piece in pieces]
    with _opened(NIXL, tmp_path) as offloader:
        offloader.offload([("a", pieces)])
        offloader.load([("a", copies)])

    assert is_same(Block("a", pieces), Block("a", copies))


def test_durable_nixl_synchronises_the_files_before_their_names_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a name could survive a loss of power that its bytes did not."""
    steps: list[str] = []
    rename = os.replace

    def seen_replace(*names: str) -> None:
        steps.append("name")
        rename(*names)

    def seen_fsync(fd: int) -> None:
        steps.append("directory" if S_ISDIR(os.fstat(fd).st_mode) else "file")

    source, _ = _blocks()
    with _opened(NIXL, tmp_path) as visible, _opened(NIXL, tmp_path, "durable") as durable:
        monkeypatch.setattr(os, "fsync", seen_fsync)
        monkeypatch.setattr(os, "replace", seen_replace)
        visible.offload(_items(source[:1]))
        durable.offload(_items(source[1:3]))

    assert steps == ["name", "file", "file", "name", "name", "directory"]
