"""Blocks as files: written piece by piece from a stream, moved, or read as they are stored."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, Final

from kvio import _native
from kvio._native import lib
from kvio._native.signals import reraise
from kvio.abc import RawBlock, Source, SourceFile
from kvio.backends.posix import outcome
from kvio.backends.posix.engine import LOOK, Engine, Request
from kvio.core.buffers import aligned
from kvio.errors import BlockNotFoundError, UnsupportedError, storage_error
from kvio.types import Blocks, Cancellation, IfExists, Receipt

_STALE = -errno.ESTALE


def write(
    engine: Engine,
    key: str,
    source: Source,
    nbytes: int | None,
    at_least: int,
    if_exists: IfExists,
    cancel: Cancellation | None = None,
) -> Receipt:
    """Write one block, or raise its error; see `kvio.abc.Backend.write_stream`."""
    concurrency = engine.counters.in_flight + 1
    mode, reason = engine.for_write(nbytes or at_least, concurrency)
    stream = _Stream(engine, key, source, nbytes)
    ops = engine.run(
        Request(
            function=lib.kvio_write_batch,
            steps=stream,
            blocks=Blocks((key,), ((),), (nbytes or 0,)),
            modes=(mode,),
            flags=engine.write_flags,
            op_flags=lib.KVIO_OP_STREAM,
            create=True,
            if_exists=if_exists,
            cancel=cancel,
        )
    )
    error = engine.root_error(ops, key)
    if error is not None:
        raise error
    (answer,) = ops.answers()
    if answer.status:
        raise outcome.error_of(answer, key, stream.nbytes, 0, engine.name)
    known = engine.for_write(stream.nbytes, concurrency)
    reason = known[1] if known[0] == mode else reason
    return outcome.receipt_of(
        answer, key, stream.nbytes, engine.level, reason, checksum=engine.checksum
    )


class _Stream:
    """Writes one block from a stream, piece by piece: the steps of a request.

    Attributes:
        nbytes: the length if it is known, else the number of bytes so far.
    """

    def __init__(self, engine: Engine, key: str, source: Source, nbytes: int | None) -> None:
        self._engine = engine
        self._key = key
        self._source = source
        self._length = nbytes
        self._buffer = aligned(engine.options.segment_bytes)
        self._begun = False
        self._status = 0
        self.nbytes = nbytes or 0

    def transfer(self, call: Any, op: Any) -> None:
        """Write and publish the block; it can be asked again only before the first byte."""
        if self._begun:  # a retry, but bytes of the source are gone
            removed = self._status == _STALE
            doing = "publish in a directory that was removed meanwhile" if removed else "publish"
            raise storage_error(-self._status, doing, key=self._key, backend=self._engine.name)
        op.fd = -1
        try:
            if lib.kvio_write_begin(call, op):
                return  # the existing block was kept, or the write failed
            self._begun = True
            op.status = -errno.ECANCELED  # until all of it is written
            op.status = self._write(call, op)
            if op.status == 0:
                lib.kvio_write_end(call, op)
            else:
                op.site = lib.KVIO_SITE_WRITE
        finally:
            self._status = int(op.status)
            lib.kvio_write_abort(call, op)  # drops a temporary that is still there

    def _write(self, call: Any, op: Any) -> int:
        """Write the bytes of the source and the trailer; return 0 or -errno."""
        part = _native.new("kvio_part[1]")
        view = _native.from_buffer(self._buffer)
        crc = _native.new("uint32_t *")
        op.parts, op.nparts, op.offset = part, 1, 0
        part[0].base = view
        try:
            while True:
                part[0].nbytes = got = self._next(op.offset)
                end = op.offset + got
                last = got < len(self._buffer) or end == self._length
                op.nbytes = end if last else end + 1  # one more, to say that others follow
                status: int = lib.kvio_write_range(call, op, op.offset, got, crc)
                reraise()
                if status or last:
                    break
                op.offset = end
        finally:
            _native.release(view)
        op.crc, op.offset, self.nbytes = crc[0], 0, op.nbytes
        return status

    def _next(self, start: int) -> int:
        """Fill the buffer from the source until it ends; return the number of bytes."""
        rest = len(self._buffer) if self._length is None else self._length - start
        room = self._buffer[:rest]
        got = 0
        while got < len(room):
            count = self._source(room[got:])
            if not count:
                break
            got += count
        return got


# --------------------------------------------------------------------------------------------------
# A file of the caller's that becomes a block.


#: What the file system cannot do, and nothing is published then: the store copies the bytes.
#: The last is a clone whose inode without a name cannot be linked.
_MUST_COPY: Final = (
    (-errno.EXDEV, lib.KVIO_SITE_RENAME),
    (-errno.EXDEV, lib.KVIO_SITE_LINK),
    (-errno.EXDEV, lib.KVIO_SITE_CLONE),
    (-errno.EOPNOTSUPP, lib.KVIO_SITE_CLONE),
    (-errno.EOPNOTSUPP, lib.KVIO_SITE_LINK),
)


def take(
    engine: Engine, key: str, source: SourceFile, if_exists: IfExists, cancel: Cancellation | None
) -> Receipt | None:
    """Make a file a block, or a clone of it; see `kvio.abc.Backend.write_file`."""
    if not (source.movable if source.move else engine.clones):
        return None
    steps = _Take(source)
    ops = engine.run(
        Request(
            function=lib.kvio_write_batch,
            steps=steps,
            blocks=Blocks((key,), ((),), (source.nbytes,)),
            modes=(LOOK,),
            flags=engine.write_flags,
            op_flags=lib.KVIO_OP_STREAM | (0 if source.move else lib.KVIO_OP_CLONE),
            create=True,
            if_exists=if_exists,
            cancel=cancel,
        )
    )
    error = engine.root_error(ops, key)
    if error is not None:
        raise error
    (answer,) = ops.answers()
    if (answer.status, answer.site) in _MUST_COPY:
        if answer.status == -errno.EOPNOTSUPP:
            engine.clones = False
        return None
    if answer.status == -errno.EAGAIN and answer.site == lib.KVIO_SITE_FCNTL:
        doing = f"move file {source.path!r}, which is open for writing elsewhere: close it first,"
        raise storage_error(errno.EAGAIN, doing, key=key, backend=engine.name)
    if answer.status:
        raise outcome.error_of(answer, key, source.nbytes, 0, engine.name)
    return outcome.receipt_of(
        answer,
        key,
        steps.nbytes,
        engine.level,
        _MOVED if source.move else _CLONED,
        checksum=engine.checksum,
    )


_MOVED: Final = "the file itself became the block"
_CLONED: Final = "a clone of the file, which shares its extents"


class _Take:
    """Makes one file a block: the steps of a request, which may be tried again."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self.nbytes = source.nbytes

    def transfer(self, call: Any, op: Any) -> None:
        source = self._source
        name = _native.new("char[]", os.fsencode(source.name))
        file = _native.new(
            "kvio_source *", (source.fd, source.dirfd, name, source.nbytes, source.move, 0)
        )
        lib.kvio_write_file(call, op, file)
        reraise()
        self.nbytes = int(op.nbytes)


