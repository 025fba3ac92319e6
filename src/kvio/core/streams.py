"""Write and read blocks of any length piece by piece, with little memory."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.abc import Backend, Source, SourceFile
from kvio.core.buffers import aligned
from kvio.core.reads import read_fresh
from kvio.errors import (
    BlockSizeError,
    CorruptBlockError,
    KvioError,
    StorageError,
    TransientStorageError,
    storage_error,
)
from kvio.types import BlockStat, Cancellation, IfExists, Level, MiB, Receipt

#: Blocks up to this length are held in memory and written at once.
HELD_BYTES: Final = 64 * MiB
_PIECE_BYTES: Final = 16 * MiB
#: Not /tmp, which is memory on many systems.
_SPOOL_DIRECTORY: Final = "/var/tmp"  # noqa: S108  # the file there has no name


def write(
    backend: Backend,
    key: str,
    source: Source,
    nbytes: int | None,
    if_exists: IfExists,
    cancel: Cancellation | None = None,
) -> Receipt:
    """Store the bytes of a source: *nbytes* of them, or all.

    Raises:
        BlockSizeError: the source ended before *nbytes*.
        KvioError: as `Backend.write_block`; nothing is visible.
    """
    held = aligned(HELD_BYTES if nbytes is None else min(nbytes, HELD_BYTES))
    got = _fill(held, source)
    if nbytes is not None:
        source = _Exactly(source, key, got, nbytes)
        source.check(got == len(held))
    more = None if got < HELD_BYTES or got == nbytes else source
    return write_held(backend, key, held[:got], more, nbytes, if_exists, cancel)


def write_held(
    backend: Backend,
    key: str,
    held: memoryview,
    more: Source | None,
    nbytes: int | None,
    if_exists: IfExists,
    cancel: Cancellation | None = None,
) -> Receipt:
    """Store the bytes in memory, then those of a source if there are *more*; *nbytes*: of both.

    Raises:
        KvioError: as `Backend.write_block`; nothing is visible.
    """
    if more is None:
        return backend.write_block(key, [held], if_exists=if_exists, cancel=cancel)
    whole = _Joined(held, more)
    receipt = backend.write_stream(
        key, whole, nbytes=nbytes, at_least=len(held), if_exists=if_exists, cancel=cancel
    )
    return _write_spooled(backend, key, whole, if_exists) if receipt is None else receipt


def write_file(
    backend: Backend,
    key: str,
    source: SourceFile,
    if_exists: IfExists,
    cancel: Cancellation | None = None,
) -> Receipt:
    """Store the bytes of a file, without a second copy where the backend can.

    Raises:
        BlockSizeError: the file became shorter.
        KvioError: as `Backend.write_block`; a file that was to move is still there.
    """
    receipt = backend.write_file(key, source, if_exists=if_exists, cancel=cancel)
    if receipt is not None:
        return receipt
    with open(source.fd, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        if source.nbytes <= HELD_BYTES:
            receipt = write(backend, key, file.readinto, source.nbytes, if_exists, cancel)
        else:
            receipt = _write_long_file(backend, key, source, file.readinto, if_exists, cancel)
    if source.move:
        try:
            files.remove(source.dirfd, source.name)
            if receipt.level is Level.DURABLE:
                files.sync_dir(source.dirfd)
        except FileNotFoundError:
            pass
        except OSError as exc:
            doing = f"remove file {source.path!r}, which is stored"
            raise storage_error(exc.errno or errno.EIO, doing, key=key) from exc
    return receipt


def _write_long_file(
    backend: Backend,
    key: str,
    source: SourceFile,
    readinto: Source,
    if_exists: IfExists,
    cancel: Cancellation | None,
) -> Receipt:
    """Write a file as a stream, or from a memory map where the backend has no streams."""
    nbytes = source.nbytes
    exactly = _Exactly(readinto, key, 0, nbytes)
    receipt = backend.write_stream(
        key, exactly, nbytes=nbytes, at_least=nbytes, if_exists=if_exists, cancel=cancel
    )
    if receipt is not None:
        return receipt
    try:
        pages = memoryview(mmap.mmap(source.fd, nbytes, access=mmap.ACCESS_READ))
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"map file {source.path!r}", key=key) from exc
    return backend.write_block(key, [pages], if_exists=if_exists, cancel=cancel)


@contextmanager
def opened(path: str, key: str, *, move: bool) -> Iterator[SourceFile]:
    """Hold a regular file open to become a block; to move it, it must not be a link.

    Raises:
        StorageError: it cannot be opened, or is not a regular file.
    """
    directory, name = os.path.split(path)
    fds: list[int] = []
    movable = move
    flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if move else 0)
    try:
        fds.append(os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fds.append(os.open(name, flags | (os.O_RDWR if move else os.O_RDONLY), dir_fd=fds[0]))
        except PermissionError:
            if not move:
                raise
            movable = False  # lost: it is copied
            fds.append(os.open(name, flags | os.O_RDONLY, dir_fd=fds[0]))
        info = os.fstat(fds[1])
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError as exc:
        for fd in fds:
            os.close(fd)
        doing = f"open file {path!r}, which must be a regular file,"
        raise storage_error(exc.errno or errno.EIO, doing, key=key) from exc
    try:
        yield SourceFile(
            path=path,
            fd=fds[1],
            dirfd=fds[0],
            name=name,
            nbytes=info.st_size,
            move=move,
            movable=movable,
        )
    finally:
        for fd in fds:
            os.close(fd)


def read(
    backend: Backend,
    key: str,
    offset: int,
    nbytes: int | None,
    *,
    checked_first: bool,
    stat: BlockStat | None = None,
) -> Iterator[memoryview]:
    """Yield a block, or a range of it, piece by piece; a piece is valid until the next.

    With *checked_first* a long block is read twice, the first time to verify it; else its checksum
    is compared before the last piece is yielded.

    Raises:
        CorruptBlockError: the bytes yielded are not those written.
        TransientStorageError: the block was replaced meanwhile.
        KvioError: as `Backend.read_block_into`.
    """
    if stat is None:
        stat = backend.stat_block(key)
    end = stat.nbytes if nbytes is None else min(stat.nbytes, offset + nbytes)
    if end - offset <= _PIECE_BYTES:
        yield read_fresh(backend, key, offset, nbytes, None)
        return
    whole = (offset, end) == (0, stat.nbytes)
    if whole and checked_first:
        error = backend.verify_block(key).error
        if error is not None:
            raise error
    room = aligned(_PIECE_BYTES)
    crc = 0
    for at in range(offset, end, _PIECE_BYTES):
        piece = room[: min(_PIECE_BYTES, end - at)]
        try:
            got = backend.read_block_into(key, [piece], offset=at, nbytes=len(piece))
        except BlockSizeError:  # it is shorter now
            got = 0
        if got != len(piece):
            raise _replaced(key)
        crc = _native.crc32c(piece, crc)
        if at + len(piece) == end:
            _check_end(backend, stat, crc if whole else None)
        yield piece


def _check_end(backend: Backend, stat: BlockStat, crc: int | None) -> None:
    """Raise if a block was replaced while it was read, or if its checksum is not *crc*."""
    key = stat.key
    if backend.stat_block(key) != stat:
        raise _replaced(key)
    if crc is not None and stat.checksum not in (None, crc):
        text = f"block {key!r} is corrupt: the payload's checksum is wrong"
        raise CorruptBlockError(text, key=key)


def _fill(room: memoryview, source: Source) -> int:
    """Fill memory from a source until it ends; return the number of bytes."""
    got = 0
    while got < len(room):
        count = source(room[got:])
        if not count:
            break
        got += count
    return got


class _Exactly:
    """A source that must have *nbytes* bytes; no more are read from it."""

    def __init__(self, source: Source, key: str, got: int, nbytes: int) -> None:
        self._source, self._key, self._got, self._nbytes = source, key, got, nbytes

    def __call__(self, room: memoryview) -> int:
        room = room[: self._nbytes - self._got]
        count = self._source(room) if room else 0
        self._got += count
        self.check(count > 0 or not room)
        return count

    def check(self, there: bool) -> None:  # noqa: FBT001  # private, always by position
        """Raise `BlockSizeError` for a source that ended before."""
        if not there:
            raise BlockSizeError(
                f"the input of block {self._key!r} ended after {self._got} of {self._nbytes} "
                "bytes: it became shorter while it was read",
                key=self._key,
            )


class _Joined:
    """A source that begins with bytes in memory and goes on with another source."""

    def __init__(self, held: memoryview, source: Source) -> None:
        self._held, self._source = held, source

    def __call__(self, room: memoryview) -> int:
        count = min(len(room), len(self._held))
        if not count:
            return self._source(room)
        room[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


def _write_spooled(backend: Backend, key: str, source: Source, if_exists: IfExists) -> Receipt:
    """Write through a spool file without a name, whose pages the system can drop from memory."""
    import tempfile  # imported late: few programs use it

    directory = os.environ.get("TMPDIR") or _SPOOL_DIRECTORY
    try:
        spool = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # closed below
    except OSError as exc:
        raise _spool_error(exc, directory, key) from exc
    with spool:
        nbytes, crc = _spool(spool.fileno(), source, directory, key)
        try:
            pages = memoryview(mmap.mmap(spool.fileno(), nbytes, access=mmap.ACCESS_READ))
        except OSError as exc:
            raise _spool_error(exc, directory, key) from exc
    # Not cancellable: a backend may copy what can be cancelled, and this may be larger than memory.
    receipt = backend.write_block(key, [pages], if_exists=if_exists)
    if not receipt.existed and receipt.checksum not in (None, crc):
        backend.delete_block(key)
        text = f"block {key!r}: the file in {directory} that held it lost bytes; it is not stored"
        raise StorageError(text, errno=errno.EIO, key=key)
    return receipt


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Hold a directory of temporary files, and remove it with what is in it."""
    import tempfile  # imported late: few programs use it

    directory = os.environ.get("TMPDIR") or _SPOOL_DIRECTORY
    try:
        made = tempfile.TemporaryDirectory(
            prefix="kvio-", dir=directory, ignore_cleanup_errors=True
        )
    except OSError as exc:
        doing = f"make a directory in {directory} (TMPDIR chooses another directory)"
        raise storage_error(exc.errno or errno.EIO, doing) from exc
    with made as path:
        yield Path(path)


def _spool(fd: int, source: Source, directory: str, key: str) -> tuple[int, int]:
    """Copy a source to a file; return the number of bytes and their CRC32C."""
    room = aligned(_PIECE_BYTES)
    nbytes = crc = 0
    while got := _fill(room, source):
        crc = _native.crc32c(room[:got], crc)
        nbytes += got
        rest = room[:got]
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except OSError as exc:
                raise _spool_error(exc, directory, key) from exc
    return nbytes, crc


def _spool_error(exc: OSError, directory: str, key: str) -> KvioError:
    doing = f"hold its bytes in {directory} (TMPDIR chooses another directory)"
    return storage_error(exc.errno or errno.EIO, doing, key=key)


def _replaced(key: str) -> TransientStorageError:
    text = f"block {key!r} was replaced while it was read: read it again"
    return TransientStorageError(text, errno=errno.EBUSY, key=key)
