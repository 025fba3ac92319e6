"""`drop_cache` and `path_of` where blocks are files: what the page cache has, and which file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import pytest

import kvio
from kvio import _native
from kvio.types import BlockStatus, KiB
from tests.posix import faultlab
from tests.posix.test_modes import cached, open_or_skip

DATA = os.urandom(512 * KiB)


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root on a disk: what is in memory cannot be dropped."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_dropped_block_is_not_in_the_page_cache(
    root: Path, layout: Literal["block", "plain"]
) -> None:
    """Also one whose pages were dirty: they are written back first. Others stay."""
    with kvio.open_store("posix-tmpfile", root=root, layout=layout) as store:
        for key in ("dirty", "clean", "other"):
            store.write_block(key, DATA)
        faultlab.file_of(root, "clean", layout=layout).read_bytes()
        assert cached(root, "dirty", layout=layout) > 0.9

        results = store.drop_cache(["dirty", "missing", "clean"])

        ok, missing = BlockStatus.OK, BlockStatus.MISSING
        assert [(r.key, r.status) for r in results] == [
            *(("dirty", ok), ("missing", missing), ("clean", ok)),
        ]
        assert cached(root, "dirty", layout=layout) == 0.0
        assert cached(root, "clean", layout=layout) == 0.0
        assert cached(root, "other", layout=layout) > 0.9
        assert all(store.read_block(key) == DATA for key in ("dirty", "clean"))


def test_clean_pages_are_dropped_without_a_sync(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync makes a disk flush its own cache, which costs a read nothing less than a write."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("block", DATA)
        assert store.drop_cache(["block"])[0].ok
        if _dirty(store.path_of("block")) is None:
            pytest.skip("needs cachestat (Linux 6.5)")
        assert store.read_block("block") == DATA

        def fail(_: int) -> None:
            raise AssertionError("a sync of a clean file")

        monkeypatch.setattr(os, "fdatasync", fail)

        assert store.drop_cache(["block"])[0].ok
        assert cached(root, "block") == 0.0


def test_hybrid_reads_a_dropped_block_past_the_page_cache_every_time(root: Path) -> None:
    """Without the drop its second read would bring it there, for a third one."""
    with open_or_skip("hybrid", root, calibration="none") as store:
        store.write_block("block", DATA)
        for count in range(1, 5):
            assert store.drop_cache(["block"])[0].ok
            assert store.read_block("block") == DATA
            assert cached(root, "block") < 0.1, count


def _dirty(path: Path) -> int | None:
    with path.open("rb") as file:
        return _native.dirty_bytes(file.fileno(), path.stat().st_size)


def test_a_block_that_cannot_be_dropped_stops_no_other(root: Path) -> None:
    """What is not a regular file has the error; the blocks beside it are dropped."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        for key in ("first", "fifo", "last"):
            store.write_block(key, DATA)
        path = store.path_of("fifo")
        path.unlink()
        os.mkfifo(path)

        results = store.drop_cache(["first", "fifo", "last"])

        assert [result.ok for result in results] == [True, False, True]
        assert isinstance(results[1].error, kvio.UnsupportedError)
        assert cached(root, "last") == 0.0
        path.unlink()


def test_a_store_that_is_open_read_only_drops_and_names_files(root: Path) -> None:
    """Neither changes a block."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("block", DATA)
    with kvio.open_store("posix-tmpfile", root=root, options={"read_only": "true"}) as store:
        assert store.drop_cache(["block"])[0].ok
        assert cached(root, "block") == 0.0
        assert store.path_of("block") == faultlab.file_of(root, "block")


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_the_path_is_that_of_the_file(root: Path, layout: Literal["block", "plain"]) -> None:
    """In every layout, with the namespace of the store, and plain files have the bytes alone."""
    options = {"namespace": "mine"} if layout == "block" else {}
    with kvio.open_store("hybrid", root=root, layout=layout, options=options) as store:
        store.write_block("a/b", DATA)
        path = store.path_of("a/b", timeout=60)

        assert path.read_bytes()[: len(DATA)] == DATA
        assert (path.stat().st_size == len(DATA)) == (layout == "plain")
        path.unlink()
        with pytest.raises(kvio.BlockNotFoundError):
            store.path_of("a/b")


def test_no_path_leads_out_of_a_moved_root(tmp_path: Path) -> None:
    """The file at the old path would be that of another store."""
    root, other = tmp_path / "root", tmp_path / "other"
    with kvio.open_store("posix-tmpfile", root=root, create=True) as store:
        store.write_block("block", DATA)
        root.rename(other)
        shutil.copytree(other, root)

        with pytest.raises(kvio.RootMovedError):
            store.path_of("block")
