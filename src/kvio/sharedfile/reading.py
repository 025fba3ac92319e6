"""Read a sealed shared file, verifying the checksums of its cells."""

from __future__ import annotations

import errno
import operator
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from kvio import _native
from kvio._native import files
from kvio.abc import RunAll
from kvio.core import threads
from kvio.core.buffers import (
    BouncePool,
    Data,
    aligned,
    as_parts,
    check_memory,
    scatter,
    total_bytes,
)
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
from kvio.sharedfile.index import Index, SealError
from kvio.sharedfile.layout import slice_parts
from kvio.sharedfile.names import Names
from kvio.types import KiB, MiB, Verify

Mode = Literal["hybrid", "buffered", "direct"]

#: The most pieces of memory in one read: IOV_MAX of Linux.
_PIECES: Final = 1024
#: The least bytes that another thread reads, and the alignment of such pieces.
_PIECE_BYTES: Final = 2 * MiB
_STEP_BYTES: Final = 64 * KiB
#: The size of one system call and of a bounce buffer, and the number of buffers kept.
_CHUNK_BYTES: Final = 1 * MiB
_BOUNCES: Final = 4
#: Cells of at least this length are read directly if at most this share is in the page cache.
_COLD_BYTES: Final = 64 * KiB
_COLD_FRACTION: Final = 0.5


