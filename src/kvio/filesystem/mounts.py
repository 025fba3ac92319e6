"""Find the mount of a path, and the file systems and devices below it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvio.filesystem.sysfs import Tree

_ESCAPE: Final = re.compile(r"\\([01][0-7]{2})")
_DEVICE: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,9})").fullmatch


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo, see proc_pid_mountinfo(5).

    Attributes:
        device: major and minor number; major 0: no block device.
        point: the mount point.
        kind: the file system type.
        source: the mounted device or name, as reported by the file system.
        options: the options of the file system.
    """

    device: tuple[int, int]
    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of an option, or None."""
        for option in self.options:
            if option.startswith(f"{name}="):
                return _plain(option[len(name) + 1 :])
        return None


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts in the order they were made; ignore incomplete lines."""
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        device = _DEVICE(fields[2]) if len(fields) > 5 and len(rest) > 1 else None
        if device is not None:
            yield Mount(
                (int(device[1]), int(device[2])),
                _plain(fields[4]),
                rest[0],
                _plain(rest[1]),
                tuple(rest[2].split(",")) if len(rest) > 2 else (),  # a comma inside is \054
            )


def mount_of(
    mounts: Sequence[Mount], path: str, device: tuple[int, int] | None = None
) -> Mount | None:
    """Return the mount of an absolute path without symbolic links, or None.

    Args:
        mounts: the mounts, in the order of mountinfo.
        path: the path.
        device: the path's device number, if known. It distinguishes a mount from another mount
            that hides it. On btrfs and overlayfs the device number of a file is not that of its
            mount. On a file system with a block device the two are equal; if they differ, the
            path's mount is not listed, as outside a chroot.
    """
    above = [(n, mount) for n, mount in enumerate(mounts) if _is_below(path, mount.point)]
    same = [(n, mount) for n, mount in above if mount.device == device]
    if not above:
        return None
    found = max(same or above, key=lambda item: (len(item[1].point), item[0]))[1]
    return None if device is not None and not same and found.device[0] else found


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point if point.endswith("/") else f"{point}/")


def _plain(text: str) -> str:
    r"""Decode octal escapes such as ``\040``."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


# --------------------------------------------------------------------------------------------------
# Find the file systems and devices below a path, through overlays and loop devices.
#
# An overlay writes to its upper directory and a loop device to a file; both are on another file
# system. A container hides the paths of its host; hidden layers are reported, never guessed.


MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "rootfs", "hugetlbfs", "devtmpfs"})
#: Block devices whose bytes are in memory: brd and zram.
_is_memory_device: Final = re.compile(r"(ram|zram)[0-9]+").fullmatch
#: Limit for nested loop devices and overlays.
DEEPEST: Final = 8
_BLOCK: Final = "/sys/class/block"
_BTRFS: Final = "/sys/fs/btrfs"
_EXT4: Final = "/sys/fs/ext4"
#: Content of the sysfs file ``journal_task`` of an ext4 without a journal (Linux 5.3).
_NO_JOURNAL: Final = "<none>"


@dataclass(frozen=True, slots=True)
class Holder:
    """The file system that stores a directory's names and files, below all overlays.

    Attributes:
        kind: its type, as in mount(2).
        device: the kernel's name of its block device; None: it has none, or it is hidden.
        options: its mount options.
    """

    kind: str
    device: str | None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ground:
    """The storage below a path.

    Attributes:
        holder: the file system that stores it; None: not visible.
        memory: a sentence that names the layer that is memory; None: no visible layer is.
        hidden: a sentence that names the layer that is not visible; None: all are visible.
    """

    holder: Holder | None
    memory: str | None
    hidden: str | None


@dataclass(frozen=True, slots=True)
class Block:
    """A block device and what it consists of.

    Attributes:
        name: the kernel's name.
        directory: its sysfs directory, without symbolic links; None: there is none.
        parts: the devices below it, in sysfs: the disk of a partition, the members of an array.
        file: the backing file of a loop device.
    """

    name: str
    directory: str | None
    parts: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A path and its mount.

    Attributes:
        name: the path as shown in messages.
        plain: the path without symbolic links.
        device: its device number; None: not available from the kernel.
        mount: its mount; None: the kernel lists none.
    """

    name: str
    plain: str
    device: tuple[int, int] | None
    mount: Mount | None

    @property
    def number(self) -> tuple[int, int] | None:
        """Return the number of its block device; None: its file system has none."""
        if self.device is not None and self.device[0]:
            return self.device
        number = self.mount.device if self.mount is not None else None
        return number if number is not None and number[0] else None


def place_of(tree: Tree, path: str) -> Place:
    """Return the mount of a path.

    A missing path stands for its nearest existing parent directory. If *tree* is a copy of a
    machine's /proc and /sys, the path itself is not checked, and there are no device numbers.

    Raises:
        OSError, ValueError: stat of the path failed.
    """
    name, plain, device = path, os.path.normpath("/" + path.lstrip("/")), None
    if tree.is_system:
        whole = os.path.realpath(path)
        plain, seen = _nearest(whole)
        number = seen.st_rdev if stat.S_ISBLK(seen.st_mode) else seen.st_dev
        name = path if plain == whole else f"{path}, not there yet, in {plain}"
        device = (os.major(number), os.minor(number))
    mounts = tuple(parse_mounts(tree.text("/proc/self/mountinfo") or ""))
    return Place(name, plain, device, mount_of(mounts, plain, device))


def _nearest(path: str) -> tuple[str, os.stat_result]:
    """Return a path, or its nearest existing parent directory, with its stat."""
    while True:
        try:
            return path, os.stat(path)
        except FileNotFoundError:
            path = os.path.dirname(path)


