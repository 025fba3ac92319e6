"""Remove corrupt blocks, after copying their bytes to a quarantine directory if asked."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvio import _native
from kvio.abc import Backend, RawBlock
from kvio.errors import KvioError, StorageError, UnsupportedError, storage_error
from kvio.format import MAGIC, TRAILER_BYTES, TrailerError, key_hash, unpack_trailer
from kvio.types import BlockStatus, Cancellation, MiB, Removal, status_of

_PIECE_BYTES: Final = 8 * MiB
#: Bytes that cannot be read become zeros in pieces of this size.
_SECTOR_BYTES: Final = 4096
#: How often a block may be written again while it is checked.
_ATTEMPTS: Final = 4


def remove_corrupt(
    backend: Backend,
    key: str,
    *,
    namespace: str,
    directory: str | None,
    cancel: Cancellation | None = None,
) -> Removal:
    """Remove a block if it is corrupt, but never one that replaced it since.

    It is checked here, however it was found. Its bytes are first put into *directory*, if given.
    """
    try:
        for _ in range(_ATTEMPTS):
            removal = _remove_once(backend, key, namespace, directory, cancel)
            if removal is not None:
                return removal
        text = f"block {key!r} was written {_ATTEMPTS} times while it was checked: verify it again"
        raise StorageError(text, errno=errno.EBUSY, key=key)
    except KvioError as exc:
        return Removal(key, status_of(exc), exc)


def _remove_once(
    backend: Backend,
    key: str,
    namespace: str,
    directory: str | None,
    cancel: Cancellation | None,
) -> Removal | None:
    """Check and remove the block that a key has now; None: it was replaced meanwhile."""
    with backend.open_raw(key) as raw:
        found = backend.verify_block(key, cancel=cancel)
        if found.status is not BlockStatus.CORRUPT:
            return Removal(key, found.status, found.error)
        _check_ours(raw, key, namespace)
        path = None if directory is None else _put_aside(raw, key, directory)
        if not raw.is_current():
            _take_back(path)
            return None
        backend.delete_block(key, cancel=cancel)  # if it fails, its bytes are there twice
    return Removal(key, BlockStatus.CORRUPT, None, path)


def _check_ours(raw: RawBlock, key: str, namespace: str) -> None:
    """Refuse data that may not be kvio's, found by a wrong prefix, layout or namespace.

    Raises:
        UnsupportedError: it has an intact trailer of another key or namespace, or neither a
            trailer nor its place shows that it ever was a block.
    """
    end = memoryview(bytearray(min(raw.nbytes, TRAILER_BYTES)))
    raw.read_into(end, raw.nbytes - len(end))
    trailer = bytes(end)
    if not trailer.startswith(MAGIC):
        if raw.placed:
            return
        why = "it does not end as a block does and may be other data"
    elif not _is_intact(trailer, raw.nbytes) or trailer[24:40] == key_hash(namespace, key):
        return
    else:
        why = "it is a block of another key or namespace"
    raise UnsupportedError(f"block {key!r} is not removed: {why}; kvio rm removes it")


def _is_intact(trailer: bytes, stored_nbytes: int) -> bool:
    """Return whether a trailer is intact, for whichever key."""
    try:
        unpack_trailer(
            trailer,
            stored_nbytes=stored_nbytes,
            expected_key_hash=trailer[24:40],
            crc32c=_native.crc32c,
        )
    except TrailerError:
        return False
    return True


def open_directory(path: str) -> int:
    """Open a quarantine directory, made with mode 0700 if it is missing; return its descriptor.

    Raises:
        StorageError: it cannot be made or opened.
    """
    with _typed(f"open the directory {path!r}"):
        try:
            os.makedirs(path, mode=0o700)
            os.chmod(path, 0o700)  # the umask may have taken more
        except FileExistsError:
            pass
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _put_aside(raw: RawBlock, key: str, directory: str) -> str:
    """Put the bytes of a block into a new file, mode 0600, and return its path."""
    dirfd = open_directory(directory)
    try:
        # No key contains these two characters, so names of different keys differ.
        name = key.replace("/", "~")
        for number in itertools.count(2):
            try:
                with _typed(f"put the bytes of block {key!r} into {directory!r}"):
                    if not raw.link_to(dirfd, name):
                        _copy(raw, dirfd, name)
                    os.fsync(dirfd)
                return os.path.join(directory, name)
            except FileExistsError:
                name = f"{key.replace('/', '~')}#{number}"
        raise AssertionError("unreachable")
    finally:
        os.close(dirfd)


def _copy(raw: RawBlock, dirfd: int, name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=dirfd)
    try:
        with open(fd, "wb", buffering=0) as file:
            os.fchmod(fd, 0o600)
            for piece in _pieces(raw):
                while len(piece):
                    piece = piece[file.write(piece) :]
            os.fsync(fd)
    except BaseException:
        os.unlink(name, dir_fd=dirfd)
        raise


def _pieces(raw: RawBlock) -> Iterator[memoryview]:
    """Yield the bytes of a block, with zeros where they cannot be read."""
    room = memoryview(bytearray(min(raw.nbytes, _PIECE_BYTES)))
    for start in range(0, raw.nbytes, _PIECE_BYTES):
        piece = room[: raw.nbytes - start]
        if _readable(raw, piece, start):
            yield piece
            continue
        for at in range(0, len(piece), _SECTOR_BYTES):
            sector = piece[at : at + _SECTOR_BYTES]
            if not _readable(raw, sector, start + at):
                sector[:] = bytes(len(sector))
        yield piece


def _readable(raw: RawBlock, out: memoryview, offset: int) -> bool:
    try:
        raw.read_into(out, offset)
    except StorageError as exc:
        if exc.errno != errno.EIO:
            raise
        return False
    return True


def _take_back(path: str | None) -> None:
    if path is not None:
        with _typed(f"remove {path!r}"):
            os.unlink(path)


@contextmanager
def _typed(doing: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as exc:
        if isinstance(exc, KvioError):
            raise
        raise storage_error(exc.errno or errno.EIO, doing) from exc
