"""Reading the kernel's files below a root, which a test makes by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below one root.

    Paths are given and returned as seen from the root. What is missing, unreadable or, by a link,
    outside is None or empty: a container may hide any part of /sys and /proc.
    """

    root: str

    @property
    def is_system(self) -> bool:
        """It is this machine, not a copy of one."""
        return self.root == "/"

    def text(self, path: str) -> str | None:
        """Give what a file says; a file without end is cut."""
        try:
            with open(self._outside(path), "rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "surrogateescape")
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """List a directory, sorted."""
        try:
            return tuple(sorted(os.listdir(self._outside(path))))
        except (OSError, ValueError):
            return ()

    def real(self, path: str) -> str | None:
        """Follow all links of a path that is there."""
        try:
            found = os.path.realpath(self._outside(path), strict=True)
        except (OSError, ValueError):
            return None
        return self._inside(found)

    def upwards(self, path: str) -> Iterator[str]:
        """Yield a directory and those above it, without ``/sys/devices`` and what holds it."""
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
    """Give the files below a root."""
    return Tree(os.path.realpath(root))
