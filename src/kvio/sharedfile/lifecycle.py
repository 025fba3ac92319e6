"""From a new shared file to a sealed one; `recover` and `abort` work after each step."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Final

from kvio import _native
from kvio._native import files
from kvio.core.buffers import aligned, bounce_buffer
from kvio.errors import (
    AccessDeniedError,
    BlockExistsError,
    BlockNotFoundError,
    CorruptBlockError,
    KvioError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
    storage_error,
)
from kvio.filesystem.descriptors import retrying
from kvio.filesystem.probe import is_journaled
from kvio.sharedfile import index as indices
from kvio.sharedfile import sidecar, state
from kvio.sharedfile.index import Index
from kvio.sharedfile.names import Leftovers, Names
from kvio.sharedfile.plan import Plan, PlanError
from kvio.sharedfile.reading import read_fully
from kvio.sharedfile.state import (
    ALL_BYTES,
    CANNOT_WRITE,
    SharedState,
    State,
    lock,
    open_map,
    read_plan,
    write_map,
)
from kvio.types import IOMode, Level, MiB, Receipt

#: Probe files older than this are leftovers.
_PROBE_S: Final = 60.0
_STALE_TRIES: Final = 8


@contextmanager
def typed(names: Names, doing: str) -> Iterator[None]:
    """Turn an `OSError` into an error of kvio."""
    try:
        yield
    except KvioError:
        raise
    except OSError as exc:
        number = exc.errno or errno.EIO
        error = storage_error(number, f"{doing} {names.path!r}")
        error.key = names.path
        raise error from exc


def create(
    names: Names, plan: Plan, *, preallocate: bool, group: int | None = None
) -> tuple[SharedState, int, bool]:
    """Make the map and the data file; return the map, the data's descriptor, and if allocated.

    Raises:
        BlockExistsError: the file exists, is being written, or was left unfinished.
        UnsupportedError: the file system's quotas make mapped memory unsafe.
        AccessDeniedError: this user may not give files to the *group*.
        StorageFullError: there is not enough space for the file; nothing is left behind.
    """
    with typed(names, "create"):
        if not plan.replace and names.exists(names.final):
            raise BlockExistsError(f"{names.path!r} exists", key=names.path)
        names.check_final()
        if state.limited(names.dirfd):
            raise UnsupportedError(
                f"shared file {names.path!r} on a btrfs with limited quota groups: when a quota "
                "is used up, the kernel would kill writers; use a file system without them"
            )
        beside = indices.nbytes_of(plan.layout, checksum=True) * plan.sidecar
        _check_room(names, plan.map_nbytes + beside + preallocate * padded_nbytes(plan))
        leftovers = names.leftovers()
        sweep(names, leftovers)
        journaled = not plan.durable or is_journaled(names.dirfd)
        shared, flagged = _make_shared_state(names, plan, journaled=journaled)
        try:
            if plan.durable and flagged:  # btrfs has logged the new name without the flags: a power
                files.sync(shared.fd)  # cut would leave bytes without checksums, and EIO
            sidecar.sweep(names, leftovers.sidecars)
            fd, allocated = _make_data(names, shared, preallocate=preallocate, group=group)
        except BaseException:
            try:
                _drop(names, shared)
            finally:  # a file at the data's name that cannot be removed is not ours
                with suppress(OSError):
                    names.remove(names.map)
                shared.close()
            raise
        shared.state = State.OPEN
    return shared, fd, allocated


def sealed_nbytes(plan: Plan) -> int:
    """Return the length of the sealed file in bytes."""
    layout = plan.layout
    if not plan.index:
        return layout.size
    return indices.starts_at(layout) + indices.nbytes_of(layout, checksum=plan.checksum)


def padded_nbytes(plan: Plan) -> int:
    """Return the length of the unsealed data file: whole blocks, with the index."""
    return -(-sealed_nbytes(plan) // plan.layout.align) * plan.layout.align


def _new_shared_state(names: Names) -> tuple[str, int]:
    """Make the file of a map, and return its name and its descriptor.

    A FUSE server returns ESTALE if another creator swept the file before it was open.
    """
    for _ in range(_STALE_TRIES):
        temporary = names.new_map()
        try:
            return temporary, files.create(names.dirfd, temporary)
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), temporary)


def _make_shared_state(names: Names, plan: Plan, *, journaled: bool) -> tuple[SharedState, bool]:
    temporary, fd = _new_shared_state(names)
    try:
        if not lock(fd, plan.layout.writers):
            raise FileNotFoundError(errno.ENOENT, "another creator is sweeping it")
        flagged = write_map(fd, plan)
        if plan.durable:
            files.sync(fd, journaled=journaled)
        other = files.open_file(names.dirfd, temporary, os.O_RDWR)
        try:
            shared = open_map(other, plan, locks=fd)
        finally:
            os.close(other)
        try:
            files.move(names.dirfd, temporary, names.map, replace=False)
        except OSError:
            fd = os.dup(fd)  # the map closes its own
            shared.close()
            raise
    except (FileExistsError, FileNotFoundError):  # taken, or swept by another creator
        os.close(fd)
        names.remove(temporary)
        raise BlockExistsError(_why_taken(names), key=names.path) from None
    except BaseException:
        os.close(fd)
        names.remove(temporary)
        raise
    return shared, flagged


def _why_taken(names: Names) -> str:
    try:
        shared = _open_settled_state(names)
    except (KvioError, OSError) as exc:
        return f"{names.path!r} is being written, or {names.map} is another program's: {exc}"
    try:
        if shared.is_locked(shared.plan.layout.writers):
            return f"{names.path!r} is being written"
        return (
            f"{names.path!r} was left unfinished by a process that has ended: "
            "continue or abort it with SharedFile.recover"
        )
    finally:
        shared.close()


def _make_data(
    names: Names, shared: SharedState, *, preallocate: bool, group: int | None
) -> tuple[int, bool]:
    plan = shared.plan
    names.remove(names.data)  # without a map it is a leftover of a creation
    fd = files.create(names.dirfd, names.data)
    try:
        if group is not None:
            with typed(names, f"set group {group} of"):
                os.fchown(fd, -1, group)
        with typed(names, f"allocate {padded_nbytes(plan)} bytes for"):
            allocated = files.allocate(fd, padded_nbytes(plan), preallocate=preallocate)
        _set_direct(fd, plan)
        if plan.sidecar:
            sidecar.tag(fd, plan.file_id)
        info = os.fstat(fd)
        shared.inode = (info.st_dev, info.st_ino)
    except BaseException:
        os.close(fd)
        raise
    return fd, allocated


def _check_room(names: Names, nbytes: int) -> None:
    """Refuse a file that cannot fit: allocating it would fill the disk for other processes."""
    with typed(names, f"allocate {nbytes} bytes for"):
        room = os.fstatvfs(names.dirfd)
        if nbytes > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _set_direct(fd: int, plan: Plan) -> None:
    if plan.direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _drop(names: Names, shared: SharedState) -> None:
    """Remove the files of an unsealed file, the map last, because it reserves the name."""
    shared.note(State.ABORTED)
    if _is_still(names, shared):
        names.remove(names.data)
        if shared.plan.sidecar and not names.is_inode(names.final, shared.inode):
            names.remove(names.sidecar(shared.inode[1]))
        names.remove(names.map)


def sweep(names: Names, leftovers: Leftovers | None = None) -> bool:
    """Remove leftover maps and probes; return whether a map is being made now."""
    being_made = False
    leftovers = leftovers or names.leftovers()
    for name in leftovers.probes:
        found = names.stat(name)
        if found is not None and time.time() - found.st_mtime > _PROBE_S:
            names.remove(name)
    for name in leftovers.maps:
        try:
            fd = files.open_file(names.dirfd, name, os.O_RDWR)
        except OSError:  # gone, or not kvio's
            continue
        try:
            if lock(fd, 0, ALL_BYTES):
                names.remove(name)
            else:
                being_made = True
        finally:
            os.close(fd)
    return being_made


def find_shared_state(names: Names) -> SharedState:
    """Open the map of a file that is being written.

    While `files.move` links the map to its name, a FUSE server may show another inode there. So the
    map is opened before its locks: if only the locks are the creator's, the map's state is
    "preparing".
    """
    try:
        fd = files.open_file(names.dirfd, names.map, os.O_RDWR)
    except FileNotFoundError:
        raise BlockNotFoundError(f"no shared file {names.path!r}", key=names.path) from None
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise AccessDeniedError(
                f"the map of {names.path!r} belongs to another user", errno=errno.EACCES
            )
        plan = read_plan(fd)
        locks = files.open_file(names.dirfd, names.map, os.O_RDWR)
        try:
            return open_map(fd, plan, locks=locks)
        except BaseException:
            os.close(locks)
            raise
    except FileNotFoundError:  # sealed or aborted since
        raise BlockNotFoundError(f"no shared file {names.path!r}", key=names.path) from None
    except PlanError as exc:
        raise CorruptBlockError(
            f"the map of {names.path!r} ({names.map}) cannot be used: {exc}", key=names.path
        ) from exc
    finally:
        os.close(fd)


def _open_settled_state(names: Names) -> SharedState:
    """Open the map; again if `files.move` may have been linking it at that moment.

    Raises:
        BlockExistsError: its creator is still linking it.
    """
    seen = b""
    while True:
        shared = find_shared_state(names)
        if shared.state is not State.PREPARING or shared.plan.file_id == seen:
            return shared
        seen = shared.plan.file_id
        shared.close()
        if sweep(names):
            raise BlockExistsError(f"{names.path!r} is being written", key=names.path)


def _make_writable(names: Names, shared: SharedState) -> None:
    """Undo the change of mode by a seal that was interrupted before its rename."""
    fd = _open_data(names, shared, os.O_RDONLY)
    try:
        files.set_mode(fd, 0o600)
    finally:
        os.close(fd)


def _open_data(names: Names, shared: SharedState, flags: int = os.O_RDWR) -> int:
    found = names.stat(names.data)
    if found is not None and not _is_data(found, shared):
        raise CorruptBlockError(
            f"{names.data} beside {names.path!r} is not the file its map was made for",
            key=names.path,
        )
    fd = files.open_file(names.dirfd, names.data, flags | os.O_NONBLOCK)
    try:
        _set_direct(fd, shared.plan)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_data(found: os.stat_result, shared: SharedState) -> bool:
    """Return whether a file is the one of a map: the inode number may have been reused."""
    return (
        (found.st_dev, found.st_ino) == shared.inode
        and stat.S_ISREG(found.st_mode)
        and found.st_nlink == 1
        and found.st_size in (padded_nbytes(shared.plan), sealed_nbytes(shared.plan))
    )


def join(names: Names, boot_id: bytes) -> tuple[SharedState, int]:
    """Open a shared file that is being written: its map, and a descriptor of its data.

    Raises:
        UnsupportedError: it was made on another machine, or before a restart of this one.
        BlockNotFoundError: no file of this name is being written.
        CorruptBlockError: its map is damaged or of another version.
    """
    with typed(names, "open"):
        shared = find_shared_state(names)
        try:
            if shared.state is State.PREPARING:
                raise FileNotFoundError(errno.ENOENT, "not ready")
            if shared.plan.boot_id != boot_id:
                raise UnsupportedError(
                    f"{names.path!r} was made on another machine, or before a restart of this "
                    "one: its writers share memory; recover it where it was made"
                )
            return shared, _open_data(names, shared)
        except FileNotFoundError:
            shared.close()
            raise BlockNotFoundError(
                f"{names.path!r} is not ready yet, or sealed or aborted just now", key=names.path
            ) from None
        except BaseException:
            shared.close()
            raise


def recover(names: Names, boot_id: bytes) -> tuple[SharedState, int] | None:
    """Take over a shared file whose creator has ended; None: it is sealed already.

    Raises:
        BlockNotFoundError: there is nothing to continue; leftovers have been removed.
        BlockExistsError: its creator is alive.
        CorruptBlockError: its map is damaged or of another version; nothing is changed.
    """
    with typed(names, "recover"):
        sweep(names)
        try:
            shared = _open_settled_state(names)
        except BlockNotFoundError:
            if names.exists(names.final):
                return None
            raise
        try:
            if not shared.lock_to_seal() or not _is_still(names, shared):
                raise BlockExistsError(f"{names.path!r} is being written", key=names.path)
            return _take_over(names, shared, boot_id)
        except BaseException:
            shared.close()
            raise


def _take_over(names: Names, shared: SharedState, boot_id: bytes) -> tuple[SharedState, int] | None:
    if names.is_inode(names.final, shared.inode):
        if shared.plan.durable:
            files.sync_dir(names.dirfd, journaled=is_journaled(names.dirfd))
        _drop(names, shared)
        shared.close()
        return None
    if shared.state in (State.PREPARING, State.ABORTED) or not names.exists(names.data):
        _drop(names, shared)
        raise BlockNotFoundError(
            f"the creation or removal of {names.path!r} was interrupted: there is nothing to "
            "continue, and its leftovers have been removed",
            key=names.path,
        )
    _make_writable(names, shared)
    fd = _open_data(names, shared)
    shared.require_reread()
    if shared.plan.boot_id != boot_id or not any(boot_id):  # the counts in the map were not synced
        for number in range(shared.plan.layout.cells):
            shared.clear(number)
        shared.belong_to(boot_id)
    if shared.state is State.SEALING:
        shared.state = State.OPEN
    return shared, fd


def _is_still(names: Names, shared: SharedState) -> bool:
    """Return whether the name is still that of this map, and not of a newer one."""
    info = os.fstat(shared.fd)
    return names.is_inode(names.map, (info.st_dev, info.st_ino))


def abort(names: Names, shared: SharedState) -> None:
    """Remove an unsealed file; calls of other writers fail from now on."""
    with typed(names, "abort"):
        _drop(names, shared)


# --------------------------------------------------------------------------------------------------
# Seal a shared file: wait for all bytes, sync them, and publish the file.


#: How often a wait for other processes checks whether they failed.
_CHECK_EVERY_S: Final = 0.1
_NAMED_AT_MOST: Final = 8


def wait_until_whole(names: Names, shared: SharedState, timeout: float | None) -> None:
    """Wait until every byte has been written.

    Raises:
        StorageTimeoutError: bytes are missing; the message names the ranks.
        StorageError: a writer's I/O failed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        progress = shared.progress()
        _check_state(names, shared)
        if next(shared.missing(), None) is None:
            return
        left = _CHECK_EVERY_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise StorageTimeoutError(_what_is_missing(names, shared), key=names.path)
        shared.wait(progress, min(left, _CHECK_EVERY_S))


