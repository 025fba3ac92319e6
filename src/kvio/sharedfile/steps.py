"""The steps from a new file to a sealed one; `recover` and `abort` work after each of them.

1. The map gets its name, complete, and locked by its creator. Of two creators one gets the name.
2. The data file is made and all its blocks are allocated. Then the map's state is "open".
3. Writers write. The final name does not exist.
4. Seal (sealing.py): blocks that several writers share are written, then the index; the file is
   truncated to its size and synced through a descriptor that was open before the first write, so
   that it reports every error since.
5. The file is renamed to its final name, and the directory is synced.
6. The map is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvio._native import files
from kvio.errors import (
    AccessDeniedError,
    BlockExistsError,
    BlockNotFoundError,
    CorruptBlockError,
    KvioError,
    UnsupportedError,
    storage_error,
)
from kvio.medium import is_journaled
from kvio.sharedfile import index as indices
from kvio.sharedfile import quotas, sidecar
from kvio.sharedfile.map import ALL_BYTES, Map, State, lock, open_map, read_plan, write_map
from kvio.sharedfile.names import Leftovers, Names
from kvio.sharedfile.plan import Plan, PlanError

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
) -> tuple[Map, int, bool]:
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
        if quotas.limited(names.dirfd):
            raise UnsupportedError(
                f"shared file {names.path!r} on a btrfs with limited quota groups: when a quota "
                "is used up, the kernel would kill writers; use a file system without them"
            )
        beside = indices.nbytes_of(plan.layout, checksum=True) * plan.sidecar
        _check_room(names, plan.map_nbytes + beside + preallocate * padded_nbytes(plan))
        leftovers = names.leftovers()
        sweep(names, leftovers)
        journaled = not plan.durable or is_journaled(names.dirfd)
        map_, flagged = _make_map(names, plan, journaled=journaled)
        try:
            if plan.durable and flagged:  # btrfs has logged the new name without the flags: a power
                files.sync(map_.fd)  # cut would leave bytes without checksums, and EIO
            sidecar.sweep(names, leftovers.sidecars)
            fd, allocated = _make_data(names, map_, preallocate=preallocate, group=group)
        except BaseException:
            try:
                _drop(names, map_)
            finally:  # a file at the data's name that cannot be removed is not ours
                with suppress(OSError):
                    names.remove(names.map)
                map_.close()
            raise
        map_.state = State.OPEN
    return map_, fd, allocated


def sealed_nbytes(plan: Plan) -> int:
    """Return the length of the sealed file in bytes."""
    layout = plan.layout
    if not plan.index:
        return layout.size
    return indices.starts_at(layout) + indices.nbytes_of(layout, checksum=plan.checksum)


def padded_nbytes(plan: Plan) -> int:
    """Return the length of the unsealed data file: whole blocks, with the index."""
    return -(-sealed_nbytes(plan) // plan.layout.align) * plan.layout.align


def _new_map(names: Names) -> tuple[str, int]:
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


def _make_map(names: Names, plan: Plan, *, journaled: bool) -> tuple[Map, bool]:
    temporary, fd = _new_map(names)
    try:
        if not lock(fd, plan.layout.writers):
            raise FileNotFoundError(errno.ENOENT, "another creator is sweeping it")
        flagged = write_map(fd, plan)
        if plan.durable:
            files.sync(fd, journaled=journaled)
        other = files.open_file(names.dirfd, temporary, os.O_RDWR)
        try:
            map_ = open_map(other, plan, locks=fd)
        finally:
            os.close(other)
        try:
            files.move(names.dirfd, temporary, names.map, replace=False)
        except OSError:
            fd = os.dup(fd)  # the map closes its own
            map_.close()
            raise
    except (FileExistsError, FileNotFoundError):  # taken, or swept by another creator
        os.close(fd)
        names.remove(temporary)
        raise BlockExistsError(_why_taken(names), key=names.path) from None
    except BaseException:
        os.close(fd)
        names.remove(temporary)
        raise
    return map_, flagged


def _why_taken(names: Names) -> str:
    try:
        map_ = _open_settled_map(names)
    except (KvioError, OSError) as exc:
        return f"{names.path!r} is being written, or {names.map} is another program's: {exc}"
    try:
        if map_.is_locked(map_.plan.layout.writers):
            return f"{names.path!r} is being written"
        return (
            f"{names.path!r} was left unfinished by a process that has ended: "
            "continue or abort it with SharedFile.recover"
        )
    finally:
        map_.close()


def _make_data(
    names: Names, map_: Map, *, preallocate: bool, group: int | None
) -> tuple[int, bool]:
    plan = map_.plan
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
        map_.inode = (info.st_dev, info.st_ino)
    except BaseException:
        os.close(fd)
        raise
    return fd, allocated


def _check_room(names: Names, nbytes: int) -> None:
    """Refuse a file that cannot fit: allocating it would fill the disk for other processes."""
    room = os.fstatvfs(names.dirfd)
    if nbytes > room.f_bavail * room.f_frsize:
        with typed(names, f"allocate {nbytes} bytes for"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _set_direct(fd: int, plan: Plan) -> None:
    if plan.direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _drop(names: Names, map_: Map) -> None:
    """Remove the files of an unsealed file, the map last, because it reserves the name."""
    map_.note(State.ABORTED)
    if _is_still(names, map_):
        names.remove(names.data)
        if map_.plan.sidecar and not names.is_inode(names.final, map_.inode):
            names.remove(names.sidecar(map_.inode[1]))
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


def find_map(names: Names) -> Map:
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


def _open_settled_map(names: Names) -> Map:
    """Open the map; again if `files.move` may have been linking it at that moment.

    Raises:
        BlockExistsError: its creator is still linking it.
    """
    seen = b""
    while True:
        map_ = find_map(names)
        if map_.state is not State.PREPARING or map_.plan.file_id == seen:
            return map_
        seen = map_.plan.file_id
        map_.close()
        if sweep(names):
            raise BlockExistsError(f"{names.path!r} is being written", key=names.path)


def _make_writable(names: Names, map_: Map) -> None:
    """Undo the change of mode by a seal that was interrupted before its rename."""
    fd = _open_data(names, map_, os.O_RDONLY)
    try:
        files.set_mode(fd, 0o600)
    finally:
        os.close(fd)


def _open_data(names: Names, map_: Map, flags: int = os.O_RDWR) -> int:
    found = names.stat(names.data)
    if found is not None and not _is_data(found, map_):
        raise CorruptBlockError(
            f"{names.data} beside {names.path!r} is not the file its map was made for",
            key=names.path,
        )
    fd = files.open_file(names.dirfd, names.data, flags | os.O_NONBLOCK)
    try:
        _set_direct(fd, map_.plan)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_data(found: os.stat_result, map_: Map) -> bool:
    """Return whether a file is the one of a map: the inode number may have been reused."""
    return (
        (found.st_dev, found.st_ino) == map_.inode
        and stat.S_ISREG(found.st_mode)
        and found.st_nlink == 1
        and found.st_size in (padded_nbytes(map_.plan), sealed_nbytes(map_.plan))
    )


def join(names: Names, boot_id: bytes) -> tuple[Map, int]:
    """Open a shared file that is being written: its map, and a descriptor of its data.

    Raises:
        UnsupportedError: it was made on another machine, or before a restart of this one.
        BlockNotFoundError: no file of this name is being written.
        CorruptBlockError: its map is damaged or of another version.
    """
    with typed(names, "open"):
        map_ = find_map(names)
        try:
            if map_.state is State.PREPARING:
                raise FileNotFoundError(errno.ENOENT, "not ready")
            if map_.plan.boot_id != boot_id:
                raise UnsupportedError(
                    f"{names.path!r} was made on another machine, or before a restart of this "
                    "one: its writers share memory; recover it where it was made"
                )
            return map_, _open_data(names, map_)
        except FileNotFoundError:
            map_.close()
            raise BlockNotFoundError(
                f"{names.path!r} is not ready yet, or sealed or aborted just now", key=names.path
            ) from None
        except BaseException:
            map_.close()
            raise


def recover(names: Names, boot_id: bytes) -> tuple[Map, int] | None:
    """Take over a shared file whose creator has ended; None: it is sealed already.

    Raises:
        BlockNotFoundError: there is nothing to continue; leftovers have been removed.
        BlockExistsError: its creator is alive.
        CorruptBlockError: its map is damaged or of another version; nothing is changed.
    """
    with typed(names, "recover"):
        sweep(names)
        try:
            map_ = _open_settled_map(names)
        except BlockNotFoundError:
            if names.exists(names.final):
                return None
            raise
        try:
            if not map_.lock_to_seal() or not _is_still(names, map_):
                raise BlockExistsError(f"{names.path!r} is being written", key=names.path)
            return _take_over(names, map_, boot_id)
        except BaseException:
            map_.close()
            raise


def _take_over(names: Names, map_: Map, boot_id: bytes) -> tuple[Map, int] | None:
    if names.is_inode(names.final, map_.inode):
        if map_.plan.durable:
            files.sync_dir(names.dirfd, journaled=is_journaled(names.dirfd))
        _drop(names, map_)
        map_.close()
        return None
    if map_.state in (State.PREPARING, State.ABORTED) or not names.exists(names.data):
        _drop(names, map_)
        raise BlockNotFoundError(
            f"the creation or removal of {names.path!r} was interrupted: there is nothing to "
            "continue, and its leftovers have been removed",
            key=names.path,
        )
    _make_writable(names, map_)
    fd = _open_data(names, map_)
    map_.require_reread()
    if map_.plan.boot_id != boot_id or not any(boot_id):  # the counts in the map were not synced
        for number in range(map_.plan.layout.cells):
            map_.clear(number)
        map_.belong_to(boot_id)
    if map_.state is State.SEALING:
        map_.state = State.OPEN
    return map_, fd


def _is_still(names: Names, map_: Map) -> bool:
    """Return whether the name is still that of this map, and not of a newer one."""
    info = os.fstat(map_.fd)
    return names.is_inode(names.map, (info.st_dev, info.st_ino))


def abort(names: Names, map_: Map) -> None:
    """Remove an unsealed file; calls of other writers fail from now on."""
    with typed(names, "abort"):
        _drop(names, map_)
