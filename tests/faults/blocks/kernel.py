"""Mounts, loop devices and namespaces by system call: no process is started for any of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]

_NEW_NAMESPACE: Final = 0x00020000  # CLONE_NEWNS
_PRIVATE_TREE: Final = 0x00044000  # MS_REC | MS_PRIVATE
DETACH: Final = 2  # MNT_DETACH
_PUNCH_KEEPING_SIZE: Final = 3
_LOOP_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_AUTOCLEAR: Final = 4
_LOOP_CONFIG: Final = struct.Struct("<II232s64x")  # linux/loop.h, struct loop_config
_LOOP_FLAGS_AT: Final = 52  # of lo_flags in struct loop_info64
_FLUSH_BUFFERS: Final = 0x1261  # BLKFLSBUF
_GOING_DOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2
_FORGET_DEVICES: Final = 0x50009405  # BTRFS_IOC_FORGET_DEV


def _check(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def own_namespace() -> None:
    """Have mounts of our own, which are gone when the last process that sees them is.

    What others mounted on loop devices and FUSE servers is let go of, or it would stay in use.
    """
    _check(_libc.unshare(_NEW_NAMESPACE), "unshare")
    _check(_libc.mount(b"none", b"/", None, _PRIVATE_TREE, None), "make mounts private")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source = after.split()[:2]
        if source.startswith("/dev/loop") or kind.startswith("fuse"):
            with suppress(OSError):  # what a namespace of users has locked stays
                unmount(before.split()[4].replace("\\040", " "), detach=True)


def mount(source: str, target: str, kind: str, options: str = "") -> None:
    """Mount; raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode(), 0, options.encode())
    _check(_libc.mount(*arguments), f"mount {kind}")


def unmount(target: str, *, detach: bool = False) -> None:
    """Unmount; raises OSError."""
    _check(_libc.umount2(target.encode(), DETACH if detach else 0), f"unmount {target}")


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Make a range of a file zeros."""
    _check(_libc.fallocate(fd, _PUNCH_KEEPING_SIZE, offset, nbytes), "punch a hole")


def attach(image: str) -> tuple[int, str]:
    """Put a loop device over a file: a descriptor that holds it, and its path.

    The device goes when the descriptor is closed and nothing is mounted from it.
    """
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            found = _attach_next(backing)
            if found is not None:
                return found
    finally:
        os.close(backing)


def _attach_next(backing: int) -> tuple[int, str] | None:
    """Take the next free device; None: somebody else was faster."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        path = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
    finally:
        os.close(control)
    info = bytearray(232)
    struct.pack_into("<I", info, _LOOP_FLAGS_AT, _LOOP_AUTOCLEAR)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, 512, bytes(info)))
    except OSError as exc:
        os.close(fd)
        if exc.errno == errno.EBUSY:
            return None
        raise
    return fd, path


def forget_buffers(device: int) -> None:
    """Drop what the kernel caches of a block device."""
    fcntl.ioctl(device, _FLUSH_BUFFERS)


def forget_btrfs() -> None:
    """Let btrfs forget devices that are not mounted: it takes an older image for a wrong one."""
    control = os.open("/dev/btrfs-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(control, _FORGET_DEVICES, bytearray(4096))
    finally:
        os.close(control)


def shut_down(root: str) -> None:
    """Stop a file system as a crash would: no more I/O, and its log is not written out."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("<I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)
