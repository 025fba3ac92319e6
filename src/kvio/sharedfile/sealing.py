"""Seal a shared file: wait for all bytes, sync them, and publish the file."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.buffers import aligned, bounce_buffer
from kvio.descriptors import retrying
from kvio.errors import (
    BlockExistsError,
    CorruptBlockError,
    StorageTimeoutError,
    StoreClosedError,
    storage_error,
)
from kvio.medium import is_journaled
from kvio.sharedfile import index as indices
from kvio.sharedfile import sidecar
from kvio.sharedfile.index import Index
from kvio.sharedfile.map import CANNOT_WRITE, Map, State
from kvio.sharedfile.names import Names
from kvio.sharedfile.plan import Plan
from kvio.sharedfile.reading import read_fully
from kvio.sharedfile.steps import typed
from kvio.types import IOMode, Level, MiB, Receipt

#: How often a wait for other processes checks whether they failed.
_CHECK_EVERY_S: Final = 0.1
_NAMED_AT_MOST: Final = 8


def wait_until_whole(names: Names, map_: Map, timeout: float | None) -> None:
    """Wait until every byte has been written.

    Raises:
        StorageTimeoutError: bytes are missing; the message names the ranks.
        StorageError: a writer's I/O failed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        progress = map_.progress()
        _check_state(names, map_)
        if next(map_.missing(), None) is None:
            return
        left = _CHECK_EVERY_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise StorageTimeoutError(_what_is_missing(names, map_), key=names.path)
        map_.wait(progress, min(left, _CHECK_EVERY_S))


def _check_state(names: Names, map_: Map) -> None:
    for rank, number in map_.failures():
        error = storage_error(number, f"rank {rank} failed to write its part of {names.path!r}")
        error.key = names.path
        raise error
    state = map_.state
    if state not in (State.OPEN, State.SEALING):
        raise StoreClosedError(f"{names.path!r} {CANNOT_WRITE[state]}")


