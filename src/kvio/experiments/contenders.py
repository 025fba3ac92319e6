"""What is compared: kvio's backends and what a Python program does without kvio."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import kvio
from kvio.types import Durability

PLAIN: Final = "plain Python"


class Taken(NamedTuple):
    """The I/O mode of one write and why it was taken."""

    mode: str
    reason: str


class Contender(Protocol):
    """Writes and reads blocks of several pieces below one directory."""

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        """Store a block of these pieces."""

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        """Fill the pieces from a block and count the bytes."""

    def modes(self) -> Counter[str]:
        """Count blocks by the I/O mode so far."""

    def close(self) -> None:
        """Give back what is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender before it is opened; *backend* None is plain Python."""

    backend: str | None
    checksum: bool

    @property
    def name(self) -> str:
        """Tell contenders apart in tables."""
        if self.backend is None:
            return PLAIN
        return self.backend if self.checksum else f"{self.backend}, no checksum"

    def open(self, root: Path, durability: Durability) -> Contender:
        """Open it on an empty directory.

        Raises:
            KvioError: the medium cannot do it; says why.
        """
        if self.backend is None:
            return _PlainPython(root, durability)
        return _Kvio(self.backend, root, durability, checksum=self.checksum)


def entries(backends: Sequence[str], checksum: str) -> list[Entry]:
    """List plain Python and each backend with checksums ``on``, ``off`` or ``both``."""
    wanted = {"on": (True,), "off": (False,), "both": (True, False)}[checksum]
    plain = Entry(backend=None, checksum=False)
    return [plain, *(Entry(backend=b, checksum=c) for b in backends for c in wanted)]


class _PlainPython:
    """open, write, os.replace; open, readinto: no checksum, no sweep, no exclusive create."""

    def __init__(self, root: Path, durability: Durability) -> None:
        self._root = os.fspath(root)
        self._durable = durability == "durable"
        self._modes: Counter[str] = Counter()

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        path = os.path.join(self._root, key)
        with open(f"{path}.tmp", "wb") as file:
            for piece in pieces:
                file.write(piece)
            if self._durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
        if self._durable:
            self._sync_directory()
        return Taken("buffered", "open, write, os.replace")

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        done = 0
        with open(os.path.join(self._root, key), "rb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view.nbytes and (got := file.readinto(view)):
                    view = view[got:]
                    done += got
        self._modes["buffered"] += 1
        return done

    def modes(self) -> Counter[str]:
        return self._modes.copy()

    def close(self) -> None:
        pass

    def _sync_directory(self) -> None:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Kvio:
    """One call of the public interface a block."""

    def __init__(self, backend: str, root: Path, durability: Durability, *, checksum: bool) -> None:
        options = None if checksum else {"checksum": "none", "verify": "length"}
        self._store = kvio.open_store(backend, root=root, durability=durability, options=options)

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        receipt = self._store.write_block(key, pieces)
        return Taken(str(receipt.mode), receipt.reason)

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        return self._store.read_block_into(key, pieces)

    def modes(self) -> Counter[str]:
        return Counter(self._store.stats().modes)

    def close(self) -> None:
        self._store.close()
