"""Open a shared file for a handle: create, join, recover, or read a sealed one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvio.permissions import group_number
from kvio.sharedfile import planning, steps
from kvio.sharedfile.map import Map
from kvio.sharedfile.names import Names, make_directories, open_names
from kvio.sharedfile.status import SharedFileStatus, status_of
from kvio.types import Verify

if TYPE_CHECKING:
    from kvio.placement import Placement

Path = str | os.PathLike[str]


@dataclass(slots=True, kw_only=True)
class Opened:
    """An open shared file, from which a handle is made.

    Attributes:
        names: the open directory, and the names in it.
        map: the map of its writers; None: the file is sealed.
        fd: the data file that is written, or -1.
        rank: the rank that the handle writes for; None: any.
        seals: the handle may seal.
        reason: why the I/O mode was chosen.
        io_threads, verify, mode: the options; the mode is that of reads.
        on_start: called first by each thread, with its number.
    """

    names: Names
    map: Map | None = None
    fd: int = -1
    rank: int | None = None
    seals: bool = False
    reason: str = ""
    io_threads: int = 4
    on_start: Callable[[int], None] | None = None
    verify: Verify = "full"
    mode: planning.Mode = "hybrid"


@contextmanager
def _opening(path: Path) -> Iterator[Names]:
    names = open_names(path)
    try:
        yield names
    except BaseException:
        names.close()
        raise


def create(
    path: Path, size: int, writers: int, rank: int | None, choices: dict[str, Any]
) -> Opened:
    """Make a file; see `SharedFile.create`."""
    chosen = planning.choose_options(choices)
    on_start = planning.choose_places(chosen.placement, chosen.io_threads)
    group = group_number(chosen.group)
    if chosen.dir_mode is not None:
        durable = chosen.durability == "durable"
        make_directories(path, chosen.dir_mode, group=group, durable=durable)
    with _opening(path) as names:
        plan, reason = planning.make_plan(names, size, writers, chosen)
        plan.layout.check_rank(rank or 0)
        map_, fd, allocated = steps.create(names, plan, preallocate=chosen.preallocate, group=group)
    if chosen.preallocate and not allocated:
        reason = f"{reason}; the file system cannot preallocate"
    return Opened(
        names=names, map=map_, fd=fd, rank=rank, seals=True, reason=reason,
        io_threads=chosen.io_threads, on_start=on_start,
    )  # fmt: skip


def join(path: Path, rank: int, io_threads: int, placement: Placement | None) -> Opened:
    """Open a file that is being written, for a rank; see `SharedFile.open`."""
    planning.check_io_threads(io_threads)
    on_start = planning.choose_places(placement, io_threads)
    with _opening(path) as names:
        map_, fd = steps.join(names, planning.boot_id())
        try:
            map_.plan.layout.check_rank(rank)
        except BaseException:
            os.close(fd)
            map_.close()
            raise
    return Opened(names=names, map=map_, fd=fd, rank=rank, io_threads=io_threads, on_start=on_start)


def recover(path: Path, io_threads: int, placement: Placement | None) -> Opened:
    """Take over a file; see `SharedFile.recover`."""
    planning.check_io_threads(io_threads)
    on_start = planning.choose_places(placement, io_threads)
    with _opening(path) as names:
        found = steps.recover(names, planning.boot_id())
    if found is None:
        return Opened(names=names)
    return Opened(
        names=names, map=found[0], fd=found[1], seals=True, reason="after a recovery",
        io_threads=io_threads, on_start=on_start,
    )  # fmt: skip


def status(path: Path) -> SharedFileStatus:
    """Return the state of the file at a path; see `SharedFile.status`."""
    names = open_names(path)
    try:
        return status_of(names)
    finally:
        names.close()


def sealed(
    path: Path,
    verify: Verify,
    mode: planning.Mode,
    io_threads: int,
    placement: Placement | None,
) -> Opened:
    """Open a sealed file; see `SharedFile.open`."""
    planning.check_verify(verify)
    planning.check_mode(mode)
    planning.check_io_threads(io_threads)
    on_start = planning.choose_places(placement, io_threads)
    with _opening(path) as names:
        return Opened(
            names=names, verify=verify, mode=mode, io_threads=io_threads, on_start=on_start
        )
