"""Permissions and groups of the files and directories that kvio makes."""

from __future__ import annotations

import grp
import os
import stat
from contextlib import suppress

from kvio._native import files, lib
from kvio.errors import ConfigError
from kvio.filesystem.probe import is_journaled


def check_file_mode(mode: int | None) -> None:
    """Check the option ``file_mode``; None stands for a default.

    Raises:
        ConfigError: these are no permissions of a file, or its owner could not read it.
    """
    _check("file_mode", mode, 0o777, "0o640", stat.S_IRUSR, "read")


def check_dir_mode(mode: int | None) -> None:
    """Check the option ``dir_mode``; None stands for a default.

    Raises:
        ConfigError: these are no permissions of a directory, or its owner could not use it.
    """
    _check("dir_mode", mode, 0o3777, "0o750", stat.S_IRWXU, "read, write and search")


def _check(  # what the message names
    name: str, mode: int | None, most: int, example: str, needs: int, actions: str
) -> None:
    if mode is None:
        return
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= most:
        raise ConfigError(f"{name} must be 0 to {most:#o}, such as {example}, not {mode!r}")
    if mode & needs != needs:
        raise ConfigError(f"{name} {mode:#o} does not let the owner {actions}")


def group_number(group: str | int | None) -> int | None:
    """Return the number of a group; text may be a name or digits.

    Raises:
        ConfigError: there is no such group.
    """
    if group is None or (type(group) is int and 0 <= group < lib.KVIO_NO_GROUP):
        return group
    try:
        return grp.getgrnam(group).gr_gid  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        pass
    digits = isinstance(group, str) and group.isascii() and group.isdecimal()
    if digits and int(group) < lib.KVIO_NO_GROUP:
        return int(group)
    raise ConfigError(f"there is no group {group!r} on this machine")


def umask() -> int:
    """Return the umask of this process; 0077 where the system does not tell it.

    Read from ``/proc``: `os.umask` would change it for the other threads.
    """
    with suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def missing_directories(path: str) -> list[str]:
    """List the directories of an absolute path that do not exist, the highest first."""
    missing = list[str]()
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        missing.append(path)
        path = os.path.dirname(path)
    return missing[::-1]


def make_directory(path: str, mode: int, *, group: int | None, durable: bool) -> None:
    """Make a directory with these permissions, whatever the umask.

    Until it belongs to its group it is its owner's alone; if that fails it is removed again.
    *durable*: its name is synced.

    Raises:
        OSError: it cannot be made (FileExistsError: another process did), or given to the group.
    """
    os.mkdir(path, 0o700)
    try:
        if group is not None:
            os.chown(path, -1, group)
        os.chmod(path, mode)
    except BaseException:
        with suppress(OSError):  # another process has used it already
            os.rmdir(path)
        raise
    if durable:
        parent = os.path.dirname(path.rstrip("/")) or "/"
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            files.sync_dir(fd, journaled=is_journaled(fd))
        finally:
            os.close(fd)
