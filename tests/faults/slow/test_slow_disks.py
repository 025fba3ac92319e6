"""Disks that are slow or frozen: a delayed FUSE server, a throttled loop device, fsfreeze.

Root; loop devices; FUSE; cgroup version 1 with blkio for the throttle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import kvio
from tests.core.test_timeouts import frozen
from tests.faults.sizes import seed, size
from tests.faults.slow.deadlines import SOON_S, Lateness
from tests.faults.slow.test_stopped import settle
from tests.faults.totals import Tally
from tests.faults.without import passthrough
from tests.posix import children, faultlab, mounts

LONG_S: Final = 60.0
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")
#: So slow that one block of `_NBYTES` outlasts every deadline here by far.
_BYTES_A_SECOND: Final = size(1 << 20, 1 << 19)
_NBYTES: Final = 3 << 19
#: What so many calls leave under way is what the disk has room for.
_AT_ONCE: Final = 4

pytestmark = [pytest.mark.slow, pytest.mark.root]


@contextmanager
def throttled(device: int, work: Path) -> Iterator[None]:
    """Let this process write to a block device slowly."""
    children.need_root()
    if not (_BLKIO / "blkio.throttle.write_bps_device").exists():
        pytest.skip("needs cgroup version 1 with blkio throttling")
    group = _BLKIO / f"kvio-{os.getpid()}-{work.name}"
    before = _BLKIO / _own_group()
    group.mkdir()
    try:
        number = f"{os.major(device)}:{os.minor(device)}"
        (group / "blkio.throttle.write_bps_device").write_text(f"{number} {_BYTES_A_SECOND}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if "blkio" in names.split(","):
            return path.lstrip("/")
    return ""


def hybrid(root: Path) -> kvio.Store:
    """Open a store that writes past the page cache: a throttle is felt at once."""
    try:
        return kvio.open_store("posix-direct", root=root, io_threads=2)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the loop mount lacks it: {exc}")


def test_a_deadline_holds_on_a_throttled_disk(disk_path: Path, tally: Tally) -> None:
    """Large writes give up in time, leave no name, and small ones get through after them."""
    late = Lateness()
    data = faultlab.pattern(seed(), _NBYTES)
    published = 0
    with mounts.loop_filesystem("ext4", disk_path) as root, hybrid(root) as store:
        for first in range(0, size(2, 12), _AT_ONCE):
            with throttled(root.stat().st_dev, disk_path):
                for number in range(first, first + size(2, _AT_ONCE)):
                    with late.expected():
                        store.write_block(f"k{number}", data, timeout=SOON_S)
                settle(store)
                assert store.write_block(f"small{first}", b"data", timeout=LONG_S).nbytes == 4
            assert faultlab.peek(root, f"small{first}") == b"data"
            # One that had come to its name by then has it, whole.
            for key in list(store.list_keys("k")):
                published += 1
                assert faultlab.peek(root, key) == data, f"{key} is torn"
                store.delete_block(key)
            assert not faultlab.temporaries(root)
    late.count(tally)
    tally.add(faults=len(late.over), torn=0)
    print(f"throttled disk: {late}; {published} were published all the same")


def test_a_slow_server_is_slow_and_no_more(disk_path: Path, tally: Tally) -> None:
    """Each write a little late: deadlines above that hold receipts, those below none."""
    late = Lateness()
    with passthrough.mounted(disk_path) as mount:
        (mount.below / "root").mkdir(mode=0o700)
        root = mount.path / "root"
        with kvio.open_store("posix-tmpfile", root=root, io_threads=2) as store:
            mount.delay_ms = 20
            start = time.monotonic()
            results = store.write_blocks([(f"b{i}", b"data") for i in range(8)], timeout=LONG_S)
            assert all(result.ok for result in results)
            assert time.monotonic() - start >= 0.02, "the server is not slow at all"
            mount.delay_ms = size(2_000, 4_000)  # `SOON_S` is over long before
            for number in range(size(2, 12)):
                with late.expected():
                    store.write_block(f"k{number}", b"data", timeout=SOON_S)
            settle(store)
            mount.delay_ms = 0
            assert sorted(store.list_keys()) == [f"b{i}" for i in range(8)]
            assert not faultlab.temporaries(mount.below / "root")
    late.count(tally)
    tally.add(faults=len(late.over), receipts=8, lost=0, torn=0)
    print(f"delayed server: {late}")


def test_a_tier_over_a_frozen_file_system_stores_all_when_it_thaws(
    disk_path: Path, tally: Tally
) -> None:
    """What was accepted is read, not stored, until the thaw; then each has its receipt."""
    late = Lateness()
    data = faultlab.pattern(seed(), 60_000)
    with (
        mounts.loop_filesystem("ext4", disk_path) as root,
        kvio.open_store("posix-tmpfile", root=root, io_threads=2) as store,
        kvio.stage(store, capacity="1MiB", timeout=LONG_S) as tier,
    ):
        with frozen(root.parent):
            receipts = [tier.write_block(f"k{number}", data) for number in range(6)]
            for _ in range(size(2, 10)):
                with late.expected():
                    tier.barrier(timeout=SOON_S)
            assert not any(receipt.done for receipt in receipts)
            assert bytes(tier.read_block("k3", timeout=LONG_S)) == data
        for receipt in receipts:
            receipt.wait(timeout=LONG_S)
        for receipt in receipts:
            assert faultlab.peek(root, receipt.key) == data
    late.count(tally)
    tally.add(receipts=len(receipts), lost=0, torn=0)
    print(f"frozen file system: {late}")
