"""Single steps on files and names, each a system call that tests can fail; all raise OSError."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import fsencode
from typing import Any, Final

from kvio._native import (
    NULL,
    Memory,
    Template,
    check,
    ffi,
    from_buffer,
    lib,
    new,
    release,
    set_bounce,
)
from kvio._native.faults import current_fault
from kvio._native.signals import raised, reraise

_PARTS: Final[Any] = ffi.typeof("kvio_part[]")


class SyncFailedError(OSError):
    """A sync failed: what it was part of is never made once more."""


def create(dirfd: int, name: str) -> int:
    """Make a file that did not exist, 0600, open for reading and writing."""
    return check(lib.kvio_file_create(current_fault(), dirfd, fsencode(name)), name)


def open_file(dirfd: int, name: str, flags: int) -> int:
    """Open a file, never through a link."""
    return check(lib.kvio_file_open(current_fault(), dirfd, fsencode(name), flags), name)


def allocate(fd: int, nbytes: int, *, preallocate: bool) -> bool:
    """Extend a file to its full size; False: as a hole, without allocated blocks."""
    return check(lib.kvio_file_allocate(current_fault(), fd, nbytes, preallocate)) == 0


def truncate(fd: int, nbytes: int) -> None:
    """Cut a file to its size."""
    check(lib.kvio_file_truncate(current_fault(), fd, nbytes))


def touch(fd: int) -> None:
    """Make the next sync of a descriptor write its inode too; see ``kvio_inode_touch``."""
    lib.kvio_inode_touch(current_fault(), fd)


def sync(fd: int, *, journaled: bool = True) -> None:
    """Wait until all bytes of a file are on stable storage: fdatasync(2).

    *journaled*: the file system writes names and inodes together.
    """
    if not journaled:
        touch(fd)
    with _syncing():
        check(lib.kvio_file_sync(current_fault(), fd))


def set_mode(fd: int, mode: int) -> None:
    """Set a file's permissions."""
    check(lib.kvio_file_mode(current_fault(), fd, mode))


def close(fd: int) -> None:
    """Close a descriptor, which is gone even when this raises."""
    check(lib.kvio_file_close(current_fault(), fd))


def move(dirfd: int, name: str, to: str, *, replace: bool) -> None:
    """Rename a file in its directory; without *replace* a name that is taken is refused."""
    check(lib.kvio_name_move(current_fault(), dirfd, fsencode(name), fsencode(to), replace), to)


def exchange(dirfd: int, name: str, other: str) -> None:
    """Let two names of a directory exchange their files in one step."""
    check(lib.kvio_name_exchange(current_fault(), dirfd, fsencode(name), fsencode(other)), name)


def remove(dirfd: int, name: str) -> None:
    """Remove a name."""
    check(lib.kvio_name_remove(current_fault(), dirfd, fsencode(name)), name)


def flush(fd: int) -> None:
    """Have the file system say what it would say at the last close, as NFS does of a full server.

    Raises:
        OSError: bytes that were taken did not arrive.
    """
    os.close(os.dup(fd))


def sync_dir(dirfd: int, *, journaled: bool = True) -> None:
    """Wait until the names of a directory are on stable storage."""
    if not journaled:
        touch(dirfd)
    with _syncing():
        check(lib.kvio_dir_sync(current_fault(), dirfd))


@contextmanager
def _syncing() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SyncFailedError(exc.errno, exc.strerror) from None


class Words:
    """A mapped file's memory for the C core, which counts cells and wakes waiters in it."""

    __slots__ = ("_base", "_memory")

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        view = from_buffer(memory, require_writable=True)
        self._base: Any = int(ffi.cast("uintptr_t", view))
        release(view)  # see ops.py: it must not meet the garbage collector

    def cells(self, at: int) -> Any:
        """Return the address of cells that begin *at* bytes into the memory."""
        return ffi.cast("kvio_cell *", self._base + at)

    def word(self, at: int) -> Any:
        """Return the address of a word *at* bytes into the memory."""
        return ffi.cast("uint32_t *", self._base + at)

    def forget(self) -> None:
        """Use the memory no more: it is about to be unmapped."""
        self._base = self._memory = None

    def wait(self, at: int, value: int, timeout_s: float) -> None:
        """Sleep while the word there has *value*, *timeout_s* at most; may wake early."""
        lib.kvio_wait_word(self.word(at), value, int(timeout_s * 1e9))

    def bump(self, at: int) -> None:
        """Add one to the word there and wake who waits."""
        lib.kvio_bump_word(self.word(at))


