"""The state that the writers of a shared file share in memory until it is sealed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from kvio._native import files
from kvio._native.files import Words
from kvio.errors import StorageError, storage_error
from kvio.filesystem.descriptors import retrying
from kvio.sharedfile import plan as plans
from kvio.sharedfile.layout import Missing, Stripe
from kvio.sharedfile.plan import INODE_AT, PROGRESS_AT, REREAD_AT, STATE_AT, WRITER_BYTES, Plan

#: From linux/btrfs.h: struct btrfs_ioctl_fs_info_args, of which the identity is wanted.
_BTRFS_IOC_FS_INFO: Final = 0x8400941F
_FS_INFO: Final = struct.Struct("=QQ16s992x")
_SYSFS: Final = Path("/sys/fs/btrfs")


def limited(fd: int) -> bool:
    """Return whether a file is on a btrfs with a limited quota group.

    btrfs copies a page anew after every writeback and asks the quota for the room; where there is
    none, the process that stores into the page is killed. Since Linux 5.9 the kernel reports limits
    to every process.
    """
    try:
        info = fcntl.ioctl(fd, _BTRFS_IOC_FS_INFO, bytes(_FS_INFO.size))
    except OSError:  # another file system
        return False
    identity = str(uuid.UUID(bytes=_FS_INFO.unpack(info)[2]))
    found = False
    with suppress(OSError, ValueError):
        for flags in (_SYSFS / identity / "qgroups").glob("*/limit_flags"):
            found = found or int(flags.read_text(), 0) != 0
    return found


# --------------------------------------------------------------------------------------------------
# The map of a shared file: the state that its writers share in memory until it is sealed.
#
# It is a file beside the shared file that all writers map. Locks on its bytes show which writers
# are alive: the handle of a rank locks the byte of the rank, and the handle that seals locks the
# last one. The kernel releases them when a process ends in any way.


_U32 = struct.Struct("=I")
_INODE = struct.Struct("=QQ")
_WRITER = struct.Struct("=IiII")
_LOCK: Final = struct.Struct("=hh4xqqi4x")
#: From linux/fs.h.
_FLAGS: Final = struct.Struct("=q")
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_NOCOW_FL: Final = 0x00800000
_BUSY: Final = (errno.EAGAIN, errno.EACCES)
#: A length for `lock`: the whole file.
ALL_BYTES: Final = 0


class State(IntEnum):
    """The state of a shared file."""

    PREPARING = 0
    OPEN = 1
    SEALING = 2
    SEALED = 3
    ABORTED = 4
    FAILED = 5


#: Why a file in another state than open cannot be written.
CANNOT_WRITE: Final = {
    State.PREPARING: "is not ready yet",
    State.SEALING: "is being sealed",
    State.SEALED: "is sealed",
    State.ABORTED: "was aborted",
    State.FAILED: "cannot be finished: I/O failed; abort it",
}


#: Of madvise(2); Linux 5.14.
_MADV_POPULATE_WRITE: Final = 23


class SharedState:
    """An open map; its words are shared with every process that has it open."""

    def __init__(self, fd: int, memory: mmap.mmap, plan: Plan) -> None:
        self.fd = fd  # for locks only
        self.plan = plan
        self._memory = memory
        self._view = memoryview(self._memory)
        self._words = Words(self._memory)
        layout = plan.layout
        self._cells: Any = self._words.cells(plan.cells_at)
        self._rows = self._view[plan.cells_at : plan.cells_at + 8 * layout.cells].cast("I")
        self._head = self._view[STATE_AT : STATE_AT + 16].cast("I")

    @property
    def is_open(self) -> bool:
        """True if the file may be written."""
        return self._head[0] == State.OPEN

    @property
    def state(self) -> State:
        """The state of the file."""
        return State(min(self._word(STATE_AT), State.FAILED))

    @state.setter
    def state(self, state: State) -> None:
        self._reach(STATE_AT)
        _U32.pack_into(self._view, STATE_AT, state)
        self.notify()

    def note(self, state: State) -> None:
        """Set the state if the map can still be written; removing the file works without it."""
        with suppress(StorageError):
            self.state = state

    @property
    def must_reread(self) -> bool:
        """True if a seal must read all bytes again, because an error may have been missed."""
        return bool(self._word(REREAD_AT))

    def require_reread(self) -> None:
        """Set `must_reread`."""
        self._reach(REREAD_AT)
        _U32.pack_into(self._view, REREAD_AT, 1)

    def sync(self, fd: int, *, journaled: bool = True) -> None:
        """Sync the data file as its plan says; *journaled* as in `files.sync`.

        If the handler of a signal raises an exception, the result of the sync is unknown, and the
        kernel reports an error only once: so a seal must read all bytes again.
        """
        try:
            if self.plan.durable:
                files.sync(fd, journaled=journaled)
            else:
                retrying(lambda: files.flush(fd))
        except OSError:
            raise
        except BaseException:
            self.require_reread()
            raise

    def belong_to(self, boot_id: bytes) -> None:
        """Set its boot; no cell may be counted as written."""
        self.plan = replace(self.plan, boot_id=boot_id)
        head, _ = plans.pack(self.plan)
        self._reach(0, len(head))
        self._view[: len(head)] = head

    @property
    def inode(self) -> tuple[int, int]:
        """The device and inode of the data file."""
        device, number = _INODE.unpack_from(self._view, INODE_AT)
        return device, number

    @inode.setter
    def inode(self, inode: tuple[int, int]) -> None:
        self._reach(INODE_AT)
        _INODE.pack_into(self._view, INODE_AT, *inode)

    def _reach(self, at: int, nbytes: int = 1) -> None:
        """Fault pages in before they are changed.

        The first store into a page after its writeback calls the file system, and one that has
        shut down, or has no space for a copy, would kill the process with SIGBUS.

        Raises:
            StorageError: the store would do so.
        """
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE, start, at + nbytes - start)
        except OSError as exc:
            if exc.errno == errno.EFAULT:  # EINVAL: a kernel before 5.14
                raise storage_error(errno.EIO, "note progress in the map of a shared file") from exc

    def _word(self, at: int) -> int:
        return int(_U32.unpack_from(self._view, at)[0])

    # Progress.

    def notify(self) -> None:
        """Wake the processes in `wait`."""
        self._reach(PROGRESS_AT)
        self._words.bump(PROGRESS_AT)

    def progress(self) -> int:
        """Return a number that changes with every call of `notify`."""
        return self._word(PROGRESS_AT)

    def wait(self, progress: int, timeout_s: float) -> None:
        """Sleep until `progress` differs from *progress*, for at most *timeout_s* seconds."""
        self._words.wait(PROGRESS_AT, progress, timeout_s)

    # Cells.

    def cell_address(self, number: int) -> Any:
        """Return the address of a cell, for the C core."""
        return self._cells + number

    def c_stripe(self, stripe: Stripe) -> Any:
        """Return a stripe as the C core describes it."""
        return files.make_stripe(
            stripe.start, stripe.end, stripe.origin, self.plan.layout.cell_bytes,
            self._cells + stripe.first_cell, self._words.word(PROGRESS_AT),
        )  # fmt: skip

    def checksum(self, number: int) -> int:
        """Return the checksum of a complete cell."""
        return self._rows[2 * number]

    def written(self, number: int) -> int:
        """Return the number of bytes of a cell that have been written."""
        return self._rows[2 * number + 1]

    def clear(self, number: int) -> None:
        """Mark a cell as not written."""
        self._reach(self.plan.cells_at + 8 * number, 8)
        self._rows[2 * number] = self._rows[2 * number + 1] = 0

    def missing(self, rank: int | None = None) -> Iterator[Missing]:
        """Yield the incomplete cells of a rank or of all, in file order."""
        for owner, number, start, end in self.plan.layout.all_cells(rank):
            if self.written(number) != end - start:
                yield Missing(owner, start, end - start)

    def block(self, index: int) -> memoryview:
        """Return the memory of a file block that several writers share, by its index."""
        align = self.plan.layout.align
        at = self.plan.blocks_at + index * align
        self._reach(at, align)
        return self._view[at : at + align]

    # Writers.

    def fail(self, rank: int, number: int) -> None:
        """Record that a writer's I/O failed: the file can only be aborted."""
        at = plans.WRITERS_AT + WRITER_BYTES * rank
        self._reach(at, WRITER_BYTES)
        _WRITER.pack_into(self._view, at, 1, number, os.getpid(), 0)
        self.state = State.FAILED

    def failures(self) -> list[tuple[int, int]]:
        """Return the ranks whose I/O failed, with the errno of each."""
        found = []
        for rank in range(self.plan.layout.writers):
            failed, number, _, _ = _WRITER.unpack_from(
                self._view, plans.WRITERS_AT + WRITER_BYTES * rank
            )
            if failed:
                found.append((rank, number))
        return found

    # Locks.

    def lock(self, byte: int) -> bool:
        """Lock a byte; False: another handle has locked it."""
        return lock(self.fd, byte)

    def unlock(self, byte: int) -> None:
        """Unlock a byte."""
        asked = _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
        with _locking():
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, asked)

    def is_locked(self, byte: int) -> bool:
        """Return whether another handle has locked a byte."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        with _locking():
            answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def lock_to_seal(self) -> bool:
        """Lock the byte of the handle that seals; False: another handle has it."""
        return self.lock(self.plan.layout.writers)

    def close(self) -> None:
        """Release all locks and unmap it; no thread may be using it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._words.forget()
        self._rows.release()
        self._head.release()
        self._view.release()
        with suppress(BufferError):  # in a forked child: a thread of the parent used a block
            self._memory.close()


