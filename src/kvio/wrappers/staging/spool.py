"""The spool: a file without a name for bytes of an open file that do not fit into the tier."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kvio.errors import StorageError, storage_error
from kvio.types import MiB, Parts

_PIECE_BYTES = 64 * MiB


class Spool:
    """A temporary file of mode 0600 that is removed with this object or its process.

    Raises:
        StorageError: the directory takes none.
    """

    def __init__(self, directory: str, key: str) -> None:
        self._key = key
        with self._errors("make a file to spill to"):
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115

    def write(self, parts: Parts, at: int) -> None:
        """Write parts one after the other, from *at* on.

        Raises:
            StorageError: the medium failed or is full.
        """
        with self._errors("spill"):
            for part in parts:
                done = 0
                while done < len(part):  # in pieces: handlers of signals run between them
                    piece = part[done : done + _PIECE_BYTES]
                    done += os.pwrite(self._file.fileno(), piece, at + done)
                at += len(part)

    @contextmanager
    def view(self) -> Iterator[memoryview]:
        """Lend the bytes without reading them into memory of our own.

        Nobody else can cut the file; a medium that cannot read back what it took ends the process
        (SIGBUS), as with every mapped file.
        """
        with self._errors("map what was spilled"):
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        yield memoryview(mapped)  # unmapped with its last view: a call given up may still look

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if isinstance(exc, StorageError):
                raise
            raise storage_error(exc.errno or 0, doing, key=self._key) from exc
