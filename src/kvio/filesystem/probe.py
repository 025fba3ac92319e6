"""The properties of a mounted file system, and whether its fsync can be trusted.

They come from probing (``kvio_probe``), from statfs(2), from the mount options in
/proc/self/mountinfo, and from the devices below (`kvio.filesystem.mounts`). docs/durability.md has
the table: ``durable`` is refused unless there is a reason to promise it.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvio import _native
from kvio.filesystem.mounts import (
    Ground,
    Holder,
    block_name,
    block_of_number,
    ground_of,
    has_journal,
)
from kvio.filesystem.sysfs import tree_at

#: No file can be made, because of the mount, the permissions, or an immutable directory.
NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)

#: By statfs(2) magic number, from linux/magic.h and the file systems' own headers.
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
#: Their fsync can be trusted, as kvio's power cuts showed (docs/durability.md).
_SHOWN: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay"))
#: Their fsync can be trusted by their documentation; kvio's tests did not cut their power.
_DOCUMENTED: Final = frozenset(("f2fs", "zfs", "bcachefs", "lustre", "gpfs", "ceph", "beegfs"))
#: They write names and inodes together, by a journal, a log or copy-on-write. The ext family does
#: so where it has a journal.
_JOURNALED: Final = frozenset(("xfs", "btrfs", "f2fs", "zfs", "bcachefs"))
_EXT: Final = ("ext2", "ext3", "ext4")
_UNTRUSTED: Final = {
    "fuse": "a FUSE server without fsync or fsyncdir reports success all the same",
    "nfs": "an async NFS export acknowledges what it has not stored, and a client cannot know",
}
_IN_MEMORY: Final = ("tmpfs", "ramfs")
#: By device and mount table: the result of `examine`.
_known: dict[tuple[int, int], FileSystem] = {}
_KNOWN_AT_MOST: Final = 64
_UNSAFE_OPTIONS: Final = ("nobarrier", "barrier=0", "volatile", "fsync=volatile")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A root directory's file system.

    Attributes:
        name: of the file system, or its magic number in hexadecimal.
        mount_options: as the kernel lists them, empty where /proc is absent.
        not_durable_because: why fsync is not trusted, or None.
        in_memory: the file system is memory: no option makes it durable.
        journaled: names and inodes reach the disk together; False also where that is unknown.
        direct_io: direct I/O works and bypasses the page cache.
        memory_align, offset_align: the alignment that direct I/O needs, of memory and of offsets
            and lengths.
        tmpfile: O_TMPFILE works, and such a file can be linked.
        tmpfile_durable: and a file that was synced before it got its name survives a power cut.
        durable_notes: conditions of a promise of ``durable``.
        notes: all that a user should know, these included.
    """

    name: str
    mount_options: str
    not_durable_because: str | None
    in_memory: bool
    journaled: bool
    direct_io: bool
    memory_align: int
    offset_align: int
    tmpfile: bool
    tmpfile_durable: bool
    dontcache: bool
    cachestat: bool
    probe: dict[str, int]
    durable_notes: tuple[str, ...]
    notes: tuple[str, ...]


def examine(dirfd: int, probe_name: str) -> FileSystem:
    """Probe the file system of a directory; leaves no files behind.

    Raises:
        OSError: no file can be made in the directory, or a descriptor is lacking.
    """
    return _judge(dirfd, _native.probe(dirfd, probe_name), read_only=False)


def examine_to_read(dirfd: int, filefd: int, file: str | None) -> FileSystem:
    """Examine the file system without writing, by a *file* in the directory *filefd* if any.

    Raises:
        OSError: the file cannot be opened, or a descriptor is lacking.
    """
    return _judge(dirfd, _native.probe_reading(filefd, file), read_only=True)


def _judge(dirfd: int, probe: dict[str, int], *, read_only: bool) -> FileSystem:
    ground = _ground(dirfd)
    name = _name_of(probe["fs_magic"], ground)
    holder = ground.holder if name == "overlay" else _own_holder(dirfd, name)
    journal = has_journal(tree_at("/"), holder)
    options = _mount_options(dirfd)
    tmpfile = probe["tmpfile"] == 0 and 0 in (probe["link_empty_path"], probe["link_proc"])
    direct_io, direct_note = _judge_direct(name, probe)
    nothing_to_read = probe["direct"] == -errno.ENOENT
    notes = [direct_note] if direct_note and not nothing_to_read else []
    not_durable = _judge_durable(name, options, probe, ground)
    journaled = _is_journaled(holder, journal)
    # btrfs is journaled so, and before Linux 6.16 its log has nothing of a file that was synced
    # while it had no name. Without a journal the sync of a directory writes no inode.
    tmpfile_durable = tmpfile and journaled and name in (*_EXT, "xfs")
    durable_notes = [] if not_durable else _notes_on_durable(name, ground, journal)
    notes += durable_notes
    if tmpfile and not tmpfile_durable and not not_durable:
        notes.append(
            "durable blocks are written to named temporaries and renamed: a file that is synced "
            f"before it has a name may be lost on {_described(name, journal)}"
        )
    if not tmpfile and not read_only:
        notes.append("no usable O_TMPFILE: blocks are written to named temporaries and renamed")
    if probe["cachestat"] and not nothing_to_read:
        notes.append("no cachestat: hybrid reads choose by size alone")
    return FileSystem(
        name=name,
        mount_options=options or "",
        not_durable_because=not_durable,
        in_memory=name in _IN_MEMORY,
        journaled=journaled,
        direct_io=direct_io,
        memory_align=_alignment(probe["dio_memory_align"]),
        offset_align=max(_alignment(probe["dio_offset_align"]), 4096),
        tmpfile=tmpfile,
        tmpfile_durable=tmpfile_durable,
        dontcache=probe["dontcache"] == 0,
        cachestat=probe["cachestat"] == 0,
        probe=probe,
        durable_notes=tuple(durable_notes),
        notes=tuple(notes),
    )


