"""Reading a sealed shared file, with the checksums of its cells."""

from __future__ import annotations

import os

from kvio import _native
from kvio._native import files
from kvio.buffers import Data, as_parts, total_bytes
from kvio.errors import BlockNotFoundError, BlockSizeError, CorruptBlockError
from kvio.sharedfile import index as indices
from kvio.sharedfile.index import Index, SealError
from kvio.sharedfile.names import Names
from kvio.types import Verify


def read_fully(fd: int, view: memoryview, offset: int) -> int:
    """Fill a view from a file, or as much of it as there is; the count."""
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if not n:
            break
        done += n
    return done


def open_sealed(names: Names) -> tuple[int, Index]:
    """Open a sealed file and read its index.

    Raises:
        BlockNotFoundError: there is none.
        CorruptBlockError: it does not end as a sealed shared file does, or was damaged.
    """
    try:
        fd = files.open_file(names.dirfd, names.final, os.O_RDONLY)
    except FileNotFoundError:
        raise BlockNotFoundError(f"no shared file {names.path!r}", key=names.path) from None
    try:
        return fd, _read_index(fd)
    except SealError as exc:
        os.close(fd)
        raise CorruptBlockError(
            f"{names.path!r} cannot be read as a shared file: {exc}", key=names.path
        ) from exc
    except BaseException:
        os.close(fd)
        raise


def _read_index(fd: int) -> Index:
    nbytes = os.fstat(fd).st_size
    trailer = os.pread(fd, indices.TRAILER_BYTES, max(0, nbytes - indices.TRAILER_BYTES))
    table = indices.table_nbytes(trailer)
    if table > nbytes:
        raise SealError("its index is longer than the file")
    at = nbytes - len(trailer) - table
    return indices.unpack(os.pread(fd, table, at), trailer, nbytes)


class Reader:
    """Reads from one sealed file; any number of threads may."""

    def __init__(self, fd: int, index: Index, path: str, verify: Verify) -> None:
        self._fd, self.index, self._path = fd, index, path
        self._checksums = index.checksums if verify == "full" else None

    def pread_into(self, out: Data, offset: int) -> int:
        """Fill *out*; see `SharedFile.pread_into`."""
        parts = as_parts(out, writable=True)
        nbytes = total_bytes(parts)
        size = self.index.layout.size
        if offset < 0 or offset + nbytes > size:
            raise BlockSizeError(
                f"{nbytes} bytes at offset {offset} lie beyond {self._path!r} of {size} bytes",
                key=self._path,
            )
        at = offset
        for part in parts:
            self._read_part(part, at)
            at += len(part)
        return nbytes

    def _read_part(self, part: memoryview, offset: int) -> None:
        if self._checksums is None:
            self._fill(part, offset)
            return
        layout, at, end = self.index.layout, offset, offset + len(part)
        while at < end:
            stripe = layout.stripe_at(at)
            cell = (at - stripe.origin) // layout.cell_bytes
            first = max(stripe.origin + cell * layout.cell_bytes, stripe.start)
            last = min(stripe.origin + (cell + 1) * layout.cell_bytes, stripe.end)
            stop = min(last, end)
            own = part[at - offset : stop - offset]
            self._read_cell(own, at, stripe.first_cell + cell, first, last)
            at = stop

    def _read_cell(self, out: memoryview, at: int, number: int, first: int, last: int) -> None:
        """Read a part of a cell; all of it is read, to see whether it is what was written."""
        whole = out if (first, last) == (at, at + len(out)) else _native.allocate(last - first, 64)
        self._fill(whole, first)
        assert self._checksums is not None
        if _native.crc32c(whole) != self._checksums[number]:
            if whole is out:
                out[:] = bytes(len(out))
            raise CorruptBlockError(
                f"bytes {first} to {last} of {self._path!r} are not what was written",
                key=self._path,
            )
        if whole is not out:
            out[:] = whole[at - first : at - first + len(out)]

    def _fill(self, view: memoryview, offset: int) -> None:
        if read_fully(self._fd, view, offset) < len(view):
            raise CorruptBlockError(f"{self._path!r} is cut short", key=self._path)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)
