"""In the guest: kvio where a quota is used up on a file system that has room.

    python -m tests.faults.guest.quotas CASE…

The disks are an ext4 with the quota feature and an xfs. A line of JSON for each case: what was
lost of the room, or how the case failed.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvio
import kvio.sharedfile  # now: the users of the cases may not read where Python is
from tests.faults.full import story
from tests.faults.guest import inside
from tests.posix import children, faultlab, mounts

_LIMIT_KIB: Final = 4096
_HUGE_BYTES: Final = 6 << 20
_INODES: Final = 100
_QUOTACTL: Final = 179  # x86_64
_GET, _SET = 0x800007, 0x800008
_LIMITS: Final = struct.Struct("<8QI4x")  # struct if_dqblk of linux/quota.h
_BOTH_LIMITS: Final = 5
_XATTR: Final = struct.Struct("<5I8x")  # struct fsxattr of linux/fs.h
_GET_XATTR, _SET_XATTR = 0x801C581F, 0x401C5820
_INHERIT_PROJECT: Final = 0x200
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one user, or of one project, on one disk.

    Attributes:
        kind: the disk's file system.
        owner: the number of the user or project.
        project: it is one of a project, which binds root too.
        error: what the kernel says where the bytes are used up.
    """

    kind: str
    owner: int
    project: bool = False
    error: str = "EDQUOT"

    @property
    def root(self) -> Path:
        """The directory that is limited."""
        return Path("/mnt", self.kind, f"root{self.owner}")

    def start(self, *, inodes: int = 0) -> None:
        """Make the directory, and set the limits."""
        self.root.mkdir(mode=0o700)
        if self.project:
            self._mark()
        else:
            os.chown(self.root, self.owner, self.owner)
        limit = 0 if inodes else _LIMIT_KIB
        self._control(_SET, (limit, 0, 0, inodes, 0, 0, 0, 0, _BOTH_LIMITS))

    def used(self) -> tuple[int, int]:
        """Return how many bytes and inodes are in use."""
        mounts.free_bytes(self.root)  # everything is written
        counted = self._control(_GET, (0,) * 9)
        return counted[2], counted[5]

    def left_bytes(self) -> int:
        """Return how many bytes are left; xfs frees behind one's back."""
        return (_LIMIT_KIB << 10) - min(self.used()[0] for _ in range(5))

    def inside(self, work: Callable[[], Any]) -> Any:
        """Do something as whom the quota binds."""

        def as_user() -> str:
            if not self.project:
                children.become(self.owner)
            return json.dumps(work())

        return json.loads(children.in_child(as_user))

    def _mark(self) -> None:
        fd = os.open(self.root, os.O_RDONLY)
        words = list(_XATTR.unpack(fcntl.ioctl(fd, _GET_XATTR, bytes(_XATTR.size))))
        words[0], words[3] = words[0] | _INHERIT_PROJECT, self.owner
        fcntl.ioctl(fd, _SET_XATTR, _XATTR.pack(*words))
        os.close(fd)

    def _control(self, command: int, values: tuple[int, ...]) -> tuple[int, ...]:
        text = ctypes.create_string_buffer(_LIMITS.pack(*values), _LIMITS.size)
        number = DISKS.index(self.kind)
        whom = command << 8 | (2 if self.project else 0)
        where = inside.device(number).encode()
        if _libc.syscall(_QUOTACTL, whom, where, self.owner, text):
            raise OSError(ctypes.get_errno(), f"quotactl: {os.strerror(ctypes.get_errno())}")
        return _LIMITS.unpack(text.raw)


DISKS: Final = ("ext4", "xfs")
_SLACK_BYTES: Final = {"ext4": 4096, "xfs": 128 << 10}


def blocks(quota: Quota, way: str) -> int:
    """Run a story of blocks and judge it; return the space that was lost."""
    quota.start()
    slack = _SLACK_BYTES[quota.kind]

    def work() -> dict[str, Any]:
        with story.WAYS[way].open(quota.root) as store:
            return story.report(store, _HUGE_BYTES, quota.left_bytes, slack)

    reported = quota.inside(work)
    story.judge(reported, quota.root, layout=story.WAYS[way].layout, numbers=(quota.error,))
    assert reported["lost room"] <= slack, reported["lost room"]
    return len(reported["stored"])


