"""A device that fills up: what was stored is whole, what was not leaves no trace.

Needs e2fsprogs, xfsprogs, btrfs-progs and loop devices, for what they make.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from tests.faults.full import liar, media, story
from tests.faults.sizes import FULL
from tests.faults.totals import Tally
from tests.posix import faultlab, mounts

pytestmark = [pytest.mark.root, pytest.mark.slow]

#: Every way on every file system; nothing in memory is durable or direct.
_ALL = [
    (kind, way)
    for kind in media.KINDS
    for way in story.WAYS
    if kind != "tmpfs" or not way.endswith("durable")
]
_FEW = [
    ("ext4", "tmpfile-durable"),
    ("ext4", "direct-durable"),
    ("xfs", "tmpfile"),
    ("btrfs", "renamed-durable"),
    ("tmpfs", "tmpfile"),
]


@pytest.fixture
def root(kind: str, tmp_path: Path) -> Iterator[Path]:
    """Yield a root with little room."""
    with media.almost_full(kind, tmp_path) as root:
        yield root


def open_way(name: str, root: Path) -> kvio.Store:
    """Open a store, or skip where the file system has no such way."""
    try:
        return story.WAYS[name].open(root)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize(("kind", "way"), _ALL if FULL else _FEW)
def test_a_full_device_refuses_what_does_not_fit_and_nothing_else(
    root: Path, kind: str, way: str, tally: Tally
) -> None:
    """A StorageFullError, no receipt, no name, the room back, and what is smaller still fits."""
    slack = media.SLACK_BYTES[kind]
    with open_way(way, root) as store:
        reported = story.report(store, media.HUGE_BYTES, lambda: mounts.free_bytes(root), slack)

    story.judge(reported, root, layout=story.WAYS[way].layout, numbers=("ENOSPC",))
    assert reported["lost room"] <= slack
    tally.add(faults=5, receipts=len(reported["stored"]) + 4, lost=0, torn=0)


@pytest.mark.parametrize("kind", media.KINDS)
@pytest.mark.parametrize("preallocate", [True, False], ids=["allocated", "hole"])
def test_a_shared_file_that_does_not_fit_leaves_nothing(
    root: Path, kind: str, *, preallocate: bool, tally: Tally
) -> None:
    """It fails when it is made or when it is written, is never sealed, and gives its room back."""
    before = mounts.free_bytes(root)
    with pytest.raises(kvio.StorageFullError) as caught:  # noqa: PT012  # one of these calls
        file = kvio.SharedFile.create(
            root / "f", media.HUGE_BYTES, writers=2, preallocate=preallocate, durability="visible"
        )
        with file:
            for rank in (0, 1):
                for at, nbytes in file.domain(rank):
                    file.pwrite(story.content("f", nbytes), at)
            file.seal()

    assert caught.value.errno is not None
    assert list(root.iterdir()) == []
    slack = media.SLACK_BYTES[kind]
    assert mounts.lost_bytes(before, lambda: mounts.free_bytes(root), slack) <= slack
    data = story.content("g", media.LEAVE_BYTES // 4)
    with kvio.SharedFile.create(root / "g", len(data), durability="visible") as file:
        file.pwrite(data, 0)
        file.seal()
        assert file.pread_into(out := bytearray(len(data))) == len(data)
    assert out == data
    tally.add(faults=1)


@pytest.mark.parametrize("kind", media.KINDS)
def test_a_staging_tier_loses_nothing_to_a_full_store(root: Path, kind: str, tally: Tally) -> None:
    """Receipts of what did not fit say so, the bytes stay readable, and a retry stores them."""
    way = "tmpfile" if kind == "tmpfs" else "tmpfile-durable"
    keys = [f"k{number}" for number in range(50)]
    with open_way(way, root) as store:
        tier = kvio.stage(store, "32MiB", retries=0)
        receipts = {key: tier.write_block(key, story.content(key, story.BLOCK)) for key in keys}
        with pytest.raises(kvio.StorageFullError):
            tier.barrier()
        failed = {receipt.key for receipt in tier.failed}

        assert 0 < len(failed) < len(keys)
        for key, receipt in receipts.items():
            data, stored = story.content(key, story.BLOCK), faultlab.peek(root, key)
            named = "fsync the directory" in str(receipt.error)  # it stands, whole, unconfirmed
            assert (receipt.receipt is None) == (key in failed), key
            assert stored == (data if named or key not in failed else None), (key, receipt.error)
            assert isinstance(receipt.error, kvio.StorageFullError) == (key in failed), key
            assert bytes(tier.read_block(key)) == data
        with pytest.raises(kvio.TierNotDrainedError) as caught:
            tier.close()
        assert set(caught.value.keys) == failed

        media.make_room(root)
        assert {receipt.key for receipt in tier.retry_failed()} == failed
        tier.barrier()
        tier.close()
    level = "visible" if kind == "tmpfs" else "durable"
    assert {receipt.level for receipt in receipts.values()} == {level}
    for key in keys:
        assert faultlab.peek(root, key) == story.content(key, story.BLOCK)
    assert not faultlab.temporaries(root)
    tally.add(faults=len(failed), receipts=len(keys), lost=0, torn=0)


@pytest.mark.parametrize("kind", media.KINDS)
def test_a_staged_file_that_finds_its_spool_full_fails_by_itself(
    root: Path, kind: str, tmp_path: Path, tally: Tally
) -> None:
    """It is a StorageFullError, the file leaves no block and no room, and others go on."""
    before = mounts.free_bytes(root)
    elsewhere = tmp_path / "store"
    elsewhere.mkdir(mode=0o700)
    with (
        kvio.open_store("posix-tmpfile", root=elsewhere) as store,
        kvio.stage(store, "1MiB", spool=root) as tier,
    ):
        data = story.content("large", media.HUGE_BYTES)
        with pytest.raises(kvio.StorageFullError), tier.open("large", "wb") as file:  # noqa: PT012
            for at in range(0, len(data), 1 << 20):
                file.write(data[at : at + (1 << 20)])
        assert not tier.contains("large")
        with tier.open("fits", "wb") as file:
            file.write(data[: media.LEAVE_BYTES // 2])

    assert faultlab.peek(elsewhere, "large") is None
    assert faultlab.peek(elsewhere, "fits") == data[: media.LEAVE_BYTES // 2]
    slack = media.SLACK_BYTES[kind]
    assert mounts.lost_bytes(before, lambda: mounts.free_bytes(root), slack) <= slack
    tally.add(faults=1)


def run_story(root: Path, way: str, environment: dict[str, str]) -> str:
    """Run a story in a process of its own, perhaps a broken one; how it failed, or nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.full.story", str(root), way, str(media.HUGE_BYTES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        return done.stderr
    way_layout = story.WAYS[way].layout
    try:
        story.judge(json.loads(done.stdout), root, layout=way_layout, numbers=("ENOSPC",))
    except AssertionError as exc:
        return repr(exc)
    return ""


@pytest.mark.parametrize("kind", ["tmpfs"])  # which writes short before it is full
@pytest.mark.parametrize("variant", ["none", *liar.EARLY])
def test_a_store_that_takes_no_heed_of_a_full_device_is_caught(
    root: Path, variant: str, tmp_path: Path, tally: Tally
) -> None:
    """A process whose writes are all taken for whole reports what the file system does not have."""
    more = {} if variant == "none" else liar.environment(liar.build(tmp_path), variant)
    bad = run_story(root, "tmpfile", {**os.environ, **more})

    assert bool(bad) == (variant != "none"), bad
    tally.add(mutants=int(variant != "none"), caught=int(bool(bad)))