def open_map(fd: int, plan: Plan, *, locks: int) -> SharedState:
    """Map the file of *fd*; the map owns *locks*, another descriptor of the same file.

    Raises:
        PlanError: they are two files: the name was reused meanwhile.
    """
    if not os.path.samestat(os.fstat(fd), os.fstat(locks)):
        raise plans.PlanError("it was replaced")
    return SharedState(locks, mmap.mmap(fd, plan.map_nbytes, mmap.MAP_SHARED), plan)


def lock(fd: int, byte: int, nbytes: int = 1) -> bool:
    """Lock bytes of a file for this descriptor; False: another one has locked them."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, nbytes, 0)
    with _locking():
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
        except OSError as exc:
            if exc.errno in _BUSY:
                return False
            raise
    return True


@contextmanager
def _locking() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, "lock the map of a shared file") from exc


def write_map(fd: int, plan: Plan) -> bool:
    """Fill a new file with an empty map; return whether it has flags of btrfs.

    The log of btrfs loses them when the file is renamed.
    """
    head, sizes = plans.pack(plan)
    flagged = _write_in_place(fd)
    os.posix_fallocate(fd, 0, plan.map_nbytes)
    os.pwrite(fd, sizes, plan.sizes_at)
    os.pwrite(fd, head, 0)
    return flagged


def _write_in_place(fd: int) -> bool:
    """Turn off copy-on-write on btrfs: on a full disk a store to a page would be a SIGBUS."""
    try:
        flags = _FLAGS.unpack(fcntl.ioctl(fd, _FS_IOC_GETFLAGS, _FLAGS.pack(0)))[0]
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, _FLAGS.pack(flags | _FS_NOCOW_FL))
    except OSError:  # other file systems write in place, or have no such flags
        return False
    return True


def read_plan(fd: int) -> Plan:
    """Read the plan at the beginning of a map.

    Raises:
        PlanError: it is not a plan.
    """
    info = os.fstat(fd)
    head = os.pread(fd, plans.WRITERS_AT, 0)
    if len(head) < plans.WRITERS_AT:
        raise plans.PlanError("shorter than a map's head")
    rest = plans.room_of(head)
    return plans.unpack(head + os.pread(fd, rest, plans.WRITERS_AT), info.st_size)
