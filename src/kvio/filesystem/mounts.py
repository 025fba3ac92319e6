"""Find the mount of a path in /proc/self/mountinfo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
