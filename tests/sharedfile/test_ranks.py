"""Ranks of a communicator as writers: all have a handle, or all an error that names the rank."""

from __future__ import annotations

import io
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import SharedFile
from kvio.sharedfile import ranks

from . import raw

SIZE = 40_000
DATA = raw.random_bytes(SIZE)


class Unpickler(pickle.Unpickler):
    """Knows the classes that every rank has, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        assert module == "kvio.errors", f"{module}.{name} was sent"
        return super().find_class(module, name)


class World:
    """What the ranks of a communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.said: list[bytes] = [b""] * size


class Communicator:
    """A communicator whose ranks are threads of this process; objects are pickled as by mpi4py."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    def allgather(self, said: Any) -> list[Any]:
        """Return what every rank says."""
        self._world.barrier.wait()
        self._world.said[self.rank] = pickle.dumps(said)
        self._world.barrier.wait()
        assert max(map(len, self._world.said)) < 16_384
        return [Unpickler(io.BytesIO(one)).load() for one in self._world.said]


def in_ranks(size: int, work: Any) -> list[Any]:
    """Run *work* for every rank at once; return what each answered, or raised."""
    world = World(size)

    def attempt(rank: int) -> Any:
        try:
            return work(Communicator(world, rank))
        except BaseException as exc:  # noqa: BLE001  # what is raised is what is tested
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

    assert [type(error) for error in found] == [kvio.AccessDeniedError] * 4
    assert [error.errno for error in found] == [13] * 4
    assert [str(error).partition(": ")[::2] for error in found if error is not found[2]] == [
        ("rank 2", "not you")
    ] * 3
    assert str(found[2]) == "not you"
    assert found[2].__notes__ == ["raised by rank 2 of 4"]
    assert raw.names(disk_path) == []


class ForeignError(Exception):
    """What no other process has a class for; pickling it is an error."""

    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")

    def __str__(self) -> str:
        raise ValueError("it has no text")


#: What a rank may raise that is no KvioError, and how others name it.
RAISED: list[tuple[BaseException, str]] = [
    (MemoryError(), "MemoryError"),
    (OSError(5, "the disk"), "OSError: [Errno 5] the disk"),
    (TypeError("no such argument"), "TypeError: no such argument"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SystemExit(3), "SystemExit: 3"),
    (ForeignError(), "ForeignError: <exception str() failed>"),
    (RuntimeError("x" * 10_000_000), "RuntimeError: xxx"),
]


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(("error", "named"), RAISED, ids=[type(e).__name__ for e, _ in RAISED])
def test_whatever_one_rank_raises_ends_all(
    error: BaseException, named: str, failing: int, disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank raises its own error, the others one that names rank and error; nothing is left."""
    step = "open" if failing else "create"
    before = getattr(SharedFile, step)

    def fail(path: Any, *arguments: Any, **options: Any) -> SharedFile:
        rank = arguments[0] if failing else 0
        if rank == failing:
            raise error.with_traceback(None)
        file: SharedFile = before(path, *arguments, **options)
        return file

    monkeypatch.setattr(SharedFile, step, fail)
    found = in_ranks(
        4, lambda comm: SharedFile.from_comm(comm, disk_path / "f", SIZE, durability="visible")
    )

    assert found.pop(failing) is error
    assert [(type(other), other.rank) for other in found] == [(kvio.RankFailedError, failing)] * 3
    assert all(f"rank {failing} failed" in str(other) and named in str(other) for other in found)
    assert raw.names(disk_path) == []


