"""`SharedFile`, the handle of a shared file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from kvio.core import lifetime
from kvio.core.buffers import Data
from kvio.errors import ConfigError, StoreClosedError, UnsupportedError
from kvio.filesystem.descriptors import retrying
from kvio.sharedfile import lifecycle, opening, ranks
from kvio.sharedfile.index import Index
from kvio.sharedfile.layout import Extent, Layout, Missing
from kvio.sharedfile.opening import AnyPath, Opened, SharedFileStatus
from kvio.sharedfile.reading import Mode, Reader, open_checked
from kvio.sharedfile.state import CANNOT_WRITE, SharedState, State
from kvio.sharedfile.writing import Submitter, Writer
from kvio.types import MiB, Receipt, Verify

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

    from kvio.placement import Placement

_CHUNK_BYTES: Final = 4 * MiB


class SharedFile:
    """One file that several writers write at the same time, each its own *domain*.

    `create` makes the file and returns the handle that seals it; other threads use the same
    handle, other processes `open` their own, with their rank. The path does not exist until
    `seal`, which publishes the whole file; reads verify its checksums. All writers are on one
    machine, because they share a memory-mapped file.

    A handle is thread-safe. It cannot be used in a forked child, which must open its own. A
    context manager closes it at the end; if an exception ends the block, the handle that seals
    aborts the file.

    Attributes:
        path: as passed.
        rank: the rank that this handle writes for; None: any without another handle.
    """

    def __init__(self, opened: Opened) -> None:
        """Not for users: `create`, `open`, `recover` and `from_comm` make handles."""
        self.path, self.rank = opened.names.path, opened.rank
        self._names, self._shared, self._fd = opened.names, opened.map, opened.fd
        self._seals, self._reason, self._verify = opened.seals, opened.reason, opened.verify
        self._submitter = Submitter(opened.io_threads, opened.on_start, self.path)
        self._helpers = Submitter(opened.io_threads, opened.on_start, self.path)
        self._mode = opened.mode
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._closed = ""
        self._door, self._sight = threading.RLock(), threading.Lock()
        try:
            self._begin(opened)
        except BaseException:
            self._closed = "was not opened"
            self._leave_map()
            self._names.close()
            raise
        lifetime.watch_forks(self)

    def _begin(self, opened: Opened) -> None:
        if opened.map is None:
            self._open_reader()
            return
        self._writer = Writer(
            opened.map, opened.fd, self.path, rank=opened.rank, chunk_bytes=_CHUNK_BYTES,
            bounces=opened.io_threads, run_all=self._helpers.run_all,
        )  # fmt: skip
        if opened.rank is not None:
            self._writer.claim(opened.rank)

    @classmethod
    def create(
        cls, path: AnyPath, size: int, *, writers: int = 1, rank: int | None = None, **options: Any
    ) -> Self:
        """Make a file of *size* bytes for *writers* ranks, and return the handle that seals it.

        Args:
            path: the path of the sealed file; its directory must exist, unless *dir_mode* is
                passed.
            size: bytes of the payload.
            writers: number of ranks that write it.
            rank: the one that this handle writes for; None: any without another handle.
            options: fields of `SharedFileOptions`.

        Raises:
            ConfigError: an option is wrong, or the file system cannot be durable.
            BlockExistsError: the path exists, is being written, or was left unfinished.
            StorageFullError: there is not enough space for the file; nothing is left behind.
        """
        return cls(retrying(lambda: opening.create(path, size, writers, rank, options)))

    @classmethod
    def from_comm(
        cls, comm: Intracomm | ProcessGroup, path: AnyPath, size: int, **options: Any
    ) -> Self:
        """Make a file for the ranks of a communicator on one machine; a collective call.

        Rank 0 gets the handle that seals: ``seal(timeout=None)`` there waits for the bytes of the
        others, which close their handles when they have written. If one rank fails with any
        exception, every rank raises and nothing is left behind; a rank that is interrupted raises
        its `KeyboardInterrupt` when all ranks have made the call.

        Args:
            comm: a communicator of mpi4py, or a process group of torch.distributed that has a
                backend for the CPU, such as gloo.
            path: as for `create`.
            size: as for `create`.
            options: as for `create`.

        Raises:
            ConfigError: *comm* is neither of these.
            UnsupportedError: the ranks are not all on one machine, or the group has no backend for
                the CPU.
            KvioError: the error of `create` on rank 0, or of `open` on another; on every rank.
            RankFailedError: another rank raised an exception that is not a `KvioError`.
        """
        group = ranks.ranks_of(comm)
        return ranks.on_first(
            group,
            lambda: cls.create(path, size, writers=group.size, rank=0, **options),
            lambda: cls.open(path, group.rank),
            cls.close,
            cls.abort,
        )

    @classmethod
    def open(
        cls,
        path: AnyPath,
        rank: int | None = None,
        *,
        io_threads: int = 4,
        placement: Placement | None = None,
        verify: Verify = "full",
        mode: Mode = "hybrid",
    ) -> Self:
        """Open a file to write the domain of *rank*, or without a rank a sealed file to read.

        Cells that an earlier handle of the rank wrote in part must be written again; `missing`
        lists them.

        Args:
            path: as for `create`.
            rank: the rank to write for; None: read a sealed file.
            io_threads: threads of the handle for large reads and writes.
            placement: processors for these threads; None: the system decides.
            verify: for reading: "full": compare the checksum of every cell that is read;
                "length", "off": check only the index when the file is opened.
            mode: for reading: "buffered", "direct", or "hybrid": direct for whole cells that are
                not in the page cache, once each.

        Raises:
            BlockNotFoundError: there is no such file, or it is not sealed.
            BlockExistsError: another handle writes for the rank.
            ConfigError: there is no such rank.
            CorruptBlockError: it is damaged, or not a shared file, or made by another version.
            UnsupportedError: it was made on another machine, or before a restart.
            AccessDeniedError: it belongs to another user.
        """
        if rank is None:
            return retrying(lambda: cls(opening.sealed(path, verify, mode, io_threads, placement)))
        return retrying(lambda: cls(opening.join(path, rank, io_threads, placement)))

    @classmethod
    def recover(
        cls, path: AnyPath, *, io_threads: int = 4, placement: Placement | None = None
    ) -> Self:
        """Take over a file whose creator has ended, to continue it, seal it or `abort` it.

        Complete cells are kept, and `missing` lists the others; after a restart of the machine
        none is kept. Kept cells are read again from the disk when the file is sealed. A file that
        was sealed already is opened for reading.

        Raises:
            BlockNotFoundError: there is nothing to continue; leftovers have been removed.
            BlockExistsError: the process that seals it is alive.
            CorruptBlockError: it was damaged or made by another version.
        """
        return retrying(lambda: cls(opening.recover(path, io_threads, placement)))

    @classmethod
    def status(cls, path: AnyPath) -> SharedFileStatus:
        """Return the state of the file at a path, without opening it to write or recover.

        Raises:
            BlockNotFoundError: there is no shared file, neither sealed nor being written.
            CorruptBlockError: the file is damaged, or not a shared file.
            AccessDeniedError: another user is writing it.
        """
        return retrying(lambda: opening.status(path))

    def __del__(self) -> None:
        """Warn that it was not closed, and close it when its queued writes have ended."""
        if not getattr(self, "_closed", "not made") and lifetime.dropped is not None:
            lifetime.dropped(self, f"a handle of shared file {self.path!r}", self.close)

    @property
    def size(self) -> int:
        """The length of the payload in bytes."""
        return self._layout.size

    @property
    def writers(self) -> int:
        """The number of ranks."""
        return self._layout.writers

    @property
    def mode(self) -> Literal["buffered", "direct"] | None:
        """The I/O mode of writers; None: the file is sealed."""
        self._check_open()
        shared = self._shared
        plan = None if shared is None else shared.plan
        return None if plan is None else "direct" if plan.direct else "buffered"

    @property
    def align(self) -> int:
        """The file block in bytes: writes that begin and end on a multiple of it can be direct."""
        return self._layout.align

    def domain(self, rank: int | None = None) -> tuple[Extent, ...]:
        """Return the extents that a rank writes, in file order; None: the rank of this handle.

        Raises:
            ConfigError: there is no such rank.
        """
        rank = self.rank if rank is None else rank
        if rank is None:
            raise ConfigError("this handle has no rank: pass one")
        return self._layout.domain(rank)

    def cells(self, rank: int | None = None) -> list[Extent]:
        """Return the cells of a rank or of all: the pieces with a checksum each, in file order.

        Raises:
            ConfigError: there is no such rank.
        """
        return [Extent(start, end - start) for _, _, start, end in self._layout.all_cells(rank)]

    def pwrite(self, data: Data, offset: int) -> int:
        """Write all bytes of *data* at *offset* of the file, and return their number.

        It may be called from any thread, in any order, for any piece of a domain, but every byte
        is written once. When it returns, *data* may be reused; the bytes are safe only after
        `seal`.

        Args:
            data: a buffer, a CPU tensor, or a sequence of them.
            offset: offset of the first byte in the file.

        Raises:
            TypeError: *data* is not a buffer, or holds objects, pointers or numbers in the other
                byte order.
            BlockSizeError: it does not fit the file or the domain, or overlaps written bytes.
            BlockExistsError: another handle writes for that rank.
            StoreClosedError: the file is sealed, aborted, or a writer's I/O failed.
            StorageError: the storage failed: this file cannot be sealed any more.
        """
        return self._writing().pwrite(data, offset)

    def submit_pwrite(self, data: Data, offset: int) -> Future[int]:
        """Write in another thread; *data* must not change until the future is done.

        Waits while more than 256 MiB are queued. The future raises the errors of `pwrite`.
        """
        return self._submitter.submit(self._writing(), data, offset)

    def missing(self, rank: int | None = None) -> list[Missing]:
        """Return the incomplete cells of a rank or of all, in file order."""
        with self._sight:
            self._check_open()
            return [] if self._shared is None else list(self._shared.missing(rank))

    def seal(self, timeout: float | None = 0.0) -> Receipt:
        """Publish the whole file under its path; this handle reads it from then on.

        Args:
            timeout: seconds to wait for writers that have not written all their bytes; None: no
                limit.

        Returns:
            A receipt: length and checksum of the payload, and the level that was reached.

        Raises:
            UnsupportedError: this handle neither created nor recovered the file.
            StorageTimeoutError: bytes are missing; the message names ranks and bytes. Retry later.
            StoreClosedError: it is sealed or aborted.
            BlockExistsError: another file got the path meanwhile.
            CorruptBlockError: bytes written before a recovery do not read back.
            StorageError: the storage or a writer failed: there is no file; abort it. If only the
                sync of its directory failed, the file exists but a power cut may lose it: close
                this handle.
        """
        with self._door:
            shared = self._sealing(State.OPEN, State.SEALING, State.FAILED)
            self._submitter.drain()
            lifecycle.wait_until_whole(self._names, shared, timeout)
            self._finish_own()
            sealed = lifecycle.seal(self._names, shared, self._fd, reason=self._reason)
            self._read_from(sealed.fd, sealed.index)
            self._leave_map()
            return sealed.receipt

    def abort(self) -> None:
        """Remove the unfinished file and close; calls of other writers fail from now on.

        Raises:
            UnsupportedError: this handle neither created nor recovered the file.
            StoreClosedError: it is sealed or aborted.
        """
        states = State.OPEN, State.SEALING, State.FAILED, State.ABORTED
        with self._sight:
            self._sealing(*states).note(State.ABORTED)  # ends a seal that waits
        with self._door:
            shared = self._sealing(*states)
            self._stop_own()
            lifecycle.abort(self._names, shared)
            self.close()

    def pread_into(self, out: Data, offset: int = 0) -> int:
        """Fill *out* with the bytes of a sealed file from *offset* on; return their number.

        Cells of which a part is wanted are read whole to verify them, see *verify* of `open`.

        Raises:
            UnsupportedError: the file is not sealed.
            TypeError: *out* is not a buffer, or holds objects, pointers or numbers in the other
                byte order.
            BlockSizeError: the range does not fit the file.
            CorruptBlockError: the bytes are not those written.
        """
        self._check_open()
        if self._reader is None:
            raise UnsupportedError(f"{self.path!r} is not sealed: it cannot be read yet")
        return self._reader.pread_into(out, offset)

    def close(self) -> None:
        """Finish this handle's writes and close it; a file that is not sealed stays unfinished.

        Raises:
            StorageError: not all bytes could be written; the file cannot be sealed.
        """
        with self._door:
            if not self._closed:
                self._closed = "is closed"
                lifetime.forget_forks(self)
                self._close()

    def _close(self) -> None:
        try:
            if self._shared is not None and self._shared.state is State.OPEN:
                self._finish_own()
        except BaseException:
            self._submitter.cancel()
            raise
        finally:
            self._stop_own()
            self._leave_map()
            if self._reader is not None:
                self._reader.close()
            self._helpers.close()
            self._names.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._sight:
            unfinished = self._shared is not None and self._shared.state is not State.SEALED
        if kind is not None and self._seals and not self._closed and unfinished:
            try:
                self.abort()
            finally:  # also if nothing can be removed: this handle is not used any more
                self.close()
        else:
            self.close()

    def __repr__(self) -> str:
        with self._sight:
            state = "sealed" if self._shared is None else self._shared.state.name.lower()
        what = self._closed or state
        return f"<SharedFile {self.path!r} {what}>"

    @property
    def _layout(self) -> Layout:
        shared = self._shared
        if shared is not None:
            return shared.plan.layout
        if self._reader is None:
            raise StoreClosedError(f"this handle of {self.path!r} {self._closed}")
        return self._reader.index.layout

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"this handle of {self.path!r} {self._closed}")

    def _writing(self) -> Writer:
        self._check_open()
        if self._writer is None:
            raise StoreClosedError(f"{self.path!r} {CANNOT_WRITE[State.SEALED]}")
        return self._writer

    def _sealing(self, *states: State) -> SharedState:
        self._check_open()
        state = State.SEALED if self._shared is None else self._shared.state
        if self._shared is None or state not in states:
            raise StoreClosedError(f"{self.path!r} {CANNOT_WRITE[state]}")
        if not self._seals:
            raise UnsupportedError(
                f"only the handle that created or recovered {self.path!r} seals or aborts it"
            )
        return self._shared

    def _finish_own(self) -> None:
        self._submitter.close()
        if self._writer is not None:
            self._writer.finish()

    def _stop_own(self) -> None:
        self._submitter.close()
        if self._writer is not None:
            self._writer.stop()

    def _leave_map(self) -> None:
        if self._shared is not None:
            with self._sight:
                shared, self._shared, self._writer = self._shared, None, None
                shared.close()
            with suppress(OSError):  # `finish` and `seal` have checked, and an aborted file is gone
                os.close(self._fd)

    def _open_reader(self) -> None:
        with lifecycle.typed(self._names, "open"):
            fd, index = open_checked(self._names)
        self._read_from(fd, index)

    def _read_from(self, fd: int, index: Index) -> None:
        self._reader = Reader(
            fd, index, self.path, self._verify, run_all=self._helpers.run_all, mode=self._mode
        )

    def _after_fork(self) -> None:
        """Close all descriptors in a forked child."""
        self._closed = "belongs to the parent process: open it again"
        self._door, self._sight = threading.RLock(), threading.Lock()
        self._leave_map()
        self._names.close()
        if self._reader is not None:
            self._reader.abandon()
