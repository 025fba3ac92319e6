"""The names of a shared file: its final name, and those of its files until it is sealed."""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvio._native import files
from kvio.errors import ConfigError, storage_error
from kvio.filesystem.permissions import make_directory, missing_directories

_MAP: Final = ".kvio-map"
_DATA: Final = ".kvio-data"
_PROBE: Final = ".kvio-probe"
_SUMS: Final = ".kvio-sums"
_LEFTOVER: Final = re.compile(r"(\.kvio-(?:map|probe|sums))\.[0-9a-f]{16}").fullmatch
#: The longest addition to a name: a suffix and the random part of a temporary.
_ROOM: Final = 48
_NAME_MAX: Final = 255


class Leftovers(NamedTuple):
    """Files that belong to a shared file and may be leftovers.

    Attributes:
        maps: being made, or left by a creation that was interrupted.
        probes: in use, or left by an interrupted one.
        sidecars: of the existing file, or of a removed one.
    """

    maps: list[str]
    probes: list[str]
    sidecars: list[str]


@dataclass(frozen=True, slots=True)
class Names:
    """An open directory, and the names of one shared file in it.

    Attributes:
        path: as the user passed it, for messages.
        final: the name of the sealed file.
        data: the name of the data file until then.
        map: the name of the map until then.
    """

    dirfd: int
    path: str
    final: str

    @property
    def data(self) -> str:
        """The name of the data file until the file is sealed."""
        return f".{self.final}{_DATA}"

    @property
    def map(self) -> str:
        """The name of the map until the file is sealed."""
        return f".{self.final}{_MAP}"

    def new_map(self) -> str:
        """Return a name for a map that is being made."""
        return f"{self.map}.{secrets.token_hex(8)}"

    def new_probe(self) -> str:
        """Return a name for a file that probes the file system."""
        return f".{self.final}{_PROBE}.{secrets.token_hex(8)}"

    def sidecar(self, inode: int) -> str:
        """Return the name of the sidecar of a sealed file with this inode."""
        return f".{self.final}{_SUMS}.{inode:016x}"

    def leftovers(self) -> Leftovers:
        """List the directory once, and return the files of this path that may be leftovers."""
        mark = f".{self.final}"
        found: dict[str, list[str]] = {_MAP: [], _PROBE: [], _SUMS: []}
        for name in os.listdir(self.dirfd):
            match = _LEFTOVER(name, len(mark)) if name.startswith(mark) else None
            if match is not None:
                found[match[1]].append(name)
        return Leftovers(*found.values())

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of a name, not through a link; None: it does not exist."""
        try:
            return os.stat(name, dir_fd=self.dirfd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def check_final(self) -> None:
        """Raise `ConfigError` if the path is something else than a regular file."""
        found = self.stat(self.final)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self.path!r} is not a regular file: it is not replaced")

    def exists(self, name: str) -> bool:
        """Return whether a name exists."""
        return self.stat(name) is not None

    def is_inode(self, name: str, inode: tuple[int, int]) -> bool:
        """Return whether a name leads to this inode."""
        found = self.stat(name)
        return found is not None and (found.st_dev, found.st_ino) == inode

    def remove(self, name: str) -> None:
        """Remove a name if it exists."""
        with suppress(FileNotFoundError):
            files.remove(self.dirfd, name)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.dirfd)


def make_directories(
    path: str | os.PathLike[str], mode: int, *, group: int | None, durable: bool
) -> None:
    """Make the directories of a path that are missing, with these permissions.

    Raises:
        StorageError: one cannot be made, or given to the group.
    """
    for directory in missing_directories(os.path.dirname(os.path.abspath(os.fspath(path)))):
        try:
            make_directory(directory, mode, group=group, durable=durable)
        except FileExistsError:  # another process made it
            continue
        except OSError as exc:
            raise storage_error(exc.errno or 0, f"make directory {directory!r}") from exc


def open_names(path: str | os.PathLike[str]) -> Names:
    """Open the directory of a shared file.

    Raises:
        ConfigError: the path does not name a file, or its name is too long.
        StorageError: the directory cannot be opened.
    """
    text = os.fspath(path)
    directory, final = os.path.split(text)
    if not isinstance(text, str) or final in ("", ".", "..") or "\0" in text:
        raise ConfigError(f"{text!r} does not name a file")
    try:
        os.fsencode(directory)
        nbytes = len(os.fsencode(final))
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} does not name a file: this system cannot write it") from None
    if nbytes > _NAME_MAX - _ROOM:
        raise ConfigError(f"the name {final!r:.80} is longer than {_NAME_MAX - _ROOM} bytes")
    try:
        fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise storage_error(exc.errno or 0, f"open the directory of {text!r}") from exc
    return Names(fd, text, final)
