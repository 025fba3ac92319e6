"""The paths of keys below the root, and the directories of a store, which are kept open.

``block``: two levels of 16 directories by the first byte of the key's hash; the file name is the
key with ``/`` written ``~``, which no key contains. ``plain``: the path is the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvio import _native
from kvio._native import NULL, files, lib
from kvio.descriptors import SHARED, retrying
from kvio.format import key_hash
from kvio.types import Layout, is_key

LEAVES: Final = tuple(f"{byte >> 4:x}/{byte & 15:x}" for byte in range(256))
_LEAF_NUMBERS: Final = {leaf: number for number, leaf in enumerate(LEAVES)}
_MAX_OPEN: Final = 288


def split_key(key: str) -> tuple[str, str]:
    """Return the directory and the file name of a key in ``layout=plain``."""
    directory, _, name = key.rpartition("/")
    return directory, name


class KeptDirectory:
    """A directory that a store keeps open; *cdata* is the ``kvio_dir *`` that calls acquire.

    *synced*: its name is durable, or need not be.
    """

    __slots__ = ("_owner", "cdata", "path", "synced")

    def __init__(self, owner: Directories, path: str, cdata: Any, *, synced: bool) -> None:
        self._owner = owner
        self.path = path
        self.cdata = cdata
        self.synced = synced

    def was_used(self) -> bool:
        """Return whether a call acquired it since the last call of this method."""
        return bool(lib.kvio_dir_was_used(self.cdata))

    def evict(self) -> bool:
        """Close it, unless its store has done so; False: a call uses it."""
        if self.cdata.fd < 0:
            return True
        fd = lib.kvio_dir_evict(self.cdata)
        if fd < 0:
            return False
        self._owner.kept.pop(self.path, None)
        os.close(fd)
        return True


class Directories:
    """The directories below a root; the recently used ones are kept open, as `SHARED` allows.

    While an operation has acquired a kept directory, its descriptor always leads to the same path:
    it is not closed, and if the directory is removed and made again, the new one gets the same
    descriptor (dup2), so that calls of other threads are not disturbed.

    Attributes:
        kept: by path; changed under the lock of `SHARED`.
    """

    def __init__(
        self,
        rootfd: int,
        leaf_table: _native.LeafTable | None,
        *,
        durable: bool,
        journaled: bool,
        read_only: bool = False,
        permissions: _native.Permissions = _native.PRIVATE,
    ) -> None:
        self.rootfd = rootfd
        self._read_only = read_only
        self.permissions = permissions
        self.journaled = journaled
        self.kept: dict[str, KeptDirectory] = {}
        self._leaf_table = leaf_table
        self._durable = durable
        #: By path, the handles of hashed directories whose names are durable.
        self._synced: dict[str, bytes] = {}

    def find(self, path: str, *, create: bool) -> Any:
        """Return the ``kvio_dir *`` of a directory; NULL: `open` it."""
        kept = self.kept.get(path)
        return NULL if kept is None or create > kept.synced else kept.cdata

    def open(self, path: str, *, create: bool) -> tuple[int, KeptDirectory | None]:
        """Return a descriptor, making the directory if asked.

        With it comes the kept directory, which was acquired for the caller; None: the caller
        closes the descriptor after its call.

        Raises:
            OSError: ENOENT where it is missing and *create* is False, or any other failure.
        """
        with SHARED.lock:
            kept = self._acquire(path)
        if kept is None:
            fd = self._open_anew(path, create=create)
            with SHARED.lock:
                kept = self._acquire(path)
                if kept is None:
                    return fd, self._keep(path, fd, synced=create)
            os.close(fd)  # another thread was faster
        if create > kept.synced:
            try:
                self.refresh(path, create=True)
            except OSError:
                lib.kvio_dir_release(kept.cdata)
                raise
        return kept.cdata.fd, kept

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Hold the descriptor of an existing directory open.

        Raises:
            OSError: as `open` does.
        """
        fd, kept = self.open(path, create=False)
        try:
            yield fd
        finally:
            if kept is None:
                os.close(fd)
            else:
                lib.kvio_dir_release(kept.cdata)

    def add_synced(self, path: str, fd: int) -> None:
        """Keep a hashed directory if there is room, else close it; the caller syncs its name."""
        self._note_synced(path, fd)
        with SHARED.lock:
            kept = self._keep(path, fd, synced=True)
        if kept is None:
            os.close(fd)
        else:
            lib.kvio_dir_release(kept.cdata)

    def refresh(self, path: str, *, create: bool) -> int:
        """Open an acquired directory again by its path, under the same descriptor.

        Raises:
            OSError: as `open` does.
        """
        fd = self._open_anew(path, create=create)
        with SHARED.lock:
            kept = self.kept[path]
            number = int(kept.cdata.fd)
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
        kept.synced = create or self._always_synced
        return number

    def sync(self, fd: int) -> None:
        """Sync a directory.

        Raises:
            OSError: it failed.
        """
        if not self.journaled:
            files.touch(fd)
        os.fsync(fd)

    def close(self) -> None:
        """Close every descriptor; no call may be in progress."""
        with SHARED.lock:
            while self.kept:
                kept = self.kept.popitem()[1]
                SHARED.remove(kept)
                fd, kept.cdata.fd = kept.cdata.fd, -1
                if fd >= 0:
                    os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptors that a forked child has from its parent."""
        for kept in self.kept.values():
            if kept.cdata.fd >= 0:
                os.close(kept.cdata.fd)

    @property
    def _always_synced(self) -> bool:
        return not self._durable or self._leaf_table is not None

    def _acquire(self, path: str) -> KeptDirectory | None:
        kept = self.kept.get(path)
        if kept is not None:
            lib.kvio_dir_acquire(kept.cdata)
        return kept

    def _keep(self, path: str, fd: int, *, synced: bool) -> KeptDirectory | None:
        """Keep a descriptor and acquire it; None: there is no room."""
        if len(self.kept) >= _MAX_OPEN:
            return None
        if self._leaf_table is None:
            cdata = _native.new("kvio_dir *", (-1,))
        else:
            cdata = self._leaf_table.leaf(_LEAF_NUMBERS[path])
        kept = KeptDirectory(self, path, cdata, synced=synced or self._always_synced)
        if not SHARED.add(kept):
            return None
        cdata.fd = fd
        lib.kvio_dir_acquire(cdata)
        self.kept[path] = kept
        return kept

    def _note_synced(self, path: str, fd: int) -> None:
        handle = _native.dir_handle(fd)
        if handle is not None:
            self._synced[path] = handle

    def _open_anew(self, directory: str, *, create: bool) -> int:
        if self._durable and self._leaf_table is not None:
            return self._open_synced(directory, create=create)
        return self._open_dir(directory, create=create, durable=create and self._durable)

    def _open_synced(self, directory: str, *, create: bool) -> int:
        """Open a hashed directory of a durable store, and sync its name unless that was done.

        Reads do so too, because a later write that finds it open does not sync the parent.
        """
        try:
            fd = self._open_dir(directory, create=False, durable=False)
        except FileNotFoundError:
            if not create:
                raise
        else:
            if self._synced.get(directory) == (_native.dir_handle(fd) or b""):
                return fd
            os.close(fd)
        fd = self._open_dir(directory, create=True, durable=True)
        self._note_synced(directory, fd)
        return fd

    def _open_dir(self, directory: str, *, create: bool, durable: bool) -> int:
        return _native.open_dir(
            self.rootfd,
            directory,
            create=create,
            durable=durable,
            journaled=self.journaled,
            read_only=self._read_only,
            permissions=self.permissions,
        )


def make_fan_out(directories: Directories) -> None:
    """Make and sync all directories of ``layout=block``, so that no write has to sync a parent."""
    rootfd = directories.rootfd
    for leaf in LEAVES:
        fd = _native.open_dir(rootfd, leaf, create=True, permissions=directories.permissions)
        directories.add_synced(leaf, fd)
    for parent in LEAVES[::16]:
        fd = _native.open_dir(rootfd, parent[0], create=False)
        try:
            directories.sync(fd)
        finally:
            os.close(fd)
    directories.sync(rootfd)


def walk_files(
    rootfd: int, layout: Layout, prefix: str = "", *, read_only: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield (directory, file name) of all block files; without a prefix, temporaries too.

    With ``layout=plain`` only directories that match the prefix are read. Hashed directories must
    all be read.
    """
    if layout == "plain":
        directory, _, start = prefix.rpartition("/")
        if not directory or is_key(directory):
            yield from _walk(rootfd, directory, start, read_only=read_only)
        return
    if not prefix:
        names = _scan(rootfd, "", read_only=read_only)
        yield from (("", name) for name, is_dir in names if not is_dir and name[0] == ".")
    start = prefix.replace("/", "~")
    for leaf in LEAVES:
        for name, is_dir in _scan(rootfd, leaf, read_only=read_only):
            if name.startswith(start) and not is_dir:
                yield leaf, name