def _what_is_missing(names: Names, map_: Map) -> str:
    owed = []
    for rank, cells in groupby(sorted(map_.missing()), key=lambda cell: cell.rank):
        pieces = list(cells)
        nbytes = sum(piece.nbytes for piece in pieces)
        alive = "" if map_.is_locked(rank) else ", which no process writes"
        owed.append(f"rank {rank}{alive} (up to {nbytes} bytes from {pieces[0].offset})")
    shown = ", ".join(islice(owed, _NAMED_AT_MOST))
    more = f" and {len(owed) - _NAMED_AT_MOST} more" if len(owed) > _NAMED_AT_MOST else ""
    return f"{names.path!r} is not whole: missing are parts of {shown}{more}"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A file that was published: its receipt, its index, and a descriptor to read it."""

    receipt: Receipt
    index: Index
    fd: int


def seal(names: Names, map_: Map, fd: int, *, reason: str) -> Sealed:
    """Write what is left, sync, and publish; see `steps`. *fd* stays open.

    Raises:
        StorageError: the storage failed; the file has its name only if the sync of its directory
            failed.
        BlockExistsError: another file got the name meanwhile.
        CorruptBlockError: bytes written before a recovery do not read back.
    """
    plan, index = map_.plan, _index_of(map_)
    map_.state = State.SEALING
    journaled = not plan.durable or is_journaled(names.dirfd)
    with typed(names, "seal"):
        try:
            _complete(names, map_, fd, index, journaled=journaled)
        except OSError:  # an inode that may have lost bytes is not used again
            map_.note(State.FAILED)
            raise
        if plan.sidecar:
            _write_sidecar(names, map_, fd, index, journaled=journaled)
        to_read = retrying(lambda: files.open_file(names.dirfd, names.data, os.O_RDONLY))
        try:
            _check_state(names, map_)  # a writer that closed meanwhile may have seen an error
            _publish(names, map_, journaled=journaled)
        except BaseException:
            os.close(to_read)
            raise
    receipt = Receipt(
        key=names.path,
        nbytes=plan.layout.size,
        checksum=indices.whole_checksum(index),
        level=Level.DURABLE if plan.durable else Level.VISIBLE,
        mode=IOMode.DIRECT if plan.direct else IOMode.BUFFERED,
        reason=reason,
        existed=False,
    )
    return Sealed(receipt, index, to_read)


def _complete(names: Names, map_: Map, fd: int, index: Index, *, journaled: bool) -> None:
    _write_shared_blocks(map_, fd)
    _write_end(map_.plan, fd, index)
    files.set_mode(fd, map_.plan.file_mode)
    map_.sync(fd, journaled=journaled)
    if map_.must_reread:
        _read_again(names, map_.plan, fd, index)


def _write_sidecar(names: Names, map_: Map, fd: int, index: Index, *, journaled: bool) -> None:
    """Write the sidecar; if that fails, `seal` can be called again."""
    try:
        with typed(names, "write the sidecar of"):
            sidecar.write(names, map_.plan, fd, index, journaled=journaled)
    except BaseException:
        map_.note(State.OPEN)
        raise


def _publish(names: Names, map_: Map, *, journaled: bool) -> None:
    replaced = names.stat(names.final)
    try:
        _take_final_name(names, map_, journaled=journaled)
    except FileExistsError:
        map_.state = State.OPEN
        raise BlockExistsError(f"{names.path!r} exists", key=names.path) from None
    map_.state = State.SEALED
    if map_.plan.durable:
        files.sync_dir(names.dirfd, journaled=journaled)
    with suppress(OSError):  # the file is published; `recover` removes a leftover map
        if not journaled:
            names.remove(names.data)
        names.remove(names.map)
    if not journaled:  # before the map is closed, because then its blocks may be reused
        files.sync_dir(names.dirfd, journaled=False)
    if replaced is not None:  # else its sidecar is removed by the next creation of this path
        with suppress(OSError):
            names.remove(names.sidecar(replaced.st_ino))


def _take_final_name(names: Names, map_: Map, *, journaled: bool) -> None:
    """Rename the data to its final name.

    Without a journal an old file keeps a name, that of the data, until the directory is synced:
    else a power cut could lose the old file and the new one.
    """
    if not journaled and map_.plan.replace and names.exists(names.final):
        names.check_final()
        with suppress(FileNotFoundError):  # it was removed meanwhile
            try:
                files.exchange(names.dirfd, names.data, names.final)
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.ENOSYS):  # no RENAME_EXCHANGE here
                    raise
            else:
                return
    files.move(names.dirfd, names.data, names.final, replace=map_.plan.replace)


def _index_of(map_: Map) -> Index:
    plan = map_.plan
    sums = [map_.checksum(n) for n in range(plan.layout.cells)] if plan.checksum else None
    return Index(plan.file_id, plan.layout, sums)


def _write_shared_blocks(map_: Map, fd: int) -> None:
    align = map_.plan.layout.align
    for place, number in enumerate(map_.plan.layout.shared_blocks):
        _write(map_.plan, fd, map_.block(place), number * align)


def _write_end(plan: Plan, fd: int, index: Index) -> None:
    """Write the index, if any, and truncate the file to its size."""
    at, align = indices.starts_at(plan.layout), plan.layout.align
    if not plan.index:
        files.truncate(fd, plan.layout.size)
        return
    end = indices.pack(index)
    memory = aligned(-(-len(end) // align) * align)
    memory[: len(end)] = end
    memory[len(end) :] = bytes(len(memory) - len(end))
    _write(plan, fd, memory, at)
    files.truncate(fd, at + len(end))


def _write(plan: Plan, fd: int, memory: memoryview, offset: int) -> None:
    template = _native.make_template(memory_align=plan.memory_align, offset_align=plan.layout.align)
    bounce = bounce_buffer(MiB) if plan.direct else None
    files.write_parts(
        template, fd, [memory], offset, len(memory), files.UNCOUNTED, direct=plan.direct,
        bounce=bounce,
    )  # fmt: skip


def _read_again(names: Names, plan: Plan, fd: int, index: Index) -> None:
    """Read all bytes from the disk, because errors of their writeback may have been missed."""
    if index.checksums is None:
        raise CorruptBlockError(
            f"{names.path!r} has no checksums, so bytes written before its recovery, or before "
            "a signal interrupted its sync, cannot be checked; abort it",
            key=names.path,
        )
    _native.drop_cache(fd)
    room = aligned(plan.layout.cell_bytes + plan.layout.align)
    for rank, number, start, end in plan.layout.all_cells():
        first = start // plan.layout.align * plan.layout.align
        view = room[: -(-(end - first) // plan.layout.align) * plan.layout.align]
        read_fully(fd, [view], first)
        if _native.crc32c(view[start - first : end - first]) != index.checksums[number]:
            raise CorruptBlockError(
                f"bytes {start} to {end} of {names.path!r}, of rank {rank}, are not what was "
                "written; abort it",
                key=names.path,
            )
