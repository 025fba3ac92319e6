"""Write the domain of a rank, from any thread."""

from __future__ import annotations

import errno
import operator
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from kvio import _native
from kvio._native import Memory, Template, files
from kvio.abc import RunAll
from kvio.core import threads
from kvio.core.buffers import BouncePool, Data, aligned, as_parts, total_bytes
from kvio.core.executor import Executor, Job
from kvio.errors import (
    BlockExistsError,
    BlockSizeError,
    KvioError,
    StorageError,
    StoreClosedError,
    storage_error,
)
from kvio.sharedfile.layout import Piece, Stripe, Way, cut, slice_parts
from kvio.sharedfile.state import CANNOT_WRITE, SharedState
from kvio.types import MiB


class Coverage:
    """Disjoint half-open ranges, merged where they touch; not thread-safe."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> tuple[int, int] | None:
        """Add a non-empty range; or return the range it overlaps, and add nothing."""
        i = bisect_right(self._starts, start)
        if i and self._ends[i - 1] > start:
            return self._starts[i - 1], self._ends[i - 1]
        if i < len(self._starts) and self._starts[i] < end:
            return self._starts[i], self._ends[i]
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        return None


# --------------------------------------------------------------------------------------------------
# The threads of a handle, with a bound on queued bytes.


_QUEUED_BYTES: Final = 256 * MiB


class Submitter:
    """Threads of one handle, started when first needed."""

    def __init__(self, threads: int, on_start: Callable[[int], None] | None, path: str) -> None:
        self._threads = threads
        self._path = path
        self._on_start = on_start
        self._lock = threading.Lock()
        self._executor: Executor | None = None

    def submit(self, writer: Writer, data: Data, offset: int) -> Future[int]:
        """Queue a write; waits while more than 256 MiB are queued."""
        nbytes = total_bytes(as_parts(data))
        job = Job(lambda: writer.pwrite(data, offset), nbytes=nbytes, read=False)
        self._started().submit(job)
        return job.future

    def run_all(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks on these threads and the caller's; see `Executor.run_all`."""
        return self._started().run_all(tasks)

    def _started(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._executor = Executor(
                    threads=self._threads,
                    max_queued_bytes=_QUEUED_BYTES,
                    on_start=self._on_start,
                    name=f"shared file {self._path!r}",
                )
            return self._executor

    def drain(self) -> None:
        """Wait until no write is queued or running."""
        if self._executor is not None:
            self._executor.drain()

    def cancel(self) -> None:
        """Cancel queued writes and wait for running ones."""
        if self._executor is not None:
            self._executor.close(timeout=0.0)

    def close(self) -> None:
        """Finish queued writes and end the threads."""
        if self._executor is not None:
            self._executor.close()


#: The C core keeps the end of a bounce buffer for a trailer and its padding.
_BEYOND_CHUNK = 2 * _native.lib.KVIO_MAX_ALIGN
#: From this length on, two threads write and sum sooner than one.
_OVERLAP_BYTES: Final = 2 * MiB
#: Direct writes of this length run concurrently, so that the disk always has work.
_SIDE_BY_SIDE_BYTES: Final = 4 * MiB
#: After at most so many bytes they are counted as written; after a crash the rest of a cell is
#: written again.
_COUNTED_BYTES: Final = 32 * MiB


class _Near(NamedTuple):
    """The stripe of a write, and the part of it where no block has another writer."""

    stripe: Stripe
    c_stripe: Any
    first: int
    last: int


@dataclass(slots=True)
class _Block:
    """A file block of which a part has been written."""

    memory: memoryview
    filled: int = 0


class Writer:
    """The writes of one handle to the data file *fd*.

    Every byte of its ranks is written through it, once. *rank* None: it writes for every rank
    without another handle.
    """

    def __init__(
        self,
        shared: SharedState,
        fd: int,
        path: str,
        *,
        rank: int | None,
        chunk_bytes: int,
        bounces: int,
        run_all: RunAll,
    ) -> None:
        plan = shared.plan
        writers = 1 if rank is None else plan.layout.writers
        self._overlaps = plan.checksum and len(os.sched_getaffinity(0)) >= 2 * writers
        self._run_all = run_all
        self._shared, self._fd, self._path, self._rank = shared, fd, path, rank
        self._layout, self._direct = plan.layout, plan.direct
        self._misaligned = plan.layout.align - 1 if plan.direct else 0  # low bits of an offset
        make_template = partial(
            _native.make_template,
            memory_align=plan.memory_align,
            offset_align=plan.layout.align,
            chunk_bytes=chunk_bytes,
        )
        self._template = make_template(checksum=plan.checksum)
        self._unsummed = make_template(checksum=False)
        self._near: _Near | None = None
        self._pool = BouncePool(chunk_bytes + _BEYOND_CHUNK, limit=bounces)
        self._lock = threading.RLock()
        self._coverage = Coverage()
        self._blocks: dict[int, _Block] = {}
        self._ranks: set[int] = set()
        self._busy: set[object] = set()
        self._idle = threads.Condition(self._lock)
        self._closed = self._finished = False

    def claim(self, rank: int) -> None:
        """Make this the handle of a rank; cells written in part must be written again.

        Raises:
            BlockExistsError: another handle, in this process or another, writes for it.
        """
        with self._lock:
            self._claim(rank)

    def pwrite(self, data: Data, offset: int) -> int:
        """Write all of *data*; see `SharedFile.pwrite`."""
        parts, offset = as_parts(data), operator.index(offset)
        nbytes = total_bytes(parts)
        end = offset + nbytes
        self._check_range(offset, nbytes)
        if not nbytes:
            return 0
        call = object()
        try:
            with self._lock:
                near = self._enter(offset, end, call)
            if (
                near is not None
                and near.first <= offset
                and end <= near.last
                and (not (offset | end) & self._misaligned and len(parts) == 1)
            ):
                self._put_one(parts[0], offset, near)
            else:
                self._write(parts, offset, end)
        except KvioError:
            raise
        except BaseException:  # it is not known which bytes were written
            self._note_failure(self._layout.stripe_at(offset).rank, errno.ECANCELED)
            raise
        finally:
            with self._lock:
                self._busy.discard(call)
                self._idle.notify_all()
        return nbytes

    def stop(self) -> None:
        """Refuse further calls and wait for those in progress."""
        with self._lock:
            self._closed = True
            threads.wait_for(self._idle, lambda: not self._busy, None)

    def finish(self) -> None:
        """Stop, sync, and release the ranks for other handles.

        Raises:
            StorageError: not all bytes could be written; the file cannot be sealed.
        """
        self.stop()
        if self._finished:
            return
        self._finished = True
        try:
            if self._ranks:
                with self._failing(min(self._ranks), "sync"):
                    self._shared.sync(self._fd)
        except KvioError:
            raise
        except BaseException:  # the handler of a signal raised it: this may be called again
            self._finished = False
            raise
        for rank in self._ranks:
            self._shared.unlock(rank)
        self._shared.notify()

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self._layout.size:
            raise BlockSizeError(
                f"{nbytes} bytes at offset {offset} do not fit {self._path!r} of "
                f"{self._layout.size} bytes",
                key=self._path,
            )

    def _enter(self, start: int, end: int, call: object) -> _Near | None:
        """Check and register a write; return the stripe that contains it, if one does."""
        if self._closed:
            raise StoreClosedError(f"this handle of {self._path!r} is closed")
        if not self._shared.is_open:
            raise StoreClosedError(f"{self._path!r} {CANNOT_WRITE[self._shared.state]}")
        near = self._near
        if near is None or start < near.stripe.start or end > near.stripe.end:
            self._check_domain(start, end)
            near = self._find_near(start, end)
        overlap = self._coverage.add(start, end)
        if overlap:
            raise BlockSizeError(
                f"bytes {start} to {end} of {self._path!r} overlap bytes {overlap[0]} to "
                f"{overlap[1]}, which were written before",
                key=self._path,
            )
        self._busy.add(call)
        return near

    def _find_near(self, start: int, end: int) -> _Near | None:
        stripe, align = self._layout.stripe_at(start), self._layout.align
        if end > stripe.end:
            return None
        last = stripe.end if stripe.end == self._layout.size else stripe.end // align * align
        first = -(-stripe.start // align) * align
        self._near = _Near(stripe, self._shared.c_stripe(stripe), first, last)
        return self._near

    def _check_domain(self, start: int, end: int) -> None:
        while start < end:
            stripe = self._layout.stripe_at(start)
            if self._rank is not None and stripe.rank != self._rank:
                raise BlockSizeError(
                    f"byte {start} of {self._path!r} lies in the domain of rank {stripe.rank}, "
                    f"not in that of rank {self._rank}",
                    key=self._path,
                )
            if stripe.rank not in self._ranks:
                self._claim(stripe.rank)
            start = stripe.end

    def _claim(self, rank: int) -> None:
        if rank in self._ranks:
            return
        if not self._shared.lock(rank):
            raise BlockExistsError(
                f"another handle writes rank {rank} of {self._path!r}", key=self._path
            )
        self._ranks.add(rank)
        for stripe in self._layout.stripes_of(rank):
            for number, start, end in self._layout.cells_of(stripe):
                if self._shared.written(number) == end - start:
                    self._coverage.add(start, end)
                else:
                    self._shared.clear(number)

    def _write(self, parts: Sequence[memoryview], start: int, end: int) -> None:
        for piece in cut(self._layout, start, end, direct=self._direct):
            own = parts
            if piece.start != start or piece.end != end:
                own = slice_parts(parts, piece.start - start, piece.end - start)
            with self._failing(piece.stripe.rank, "write"):
                self._put(piece, own)
        self._shared.notify()

    def _put_one(self, part: memoryview, offset: int, near: _Near) -> None:
        """Write one piece of memory inside one stripe: the fast path."""
        try:
            if self._overlaps and len(part) >= _OVERLAP_BYTES and len(self._busy) == 1:
                for at in range(0, len(part), _COUNTED_BYTES):
                    piece = part[at : at + _COUNTED_BYTES]
                    self._put_side_by_side(piece, offset + at)
            else:
                self._put_whole(self._template, part, offset, near.c_stripe)
        except OSError as exc:
            raise self._failure(exc, near.stripe.rank, "write") from exc

    def _put_side_by_side(self, part: memoryview, offset: int) -> None:
        """Write while another thread computes the checksums; then count the bytes."""
        shares: list[tuple[int, int, int, int]] = []

        def sum_up() -> None:
            stop = offset + len(part)
            for cell, start, end in self._layout.cells_between(offset, stop):
                first, last = max(start, offset), min(end, stop)
                checksum = _native.crc32c(part[first - offset : last - offset])
                shares.append((cell, checksum, last - first, end - last))

        def write(at: int, end: int) -> None:
            self._put_whole(self._unsummed, part[at:end], offset + at, files.UNCOUNTED)

        step = _SIDE_BY_SIDE_BYTES if self._direct else len(part)
        ends = [*range(step, len(part) - step // 2, step), len(part)]
        writes = [partial(write, at, end) for at, end in zip([0, *ends], ends, strict=False)]
        self._run_all([*writes[:1], sum_up, *writes[1:]])
        for cell, checksum, nbytes, behind in shares:
            files.count_bytes(self._shared.cell_address(cell), checksum, nbytes, behind)
        self._shared.notify()

    def _put_whole(self, template: Template, part: memoryview, offset: int, stripe: Any) -> None:
        asked = template, self._fd, part, offset, stripe
        if files.write_part(*asked, direct=self._direct):
            return
        with self._bounce() as bounce:
            files.write_part(*asked, direct=True, bounce=bounce)

    def _put(self, piece: Piece, parts: Sequence[memoryview]) -> None:
        if piece.way is Way.STRAIGHT:
            stripe = self._shared.c_stripe(piece.stripe)
            self._transfer(parts, piece.start, piece.end - piece.start, stripe)
        elif piece.way is Way.MERGED:
            self._merge(piece, parts)
        else:
            self._share(piece, parts)

    def _transfer(self, parts: Sequence[memoryview], offset: int, nbytes: int, stripe: Any) -> None:
        with self._bounce() if self._direct else nullcontext() as bounce:
            files.write_parts(
                self._template, self._fd, parts, offset, nbytes, stripe, direct=self._direct,
                bounce=bounce,
            )  # fmt: skip

    @contextmanager
    def _bounce(self) -> Iterator[Memory]:
        bounce = self._pool.take()
        try:
            yield bounce
        finally:
            self._pool.give(bounce)

    def _merge(self, piece: Piece, parts: Sequence[memoryview]) -> None:
        """Keep a part of a file block until the block is complete, then write it."""
        align = self._layout.align
        number, at = divmod(piece.start, align)
        whole = min((number + 1) * align, self._layout.size) - number * align
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _Block(_zeros(align))
            _gather(block.memory[at : at + piece.end - piece.start], parts)
            block.filled += piece.end - piece.start
            if block.filled < whole:
                return
            del self._blocks[number]
        self._transfer([block.memory], number * align, align, files.UNCOUNTED)
        self._count(piece.stripe, number * align, block.memory[:whole])

    def _share(self, piece: Piece, parts: Sequence[memoryview]) -> None:
        """Put bytes of a file block with several writers into the map."""
        align = self._layout.align
        number, at = divmod(piece.start, align)
        block = self._shared.block(self._layout.shared_blocks.index(number))
        room = block[at : at + piece.end - piece.start]
        _gather(room, parts)
        self._count(piece.stripe, piece.start, room)

    def _count(self, stripe: Stripe, start: int, data: memoryview) -> None:
        cell_bytes = self._layout.cell_bytes
        cell = self._cell(stripe, start)
        end = min(stripe.origin + (cell - stripe.first_cell + 1) * cell_bytes, stripe.end)
        nbytes = len(data)
        address = self._shared.cell_address(cell)
        files.count_bytes(address, _native.crc32c(data), nbytes, end - start - nbytes)

    def _cell(self, stripe: Stripe, offset: int) -> int:
        return stripe.first_cell + (offset - stripe.origin) // self._layout.cell_bytes

    @contextmanager
    def _failing(self, rank: int, doing: str) -> Iterator[None]:
        """Record a failure of the storage: the inode may have lost bytes and cannot be sealed."""
        try:
            yield
        except OSError as exc:
            raise self._failure(exc, rank, doing) from exc

    def _note_failure(self, rank: int, number: int) -> None:
        with suppress(StorageError):  # if that cannot be recorded, no seal is possible either
            self._shared.fail(rank, number)

    def _failure(self, exc: OSError, rank: int, doing: str) -> StorageError:
        number = exc.errno or errno.EIO
        self._note_failure(rank, number)
        if isinstance(exc, StorageError):
            return exc
        error = storage_error(number, f"{doing} of rank {rank} to {self._path!r}")
        error.key = self._path
        return error


def _zeros(nbytes: int) -> memoryview:
    memory = aligned(nbytes, max(nbytes, 4096))
    memory[:] = bytes(nbytes)
    return memory


def _gather(room: memoryview, parts: Sequence[memoryview]) -> None:
    at = 0
    for part in parts:
        room[at : at + len(part)] = part
        at += len(part)