@pytest.mark.usefixtures("nothing_open")
def test_an_error_of_kvio_is_sent_without_what_hangs_on_it(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its type, number and key reach the other ranks; what a caller attached does not."""

    class Key(str):
        __slots__ = ()

    def fail(*_: Any, **__: Any) -> SharedFile:
        error = kvio.StorageFullError("no " + "room " * 100_000, errno=28, key=Key("k" * 100_000))
        error.attached = ForeignError()  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(SharedFile, "create", fail)
    own, other = in_ranks(2, lambda comm: SharedFile.from_comm(comm, disk_path / "f", SIZE))

    assert isinstance(own.attached, ForeignError)
    assert (type(other), other.errno, other.key[:3]) == (kvio.StorageFullError, 28, "kkk")
    assert str(other).startswith("rank 0: no room room")
    assert not hasattr(other, "attached")


@pytest.mark.usefixtures("nothing_open")
def test_an_error_class_of_another_module_is_sent_as_text(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may not have it, though it is a KvioError."""

    class OwnError(kvio.KvioError):
        pass

    def fail(*_: Any, **__: Any) -> SharedFile:
        raise OwnError("of my own")

    monkeypatch.setattr(SharedFile, "create", fail)
    own, other = in_ranks(2, lambda comm: SharedFile.from_comm(comm, disk_path / "f", SIZE))

    assert type(own) is OwnError
    assert type(other) is kvio.RankFailedError
    assert "OwnError: of my own" in str(other)


@pytest.mark.usefixtures("nothing_open")
def test_what_cannot_be_undone_does_not_hide_the_error(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 raises what rank 1 met, and says that its own file is still there."""
    abort = SharedFile.abort

    def fail_to_abort(file: SharedFile) -> None:
        abort(file)
        raise kvio.StorageError("cannot remove it")

    monkeypatch.setattr(SharedFile, "abort", fail_to_abort)
    found = in_ranks(
        2,
        lambda comm: SharedFile.from_comm(
            comm, disk_path / ("g" if comm.rank else "f"), SIZE, durability="visible"
        ),
    )

    assert [type(error) for error in found] == [kvio.BlockNotFoundError] * 2
    assert "cannot remove it" in found[0].__notes__[0]


@pytest.mark.usefixtures("nothing_open")
def test_arguments_that_only_one_rank_has_wrong_end_all(disk_path: Path) -> None:
    """A path or size of the wrong type on one rank is an error on every rank."""
    wrong: list[Callable[[int], tuple[Any, Any]]] = [
        lambda rank: (None if rank == 1 else disk_path / "f", SIZE),
        lambda rank: (disk_path / "f", "large" if rank == 0 else SIZE),
    ]
    for choose in wrong:
        found = in_ranks(
            3,
            lambda comm, choose=choose: SharedFile.from_comm(
                comm, *choose(comm.rank), durability="visible"
            ),
        )
        assert sorted(type(error).__name__ for error in found) == [
            "RankFailedError",
            "RankFailedError",
            "TypeError",
        ]
        assert raw.names(disk_path) == []


@pytest.mark.parametrize("comm", [None, 3, object()])
def test_what_is_no_communicator_is_refused(comm: Any, disk_path: Path) -> None:
    """By a ConfigError that says what is taken; torch's marker of a non-member is an int."""
    with pytest.raises(kvio.ConfigError, match="neither a communicator of mpi4py nor"):
        SharedFile.from_comm(comm, disk_path / "f", SIZE)


@pytest.mark.usefixtures("nothing_open")
def test_ranks_of_several_machines_are_refused(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every rank, with both counts, before anything is made."""
    machines = iter(["here", "there", "here"])
    monkeypatch.setattr(ranks, "_machine", lambda: next(machines))
    found = in_ranks(3, lambda comm: SharedFile.from_comm(comm, disk_path / "file", SIZE))

    assert [type(error) for error in found] == [kvio.UnsupportedError] * 3
    assert sorted(str(error)[:36] for error in found) == [
        "3 ranks, 1 of them on this machine: ",
        *["3 ranks, 2 of them on this machine: "] * 2,
    ]
    assert raw.names(disk_path) == []


def test_signal_handlers_wait_for_the_end_of_an_exchange_and_are_put_back() -> None:
    """None is called while it lasts, all are called after it, though the first one raises."""
    called: list[int] = []

    def handler(number: int, _: object) -> None:
        called.append(number)
        raise InterruptedError

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, handler) for number in numbers]
    held = ranks._HeldSignals()
    try:
        held.hold()
        for number in numbers:
            signal.raise_signal(number)
        assert called == []
        held.release()
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
        for number in numbers:
            with pytest.raises(InterruptedError):
                held.deliver()
            assert called[-1] == number
        held.deliver()
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)

    assert called == list(numbers)


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
