"""Small file systems with a little room left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.posix import mounts

KINDS: Final = ("ext4", "xfs", "btrfs", "tmpfs")
#: What is left for blocks, and a block that never fits.
LEAVE_BYTES: Final = 7 << 20
HUGE_BYTES: Final = 20 << 20
#: How much room what failed may keep: ext4 and tmpfs count every block, xfs and btrfs keep some
#: for their own trees.
SLACK_BYTES: Final = {"ext4": 4096, "tmpfs": 4096, "xfs": 128 << 10, "btrfs": 512 << 10}


@contextmanager
def almost_full(kind: str, work: Path) -> Iterator[Path]:
    """Mount a file system with `LEAVE_BYTES` of room, and give a root on it."""
    if kind == "tmpfs":
        with mounts.memory_filesystem(work, f"size={LEAVE_BYTES}") as root:
            yield root
        return
    more = ("-N", "4096") if kind == "ext4" else ()
    with mounts.loop_filesystem(kind, work, *more) as root:
        fill(root)
        yield root


def filler_of(root: Path) -> Path:
    """Name the file that takes the room."""
    return root.parent / "filler"


def fill(root: Path, leave: int = LEAVE_BYTES) -> None:
    """Take room with one file until only so much is left."""
    info = os.statvfs(root)
    with filler_of(root).open("ab") as filler:
        more = info.f_bavail * info.f_frsize - leave
        if more > 0:
            os.posix_fallocate(filler.fileno(), filler.tell(), more)
            os.fsync(filler.fileno())


def make_room(root: Path) -> None:
    """Release the filler's space; a tmpfs, which has none, becomes larger."""
    if filler_of(root).exists():
        filler_of(root).unlink()
    else:
        more = f"remount,size={4 * HUGE_BYTES}"
        subprocess.run(["mount", "-o", more, str(root.parent)], check=True, timeout=60)
