"""The root directory of a store, the paths of its keys, and the directories kept open."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

from kvio import _native
from kvio._native import NULL, PRIVATE, Permissions, files, lib
from kvio.errors import (
    AccessDeniedError,
    ConfigError,
    RootMovedError,
    StorageError,
    storage_error,
)
from kvio.filesystem.descriptors import SHARED, retrying
from kvio.filesystem.permissions import make_directory, missing_directories
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


# --------------------------------------------------------------------------------------------------
# The root directory of a store: opening, checks, temporaries and the calibration in it.


#: Temporaries start with a dot, which no key does.
TEMP_MARK = ".kvio-tmp-"
CALIBRATION_NAME = ".kvio-calibration.json"
_CALIBRATION_BYTES = 4 << 20
#: The root is checked again before a receipt that comes later than this after the last check.
_CHECK_S: Final = 1.0
#: Errors of a path that does not exist.
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def open_root(
    path: str,
    *,
    create: bool,
    shared: bool,
    durable: bool = False,
    permissions: Permissions = PRIVATE,
) -> int:
    """Open the root and return its descriptor.

    *create*: make it, and what is missing above it, with *permissions* whatever the umask, and
    where *durable* synced in its parent.

    Raises:
        ConfigError: it is missing, not a directory, or writable by others and *shared* is False.
        AccessDeniedError: this user may not read it.
    """
    if create:
        for directory in [*missing_directories(os.path.dirname(path)), path]:
            _make(directory, permissions, durable=durable)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"root {path!r} does not exist; make it, or pass create=true") from None
    except NotADirectoryError:
        raise ConfigError(f"root {path!r} is not a directory") from None
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"open root {path!r}") from exc
    try:
        _check(fd, path, shared=shared, expected=permissions.dir_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen_root(fd: int, path: str) -> int:
    """Open the directory of a parent process's descriptor again, wherever it is now.

    Raises:
        StorageError: it cannot be opened.
    """
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"open root {path!r}") from exc


class RootWatch:
    """Checks that the path of a root still leads to the directory that was opened.

    Before writers return a receipt they compare `due_s` with the clock, and check if it has
    passed. The first write, and each write while the root is moved, check before they write too:
    so no more blocks go into a moved directory, and writes succeed again when it is back.

    Attributes:
        due_s: time of the next check, by `time.monotonic`.
        check_first: there was no check yet, or the last one failed.
    """

    __slots__ = ("_fd", "_identity", "_path", "check_first", "due_s")

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._identity = _identity(os.fstat(fd))
        self.due_s = 0.0
        self.check_first = True

    def check(self, key: str | None = None) -> None:
        """Compare the path with the directory.

        Raises:
            RootMovedError: it leads elsewhere or does not exist; the store refuses writes.
            StorageError: it cannot be checked.
        """
        error = self.find(key)
        if error is not None:
            raise error

    def find(self, key: str | None = None) -> StorageError | None:
        """Return the error of `check`."""
        now = monotonic()
        number = 0
        try:
            if _identity(os.stat(self._path)) != self._identity:
                number = errno.ESTALE
        except PermissionError:  # a process that dropped its privileges cannot know
            pass
        except OSError as exc:
            number = exc.errno or errno.EIO
            if number not in _GONE:
                return storage_error(number, f"look up root {self._path!r}", key=key)
        self.check_first = number != 0
        if number:
            return RootMovedError(self._describe(number), errno=number, key=key)
        self.due_s = now + _CHECK_S
        return None

    def _describe(self, number: int) -> str:
        leads = "leads to another directory" if number == errno.ESTALE else "leads nowhere"
        todo = "Move it back, or open the store anew"
        if _is_removed(self._fd):
            where, todo = ", and its directory was removed", "Open the store anew"
        elif (now := _path_of(self._fd)) != self._path:
            where = f"; its directory is {now!r} now"
        else:
            where = ""
        return f"no receipt: root {self._path!r} {leads} since the store was opened{where}. {todo}"


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _is_removed(fd: int) -> bool:
    """Return whether an open directory has no name; False also where that cannot be known."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return False


def _path_of(fd: int) -> str:
    """Return the path of an open directory, as far as this process sees it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "out of sight"


def _make(path: str, permissions: Permissions, *, durable: bool) -> None:
    try:
        make_directory(path, permissions.dir_mode, group=permissions.group, durable=durable)
    except FileExistsError:
        _repair(path, permissions)
    except FileNotFoundError:
        raise ConfigError(f"the parent of root {path!r} does not exist") from None
    except OSError as exc:
        group = "" if permissions.group is None else f" for group {permissions.group}"
        raise storage_error(exc.errno or errno.EIO, f"make root {path!r}{group}") from exc


def _repair(path: str, permissions: Permissions) -> None:
    """Make a root usable whose maker died between making it and setting its permissions.

    Such a root is ours and empty, and a umask may have taken even the owner's bits. What can be
    read and is not empty is as its owner wants it. Other defects are found when it is opened.
    """
    with suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            lacks = ~info.st_mode & permissions.dir_mode if info.st_uid == os.geteuid() else 0
            unreadable = lacks & (stat.S_IRUSR | stat.S_IXUSR)
            if lacks and (unreadable or not os.listdir(path)):
                if permissions.group is not None:
                    os.chown(f"/proc/self/fd/{fd}", -1, permissions.group)
                os.chmod(f"/proc/self/fd/{fd}", permissions.dir_mode)
        finally:
            os.close(fd)


def _check(fd: int, path: str, *, shared: bool, expected: int) -> None:
    info = os.fstat(fd)
    if not shared and info.st_mode & ~expected & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"root {path!r} is writable by group or others (mode {info.st_mode & 0o7777:04o}); "
            f"chmod go-w it, or pass shared_root=true or dir_mode={info.st_mode & 0o7777:04o}"
        )
    if not shared and info.st_uid != os.geteuid():
        raise ConfigError(f"root {path!r} belongs to uid {info.st_uid}; pass shared_root=true")
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        raise AccessDeniedError(f"root {path!r} is not readable by this user", errno=errno.EACCES)


def host_tag() -> str:
    """Return eight characters that differ between machines, boots and process-id namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "00000000"
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=4).hexdigest()


def temp_prefix() -> str:
    """Return the prefix of this process's temporaries: its host and process number."""
    return f"{TEMP_MARK}{host_tag()}-{os.getpid()}-"


def is_leftover(path: Path, *, older_than_s: float) -> bool:
    """Return whether the writer of a temporary is dead.

    On this host it is dead if its process has ended. A writer on another host, or before a
    reboot, is taken for dead if its temporary has not changed for *older_than_s* seconds; so is
    one whose process number was reused.
    """
    fields = path.name.removeprefix(TEMP_MARK).split("-")
    if len(fields) != 3 or not fields[1].isdecimal():
        return False
    try:
        idle_s = time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return False
    known = fields[0] == host_tag() != "00000000"
    return (known and not _alive(int(fields[1]))) or idle_s > older_than_s


def remove_temporary(path: Path) -> None:
    """Remove a temporary file, or a directory of temporary files, that may be gone already."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def read_calibration(path: str) -> str:
    """Return the text of a root's calibration file, if it is a regular file of limited size.

    Raises:
        OSError: it does not exist, or cannot be read.
        ValueError: it is not a regular file, is too long, or is not text.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(path, CALIBRATION_NAME), flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        text = os.read(fd, _CALIBRATION_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _CALIBRATION_BYTES:
        raise ValueError(f"it has more than {_CALIBRATION_BYTES} bytes")
    return text.decode()
