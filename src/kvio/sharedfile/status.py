"""What stands at the path of a shared file, found without joining it or taking it over."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast

from kvio.errors import BlockNotFoundError
from kvio.sharedfile.map import Map
from kvio.sharedfile.names import Names
from kvio.sharedfile.planning import boot_id
from kvio.sharedfile.reading import open_checked
from kvio.sharedfile.steps import find_map, typed

Standing = Literal["preparing", "open", "sealing", "failed", "aborted", "sealed"]


@dataclass(frozen=True, slots=True)
class SharedFileStatus:
    """What became of a shared file, at the moment it was looked at.

    Attributes:
        path: as given.
        state: "sealed": the file is there, whole. "preparing": it is being created; "open": it is
            being written; "sealing": it is being sealed, or was when that process ended;
            "failed": I/O failed, so that it can only be aborted; "aborted": it is being removed.
        size: of the payload, in bytes.
        writers: how many ranks there are.
        checksums: where they are, or will be: "file": behind the payload, "sidecar": beside it,
            "none": nowhere.
        owed: the bytes that each rank still has to write; none of one that has written all.
        writing: the ranks for which a handle is open.
        sealer: a handle that may seal it is open; without one, recover it or abort it.
        failures: the errno that each rank met whose I/O failed.
        this_boot: it was created since this machine was started; else what was written of it does
            not count.
    """

    path: str
    state: Standing
    size: int
    writers: int
    checksums: Literal["file", "sidecar", "none"]
    owed: dict[int, int]
    writing: tuple[int, ...]
    sealer: bool
    failures: dict[int, int]
    this_boot: bool

    @property
    def owed_bytes(self) -> int:
        """How many bytes are still to be written, by all ranks."""
        return sum(self.owed.values())


def status_of(names: Names) -> SharedFileStatus:
    """Look at a path; see `SharedFile.status`."""
    with typed(names, "look at"):
        try:
            map_ = find_map(names)
        except BlockNotFoundError:
            return _of_sealed(names)
        try:
            if names.is_inode(names.final, map_.inode):  # its map goes next
                return _of_sealed(names)
            return _of_map(names, map_)
        finally:
            map_.close()


def _of_sealed(names: Names) -> SharedFileStatus:
    fd, index = open_checked(names)
    try:
        plain = os.fstat(fd).st_size == index.layout.size
    finally:
        os.close(fd)
    return SharedFileStatus(
        path=names.path,
        state="sealed",
        size=index.layout.size,
        writers=index.layout.writers,
        checksums="none" if index.checksums is None else "sidecar" if plain else "file",
        owed={},
        writing=(),
        sealer=False,
        failures={},
        this_boot=True,
    )


def _of_map(names: Names, map_: Map) -> SharedFileStatus:
    plan = map_.plan
    owed: Counter[int] = Counter()
    for rank, _, nbytes in map_.missing():
        owed[rank] += nbytes
    kept = plan.checksum and (plan.index or plan.sidecar)
    return SharedFileStatus(
        path=names.path,
        state=cast("Standing", map_.state.name.lower()),
        size=plan.layout.size,
        writers=plan.layout.writers,
        checksums="none" if not kept else "sidecar" if plan.sidecar else "file",
        owed=dict(owed),
        writing=tuple(rank for rank in range(plan.layout.writers) if map_.is_locked(rank)),
        sealer=map_.is_locked(plan.layout.writers),
        failures=dict(map_.failures()),
        this_boot=plan.boot_id == boot_id() and any(plan.boot_id),
    )