def _check_state(names: Names, shared: SharedState) -> None:
    for rank, number in shared.failures():
        error = storage_error(number, f"rank {rank} failed to write its part of {names.path!r}")
        error.key = names.path
        raise error
    state = shared.state
    if state not in (State.OPEN, State.SEALING):
        raise StoreClosedError(f"{names.path!r} {CANNOT_WRITE[state]}")


def _what_is_missing(names: Names, shared: SharedState) -> str:
    owed = []
    for rank, cells in groupby(sorted(shared.missing()), key=lambda cell: cell.rank):
        pieces = list(cells)
        nbytes = sum(piece.nbytes for piece in pieces)
        alive = "" if shared.is_locked(rank) else ", which no process writes"
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


def seal(names: Names, shared: SharedState, fd: int, *, reason: str) -> Sealed:
    """Write what is left, sync, and publish; see `steps`. *fd* stays open.

    Raises:
        StorageError: the storage failed; the file has its name only if the sync of its directory
            failed.
        BlockExistsError: another file got the name meanwhile.
        CorruptBlockError: bytes written before a recovery do not read back.
    """
    plan, index = shared.plan, _index_of(shared)
    shared.state = State.SEALING
    journaled = not plan.durable or is_journaled(names.dirfd)
    with typed(names, "seal"):
        try:
            _complete(names, shared, fd, index, journaled=journaled)
        except OSError:  # an inode that may have lost bytes is not used again
            shared.note(State.FAILED)
            raise
        if plan.sidecar:
            _write_sidecar(names, shared, fd, index, journaled=journaled)
        to_read = retrying(lambda: files.open_file(names.dirfd, names.data, os.O_RDONLY))
        try:
            _check_state(names, shared)  # a writer that closed meanwhile may have seen an error
            _publish(names, shared, journaled=journaled)
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


