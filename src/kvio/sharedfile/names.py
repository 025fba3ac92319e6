"""The names of a shared file: its own, and those it has while it is written."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvio._native import files
from kvio.errors import ConfigError, storage_error

_MAP: Final = ".kvio-map"
_DATA: Final = ".kvio-data"
#: What a name must leave room for: the marks and the random part of a temporary.
_ROOM: Final = 48
_NAME_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class Names:
    """A directory, open, and the names of one shared file in it.

    Attributes:
        path: as the user gave it, for messages.
        final: the file's own name, which appears when it is sealed.
        data: what holds the bytes until then.
        map: what tells writers of each other until then.
    """

    dirfd: int
    path: str
    final: str

    @property
    def data(self) -> str:
        """What holds the bytes until the file is sealed."""
        return f".{self.final}{_DATA}"

    @property
    def map(self) -> str:
        """What tells writers of each other until the file is sealed."""
        return f".{self.final}{_MAP}"

    def new_map(self) -> str:
        """Make a name for a map that is not complete yet."""
        return f"{self.map}.{secrets.token_hex(8)}"

    def unfinished_maps(self) -> list[str]:
        """List maps whose making was cut short, or is under way."""
        mark = f"{self.map}."
        return [name for name in os.listdir(self.dirfd) if name.startswith(mark)]

    def exists(self, name: str) -> bool:
        """Tell whether a name is taken."""
        try:
            os.stat(name, dir_fd=self.dirfd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a name if it stands."""
        with suppress(FileNotFoundError):
            files.remove(self.dirfd, name)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.dirfd)


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
    if len(os.fsencode(final)) > _NAME_MAX - _ROOM:
        raise ConfigError(f"the name {final!r:.80} is longer than {_NAME_MAX - _ROOM} bytes")
    try:
        fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise storage_error(exc.errno or 0, f"open the directory of {text!r}", key=text) from exc
    return Names(fd, text, final)
