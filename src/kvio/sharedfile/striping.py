"""The stripe of a file system, if it reports one: domains begin on it."""

from __future__ import annotations

import fcntl
import struct
from typing import Final

#: From xfs_fs.h: the geometry of a mounted file system, version 1.
_XFS_IOC_FSGEOMETRY_V1: Final = 0x80705864
_XFS_MAGIC: Final = 0x58465342
_GEOMETRY: Final = struct.Struct("=8I4Q16s2IiIIII4x")


def stripe_bytes(dirfd: int, fs_magic: int) -> int:
    """Return the stripe unit of a directory's file system in bytes; 0: it reports none.

    XFS reports the value of ``mkfs.xfs -d su=`` or of the device. ext4 does not report it.
    """
    if fs_magic != _XFS_MAGIC:
        return 0
    try:
        geometry = fcntl.ioctl(dirfd, _XFS_IOC_FSGEOMETRY_V1, bytes(_GEOMETRY.size))
    except OSError:
        return 0
    fields = _GEOMETRY.unpack(geometry)
    block, unit = fields[0], fields[13]
    return int(block * unit)
