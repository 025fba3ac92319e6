"""A subvolume whose quota group is used up, on a file system that has room: EDQUOT.

Needs btrfs-progs and loop devices.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from tests.faults.full import media, story
from tests.faults.sizes import FULL
from tests.faults.totals import Tally
from tests.posix import children, faultlab, mounts

pytestmark = [pytest.mark.root, pytest.mark.slow]

_LIMIT_BYTES = 8 << 20
#: How much of its room a quota group has to spare for trees, and rounds to.
_SLACK_BYTES = 128 << 10


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Path]:
    """Yield a root in a subvolume that may hold 8 MiB."""
    with mounts.loop_filesystem("btrfs", tmp_path) as root:
        top, volume = str(root.parent), str(root.parent / "volume")
        for command in (
            ["quota", "enable", top],
            ["subvolume", "create", volume],
            ["qgroup", "limit", str(_LIMIT_BYTES), volume],
        ):
            done = subprocess.run(["btrfs", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no quota groups here: {done.stderr.strip():.200}")
        own = Path(volume, "root")
        own.mkdir(mode=0o700)
        yield own


def used_bytes(root: Path) -> int:
    """Return what a quota group counts, when everything is written."""
    volume = str(root.parent)
    subprocess.run(["btrfs", "filesystem", "sync", volume], check=True, capture_output=True)
    shown = subprocess.run(
        ["btrfs", "qgroup", "show", "--raw", "-f", volume],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(shown.splitlines()[-1].split()[1])


@pytest.mark.parametrize("way", story.WAYS if FULL else ["tmpfile-durable"])
def test_a_quota_that_is_used_up_is_a_full_medium(limited: Path, way: str, tally: Tally) -> None:
    """A StorageFullError of EDQUOT, no receipt, no name, and what is smaller still fits."""
    try:
        store = story.WAYS[way].open(limited)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))

    def left_bytes() -> int:
        return _LIMIT_BYTES - used_bytes(limited)

    with store:
        reported = story.report(store, media.HUGE_BYTES, left_bytes, _SLACK_BYTES)

    story.judge(reported, limited, layout=story.WAYS[way].layout, numbers=("EDQUOT",))
    assert reported["lost room"] <= _SLACK_BYTES
    tally.add(faults=5, receipts=len(reported["stored"]) + 4, lost=0, torn=0)


@pytest.mark.parametrize("preallocate", [True, False], ids=["allocated", "hole"])
def test_a_shared_file_under_a_quota_is_refused(
    limited: Path, *, preallocate: bool, tally: Tally
) -> None:
    """Btrfs ends a process that writes to mapped memory over its quota: none gets so far."""
    before = used_bytes(limited)

    def work() -> None:
        with pytest.raises(kvio.UnsupportedError, match="quota"):
            kvio.SharedFile.create(limited / "f", media.HUGE_BYTES, preallocate=preallocate)

    children.in_child(work)  # a signal would end it
    assert os.listdir(limited) == []
    assert used_bytes(limited) - before <= _SLACK_BYTES
    tally.add(faults=1)


def test_a_tier_over_its_quota_loses_nothing(limited: Path, tally: Tally) -> None:
    """What did not fit stays staged until the limit is raised; then all of it is stored."""
    keys = [f"k{number}" for number in range(60)]
    with (
        story.WAYS["tmpfile-durable"].open(limited) as store,
        kvio.stage(store, "32MiB", retries=0) as tier,
    ):
        receipts = [tier.write_block(key, story.content(key, story.BLOCK)) for key in keys]
        with pytest.raises(kvio.StorageFullError):
            tier.barrier()
        failed = tier.failed
        assert 0 < len(failed) < len(keys)
        subprocess.run(["btrfs", "qgroup", "limit", "none", str(limited.parent)], check=True)
        tier.retry_failed()
        tier.barrier()
    assert all(receipt.level == "durable" for receipt in receipts)
    for key in keys:
        assert faultlab.peek(limited, key) == story.content(key, story.BLOCK)
    tally.add(faults=len(failed), receipts=len(keys), lost=0, torn=0)