def block_of_number(number: tuple[int, int]) -> str:
    """Return the sysfs path of a block device."""
    return f"/sys/dev/block/{number[0]}:{number[1]}"


def block_name(tree: Tree, link: str) -> str | None:
    """Return the kernel's name of a block device in sysfs; None: it is hidden."""
    lines = (tree.text(f"{link}/uevent") or "").splitlines()
    found = (line.partition("=")[2] for line in lines if line.startswith("DEVNAME="))
    return next((name.replace("/", "!") for name in found), None)


def blocks_named(tree: Tree, source: str) -> tuple[str, ...]:
    """Return the block devices of a mount's source in sysfs; all devices of a btrfs."""
    name = (tree.real(source) if tree.is_system else None) or source
    name = name.removeprefix("/dev/").replace("/", "!")  # sysfs writes / as !
    if name.startswith("mapper!"):
        wanted = name.removeprefix("mapper!")
        maps = (block for block in tree.names(_BLOCK) if block.startswith("dm-"))
        texts = ((block, tree.text(f"{_BLOCK}/{block}/dm/name") or "") for block in maps)
        name = next((block for block, text in texts if text.strip() == wanted), name)
    for volume in tree.names(_BTRFS):
        members = tree.names(f"{_BTRFS}/{volume}/devices")
        if name in members:
            return tuple(f"{_BTRFS}/{volume}/devices/{member}" for member in members)
    return (f"{_BLOCK}/{name}",)


def block_at(tree: Tree, link: str) -> Block:
    """Read the description of a block device from sysfs."""
    directory = tree.real(link)
    name = os.path.basename(directory or link)
    if directory is None:
        return Block(name, None)
    if tree.text(f"{directory}/partition") is not None:
        return Block(name, directory, (os.path.dirname(directory),))
    slaves = tuple(f"{directory}/slaves/{part}" for part in tree.names(f"{directory}/slaves"))
    file = (tree.text(f"{directory}/loop/backing_file") or "").rstrip("\n")
    return Block(name, directory, slaves, file or None)


def blocks_below(tree: Tree, place: Place) -> tuple[str, ...]:
    """Return the block devices, in sysfs, of a mount's file system; empty if it has none."""
    if place.number is not None:
        return (block_of_number(place.number),)
    if place.mount is not None and place.mount.source.startswith("/dev/"):
        return blocks_named(tree, place.mount.source)
    return ()


def ground_of(tree: Tree, path: str) -> Ground:
    """Return the storage below a path, down to the devices, as far as the kernel shows it."""
    try:
        place = place_of(tree, path)
    except (OSError, ValueError) as exc:
        return Ground(None, None, f"{path}: {getattr(exc, 'strerror', None) or exc}")
    if place.mount is None:
        return Ground(None, None, f"the mount of {path} is not visible here")
    found = list(_beneath(tree, path, place, 0))
    return Ground(
        _holder_of(tree, place, 0),
        next((text for is_memory, text in found if is_memory), None),
        next((text for is_memory, text in found if not is_memory), None),
    )


def has_journal(tree: Tree, holder: Holder | None) -> bool | None:
    """Return whether an ext2, ext3 or ext4 has a journal; None: the kernel does not say."""
    if holder is None or holder.device is None:
        return None
    task = tree.text(f"{_EXT4}/{holder.device}/journal_task")
    return None if task is None or not task.strip() else task.strip() != _NO_JOURNAL


def _holder_of(tree: Tree, place: Place, depth: int) -> Holder | None:
    mount = place.mount
    if mount is None or depth > DEEPEST:
        return None
    if mount.kind == "overlay":
        upper = mount.option("upperdir")
        if upper is None or tree.real(upper) is None:
            return None
        return _holder_of(tree, place_of(tree, upper), depth + 1)
    blocks = blocks_below(tree, place)
    name = block_name(tree, blocks[0]) if blocks else None
    return Holder(mount.kind, name, mount.options)


def _beneath(tree: Tree, path: str, place: Place, depth: int) -> Iterator[tuple[bool, str]]:
    """Yield (True, sentence) for memory and (False, sentence) for hidden layers below a path."""
    mount = place.mount
    if depth > DEEPEST or mount is None:
        yield False, f"the mount of {path} is not visible here"
    elif mount.kind in MEMORY_FILE_SYSTEMS:
        yield True, f"{path} is on {mount.kind}, which is memory"
    elif mount.kind == "overlay":
        yield from _beneath_file(tree, "the upper directory", mount.option("upperdir"), depth)
    else:
        for block in blocks_below(tree, place):
            yield from _beneath_block(tree, block, depth)


def _beneath_file(
    tree: Tree, what: str, path: str | None, depth: int
) -> Iterator[tuple[bool, str]]:
    if path is None or tree.real(path) is None:
        yield False, f"{what}{f' {path}' if path else ''} is not visible here"
        return
    try:
        place = place_of(tree, path)
    except (OSError, ValueError):
        yield False, f"{what} {path} is not visible here"
        return
    for is_memory, text in _beneath(tree, path, place, depth + 1):
        yield is_memory, f"{what}: {text}"


def _beneath_block(tree: Tree, link: str, depth: int) -> Iterator[tuple[bool, str]]:
    block = block_at(tree, link)
    if depth > DEEPEST or block.directory is None:
        yield False, f"the device {block.name} is not visible here"
    elif block.parts:
        for part in block.parts:
            yield from _beneath_block(tree, part, depth + 1)
    elif block.file is not None:
        yield from _beneath_file(tree, f"the file of {block.name}", block.file, depth)
    elif _is_memory_device(block.name):
        yield True, f"the device {block.name} is memory"
