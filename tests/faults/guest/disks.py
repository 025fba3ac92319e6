"""Disks of a guest: images with a file system, looked at on this machine between two lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

#: Longer than any other test keeps a namespace.
_RELEASED_S: Final = 900.0
KINDS: Final = ("ext4", "ext4-nojournal", "xfs", "btrfs")
_MAKERS: Final = {
    "ext4": ("e2fsprogs", ["mkfs.ext4", "-q", "-F"]),
    "ext4-nojournal": ("e2fsprogs", ["mkfs.ext4", "-q", "-F", "-O", "^has_journal"]),
    "xfs": ("xfsprogs", ["mkfs.xfs", "-q", "-f"]),
    "btrfs": ("btrfs-progs", ["mkfs.btrfs", "-q", "-f"]),
}


def make_disk(work: Path, kind: str, size_mib: int, *options: str) -> Path:
    """Make an image with an empty file system."""
    package, maker = _MAKERS[kind]
    if shutil.which(maker[0]) is None:
        pytest.skip(f"needs {maker[0]} (Debian package {package})")
    image = work / f"{kind}.img"
    image.touch()
    os.truncate(image, size_mib << 20)
    subprocess.run([*maker, *options, str(image)], check=True, capture_output=True, timeout=60)
    return image


def type_of(kind: str) -> str:
    """Return what mount(2) calls a file system of a kind."""
    return kind.partition("-")[0]


def _wait_until_free(image: Path) -> None:
    """Wait until nobody has the image mounted: what a kernel knows of it is old after a life.

    A namespace that was made meanwhile keeps what it saw mounted, and the next mount would be
    given that again.
    """
    deadline = time.monotonic() + _RELEASED_S
    while is_attached(image):
        assert time.monotonic() < deadline, f"{image} is still mounted by somebody"


def is_attached(image: Path) -> bool:
    """Is there a loop device over the image?"""
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it may be detached right now
            if file.read_text().strip() == str(image):
                return True
    return False


@contextmanager
def mounted(image: Path, kind: str) -> Iterator[Path]:
    """Mount an image, which replays its journal; its root. Not to be mounted is a failure.

    What has no journal is checked first, as a machine does when it starts.
    """
    where = image.with_suffix(".mounted")
    where.mkdir(exist_ok=True)
    if kind == "ext4-nojournal":
        checked = subprocess.run(
            ["e2fsck", "-f", "-y", str(image)], capture_output=True, text=True, check=False
        )
        assert checked.returncode < 4, f"e2fsck cannot repair it: {checked.stdout}"  # e2fsck(8)
    command = ["mount", "-t", type_of(kind), "-o", "loop", str(image), str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "loop" in done.stderr and not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices here")
    assert done.returncode == 0, f"{kind} does not come back: {done.stderr}"
    try:
        yield where
    finally:
        ended = subprocess.run(["umount", str(where)], capture_output=True, check=False)
        if ended.returncode:  # a test that failed may have left a store open
            subprocess.run(["umount", "-l", str(where)], check=True)
        _wait_until_free(image)
