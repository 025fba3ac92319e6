"""The root directory of a store: opened with care, never followed through a surprise."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from pathlib import Path

from kvio.errors import AccessDeniedError, ConfigError, storage_error

#: Temporaries start with a dot, which no key does.
TEMP_MARK = ".kvio-tmp-"
CALIBRATION_NAME = ".kvio-calibration.json"
_CALIBRATION_BYTES = 4 << 20


def open_root(path: str, *, create: bool, shared: bool, durable: bool = False) -> int:
    """Open the root and return its descriptor.

    *create*: make it, and what is missing above it, each mode 0700 whatever the umask, and where
    *durable* synced in its parent.

    Raises:
        ConfigError: it is missing, not a directory, or open to others and *shared* is False.
        AccessDeniedError: this user may not write there.
    """
    if create:
        for directory in _missing(path):
            _make(directory, durable=durable)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"root {path!r} does not exist; make it, or pass create=true") from None
    except NotADirectoryError:
        raise ConfigError(f"root {path!r} is not a directory") from None
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"open root {path!r}") from exc
    try:
        _check(fd, path, shared=shared)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _missing(path: str) -> list[str]:
    """List the directories to make, the highest first; the last is the path itself."""
    missing = [path]
    while not os.path.lexists(missing[-1]) and os.path.dirname(missing[-1]) != missing[-1]:
        missing.append(os.path.dirname(missing[-1]))
    return [*missing[-2:0:-1], path]


def _make(path: str, *, durable: bool) -> None:
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)
        if durable:
            _sync_parent(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise ConfigError(f"the parent of root {path!r} does not exist") from None
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"make root {path!r}") from exc


def _sync_parent(path: str) -> None:
    fd = os.open(os.path.dirname(path.rstrip("/")), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(fd: int, path: str, *, shared: bool) -> None:
    info = os.fstat(fd)
    if not shared and info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"root {path!r} is writable by group or others (mode {info.st_mode & 0o7777:04o}); "
            "chmod go-w it, or pass shared_root=true"
        )
    if not shared and info.st_uid != os.geteuid():
        raise ConfigError(f"root {path!r} belongs to uid {info.st_uid}; pass shared_root=true")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise AccessDeniedError(f"root {path!r} is not writable by this user", errno=errno.EACCES)


def host_tag() -> str:
    """Give eight characters that differ between machines, boots and process-id namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "00000000"
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=4).hexdigest()


def temp_prefix() -> str:
    """Begin the names of this process's temporaries: where and who it is."""
    return f"{TEMP_MARK}{host_tag()}-{os.getpid()}-"


def is_leftover(path: Path, *, older_than_s: float) -> bool:
    """Tell whether a temporary's writer is dead: gone from this host, or long out of time.

    A writer on another host (or before a reboot) cannot be asked, so only the time since the
    temporary was last written counts there; and so it does where the process number was reused.
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
    """Read the calibration file of a root, never through a link, a pipe or more than it can be.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is no small file of text.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(path, CALIBRATION_NAME), flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is no file")
        text = os.read(fd, _CALIBRATION_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _CALIBRATION_BYTES:
        raise ValueError(f"it has more than {_CALIBRATION_BYTES} bytes")
    return text.decode()
