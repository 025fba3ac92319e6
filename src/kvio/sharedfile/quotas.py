"""Quota groups of btrfs, with which a store to mapped memory can be a SIGBUS."""

from __future__ import annotations

import fcntl
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

#: From linux/btrfs.h: struct btrfs_ioctl_fs_info_args, of which the identity is wanted.
_BTRFS_IOC_FS_INFO: Final = 0x8400941F
_FS_INFO: Final = struct.Struct("=QQ16s992x")
_SYSFS: Final = Path("/sys/fs/btrfs")


def limited(fd: int) -> bool:
    """Return whether a file is on a btrfs with a limited quota group.

    btrfs copies a page anew after every writeback and asks the quota for the room; where there is
    none, the process that stores into the page is killed. That the kernel tells who is limited,
    to whoever asks, is so since Linux 5.9.
    """
    try:
        told = fcntl.ioctl(fd, _BTRFS_IOC_FS_INFO, bytes(_FS_INFO.size))
    except OSError:  # another file system
        return False
    identity = str(uuid.UUID(bytes=_FS_INFO.unpack(told)[2]))
    found = False
    with suppress(OSError, ValueError):
        for flags in (_SYSFS / identity / "qgroups").glob("*/limit_flags"):
            found = found or int(flags.read_text(), 0) != 0
    return found
