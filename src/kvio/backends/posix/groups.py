"""Run a batch in groups whose directories are open at the same time, and retry stale operations.

With enough descriptors the group is the whole batch. With few, a group ends after some directories
that could not be kept open.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from kvio._native import NULL, lib
from kvio._native.ops import Ops
from kvio.backends.posix.layout import LEAVES, Directories, KeptDirectory, split_key
from kvio.descriptors import SHARED

_STALE: Final = -errno.ESTALE
_STALE_TRIES: Final = 8
#: A group opens at most so many directories that are closed at its end.
_TEMPORARY: Final = 8
#: How long, and at which interval, an operation that lacks a descriptor is retried: other calls
#: end meanwhile and close theirs.
_EXHAUSTED_S: Final = 1.0
_EXHAUSTED_WAIT_S: Final = 0.002


class Groups:
    """The operations of one call, each run by *function* of the C core.

    *hashed*: the directory of an operation comes from the hash of its key, else from the key.
    """

    def __init__(
        self,
        function: Any,
        call: Any,
        ops: Ops,
        keys: Sequence[str],
        directories: Directories,
        *,
        hashed: bool,
        create: bool,
    ) -> None:
        self._function = function
        self._call = call
        self._ops = ops
        self._keys = keys
        self._directories = directories
        self._hashed = hashed
        self._create = create
        self._is_lookup = function is lib.kvio_look_batch
        self._acquired: list[KeptDirectory] = []  # operations point into them

    def run(self) -> None:
        """Run all operations; a lookup ends with the first group that lacks a block."""
        ops, start = self._ops, 0
        while start < ops.count:
            stop, good = self._run_group(start, ops.count)
            if good < stop - start:
                if ops.sum_up(start, stop).exhausted:
                    self._retry_exhausted(start, stop)
                if self._is_lookup and ops.leading() < stop:
                    return
            start = stop

    def _run_group(self, start: int, most: int) -> tuple[int, int]:
        """Run a group from *start* on; return its end and how many operations succeeded at once."""
        ops, stop = self._ops, start
        temporary: dict[str, int] = {}
        try:
            while len(temporary) < _TEMPORARY:
                stop = ops.acquire(stop, most)
                if stop == most:
                    break
                found = self._open(stop, temporary)
                stop += 1
                if self._is_lookup and not found:
                    break
            good = ops.run(self._function, self._call, start, stop)
            if good < stop - start and ops.sum_up(start, stop).stale:
                self._retry_stale(start, stop, temporary)
        finally:
            ops.release(start, stop)
            for fd in temporary.values():
                os.close(fd)
        return stop, good

    def _open(self, index: int, temporary: dict[str, int]) -> bool:
        """Open the directory of an operation; False: that failed, and the operation will fail."""
        path = self._path(index)
        fd, kept = temporary.get(path, -1), None
        if fd < 0:
            try:
                fd, kept = self._directories.open(path, create=self._create)
            except OSError as exc:
                self._ops.set_directory(index, -(exc.errno or errno.EIO))
                return False
        if kept is None:
            temporary[path] = fd
            self._ops.set_directory(index, fd)
        else:
            self._acquired.append(kept)
            self._ops.set_directory(index, fd, kept.cdata)
        return True

    def _path(self, index: int) -> str:
        return LEAVES[self._ops.leaf(index)] if self._hashed else split_key(self._keys[index])[0]

    def _retry_stale(self, start: int, stop: int, temporary: dict[str, int]) -> None:
        """Retry operations whose directory was removed meanwhile, or whose file is stale.

        A file is stale only if another machine or a FUSE server replaced it, which may happen
        several times.
        """
        for index in range(start, stop):
            status = self._ops.ops[index].status
            for _ in range(_STALE_TRIES):
                if status != _STALE:
                    break
                self._reopen(index, temporary)
                status = self._ops.run_again(self._function, self._call, index)

    def _reopen(self, index: int, temporary: dict[str, int]) -> None:
        op, path = self._ops.ops[index], self._path(index)
        if op.dir == NULL:
            if path in temporary:
                os.close(temporary.pop(path))
            self._open(index, temporary)
            return
        try:
            op.dirfd = self._directories.refresh(path, create=self._create)
        except OSError as exc:
            op.dirfd = -(exc.errno or errno.EIO)

    def _retry_exhausted(self, start: int, stop: int) -> None:
        """Retry operations that lacked a descriptor one by one, while others are closed."""
        with SHARED.undisturbed():
            for index in range(start, stop):
                until = time.monotonic() + _EXHAUSTED_S
                wait_s = 0.0
                while self._ops.sum_up(index, index + 1).exhausted:
                    if time.monotonic() > until or self._call.cancel:
                        return
                    time.sleep(wait_s)
                    wait_s = _EXHAUSTED_WAIT_S
                    SHARED.give_back()
                    self._ops.begin_again(index)
                    self._run_group(index, index + 1)
