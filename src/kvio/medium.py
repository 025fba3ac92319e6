"""What a mounted file system is, and whether its fsync can be believed.

Answers come from trying (``kvio_probe``), from statfs(2), and from the mount options in
/proc/self/mountinfo; the durability table is DESIGN section 3 turned into code: a promise is
refused unless there is a reason to make it.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvio import _native

#: statfs(2) magic numbers, from linux/magic.h and the file systems' own headers.
_NAMES: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x65735546: "fuse",
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x19830326: "beegfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
}
_DURABLE: Final = frozenset(
    ("ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "lustre", "gpfs", "ceph", "beegfs")
)
#: Where the bytes of a file that was synced while it had no name are there after a power cut
#: that follows its name. btrfs logs nothing of such a file before Linux 6.16: a name over no bytes.
_SYNCS_THE_NAMELESS: Final = frozenset(("ext4", "xfs"))
_LIES: Final = {
    "tmpfs": "tmpfs is memory: nothing on it survives a power loss",
    "ramfs": "ramfs is memory: nothing on it survives a power loss",
    "fuse": "a FUSE server without fsync or fsyncdir reports success all the same",
    "nfs": "an async NFS export acknowledges what it has not stored, and a client cannot tell",
}
#: By device and mounts: what was found there.
_known: dict[tuple[int, int], Medium] = {}
_KNOWN_AT_MOST: Final = 64
_UNSAFE_OPTIONS: Final = ("nobarrier", "barrier=0", "volatile", "fsync=volatile")


@dataclass(frozen=True, slots=True)
class Medium:
    """A root directory's file system.

    Attributes:
        name: of the file system, or its magic number in hexadecimal.
        mount_options: as the kernel lists them, empty where /proc is absent.
        not_durable_because: why fsync is not believed, or None.
        direct_io: direct I/O works and bypasses the page cache.
        memory_align, offset_align: what direct I/O asks of memory and of offsets and lengths.
        tmpfile: O_TMPFILE and a way to link it exist.
        tmpfile_durable: and what was synced before it had a name survives with the name.
        notes: what a user should know.
    """

    name: str
    mount_options: str
    not_durable_because: str | None
    direct_io: bool
    memory_align: int
    offset_align: int
    tmpfile: bool
    tmpfile_durable: bool
    dontcache: bool
    cachestat: bool
    probe: dict[str, int]
    notes: tuple[str, ...]


def examine(dirfd: int, probe_name: str) -> Medium:
    """Find out by trying; leaves nothing behind.

    Raises:
        OSError: no file can be made in the directory.
    """
    probe = _native.probe(dirfd, probe_name)
    name = _NAMES.get(probe["fs_magic"], hex(probe["fs_magic"]))
    options = _mount_options(dirfd)
    tmpfile = probe["tmpfile"] == 0 and 0 in (probe["link_empty_path"], probe["link_proc"])
    direct_io, direct_note = _judge_direct(name, probe)
    notes = [direct_note] if direct_note else []
    doubt = _judge_durable(name, options, probe)
    tmpfile_durable = tmpfile and name in _SYNCS_THE_NAMELESS
    if tmpfile and not tmpfile_durable and not doubt:
        notes.append(
            "durable blocks are written to named temporaries and renamed: a file that is synced "
            f"before it has a name may come out empty on {name}"
        )
    if not tmpfile:
        notes.append("no usable O_TMPFILE: blocks are written to named temporaries and renamed")
    if probe["cachestat"]:
        notes.append("no cachestat: hybrid reads choose by size alone")
    return Medium(
        name=name,
        mount_options=options or "",
        not_durable_because=doubt,
        direct_io=direct_io,
        memory_align=_alignment(probe["dio_memory_align"]),
        offset_align=max(_alignment(probe["dio_offset_align"]), 4096),
        tmpfile=tmpfile,
        tmpfile_durable=tmpfile_durable,
        dontcache=probe["dontcache"] == 0,
        cachestat=probe["cachestat"] == 0,
        probe=probe,
        notes=tuple(notes),
    )


def recall(dirfd: int, probe_name: str) -> Medium:
    """Give what `examine` found before, as long as nothing is mounted, unmounted or mounted anew.

    Raises:
        OSError: no file can be made in the directory; only where it has to be tried.
    """
    try:
        mounts = hash(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return examine(dirfd, probe_name)
    place = os.fstat(dirfd).st_dev, mounts
    known = _known.get(place)
    if known is None:
        if len(_known) >= _KNOWN_AT_MOST:
            _known.clear()
        known = _known[place] = examine(dirfd, probe_name)
    return known


def _alignment(reported: int) -> int:
    """Take what STATX_DIOALIGN says, else one page, which no file system was seen to refuse."""
    return reported if 0 < reported <= _native.lib.KVIO_MAX_ALIGN else 4096


def _judge_direct(name: str, probe: dict[str, int]) -> tuple[bool, str]:
    if probe["direct"]:
        return False, f"direct I/O is refused ({errno.errorcode.get(-probe['direct'], '?')})"
    if probe["dio_reported"]:
        works = probe["dio_offset_align"] > 0
        return works, "" if works else f"{name} says it has no direct I/O here"
    if probe["direct_misaligned"] == 0 and name in ("tmpfs", "ramfs"):
        return False, f"{name} accepts O_DIRECT and ignores it"
    if probe["direct_misaligned"] == 0:
        return True, f"{name} accepts misaligned direct I/O and may buffer it"
    return True, ""


def _judge_durable(name: str, options: str | None, probe: dict[str, int]) -> str | None:
    if probe["fsync_dir"]:
        return f"the directory cannot be synced ({errno.errorcode.get(-probe['fsync_dir'], '?')})"
    if name in _LIES:
        return _LIES[name]
    unsafe = [option for option in _UNSAFE_OPTIONS if option in (options or "").split(",")]
    if unsafe:
        return f"{name} is mounted with {unsafe[0]}"
    if name == "overlay":
        return None if options is not None else "overlay without /proc: it may be volatile"
    return None if name in _DURABLE else f"nothing is known of fsync on {name}"


def _mount_options(dirfd: int) -> str | None:
    """Give the per-mount and per-superblock options of the mount a directory is on."""
    try:
        info = Path(f"/proc/self/fdinfo/{dirfd}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return None
    wanted = next((x.split()[1] for x in info.splitlines() if x.startswith("mnt_id:")), None)
    for line in mounts.splitlines():
        fields = line.split()
        if fields[0] == wanted:
            return f"{fields[5]},{fields[-1]}"
    return None
