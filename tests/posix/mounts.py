"""Small file systems of our own, on loop devices or in memory; root only."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.media import filesystem_of
from tests.posix import children

#: Program, its options, and the smallest image it likes, in MiB.
_MAKERS: dict[str, tuple[list[str], int]] = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-N", "256"], 16),
    "ext4-nojournal": (["mkfs.ext4", "-q", "-F", "-N", "512", "-O", "^has_journal"], 16),
    "ext2": (["mkfs.ext2", "-q", "-F", "-N", "512"], 16),
    "xfs": (["mkfs.xfs", "-q", "-f"], 300),
    "btrfs": (["mkfs.btrfs", "-q", "-f", "--mixed"], 64),
}
#: How long room that was freed may need to be free: xfs frees inodes behind one's back.
_BACK_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)
_PACKAGES = {"mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip():.200}")
    return done.stdout.strip()


@contextmanager
def loop_filesystem(
    kind: str, work: Path, *options: str, size_mib: int | None = None
) -> Iterator[Path]:
    """Mount a fresh file system, made with *options*, from an image below *work*; its root."""
    children.need_root()
    maker, least_mib = _MAKERS[kind]
    if shutil.which(maker[0]) is None:
        pytest.skip(f"needs {maker[0]} (Debian package {_PACKAGES.get(maker[0], 'e2fsprogs')})")
    image, mountpoint = work / f"{kind}.img", work / kind
    image.touch()
    os.truncate(image, (size_mib or least_mib) << 20)
    mountpoint.mkdir()
    device = _run(["losetup", "-f", "--show", str(image)])
    try:
        _run([*maker, *options, device])
        _run(["mount", "-t", kind.partition("-")[0], device, str(mountpoint)])
        try:
            yield _root_below(mountpoint)
        finally:
            # -l: a test that failed may have left a store open, which must not keep the mount.
            subprocess.run(["umount", "-l", str(mountpoint)], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
        image.unlink()


def has_journal(directory: Path) -> bool:
    """Return whether a file synced without a name keeps its bytes: xfs, or a jbd2 journal.

    Without /proc nobody knows.
    """
    if not os.path.exists("/proc/self/mountinfo"):
        return False
    device = os.stat(directory).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    journals = list(Path("/proc/fs/jbd2").glob(f"{name}-*"))  # jbd2 has a directory for each
    return filesystem_of(directory) == "xfs" or bool(journals)


@contextmanager
def journaled(directory: Path) -> Iterator[Path]:
    """Return a directory, or where it has no journal the root of an ext4 mounted below it."""
    if has_journal(directory):
        yield directory
        return
    with loop_filesystem("ext4", directory, "-N", "8192", size_mib=64) as root:
        yield root


@contextmanager
def memory_filesystem(work: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with its own limits."""
    children.need_root()
    mountpoint = work / "tmpfs"
    mountpoint.mkdir()
    _run(["mount", "-t", "tmpfs", "-o", options, "none", str(mountpoint)])
    try:
        yield _root_below(mountpoint)
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


@contextmanager
def bindfs(work: Path) -> Iterator[Path]:
    """Mount a directory by bindfs, where each name is an inode and renames take no flags."""
    children.need_root()
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs (Debian package bindfs)")
    below, mountpoint = work / "below", work / "bindfs"
    below.mkdir()
    mountpoint.mkdir()
    _run(["bindfs", str(below), str(mountpoint)])
    try:
        yield _root_below(mountpoint)
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


def _root_below(mountpoint: Path) -> Path:
    root = mountpoint / "root"
    root.mkdir(mode=0o700)
    return root


def free_bytes(path: Path) -> int:
    """Return how much room a file system has, once it has written what it still had to.

    Xfs frees inodes behind one's back, so it is asked more than once.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return max(_free_bytes(fd) for _ in range(5))
    finally:
        os.close(fd)


def _free_bytes(fd: int) -> int:
    _libc.syncfs(fd)
    info = os.fstatvfs(fd)
    return info.f_bfree * info.f_frsize


def lost_bytes(before: int, free: Callable[[], int], slack: int) -> int:
    """Return how much room does not come back; what is more than *slack* is waited for."""
    deadline = time.monotonic() + _BACK_S
    while (lost := before - free()) > slack and time.monotonic() < deadline:
        pass
    return lost
