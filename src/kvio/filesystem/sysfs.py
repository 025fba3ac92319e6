"""Read /proc and /sys below a root directory; tests use a copy of them.

The kernel writes lists of CPUs and nodes as ``0-3,8,10-11``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvio.errors import ConfigError

_MOST_BYTES: Final = 1 << 20

#: Far above what kernels can be built for (8192 CPUs, 1024 nodes), and small enough that a list
#: cannot fill memory.
MAX_NUMBER: Final = 0xFFFF

_PART: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?").fullmatch
_NUMBER: Final = re.compile(r"-?[0-9]{1,6}").fullmatch


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below one root directory.

    Paths are relative to the root. A file that is missing, unreadable, or outside the root after
    following links, is None or empty, because a container may hide any part of /sys and /proc.
    """

    root: str

    @property
    def is_system(self) -> bool:
        """Return whether the root is ``/``, that is, this machine and not a copy."""
        return self.root == "/"

    def text(self, path: str) -> str | None:
        """Return the first MiB of a file as text, or None."""
        try:
            with open(self._outside(path), "rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "surrogateescape")
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory."""
        try:
            return tuple(sorted(os.listdir(self._outside(path))))
        except (OSError, ValueError):
            return ()

    def real(self, path: str) -> str | None:
        """Return an existing path without symbolic links, or None."""
        try:
            found = os.path.realpath(self._outside(path), strict=True)
        except (OSError, ValueError):
            return None
        return self._inside(found)

    def upwards(self, path: str) -> Iterator[str]:
        """Yield a directory and its parents below ``/sys/devices``."""
        while path.startswith("/sys/devices/"):
            yield path
            path = os.path.dirname(path)

    def _outside(self, path: str) -> str:
        return path if self.is_system else f"{self.root}{path}"

    def _inside(self, path: str) -> str | None:
        if self.is_system:
            return path
        return path.removeprefix(self.root) if path.startswith(f"{self.root}/") else None


def tree_at(root: str | os.PathLike[str]) -> Tree:
    """Return the files below a root directory."""
    return Tree(os.path.realpath(root))


def parse_cpulist(text: str, *, source: str = "CPU list") -> tuple[int, ...]:
    """Return the numbers of a list, ascending and each once.

    Args:
        text: as in cpuset(7), "List format".
        source: where it is from, for the complaint.

    Raises:
        ConfigError: it is no such list, or has numbers beyond `MAX_NUMBER`.
    """
    numbers: set[int] = set()
    for part in text.strip(" \t\n").split(",") if text.strip(" \t\n") else ():
        match = _PART(part)
        if match is None:
            raise ConfigError(f"{source}: {text.strip()!r:.80} is not a list such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_NUMBER:
            raise ConfigError(f"{source}: {part!r} is not a range from 0 to {MAX_NUMBER}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """Write numbers as the kernel does; `parse_cpulist` reads it back."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def parse_number(text: str | None) -> int | None:
    """Return the number in a file; None for a negative one, which means unknown.

    What is no number is as unknown as -1.
    """
    if text is None or _NUMBER(text.strip(" \t\n")) is None:
        return None
    number = int(text)
    return number if 0 <= number <= MAX_NUMBER else None