def _complete(names: Names, shared: SharedState, fd: int, index: Index, *, journaled: bool) -> None:
    _write_shared_blocks(shared, fd)
    _write_end(shared.plan, fd, index)
    files.set_mode(fd, shared.plan.file_mode)
    shared.sync(fd, journaled=journaled)
    if shared.must_reread:
        _read_again(names, shared.plan, fd, index)


def _write_sidecar(
    names: Names, shared: SharedState, fd: int, index: Index, *, journaled: bool
) -> None:
    """Write the sidecar; if that fails, `seal` can be called again."""
    try:
        with typed(names, "write the sidecar of"):
            sidecar.write(names, shared.plan, fd, index, journaled=journaled)
    except BaseException:
        shared.note(State.OPEN)
        raise


def _publish(names: Names, shared: SharedState, *, journaled: bool) -> None:
    replaced = names.stat(names.final)
    try:
        _take_final_name(names, shared, journaled=journaled)
    except FileExistsError:
        shared.state = State.OPEN
        raise BlockExistsError(f"{names.path!r} exists", key=names.path) from None
    shared.state = State.SEALED
    if shared.plan.durable:
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


def _take_final_name(names: Names, shared: SharedState, *, journaled: bool) -> None:
    """Rename the data to its final name.

    Without a journal an old file keeps a name, that of the data, until the directory is synced:
    else a power cut could lose the old file and the new one.
    """
    if not journaled and shared.plan.replace and names.exists(names.final):
        names.check_final()
        with suppress(FileNotFoundError):  # it was removed meanwhile
            try:
                files.exchange(names.dirfd, names.data, names.final)
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.ENOSYS):  # no RENAME_EXCHANGE here
                    raise
            else:
                return
    files.move(names.dirfd, names.data, names.final, replace=shared.plan.replace)


def _index_of(shared: SharedState) -> Index:
    plan = shared.plan
    sums = [shared.checksum(n) for n in range(plan.layout.cells)] if plan.checksum else None
    return Index(plan.file_id, plan.layout, sums)


def _write_shared_blocks(shared: SharedState, fd: int) -> None:
    align = shared.plan.layout.align
    for place, number in enumerate(shared.plan.layout.shared_blocks):
        _write(shared.plan, fd, shared.block(place), number * align)


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