def count_bytes(cell: Any, checksum: int, nbytes: int, behind: int) -> None:
    """Count bytes with this CRC32C as written to a cell, *behind* bytes before its end.

    Raises:
        OSError: the map cannot be written any more.
    """
    check(lib.kvio_shared_count(cell, checksum, nbytes, behind))


def read_parts(
    template: Template,
    fd: int,
    parts: Sequence[memoryview],
    offset: int,
    *,
    file_nbytes: int,
    checksum: bool,
    bounce: Memory | None = None,
) -> int | None:
    """Fill flat views from a file at *offset*, and return their CRC32C (0 without *checksum*).

    With a *bounce* buffer *fd* is one for direct I/O. None: the file ends before that.
    """
    views = [from_buffer(part, require_writable=True) for part in parts]
    room, room_bytes = (NULL, 0) if bounce is None else (bounce.cdata, bounce.nbytes)
    crc = new("uint32_t *")
    try:
        c_parts = new(_PARTS, list(zip(views, map(len, parts), strict=True)))
        status = lib.kvio_shared_read(
            template.call, current_fault(), room, room_bytes, fd, bounce is not None, c_parts,
            len(parts), sum(map(len, parts)), offset, file_nbytes, checksum, crc,
        )  # fmt: skip
    finally:
        for view in views:
            release(view)
    if raised:
        reraise()
    if status == lib.KVIO_CORRUPT:
        return None
    check(status)
    return int(crc[0])


def make_stripe(
    start: int, end: int, origin: int, cell_bytes: int, cells: Any, progress: Any
) -> Any:
    """Describe a stripe to the C core; see ``kvio_stripe``."""
    return new("kvio_stripe *", (start, end, origin, cell_bytes, cells, progress))


#: All of a file, where nothing is counted.
UNCOUNTED: Final[Any] = make_stripe(0, 1 << 63, 0, 1 << 62, NULL, NULL)


def write_part(
    template: Template,
    fd: int,
    part: memoryview,
    offset: int,
    stripe: Any,
    *,
    direct: bool,
    bounce: Memory | None = None,
) -> bool:
    """Write one flat view as `write_parts` does; False: direct I/O wants a *bounce* for it."""
    view = from_buffer(part)
    room, room_bytes = (NULL, 0) if bounce is None else (bounce.cdata, bounce.nbytes)
    try:
        status = lib.kvio_shared_write_one(
            template.call, current_fault(), room, room_bytes, fd, direct, view, len(part), offset,
            stripe,
        )  # fmt: skip
    finally:
        release(view)
    if raised:
        reraise()
    return status != lib.KVIO_WANTS_BOUNCE and check(status) == 0


def write_parts(
    template: Template,
    fd: int,
    parts: Sequence[memoryview],
    offset: int,
    nbytes: int,
    stripe: Any,
    *,
    direct: bool,
    bounce: Memory | None,
) -> None:
    """Write flat views to a file at *offset*, all of them, and count them in a stripe's cells."""
    call, op = ffi.new("kvio_call *", template.call[0]), new("kvio_op *")
    call.fault = current_fault()
    if bounce is not None:
        set_bounce(call, bounce)
    views = [from_buffer(part) for part in parts]
    try:
        c_parts = new(_PARTS, list(zip(views, map(len, parts), strict=True)))
        op.parts, op.nparts, op.nbytes, op.offset = c_parts, len(parts), nbytes, offset
        op.fd, op.mode_taken = fd, lib.KVIO_MODE_DIRECT if direct else lib.KVIO_MODE_BUFFERED
        status = lib.kvio_shared_write(call, op, stripe)
    finally:
        for view in views:
            release(view)
    if raised:
        reraise()
    check(status)
