"""The status of a shared file, found without opening it to write or recover."""

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

StateName = Literal["preparing", "open", "sealing", "failed", "aborted", "sealed"]


@dataclass(frozen=True, slots=True)
class SharedFileStatus:
    """The state of a shared file at one moment.

    Attributes:
        path: as passed.
        state: "sealed": the file is complete. "preparing": it is being created; "open": it is
            being written; "sealing": it is being sealed, or the process that did so has ended;
            "failed": I/O failed, and it can only be aborted; "aborted": it is being removed.
        size: bytes of the payload.
        writers: number of ranks.
        checksums: their place: "file": after the payload, "sidecar": in a file beside it,
            "none": there are none.
        owed: missing bytes by rank; complete ranks are left out.
        writing: ranks with an open handle.
        sealer: the handle that seals is open; if not, recover or abort the file.
        failures: errno by rank, of ranks whose I/O failed.
        this_boot: it was created since this machine was started; else its written cells are not
            kept.
    """

    path: str
    state: StateName
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
        """The number of missing bytes of all ranks."""
        return sum(self.owed.values())


def status_of(names: Names) -> SharedFileStatus:
    """Return the state of the file at a path; see `SharedFile.status`."""
    with typed(names, "find the state of"):
        try:
            map_ = find_map(names)
        except BlockNotFoundError:
            return _of_sealed(names)
        try:
            if names.is_inode(names.final, map_.inode):  # its map is being removed
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
        state=cast("StateName", map_.state.name.lower()),
        size=plan.layout.size,
        writers=plan.layout.writers,
        checksums="none" if not kept else "sidecar" if plan.sidecar else "file",
        owed=dict(owed),
        writing=tuple(rank for rank in range(plan.layout.writers) if map_.is_locked(rank)),
        sealer=map_.is_locked(plan.layout.writers),
        failures=dict(map_.failures()),
        this_boot=plan.boot_id == boot_id() and any(plan.boot_id),
    )
