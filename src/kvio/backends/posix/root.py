"""The root directory of a store: opening, checks, temporaries and the calibration in it."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

from kvio._native import PRIVATE, Permissions
from kvio.errors import (
    AccessDeniedError,
    ConfigError,
    RootMovedError,
    StorageError,
    storage_error,
)
from kvio.permissions import make_directory, missing_directories

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