def read_fully(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fill views from a file until it ends, and return the number of bytes."""
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
        CorruptBlockError: it is not a regular file.
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
    """Open a sealed file and read its index, which is at its end or in its sidecar.

    Raises:
        BlockNotFoundError: there is none.
        CorruptBlockError: it is damaged, or not a sealed shared file.
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


class _Cell(NamedTuple):
    """A cell that a read touches.

    Attributes:
        out: the caller's memory for it.
        room: if a part is wanted, this part of the memory that the whole cell is read into.
    """

    number: int
    start: int
    end: int
    out: Sequence[memoryview]
    room: memoryview | None = None


class _Piece(NamedTuple):
    """The bytes that one thread reads at once, all in one cell."""

    cell: int
    parts: Sequence[memoryview]
    offset: int
    direct: bool


class Reader:
    """Reads from one sealed file, by any number of threads.

    Args:
        fd: the file, which the reader closes.
        run_all: runs tasks concurrently, as `Executor.run_all` does.
        mode: "buffered", "direct", or "hybrid": direct for cells that are not in the page cache.
    """

    def __init__(
        self,
        fd: int,
        index: Index,
        path: str,
        verify: Verify,
        *,
        run_all: RunAll,
        mode: Mode = "hybrid",
    ) -> None:
        self._fd, self.index, self._path = fd, index, path
        self._checksums = index.checksums if verify == "full" else None
        self._run_all = run_all
        self._mode = mode
        self._direct_fd: int | None = None
        self._was_direct: set[int] = set()
        self._template = _native.make_template(chunk_bytes=_CHUNK_BYTES)
        self._pool = BouncePool(_CHUNK_BYTES, limit=_BOUNCES)
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
        """Read the pieces of all cells concurrently, then verify each cell."""
        cells, pieces = list[_Cell](), list[_Piece]()
        for number, first, last in self.index.layout.cells_between(start, end):
            at, stop = max(first, start), min(last, end)
            cell = _Cell(number, first, last, slice_parts(parts, at - start, stop - start))
            whole = (at, stop) == (first, last)
            direct = whole and self._is_cold(cell)
            if whole or self._checksums is None:
                pieces += self._cut(len(cells), cell.out, at, direct=direct)
            else:  # the whole cell is read to verify it
                room = aligned(last - first, 64)
                cell = cell._replace(room=room[at - first : stop - first])
                pieces += self._cut(len(cells), [room], first, direct=direct)
            cells.append(cell)
        tasks = [partial(self._read_piece, piece) for piece in pieces]
        sums = self._run_all(tasks) if len(tasks) > 1 else [task() for task in tasks]
        if self._checksums is not None:
            self._check(self._checksums, cells, pieces, sums)

    def _cut(
        self, cell: int, parts: Sequence[memoryview], offset: int, *, direct: bool
    ) -> Iterator[_Piece]:
        """Split the bytes of a cell that are read into pieces for one thread each."""
        nbytes = total_bytes(parts)
        count = max(1, nbytes // _PIECE_BYTES)
        step = -(-nbytes // count // _STEP_BYTES) * _STEP_BYTES
        for at in range(0, nbytes, step):
            own = slice_parts(parts, at, min(at + step, nbytes))
            yield _Piece(cell, own, offset + at, direct)

    def _is_cold(self, cell: _Cell) -> bool:
        """Decide whether to read directly: cells that are not cached, the first time only."""
        if self._mode != "hybrid":
            return self._mode == "direct"
        nbytes = cell.end - cell.start
        if nbytes < _COLD_BYTES or cell.number in self._was_direct:
            return False
        cached = _native.cached_fraction(self._fd, nbytes, cell.start)
        if cached is None or cached > _COLD_FRACTION:
            return False
        self._was_direct.add(cell.number)
        return True

    def _read_piece(self, piece: _Piece) -> int:
        """Read a piece, and return its CRC32C (0 without verification)."""
        fd = self._open_direct() if piece.direct else -1
        try:
            if fd >= 0:
                bounce = self._pool.take()
                try:
                    return self._fill(fd, piece, bounce)
                except OSError as exc:
                    if exc.errno != errno.EINVAL:
                        raise
                    self._mode = "buffered"  # no direct I/O, or it needs another alignment
                finally:
                    self._pool.give(bounce)
            return self._fill(self._fd, piece, None)
        except CorruptBlockError:
            raise
        except OSError as exc:
            error = storage_error(exc.errno or errno.EIO, f"read {self._path!r}")
            error.key = self._path
            raise error from exc

    def _fill(self, fd: int, piece: _Piece, bounce: _native.Memory | None) -> int:
        found = files.read_parts(
            self._template,
            fd,
            piece.parts,
            piece.offset,
            file_nbytes=self.index.layout.size,
            checksum=self._checksums is not None,
            bounce=bounce,
        )
        if found is None:
            raise CorruptBlockError(f"{self._path!r} is cut short", key=self._path)
        return found

    def _open_direct(self) -> int:
        """Return a descriptor of the same file for direct I/O; -1: there can be none."""
        with self._lock:
            if self._direct_fd is None:
                flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
                try:
                    self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", flags)
                except OSError:  # no direct I/O, no descriptor left, no /proc
                    self._direct_fd, self._mode = -1, "buffered"
            return self._direct_fd

    def _check(
        self,
        checksums: Sequence[int],
        cells: Sequence[_Cell],
        pieces: Sequence[_Piece],
        sums: Sequence[int],
    ) -> None:
        """Copy intact cells that were read for a part to the caller's memory.

        Raises:
            CorruptBlockError: a cell is corrupt; its bytes become zeros in the caller's memory.
        """
        bad: _Cell | None = None
        of_cell: list[list[tuple[int, int]]] = [[] for _ in cells]
        for piece, checksum in zip(pieces, sums, strict=True):
            of_cell[piece.cell].append((checksum, total_bytes(piece.parts)))
        for cell, shares in zip(cells, of_cell, strict=True):
            if _native.crc32c_combine(shares) != checksums[cell.number]:
                bad = bad or cell
                for part in cell.out:
                    part[:] = bytes(len(part))  # corrupt bytes are not returned
            elif cell.room is not None:
                scatter(cell.room, cell.out)
        if bad is not None:
            raise CorruptBlockError(
                f"bytes {bad.start} to {bad.end} of {self._path!r} are not what was written",
                key=self._path,
            )

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._close_all()

    def close(self) -> None:
        """Wait for reads in progress and close the descriptors."""
        with self._lock:
            self._closed = True
            threads.wait_for(self._idle, lambda: not self._busy, None)
        self._close_all()

    def _close_all(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None and self._direct_fd >= 0:
            os.close(self._direct_fd)
