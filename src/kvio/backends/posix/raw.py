"""The file of a block as it is stored, for its quarantine."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from kvio.abc import RawBlock
from kvio.errors import BlockNotFoundError, UnsupportedError, storage_error

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

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._dirfd)


def _no_file(key: str) -> UnsupportedError:
    return UnsupportedError(f"block {key!r} is not a regular file: kvio rm removes it")
