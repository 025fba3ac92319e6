"""The file beside a plain shared file that keeps its checksums; docs/format.md.

It has the inode of the file in its name and, with a random id, in its head. So a crash can leave a
sidecar of no file, and no file is taken for the one that a sidecar was written for: a copy has
another inode, and what gets that inode later has another id, or another time.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.buffers import check_memory
from kvio.sharedfile import index as indices
from kvio.sharedfile.index import Index, SealError
from kvio.sharedfile.names import Names
from kvio.sharedfile.plan import Plan

MAGIC: Final = b"KVIOSUM\n"
VERSION: Final = 1
#: The id stands in an attribute of the file too; where it does not, the time of its last change
#: tells it from others.
FLAG_TAGGED: Final = 1
_HEAD = struct.Struct("<8sHH4xQq16s12x")
_CRC = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size  # 64
_ATTRIBUTE: Final = "user.kvio.id"


def tag(fd: int, file_id: bytes) -> None:
    """Write the id of a shared file into an attribute of it, where the file system has any."""
    with suppress(OSError):
        os.setxattr(fd, _ATTRIBUTE, file_id)


def _tag_of(fd: int) -> bytes | None:
    try:
        return os.getxattr(fd, _ATTRIBUTE)
    except OSError:  # none, or a file system that has no attributes
        return None


def pack(index: Index, *, inode: int, mtime_ns: int, tagged: bool) -> bytes:
    """Encode a sidecar: whose it is, then an index and its trailer as in a sealed file."""
    flags = FLAG_TAGGED if tagged else 0
    head = _HEAD.pack(MAGIC, VERSION, flags, inode, mtime_ns, index.file_id)
    return head + _CRC.pack(_native.crc32c(head)) + indices.pack(index)


def unpack(content: bytes) -> tuple[Index, int, int, bool]:
    """Decode a sidecar: the index, the inode and time of its file, whether that has the id.

    Raises:
        SealError: it is none, of another version, or damaged.
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
    """Write and sync the sidecar of the data file *fd*, to which no byte is written any more.

    Raises:
        OSError: it could not be written; what is there of it belongs to no file with a name.
    """
    info = os.fstat(fd)
    content = pack(
        index,
        inode=info.st_ino,
        mtime_ns=info.st_mtime_ns,
        tagged=_tag_of(fd) == plan.file_id,
    )
    name = names.sidecar(info.st_ino)
    names.remove(name)  # of a file that is gone and had this inode, or of a seal cut short
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
    """Read the checksums that a file's sidecar keeps; None: it has none.

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
    """Read a sidecar, of which the end says how long it is."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise SealError("its sidecar is not a regular file")
    at = max(0, info.st_size - indices.TRAILER_BYTES)
    trailer = os.pread(fd, indices.TRAILER_BYTES, at)
    check_memory(indices.table_nbytes(trailer, info.st_size - HEAD_BYTES, apart=True))
    return os.pread(fd, info.st_size, 0)


def sweep(names: Names, sidecars: list[str]) -> None:
    """Remove sidecars of files that are gone; the caller must have the map of the path."""
    standing = names.stat(names.final)
    for name in sidecars:
        if standing is None or name != names.sidecar(standing.st_ino):
            names.remove(name)
