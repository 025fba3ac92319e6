"""In the guest: a shared file in whose making btrfs commits, as it does every half a minute.

The commit comes between the making of the map's inode and its flags, so that only the log of the
next syncs has these; then another file of the directory is synced, and with it what the log holds.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final
from unittest import mock

import kvio
from kvio.sharedfile import lifecycle
from kvio.sharedfile import state as maps
from tests.faults.guest import inside
from tests.faults.guest.workload import SHARED

NBYTES: Final = 100_000


def work(line: inside.Line) -> None:
    """Make the file, and wait for the end."""
    root = Path(inside.mount(inside.device(0), "/mnt/btrfs", "btrfs"), SHARED)
    root.mkdir(mode=0o700)

    def write_map(*arguments: Any) -> bool:
        os.sync()
        return maps.write_map(*arguments)

    with mock.patch.object(lifecycle, "write_map", write_map):
        file = kvio.SharedFile.create(root / "file", NBYTES, durability="durable")
    fd = os.open(root / "other", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, bytes(4096))
    os.fsync(fd)
    line.report(str(file.size))
    threading.Event().wait()


if __name__ == "__main__":
    inside.main(work)
