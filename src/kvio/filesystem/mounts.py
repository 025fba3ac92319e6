"""Which mount a path is on, by /proc/self/mountinfo."""

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
        device: major and minor number; major 0 is no block device.
        point: where it is mounted.
        kind: the file system type.
        source: what is mounted, as the file system says.
        options: of the file system.
    """

    device: tuple[int, int]
    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Give the value of an option."""
        for option in self.options:
            if option.startswith(f"{name}="):
                return _plain(option[len(name) + 1 :])
        return None


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts in the order they were made; lines that are not whole are ignored."""
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
    """Find the mount that an absolute path without links is on.

    Args:
        mounts: as mountinfo lists them.
        path: what is looked for.
        device: the path's device number where it could be asked for. It tells a mount from one
            that hides it. Files of btrfs and overlayfs have numbers that no mount has, but of a
            file system on a block device they have its own: else the mount is not listed, as
            those around a chroot are not.
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
    r"""Undo ``\040`` and the like."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