def files(quota: Quota, way: str) -> int:
    """Use up the inodes; blocks are whole or not there."""
    quota.start(inodes=_INODES)
    layout = story.WAYS[way].layout

    def work() -> dict[str, Any]:
        with story.WAYS[way].open(quota.root) as store:
            return {f"k{i}": story.attempt(store, f"k{i}", story.SMALL) for i in range(_INODES)}

    reported = quota.inside(work)
    used = quota.used()[1]
    assert used <= _INODES
    good = [key for key, error in reported.items() if not error]
    assert 10 < len(good) < _INODES, len(good)
    for key, error in reported.items():
        assert error in ([], ["StorageFullError", quota.error, key]), error
        expected = None if error else story.content(key, story.SMALL)
        assert faultlab.peek(quota.root, key, layout=layout) == expected
    assert not faultlab.temporaries(quota.root)
    return len(good)


def shared_file(quota: Quota, *, preallocate: bool) -> int:
    """Make a shared file that is too large: nothing of it is left, all room is given back."""
    quota.start()
    before = quota.left_bytes()

    def work() -> list[Any]:
        try:
            with kvio.SharedFile.create(
                quota.root / "f", _HUGE_BYTES, preallocate=preallocate
            ) as file:
                file.pwrite(story.content("f", _HUGE_BYTES), 0)
                file.seal()
        except kvio.KvioError as exc:
            return story.error_reported(exc)
        return []

    reported = quota.inside(work)
    assert reported[:2] == ["StorageFullError", quota.error], reported
    assert os.listdir(quota.root) == []
    lost = before - quota.left_bytes()
    assert lost <= _SLACK_BYTES[quota.kind], lost
    return 0


_PROJECT = partial(Quota, "xfs", project=True, error="ENOSPC")
#: What is tried, by name; each has an owner of its own.
CASES: Final[dict[str, Callable[[], int]]] = {
    "ext4 user, tmpfile-durable": partial(blocks, Quota("ext4", 1000), "tmpfile-durable"),
    "ext4 user, direct-durable": partial(blocks, Quota("ext4", 1001), "direct-durable"),
    "ext4 user, renamed": partial(blocks, Quota("ext4", 1002), "renamed"),
    "ext4 inodes, tmpfile": partial(files, Quota("ext4", 1003), "tmpfile"),
    "ext4 inodes, renamed": partial(files, Quota("ext4", 1004), "renamed"),
    "ext4 shared file": partial(shared_file, Quota("ext4", 1005), preallocate=True),
    "ext4 shared file, hole": partial(shared_file, Quota("ext4", 1006), preallocate=False),
    "xfs user, tmpfile-durable": partial(blocks, Quota("xfs", 1000), "tmpfile-durable"),
    "xfs user, direct-durable": partial(blocks, Quota("xfs", 1001), "direct-durable"),
    "xfs user, plain-durable": partial(blocks, Quota("xfs", 1002), "plain-durable"),
    "xfs inodes, tmpfile": partial(files, Quota("xfs", 1003), "tmpfile"),
    "xfs shared file": partial(shared_file, Quota("xfs", 1005), preallocate=True),
    "xfs shared file, hole": partial(shared_file, Quota("xfs", 1006), preallocate=False),
    "xfs project, tmpfile-durable": partial(blocks, _PROJECT(42), "tmpfile-durable"),
    "xfs project, direct-durable": partial(blocks, _PROJECT(43), "direct-durable"),
    "xfs project, shared file": partial(shared_file, _PROJECT(44), preallocate=True),
    "xfs project, shared file, hole": partial(shared_file, _PROJECT(45), preallocate=False),
}
#: Of these at least.
FEW: Final = (
    "ext4 user, tmpfile-durable",
    "ext4 inodes, renamed",
    "ext4 shared file, hole",
    "xfs project, direct-durable",
    "xfs project, shared file",
)


def work(line: inside.Line) -> None:
    """Mount the disks with their quotas on, and try every case."""
    codecs.lookup("ascii")  # as with what is imported above
    inside.load("quota_v2")
    inside.mount(inside.device(0), "/mnt/ext4", "ext4", "usrquota")
    inside.mount(inside.device(1), "/mnt/xfs", "xfs", "uquota,pquota")
    for root in ("/mnt", "/mnt/ext4", "/mnt/xfs"):
        os.chmod(root, 0o755)
    inside.observe(line, {name: CASES[name] for name in sys.argv[1:]})


if __name__ == "__main__":
    inside.main(work)
