"""A file system with room for bytes but not for files, and limits on how long a file may be.

Needs e2fsprogs and loop devices, or root for a tmpfs.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from tests.faults.full import media, story
from tests.faults.totals import Tally
from tests.posix import children, faultlab, mounts

_MANY = 120
_TINY = 100


@pytest.fixture(params=["ext4", "tmpfs"])
def few_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a root where some ninety files or directories can be made."""
    if request.param == "tmpfs":
        with mounts.memory_filesystem(tmp_path, "size=64m,nr_inodes=90") as root:
            yield root
        return
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "256") as root:
        taken = root.parent / "taken"
        taken.mkdir()
        for number in range(os.statvfs(root).f_favail - 90):
            (taken / str(number)).touch()
        yield root


@pytest.mark.root
@pytest.mark.parametrize("publish", ["tmpfile", "rename"])
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_a_file_system_without_inodes_is_a_full_one(
    few_files: Path, publish: str, layout: str, tally: Tally
) -> None:
    """No inode is left behind, no block lost, and deleting one makes room for one."""
    way = story.Way(durability="visible", publish=publish, layout=layout)
    with way.open(few_files) as store:
        reported = {}
        for number in range(_MANY):
            key = f"k{number}"
            reported[key] = story.attempt(store, key, _TINY)
        free = os.statvfs(few_files).f_ffree
        results = store.write_blocks([(f"b{i}", story.content(f"b{i}", _TINY)) for i in range(9)])
        left = os.statvfs(few_files).f_ffree
        stored = [key for key, error in reported.items() if not error]

        assert 10 < len(stored) <= 90
        for key, error in reported.items():
            assert error in ([], ["StorageFullError", "ENOSPC", key])
            expected = None if error else story.content(key, _TINY)
            assert faultlab.peek(few_files, key, layout=layout) == expected
        assert all(isinstance(one.error, kvio.StorageFullError) for one in results)
        assert left == free
        assert not faultlab.temporaries(few_files)
        assert store.delete_block(stored[0])
        assert story.attempt(store, stored[0], story.BLOCK) == []
        assert story.attempt(store, stored[1], story.BLOCK) == ["StorageFullError", "ENOSPC", "k1"]
        with pytest.raises(kvio.StorageFullError):
            kvio.SharedFile.create(few_files / "f", 5000, durability="visible")
    kept = faultlab.peek(few_files, stored[1], layout=layout)
    assert kept == story.content(stored[1], _TINY)
    tally.add(faults=len(reported) - len(stored) + 11, receipts=len(stored), lost=0, torn=0)


@pytest.mark.root
def test_a_store_that_cannot_make_its_directories_is_not_opened(
    tmp_path: Path, tally: Tally
) -> None:
    """A durable store needs them before its first receipt: StorageFullError, nothing leaked."""
    with mounts.loop_filesystem("ext4", tmp_path, "-N", "256") as root:
        before = faultlab.open_descriptors()
        with pytest.raises(kvio.StorageFullError) as caught:
            story.WAYS["tmpfile-durable"].open(root)

        assert caught.value.errno == errno.ENOSPC
        assert faultlab.open_descriptors() == before
        tally.add(faults=1)


@pytest.mark.parametrize("way", ["tmpfile", "renamed", "direct-durable"])
def test_a_file_that_would_be_too_long_is_a_full_medium(
    real_disk: Path, way: str, tally: Tally
) -> None:
    """RLIMIT_FSIZE: a StorageFullError of EFBIG wherever bytes go, and all else works."""
    limit = 1 << 20
    roots = [real_disk / name for name in ("store", "files", "spool")]
    for root in roots:
        root.mkdir(mode=0o700)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with story.WAYS[way].open(roots[0]) as store:
            huge = ["StorageFullError", "EFBIG", "k"]
            assert story.attempt(store, "k", limit + 1) == huge
            assert story.attempt(store, "k", story.BLOCK) == []
            assert story.attempt(store, "k", media.HUGE_BYTES) == huge
            assert story.attempt(store, "small", story.SMALL) == []
            _staged_too_long(store, roots[2], limit)
        for preallocate in (True, False):
            _shared_too_long(roots[1] / "f", limit, preallocate=preallocate)

    try:
        story.WAYS[way].open(roots[0]).close()
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    children.in_child(work)
    assert faultlab.peek(roots[0], "k") == story.content("k", story.BLOCK)
    assert faultlab.peek(roots[0], "staged") is None
    assert not faultlab.temporaries(roots[0])
    assert os.listdir(roots[1]) == os.listdir(roots[2]) == []
    tally.add(faults=6, receipts=2, lost=0, torn=0)


def _staged_too_long(store: kvio.Store, spool: Path, limit: int) -> None:
    with kvio.stage(store, "8MiB", retries=0, spool=spool) as tier:
        receipt = tier.write_block("staged", bytes(limit + 1))
        with pytest.raises(kvio.StorageFullError) as caught:
            receipt.wait()
        assert caught.value.errno == errno.EFBIG
        assert tier.discard(receipt)


def _shared_too_long(path: Path, limit: int, *, preallocate: bool) -> None:
    with (  # noqa: PT012  # one of these calls
        pytest.raises(kvio.StorageFullError) as caught,
        kvio.SharedFile.create(path, 2 * limit, preallocate=preallocate) as file,
    ):
        file.pwrite(bytes(2 * limit), 0)
        file.seal()
    assert caught.value.errno == errno.EFBIG
