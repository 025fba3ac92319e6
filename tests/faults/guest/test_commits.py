"""A file system's own commits between two steps of kvio, and a power cut after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.guest import boot, commits, disks, judging
from tests.faults.guest.workload import SHARED
from tests.faults.totals import Tally
from tests.posix import children

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

_DISK_MIB = 300


def test_a_shared_file_is_taken_over_whenever_btrfs_commits(tmp_path: Path, tally: Tally) -> None:
    """Its map can be read after a power cut, though btrfs logs no flags of what was renamed."""
    children.need_root()
    boot.need_guest()
    image = disks.make_disk(tmp_path, "btrfs", _DISK_MIB)
    machine = boot.Guest(tmp_path, "tests.faults.guest.commits", disks=[image])
    with machine as guest:
        reported = next(guest.lines(), None)
        assert reported == str(commits.NBYTES), guest.console
        guest.cut()
    tally.add(cuts=1)
    with disks.mounted(image, "btrfs") as root:
        (root / SHARED / "other").unlink()
        assert not judging.judge_shared(root, {}).bad
        assert not list((root / SHARED).iterdir())
    image.unlink()
