"""The sidecar: a file beside a plain shared file that keeps its checksums; see docs/format.md.

Its name has the inode of the shared file; its head has the inode and a random id. So a crash can
leave a sidecar without a file, but no other file is taken for the one it belongs to: a copy has
another inode, and a later file with that inode has another id, or another time of change.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.core.buffers import check_memory
from kvio.sharedfile import index as indices
from kvio.sharedfile.index import Index, SealError
from kvio.sharedfile.names import Names
from kvio.sharedfile.plan import Plan

MAGIC: Final = b"KVIOSUM\n"
VERSION: Final = 1
#: The file has the id in an extended attribute; without it, the time of its last change is
#: compared.
FLAG_TAGGED: Final = 1
_HEAD = struct.Struct("<8sHH4xQq16s12x")
_CRC = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size  # 64
_ATTRIBUTE: Final = "user.kvio.id"


def tag(fd: int, file_id: bytes) -> None:
    """Write the id of a shared file into its extended attribute, where there are any."""
    with suppress(OSError):
        os.setxattr(fd, _ATTRIBUTE, file_id)


def _tag_of(fd: int) -> bytes | None:
    try:
        return os.getxattr(fd, _ATTRIBUTE)
    except OSError:  # it has none, or the file system has no attributes
        return None


def pack(index: Index, *, inode: int, mtime_ns: int, tagged: bool) -> bytes:
    """Encode a sidecar: its head, then an index and its trailer as in a sealed file."""
    flags = FLAG_TAGGED if tagged else 0
    head = _HEAD.pack(MAGIC, VERSION, flags, inode, mtime_ns, index.file_id)
    return head + _CRC.pack(_native.crc32c(head)) + indices.pack(index)


def unpack(content: bytes) -> tuple[Index, int, int, bool]:
    """Decode a sidecar: the index, the inode and time of its file, and whether that has the id.

    Raises:
        SealError: it is not a sidecar, of another version, or damaged.
    """
    head = content[: _HEAD.size]
    if len(content) < HEAD_BYTES + indices.TRAILER_BYTES:
        raise SealError("its sidecar is shorter than a head and a trailer")
    magic, version, flags, inode, mtime_ns, file_id = _HEAD.unpack(head)
    if magic != MAGIC:
        raise SealError("its sidecar does not begin as one does")
    if version != VERSION or flags & ~FLAG_TAGGED:
        raise SealError(f"version {version} of its sidecar with flags {flags} is not known here")
    if _CRC.unpack_from(content, _HEAD.size)[0] != _native.crc32c(head):
        raise SealError("the checksum of its sidecar's head is wrong")
    end = content[HEAD_BYTES:]
    table, trailer = end[: -indices.TRAILER_BYTES], end[-indices.TRAILER_BYTES :]
    index = indices.unpack(table, trailer, len(end), apart=True)
    if index.file_id != file_id:
        raise SealError("its sidecar has parts of two")
    return index, inode, mtime_ns, bool(flags & FLAG_TAGGED)


def write(names: Names, plan: Plan, fd: int, index: Index, *, journaled: bool) -> None:
    """Write and sync the sidecar of the complete data file *fd*.

    Raises:
        OSError: it could not be written; the file it belongs to has no final name yet.
    """
    info = os.fstat(fd)
    content = pack(
        index,
        inode=info.st_ino,
        mtime_ns=info.st_mtime_ns,
        tagged=_tag_of(fd) == plan.file_id,
    )
    name = names.sidecar(info.st_ino)
    names.remove(name)  # of a removed file with this inode, or of an interrupted seal
    beside = files.create(names.dirfd, name)
    try:
        if os.fstat(beside).st_gid != info.st_gid:
            os.fchown(beside, -1, info.st_gid)
        files.set_mode(beside, plan.file_mode)
        template = _native.make_template(memory_align=1, offset_align=1)
        files.write_parts(
            template, beside, [memoryview(content)], 0, len(content), files.UNCOUNTED,
            direct=False, bounce=None,
        )  # fmt: skip
        if plan.durable:
            files.sync(beside, journaled=journaled)
    finally:
        files.close(beside)
    if plan.durable:
        files.sync_dir(names.dirfd, journaled=journaled)


def read(names: Names, fd: int) -> Index | None:
    """Return the checksums in a file's sidecar; None: it has none.

    Raises:
        SealError: it is damaged, or another file's.
        OSError: it cannot be read.
        MemoryError: there is no memory for it.
    """
    info = os.fstat(fd)
    flags = os.O_RDONLY | os.O_NONBLOCK  # a named pipe does not wait for a writer
    try:
        beside = files.open_file(names.dirfd, names.sidecar(info.st_ino), flags)
    except FileNotFoundError:
        return None
    try:
        index, inode, mtime_ns, tagged = unpack(_content(beside))
    finally:
        os.close(beside)
    found = _tag_of(fd) if tagged else None
    same = info.st_mtime_ns == mtime_ns if found is None else found == index.file_id
    if inode != info.st_ino or not same:
        raise SealError("its sidecar was written for another file")
    if info.st_size != index.layout.size:
        raise SealError(f"it has {info.st_size} bytes, not {index.layout.size}")
    return index


def _content(fd: int) -> bytes:
    """Read a sidecar, whose trailer has its length."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise SealError("its sidecar is not a regular file")
    at = max(0, info.st_size - indices.TRAILER_BYTES)
    trailer = os.pread(fd, indices.TRAILER_BYTES, at)
    check_memory(indices.table_nbytes(trailer, info.st_size - HEAD_BYTES, apart=True))
    return os.pread(fd, info.st_size, 0)


def sweep(names: Names, sidecars: list[str]) -> None:
    """Remove sidecars of removed files; the caller must have the map of the path."""
    existing = names.stat(names.final)
    for name in sidecars:
        if existing is None or name != names.sidecar(existing.st_ino):
            names.remove(name)
