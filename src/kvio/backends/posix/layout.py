"""Where a key lives below the root, and the directories of a store, opened once.

``block``: two levels of 16 directories by the first byte of the key's hash; the file name is the
key with ``/`` written ``~``, which no key contains. ``plain``: the path is the key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.format import key_hash
from kvio.types import Layout, is_key

LEAVES: Final = tuple(f"{byte >> 4:x}/{byte & 15:x}" for byte in range(256))
_LEAF_NUMBERS: Final = {leaf: number for number, leaf in enumerate(LEAVES)}
_MAX_OPEN: Final = 288


def split_key(key: str) -> tuple[str, str]:
    """Give the directory and the file name of a key in ``layout=plain``."""
    directory, _, name = key.rpartition("/")
    return directory, name


class Directories:
    """Open descriptors of the directories below a root, the first ones used kept open.

    A kept descriptor's number never changes its path: a directory that was removed and made again
    is put under the same number (dup2), so that no other thread's call is disturbed.
    """

    def __init__(
        self, rootfd: int, places: _native.Places | None, *, durable: bool, journaled: bool
    ) -> None:
        self.rootfd = rootfd
        self.journaled = journaled
        self._places = places
        self._durable = durable
        self.kept: dict[str, int] = {}
        self._lock = threading.Lock()

    def get(self, directory: str, *, create: bool, leased: list[int]) -> int:
        """Give a descriptor, making the directory (0700) if asked.

        One that is not kept is added to *leased*: the caller closes it after its call.

        Raises:
            OSError: ENOENT where it is missing and *create* is False, or any other failure.
        """
        fd = self.kept.get(directory)
        if fd is not None:
            return fd
        fd = self._open_anew(directory, create=create)
        with self._lock:
            if directory not in self.kept and len(self.kept) < _MAX_OPEN:
                self.keep(directory, fd)
            else:
                leased.append(fd)
        return fd

    def keep(self, directory: str, fd: int) -> None:
        """Keep a descriptor open under its path until `close`."""
        self.kept[directory] = fd
        if self._places is not None:
            self._places.set(_LEAF_NUMBERS[directory], fd)

    def refresh(self, directory: str, *, create: bool) -> None:
        """Look a directory up again by its path, because the one that was open is removed.

        Raises:
            OSError: as `get` does.
        """
        with self._lock:
            old = self.kept.get(directory)
            if old is None:
                return
            fd = self._open_anew(directory, create=create)
            os.dup2(fd, old, inheritable=False)
            os.close(fd)

    def sync(self, fd: int) -> None:
        """Sync a directory.

        Raises:
            OSError: it failed.
        """
        if not self.journaled:
            files.touch(fd)
        os.fsync(fd)

    def close(self) -> None:
        """Close every descriptor; no call may be under way."""
        with self._lock:
            for directory, fd in self.kept.items():
                if self._places is not None:
                    self._places.set(_LEAF_NUMBERS[directory], -1)
                os.close(fd)
            self.kept.clear()

    def _open_anew(self, directory: str, *, create: bool) -> int:
        return _native.open_dir(
            self.rootfd,
            directory,
            create=create,
            durable=create and self._durable,
            journaled=self.journaled,
        )


def make_fan_out(directories: Directories) -> None:
    """Make and sync all directories of ``layout=block``, so that no write has to sync a parent."""
    rootfd = directories.rootfd
    for leaf in LEAVES:
        directories.keep(leaf, _native.open_dir(rootfd, leaf, create=True))
    for parent in LEAVES[::16]:
        fd = _native.open_dir(rootfd, parent[0], create=False)
        try:
            directories.sync(fd)
        finally:
            os.close(fd)
    directories.sync(rootfd)


def walk_files(rootfd: int, layout: Layout, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (directory, file name) of what lies where blocks may; no prefix: temporaries too.

    Of ``layout=plain`` only directories are read that a prefix can reach. Hashed directories must
    all be read, whatever the prefix.
    """
    if layout == "plain":
        directory, _, start = prefix.rpartition("/")
        if not directory or is_key(directory):
            yield from _walk(rootfd, directory, start)
        return
    if not prefix:
        names = _scan(rootfd, "")
        yield from (("", name) for name, is_dir in names if not is_dir and name[0] == ".")
    start = prefix.replace("/", "~")
    for leaf in LEAVES:
        for name, is_dir in _scan(rootfd, leaf):
            if name.startswith(start) and not is_dir:
                yield leaf, name


def place_of(layout: Layout, namespace: str, key: str) -> tuple[str, str]:
    """Return the directory and the file name of a key."""
    if layout == "plain":
        return split_key(key)
    return LEAVES[key_hash(namespace, key)[0]], key.replace("/", "~")


def key_of(layout: Layout, directory: str, name: str) -> str | None:
    """Turn a place back into its key; None for what is no block's name."""
    if layout == "plain":
        key = f"{directory}/{name}" if directory else name
    else:
        key = name.replace("~", "/")
    return key if is_key(key) and ("~" not in name or layout == "block") else None


def _walk(rootfd: int, directory: str, start: str = "") -> Iterator[tuple[str, str]]:
    """Yield the files of a directory whose names begin with *start*, and all files below."""
    for name, is_dir in _scan(rootfd, directory):
        if not name.startswith(start):
            continue
        if is_dir and not name.startswith("."):
            yield from _walk(rootfd, f"{directory}/{name}" if directory else name)
        elif not is_dir:
            yield directory, name


def _scan(rootfd: int, directory: str) -> Iterator[tuple[str, bool]]:
    try:
        fd = _native.open_dir(rootfd, directory, create=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir(follow_symlinks=False)
    finally:
        os.close(fd)