def recall(dirfd: int, probe_name: str) -> FileSystem:
    """Return the earlier result of `examine`, unless the mount table has changed since.

    Raises:
        OSError: no file can be made in the directory; only if it is examined now.
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
    """Return the alignment of STATX_DIOALIGN, else one page, which every file system accepted."""
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


def _ground(dirfd: int) -> Ground:
    try:
        path = os.readlink(f"/proc/self/fd/{dirfd}")
    except OSError:
        return Ground(None, None, "/proc is not mounted, so its devices are not visible here")
    return ground_of(tree_at("/"), path)


def _name_of(magic: int, ground: Ground) -> str:
    """Return the name of a file system; the mount distinguishes ext2, ext3 and ext4."""
    name = _NAMES.get(magic, hex(magic))
    if name == "ext4" and ground.holder is not None and ground.holder.kind in _EXT:
        return ground.holder.kind
    return name


def is_journaled(dirfd: int) -> bool:
    """Return whether names and inodes reach the disk together; False also where it is unknown."""
    try:
        name = _NAMES.get(_native.fs_magic(dirfd), "")
    except OSError:
        return False
    holder = _ground(dirfd).holder if name == "overlay" else _own_holder(dirfd, name)
    return _is_journaled(holder, has_journal(tree_at("/"), holder))


def _own_holder(dirfd: int, name: str) -> Holder:
    device = os.fstat(dirfd).st_dev
    block = block_of_number((os.major(device), os.minor(device)))
    return Holder(name, block_name(tree_at("/"), block))


def _is_journaled(holder: Holder | None, journal: bool | None) -> bool:  # noqa: FBT001
    if holder is None:
        return False
    return journal is True if holder.kind in _EXT else holder.kind in _JOURNALED


def _judge_durable(
    name: str, options: str | None, probe: dict[str, int], ground: Ground
) -> str | None:
    if probe["fsync_dir"]:
        return f"the directory cannot be synced ({errno.errorcode.get(-probe['fsync_dir'], '?')})"
    if name in _IN_MEMORY:
        return f"{name} is memory: nothing on it survives a power loss"
    if name in _UNTRUSTED:
        return _UNTRUSTED[name]
    unsafe = [option for option in _UNSAFE_OPTIONS if option in (options or "").split(",")]
    if unsafe:
        return f"{name} is mounted with {unsafe[0]}"
    if name == "overlay" and options is None:
        return "overlay without /proc: it may be volatile"
    if ground.memory is not None:
        return f"{ground.memory}: nothing on it survives a power loss"
    if name == "overlay" and ground.holder is not None:
        below = ground.holder.kind.partition(".")[0].replace("nfs4", "nfs")  # as in fuse.bindfs
        unsafe = [option for option in _UNSAFE_OPTIONS if option in ground.holder.options]
        if below in _UNTRUSTED or unsafe:
            reason = _UNTRUSTED.get(below) or f"it is mounted with {unsafe[0]}"
            return f"the upper directory of the overlay is on {ground.holder.kind}: {reason}"
    return None if name in _SHOWN | _DOCUMENTED else f"nothing is known of fsync on {name}"


def _described(name: str, journal: bool | None) -> str:  # noqa: FBT001  # private, by position
    if name not in _EXT or journal:
        return name
    return f"{name} {'without a journal' if journal is False else 'whose journal is not visible'}"


def _notes_on_durable(name: str, ground: Ground, journal: bool | None) -> list[str]:  # noqa: FBT001
    """Return the conditions of a promise of ``durable`` that kvio's tests did not show."""
    notes = []
    if name in _DOCUMENTED:
        notes.append(
            f"durable on {name} rests on its documentation: kvio's tests did not cut its power"
        )
    if ground.hidden is not None:
        notes.append(f"durable holds if what lies below keeps its promises: {ground.hidden}")
    if name in _EXT and journal is False:
        notes.append(
            f"{name} without a journal: after a power cut e2fsck must run before it is mounted"
        )
    return notes


def _mount_options(dirfd: int) -> str | None:
    """Return the per-mount and per-superblock options of the mount of a directory."""
    try:
        info = Path(f"/proc/self/fdinfo/{dirfd}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError as exc:
        if exc.errno in _native.EXHAUSTED:
            raise
        return None
    wanted = next((x.split()[1] for x in info.splitlines() if x.startswith("mnt_id:")), None)
    for line in mounts.splitlines():
        fields = line.split()
        if fields[0] == wanted:
            return f"{fields[5]},{fields[-1]}"
    return None