def place_of(layout: Layout, namespace: str, key: str) -> tuple[str, str]:
    """Return the directory and the file name of a key."""
    if layout == "plain":
        return split_key(key)
    return LEAVES[key_hash(namespace, key)[0]], key.replace("/", "~")


def key_of(layout: Layout, directory: str, name: str) -> str | None:
    """Return the key of a place; None if it is not the name of a block."""
    if layout == "plain":
        key = f"{directory}/{name}" if directory else name
    else:
        key = name.replace("~", "/")
    return key if is_key(key) and ("~" not in name or layout == "block") else None


def _walk(
    rootfd: int, directory: str, start: str = "", *, read_only: bool
) -> Iterator[tuple[str, str]]:
    """Yield the files of a directory whose names begin with *start*, and all files below."""
    for name, is_dir in _scan(rootfd, directory, read_only=read_only):
        if not name.startswith(start):
            continue
        if is_dir and not name.startswith("."):
            below = f"{directory}/{name}" if directory else name
            yield from _walk(rootfd, below, read_only=read_only)
        elif not is_dir:
            yield directory, name


def _scan(rootfd: int, directory: str, *, read_only: bool) -> Iterator[tuple[str, bool]]:
    try:
        fd = retrying(
            lambda: _native.open_dir(rootfd, directory, create=False, read_only=read_only)
        )
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        with retrying(lambda: os.scandir(fd)) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir(follow_symlinks=False)
    finally:
        os.close(fd)
