"""Blocks that were found corrupt: remembered, so that ``keep`` replaces them, or removed."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kvio import _native
from kvio.abc import Backend, RawBlock
from kvio.core import buffers
from kvio.errors import KvioError, StorageError, UnsupportedError, storage_error
from kvio.format import MAGIC, TRAILER_BYTES, TrailerError, key_hash, unpack_trailer
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStatus,
    Cancellation,
    IfExists,
    MiB,
    Parts,
    Receipt,
    Removal,
    status_of,
)

#: About a megabyte of keys.
MAX_KEYS: Final = 4096


class DamagedKeys:
    """Keys that were found corrupt and not written since, at most `MAX_KEYS`.

    Thread-safe.

    Attributes:
        keys: the keys, oldest first; read-only.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.keys: dict[str, None] = dict.fromkeys(keys)
        self._lock = threading.Lock()

    def note(self, key: str) -> None:
        """Remember that the block of a key was found corrupt."""
        with self._lock:
            self.keys.pop(key, None)
            self.keys[key] = None
            if len(self.keys) > MAX_KEYS:
                del self.keys[next(iter(self.keys))]

    def note_results(self, results: Iterable[BlockResult]) -> None:
        """Remember the corrupt ones of a batch."""
        for result in results:
            if result.status is BlockStatus.CORRUPT:
                self.note(result.key)

    def forget(self, key: str) -> None:
        """Forget a key: it was written, or its block is intact."""
        with self._lock:
            self.keys.pop(key, None)

    def write_block(
        self,
        backend: Backend,
        key: str,
        parts: Parts,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt:
        """Write as `Backend.write_block`, but ``keep`` replaces a block that is still corrupt."""
        if key not in self.keys:
            return backend.write_block(key, parts, if_exists=if_exists, cancel=cancel)
        chosen = self.choose(backend, key, buffers.total_bytes(parts), if_exists, cancel)
        receipt = backend.write_block(key, parts, if_exists=chosen, cancel=cancel)
        self.forget(key)
        return receipt

    def choose(
        self,
        backend: Backend,
        key: str,
        nbytes: int,
        if_exists: IfExists,
        cancel: Cancellation | None,
    ) -> IfExists:
        """Return the ``if_exists`` of a write: ``replace`` if ``keep`` would keep a corrupt block.

        The block is checked first, because another process may have written it since, and a
        visible write must not replace an intact durable block.
        """
        if if_exists != "keep" or key not in self.keys or _may_stay(backend, key, nbytes, cancel):
            return if_exists
        return "replace"

    def choose_all(
        self, backend: Backend, blocks: Blocks, cancel: Cancellation | None
    ) -> list[int]:
        """Return which blocks of a ``keep`` batch must be written with ``replace``, by position.

        If a key occurs several times, only the first: the others then find an intact block.
        """
        first = {key: at for at, key in reversed(list(enumerate(blocks.keys))) if key in self.keys}
        return sorted(
            at
            for key, at in first.items()
            if self.choose(backend, key, blocks.sizes[at], "keep", cancel) == "replace"
        )


def _may_stay(backend: Backend, key: str, nbytes: int, cancel: Cancellation | None) -> bool:
    """Return whether a ``keep`` write may go on: the existing block is intact, or there is none.

    The payload is checked whatever the option ``verify`` is. Then the block is also read in the
    usual way: the check bypasses the page cache where it can, and the cached copy may be corrupt.
    """
    found = backend.verify_block(key, cancel=cancel)
    if not found.ok:
        return found.status is BlockStatus.MISSING
    try:
        got = backend.read_block_into(key, [buffers.aligned(nbytes)], cancel=cancel)
    except KvioError:
        return False
    return got == nbytes


# --------------------------------------------------------------------------------------------------
# Remove corrupt blocks, after copying their bytes to a quarantine directory if asked.


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