# --------------------------------------------------------------------------------------------------
# The file of a block as it is stored, for its quarantine.


#: The file cannot be linked: the directory is on another file system, or on one without links, or
#: this user may not link the file (protected_hardlinks), or there is no /proc.
_NO_LINKS: Final = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS),
    errno.ENOENT,
)


class RawFile(RawBlock):
    """One open file, which stays the same if another gets its name."""

    placed = True

    def __init__(self, dirfd: int, name: str, key: str) -> None:
        """Open a regular file, never through a link.

        Raises:
            BlockNotFoundError: there is none.
            UnsupportedError: it is not a regular file.
        """
        self._key = key
        self._name = name
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(name, flags, dir_fd=dirfd)
        except FileNotFoundError:
            raise BlockNotFoundError(f"no block {key!r}", key=key) from None
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO):
                raise _no_file(key) from None
            raise storage_error(exc.errno or errno.EIO, "open the file", key=key) from exc
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise _no_file(key)
            self.nbytes = info.st_size
            self.inode, self.mtime_ns = info.st_ino, info.st_mtime_ns
            self._dirfd = os.dup(dirfd)
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, out: memoryview, offset: int) -> None:
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as exc:
                raise storage_error(exc.errno or errno.EIO, "read the file", key=self._key) from exc
            if not got:
                raise storage_error(errno.EIO, "read the file, which became shorter", key=self._key)
            done += got

    def is_current(self) -> bool:
        try:
            now = os.stat(self._name, dir_fd=self._dirfd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(now, os.fstat(self._fd))

    def link_to(self, dirfd: int, name: str) -> bool:
        info = os.fstat(self._fd)
        if os.geteuid() not in (0, info.st_uid):  # its permissions are for another user to set
            return False
        try:
            os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=dirfd, follow_symlinks=True)
        except OSError as exc:
            if exc.errno in _NO_LINKS:
                return False
            raise
        if stat.S_IMODE(info.st_mode) != 0o600:
            os.fchmod(self._fd, 0o600)
        return True

    def drop_cache(self) -> None:
        """Drop the file's pages from the page cache, dirty ones once they are written back."""
        try:
            if _native.dirty_bytes(self._fd, self.nbytes) != 0:  # None: the kernel does not say
                os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as exc:
            raise storage_error(exc.errno or errno.EIO, "drop the cache", key=self._key) from exc

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._dirfd)


def _no_file(key: str) -> UnsupportedError:
    return UnsupportedError(f"block {key!r} is not a regular file: kvio rm removes it")
