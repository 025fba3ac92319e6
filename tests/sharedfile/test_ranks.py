"""Ranks of a communicator as writers: all have a handle, or all have the error of the first."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvio
from kvio import SharedFile

from . import raw

SIZE = 40_000
DATA = raw.random_bytes(SIZE)


class World:
    """What the ranks of a communicator share."""

    def __init__(self, size: int, near: int) -> None:
        self.size, self.near = size, near
        self.barrier = threading.Barrier(size, timeout=60)
        self.said: list[Any] = [None] * size


class Communicator:
    """A communicator whose ranks are threads of this process."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    def allgather(self, said: Any) -> list[Any]:
        """Hear what every rank says."""
        self._world.barrier.wait()
        self._world.said[self.rank] = said
        self._world.barrier.wait()
        return list(self._world.said)

    def bcast(self, said: Any, root: int) -> Any:
        """Hear what one rank says."""
        return self.allgather(said)[root]

    def Split_type(self, _: object) -> Near:  # noqa: N802  # as MPI calls it
        """Give the ranks of this machine."""
        return Near(self._world.near)


class Near:
    """The ranks of one machine."""

    def __init__(self, size: int) -> None:
        self.size = size

    def Free(self) -> None:  # noqa: N802  # as MPI calls it
        """Be done with it."""


@pytest.fixture(autouse=True)
def mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `from mpi4py import MPI` give what is asked of it."""
    module: Any = ModuleType("mpi4py")
    module.MPI = ModuleType("MPI")
    module.MPI.COMM_TYPE_SHARED = 1
    monkeypatch.setitem(sys.modules, "mpi4py", module)


def in_ranks(size: int, work: Any, *, near: int | None = None) -> list[Any]:
    """Run *work* for every rank at once; its answers, or the errors of kvio that it raised."""
    world = World(size, size if near is None else near)

    def attempt(rank: int) -> Any:
        try:
            return work(Communicator(world, rank))
        except kvio.KvioError as exc:
            return exc

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(attempt, range(size)))


def write_domain(file: SharedFile) -> None:
    """Write what the handle's rank has to write."""
    for offset, nbytes in file.domain():
        file.pwrite(DATA[offset : offset + nbytes], offset)


@pytest.mark.parametrize("stripe_bytes", [0, 4096])
@pytest.mark.usefixtures("nothing_open")
def test_every_rank_writes_its_part(stripe_bytes: int, disk_path: Path) -> None:
    """Rank 0 seals what all have written, each through a handle of its own."""

    def work(comm: Any) -> int | None:
        with SharedFile.from_comm(
            comm, disk_path / "file", SIZE, stripe_bytes=stripe_bytes, durability="visible"
        ) as file:
            assert (file.rank, file.writers) == (comm.rank, 3)
            write_domain(file)
            return file.seal(timeout=60).checksum if comm.rank == 0 else None

    assert in_ranks(3, work) == [raw.crc32c(DATA), None, None]
    assert raw.sealed(disk_path / "file").payload == DATA
    assert raw.names(disk_path) == ["file"]


@pytest.mark.usefixtures("nothing_open")
def test_ranks_without_bytes_are_not_outrun_by_the_seal(disk_path: Path) -> None:
    """Though rank 0 alone has a block to write, and seals at once, all others have a handle."""

    def work(comm: Any) -> int:
        with SharedFile.from_comm(comm, disk_path / "file", 100, durability="visible") as file:
            write_domain(file)
            if comm.rank == 0:
                file.seal()
            return len(file.domain())

    for _ in range(20):
        assert in_ranks(4, work) == [1, 0, 0, 0]
        (disk_path / "file").unlink()


@pytest.mark.usefixtures("nothing_open")
def test_what_rank_0_cannot_make_is_everybodys_error(disk_path: Path) -> None:
    """Each rank raises it, and nothing is left."""
    (disk_path / "file").write_bytes(b"mine")
    found = in_ranks(3, lambda comm: SharedFile.from_comm(comm, disk_path / "file", SIZE))

    assert [type(error) for error in found] == [kvio.BlockExistsError] * 3
    assert raw.names(disk_path) == ["file"]


@pytest.mark.usefixtures("nothing_open")
def test_a_rank_that_cannot_open_is_everybodys_error(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rank 0 had made is removed, what others had opened is closed."""
    open_file = SharedFile.open

    def refuse(path: Any, rank: int | None = None, **options: Any) -> SharedFile:
        if rank == 2:
            raise kvio.AccessDeniedError("not you", errno=13)
        return open_file(path, rank, **options)

    monkeypatch.setattr(SharedFile, "open", refuse)
    found = in_ranks(
        4, lambda comm: SharedFile.from_comm(comm, disk_path / "f", SIZE, durability="visible")
    )

    assert [str(error) for error in found] == ["not you"] * 4
    assert raw.names(disk_path) == []


@pytest.mark.usefixtures("nothing_open")
def test_ranks_of_several_machines_are_refused(disk_path: Path) -> None:
    """By every rank, with both counts, before anything is made."""
    found = in_ranks(3, lambda comm: SharedFile.from_comm(comm, disk_path / "file", SIZE), near=2)

    assert [type(error) for error in found] == [kvio.UnsupportedError] * 3
    assert "3 ranks, 2 of them on this machine" in str(found[0])
    assert raw.names(disk_path) == []


def _of_another_boot(path: Path) -> None:
    """Change the boot in the head of a map, and its checksum over head and sizes."""
    data = bytearray(path.read_bytes())
    data[32:48] = b"another boot    "
    writers, sizes = int.from_bytes(data[12:16], "little"), int.from_bytes(data[72:80], "little")
    at = 192 + 16 * writers
    crc = raw.crc32c(data[:124] + data[at : at + 8 * sizes])
    data[124:128] = crc.to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.usefixtures("nothing_open")
def test_a_rank_of_another_machine_is_refused(disk_path: Path) -> None:
    """A map that was made under another kernel is memory that is not shared with its writers."""
    with SharedFile.create(disk_path / "f", SIZE, durability="visible") as file:
        _of_another_boot(disk_path / ".f.kvio-map")
        with pytest.raises(kvio.UnsupportedError, match="another machine, or before a restart"):
            SharedFile.open(disk_path / "f", 0)
        file.abort()


@pytest.mark.usefixtures("nothing_open")
def test_ranks_join_what_was_recovered_after_a_restart(disk_path: Path) -> None:
    """The file is this machine's from then on; what was written before is written anew."""
    with SharedFile.create(disk_path / "f", SIZE, writers=2, durability="visible") as file:
        file.pwrite(DATA, 0)
    _of_another_boot(disk_path / ".f.kvio-map")
    with SharedFile.recover(disk_path / "f") as file:
        assert sum(cell.nbytes for cell in file.missing()) == SIZE
        for rank in range(2):
            with SharedFile.open(disk_path / "f", rank) as writer:
                write_domain(writer)
        file.seal()

    assert raw.sealed(disk_path / "f").payload == DATA
