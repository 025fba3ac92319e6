"""Read /proc and /sys below a root directory; tests use a copy of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MOST_BYTES: Final = 1 << 20


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
