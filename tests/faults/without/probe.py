"""Is what a world lacks lacking? Run there: ``python -m tests.faults.without.probe DIRECTORY …``.

Then come the refusals of `nosupport.c`, by name, and ``proc`` or ``uid=NUMBER``. What is there
nonetheless is printed, and the status is 1. A call that is not refused fails too, in another way:
its arguments make no sense.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_SYMLINK_FOLLOW: Final = 0x400
_NOREPLACE: Final = 1
_HIPRI: Final = 1
#: Of asm-generic/unistd.h and x86: (x86_64, aarch64).
_NUMBERS: Final = {
    "openat2": (437, 437),
    "io-uring": (425, 425),
    "statx": (332, 291),
    "copy-range": (326, 285),
    "cachestat": (451, 451),
    "fallocate": (285, 47),
    "sync-range": (277, 84),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
}


def _error_of(result: int) -> int:
    return ctypes.get_errno() if result < 0 else 0


def _call(name: str, *arguments: int) -> int:
    number = _NUMBERS[name][os.uname().machine == "aarch64"]
    return _error_of(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))


def _tmpfile(directory: Path) -> int:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError as exc:
        return exc.errno or 0
    return 0


def _link(directory: Path, old: bytes, flags: int) -> int:
    target = os.fsencode(directory / "linked")
    fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        name = old % fd if b"%d" in old else old
        return _error_of(_libc.linkat(fd, name, _AT_FDCWD, target, flags))
    finally:
        os.close(fd)
        for left in ("file", "linked"):
            Path(directory, left).unlink(missing_ok=True)


def _rename(directory: Path) -> int:
    path = directory / "renamed"
    path.touch()
    old, new = os.fsencode(path), os.fsencode(directory / "anew")
    error = _error_of(_libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NOREPLACE))
    for left in (path, directory / "anew"):
        left.unlink(missing_ok=True)
    return error


#: By refusal: what is tried, and the error of a kernel that lacks it.
TRIALS: Final[dict[str, tuple[Callable[[Path], int], int]]] = {
    "tmpfile": (_tmpfile, errno.EOPNOTSUPP),
    "empty-path": (lambda at: _link(at, b"", _AT_EMPTY_PATH), errno.ENOENT),
    "follow": (lambda at: _link(at, b"/proc/self/fd/%d", _AT_SYMLINK_FOLLOW), errno.ENOENT),
    "rename-flags": (_rename, errno.EINVAL),
    "openat2": (lambda _: _call("openat2", -1, 0, 0, 0), errno.ENOSYS),
    "io-uring": (lambda _: _call("io-uring", 0, 0), errno.ENOSYS),
    "rwf-flags": (lambda _: _call("preadv2", -1, 0, 0, 0, 0, _HIPRI), errno.EOPNOTSUPP),
    "vectors2": (lambda _: _call("pwritev2", -1, 0, 0, 0, 0, 0), errno.ENOSYS),
    "statx": (lambda _: _call("statx", -1, 0, 0, 0, 0), errno.ENOSYS),
    "copy-range": (lambda _: _call("copy-range", -1, 0, -1, 0, 1, 0), errno.EXDEV),
    "cachestat": (lambda _: _call("cachestat", -1, 0, 0, 0), errno.ENOSYS),
    "fallocate": (lambda _: _call("fallocate", -1, 0, 0, 1), errno.EOPNOTSUPP),
    "sync-range": (lambda _: _call("sync-range", -1, 0, 0, 0), errno.ENOSYS),
}


def there(directory: Path, lacking: list[str]) -> Iterator[str]:
    """Name what is there although it should be lacking."""
    for name in lacking:
        if name == "proc":
            found = os.path.exists("/proc/self")
        elif name.startswith("uid="):
            found = os.geteuid() != int(name.removeprefix("uid="))
        else:
            trial, error = TRIALS[name]
            found = trial(directory) != error
        if found:
            yield name


if __name__ == "__main__":
    nonetheless = list(there(Path(sys.argv[1]), sys.argv[2:]))
    print(" ".join(nonetheless))
    sys.exit(bool(nonetheless))
