"""Reading a sealed shared file, with the checksums of its cells."""

from __future__ import annotations

import errno
import operator
import os
import stat
import threading
from collections.abc import Sequence
from typing import Final

from kvio import _native, threads
from kvio._native import files
from kvio.buffers import Data, aligned, as_parts, check_memory, scatter, total_bytes
from kvio.errors import (
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    StoreClosedError,
    out_of_memory,
    storage_error,
)
from kvio.sharedfile import index as indices
from kvio.sharedfile import sidecar
from kvio.sharedfile.cutting import slice_parts
from kvio.sharedfile.index import Index, SealError
from kvio.sharedfile.names import Names
from kvio.types import Verify

#: How many pieces of memory one read takes: IOV_MAX of Linux.
_PIECES: Final = 1024


def read_fully(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fill views from a file, or as much of them as there is; the count."""
    done, nbytes = 0, total_bytes(parts)
    rest = list(parts)
    while done < nbytes:
        n = os.preadv(fd, rest[:_PIECES], offset + done)
        if not n:
            break
        done += n
        while rest and n >= len(rest[0]):
            n -= len(rest.pop(0))
        if n:
            rest[0] = rest[0][n:]
    return done


def open_sealed(names: Names) -> int:
    """Open a sealed file.

    Raises:
        BlockNotFoundError: there is none.
        CorruptBlockError: it is no regular file.
    """
    try:
        fd = files.open_file(names.dirfd, names.final, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise BlockNotFoundError(f"no shared file {names.path!r}", key=names.path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptBlockError(f"{names.path!r} is not a regular file", key=names.path)
    return fd


def open_checked(names: Names) -> tuple[int, Index]:
    """Open a sealed file and read its index, which stands at its end or in its sidecar.

    Raises:
        BlockNotFoundError: there is none.
        CorruptBlockError: it is no sealed shared file, or was damaged.
        OutOfMemoryError: there is no memory for its index.
    """
    while True:
        fd = open_sealed(names)
        try:
            return fd, _read_index(names, fd)
        except BaseException as exc:
            info = os.fstat(fd)
            os.close(fd)
            replaced = not names.is_inode(names.final, (info.st_dev, info.st_ino))
            if not (replaced and isinstance(exc, CorruptBlockError)):
                raise  # else its sidecar went with it


def _read_index(names: Names, fd: int) -> Index:
    path, nbytes = names.path, os.fstat(fd).st_size
    try:
        beside = sidecar.read(names, fd)
        if beside is not None:
            return beside
        trailer = os.pread(fd, indices.TRAILER_BYTES, max(0, nbytes - indices.TRAILER_BYTES))
        table_nbytes = indices.table_nbytes(trailer, nbytes)
        check_memory(table_nbytes)
        table = os.pread(fd, table_nbytes, nbytes - len(trailer) - table_nbytes)
        return indices.unpack(table, trailer, nbytes)
    except MemoryError as exc:
        raise out_of_memory(exc, path, nbytes) from exc
    except SealError as exc:
        text = f"{path!r} cannot be read as a shared file: {exc}"
        raise CorruptBlockError(text, key=path) from exc


class Reader:
    """Reads from one sealed file; any number of threads may."""

    def __init__(self, fd: int, index: Index, path: str, verify: Verify) -> None:
        self._fd, self.index, self._path = fd, index, path
        self._checksums = index.checksums if verify == "full" else None
        self._lock = threading.RLock()
        self._idle = threads.Condition(self._lock)
        self._busy: set[object] = set()
        self._closed = False

    def pread_into(self, out: Data, offset: int) -> int:
        """Fill *out*; see `SharedFile.pread_into`."""
        parts, offset = as_parts(out, writable=True), operator.index(offset)
        nbytes, size = total_bytes(parts), self.index.layout.size
        if offset < 0 or offset + nbytes > size:
            raise BlockSizeError(
                f"{nbytes} bytes at offset {offset} lie beyond {self._path!r} of {size} bytes",
                key=self._path,
            )
        call = object()
        try:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(f"this handle of {self._path!r} is closed")
                self._busy.add(call)
            self._read(parts, offset, offset + nbytes)
        except MemoryError as exc:
            raise out_of_memory(exc, self._path, nbytes) from exc
        finally:
            with self._lock:
                self._busy.discard(call)
                self._idle.notify_all()
        return nbytes

    def _read(self, parts: Sequence[memoryview], start: int, end: int) -> None:
        if self._checksums is None:
            self._fill(parts, start)
            return
        layout, at = self.index.layout, start
        while at < end:
            stripe = layout.stripe_at(at)
            cell = (at - stripe.origin) // layout.cell_bytes
            first = max(stripe.origin + cell * layout.cell_bytes, stripe.start)
            last = min(stripe.origin + (cell + 1) * layout.cell_bytes, stripe.end)
            stop = min(last, end)
            own = slice_parts(parts, at - start, stop - start)
            checksum = self._checksums[stripe.first_cell + cell]
            if (first, last) == (at, stop):
                self._read_cell(own, first, checksum)
            else:
                whole = aligned(last - first, 64)
                self._read_cell([whole], first, checksum)
                scatter(whole[at - first : stop - first], own)
            at = stop

    def _read_cell(self, out: Sequence[memoryview], first: int, checksum: int) -> None:
        self._fill(out, first)
        found = 0
        for part in out:
            found = _native.crc32c(part, found)
        if found == checksum:
            return
        for part in out:
            part[:] = bytes(len(part))  # what is corrupt is not handed out
        last = first + total_bytes(out)
        raise CorruptBlockError(
            f"bytes {first} to {last} of {self._path!r} are not what was written", key=self._path
        )

    def _fill(self, parts: Sequence[memoryview], offset: int) -> None:
        try:
            done = read_fully(self._fd, parts, offset)
        except OSError as exc:
            error = storage_error(exc.errno or errno.EIO, f"read {self._path!r}")
            error.key = self._path
            raise error from exc
        if done < total_bytes(parts):
            raise CorruptBlockError(f"{self._path!r} is cut short", key=self._path)

    def abandon(self) -> None:
        """Close the descriptor in a forked child, where nobody reads."""
        os.close(self._fd)

    def close(self) -> None:
        """Wait for reads under way and close the descriptor."""
        with self._lock:
            self._closed = True
            threads.wait_for(self._idle, lambda: not self._busy, None)
        os.close(self._fd)
