"""Processes that write one file: each its part, whoever dies, and never two creators."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile, lifecycle
from kvio.sharedfile.state import lock as map_lock
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, WRITERS, Case

pytestmark = pytest.mark.slow
LONG_S = 60.0


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, disk_path: Path) -> Case:
    """Return every case that the file system supports."""
    case: Case = request.param
    refusal = kills.need_direct(case, disk_path)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    return case


def write_rank(path: Path, rank: int, case: Case) -> None:
    """What a process does that writes one rank."""
    with SharedFile.open(path, rank) as file:
        assert file.rank == rank
        kills.write_domain(file, rank, case)


def test_every_process_writes_its_part(case: Case, disk_path: Path) -> None:
    """The creator waits for all in seal; the file is whole, byte for byte."""
    path = disk_path / "f"
    with case.create(path) as file:
        assert file.mode == ("buffered" if case.mode == "buffered" else "direct")
        pids = [
            kills.start(lambda rank=rank: write_rank(path, rank, case))  # type: ignore[misc]
            for rank in range(WRITERS)
        ]
        receipt = file.seal(timeout=LONG_S)
        kills.end_well(pids)

    assert (receipt.nbytes, receipt.level) == (case.size, "durable")
    assert receipt.checksum == kills.crc32c(case.payload)
    assert kills.check_name(path, case.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(path)


def test_a_writer_that_never_comes_is_named(case: Case, disk_path: Path) -> None:
    """The timeout says which rank owes bytes, and that nobody writes it; then it may still come."""
    path = disk_path / "f"
    with case.create(path) as file:
        kills.end_well(
            [
                kills.start(lambda rank=rank: write_rank(path, rank, case))  # type: ignore[misc]
                for rank in (0, 2)
            ]
        )
        missing = "rank 1, which no process writes"
        with pytest.raises(kvio.StorageTimeoutError, match=missing) as caught:
            file.seal(timeout=0.05)
        assert "rank 0" not in str(caught.value)
        assert "rank 2" not in str(caught.value)
        assert not path.exists()

        kills.end_well([kills.start(lambda: write_rank(path, 1, case))])
        file.seal(timeout=LONG_S)
    assert kills.check_name(path, case.payload)


def test_a_writer_that_is_there_is_not_called_gone(disk_path: Path) -> None:
    """Of a rank that a living handle writes the timeout does not say that nobody does."""
    path, case = disk_path / "f", CASES[0]
    with case.create(path) as file, SharedFile.open(path, 1) as late:
        for rank in (0, 2):
            kills.write_domain(file, rank, case)
        with pytest.raises(kvio.StorageTimeoutError, match="rank 1") as caught:
            file.seal(timeout=0)
        assert "nobody" not in str(caught.value)
        kills.write_missing(late, 1, case.payload)
        file.seal()
    assert kills.check_name(path, case.payload)


def test_the_rank_of_a_dead_writer_goes_on(case: Case, disk_path: Path) -> None:
    """Killed at a write, it leaves its lock and its cells to the next handle of its rank."""
    path = disk_path / "f"

    def work() -> None:
        with SharedFile.open(path, 1) as file:
            todo = list(kills.pieces(file, 1, case.piece))
            for start, end in todo[:2]:
                file.pwrite(case.payload[start:end], start)
            with faults.inject("write", error=faults.KILL):
                for start, end in todo[2:]:
                    file.pwrite(case.payload[start:end], start)

    with case.create(path) as file:
        for rank in (0, 2):
            kills.write_domain(file, rank, case)
        assert kills.killed(kills.in_child(work))
        with pytest.raises(kvio.StorageTimeoutError, match="rank 1, which no process writes"):
            file.seal()
        with SharedFile.open(path, 1) as again:
            owed = kills.write_missing(again, 1, case.payload)
            assert owed < sum(length for _, length in again.domain())
        file.seal()
    assert kills.check_name(path, case.payload)


def test_two_handles_never_write_one_rank(disk_path: Path) -> None:
    """In one process or in two the second is refused, until the first is closed."""
    path, case = disk_path / "f", CASES[0]

    def refused() -> None:
        with pytest.raises(kvio.BlockExistsError, match="another handle writes"):
            SharedFile.open(path, 1)

    with case.create(path) as file:
        with SharedFile.open(path, 1):
            refused()
            assert not kills.killed(kills.in_child(refused))
            with pytest.raises(kvio.BlockExistsError, match="rank 1"):
                file.pwrite(b"x", file.domain(1)[0].offset)
        SharedFile.open(path, 1).close()
        file.abort()


def test_a_dead_creators_file_is_taken_over(case: Case, disk_path: Path) -> None:
    """Its writers live on and finish; who recovers it waits for them and seals."""
    path = disk_path / "f"
    ready, notify = os.pipe()
    go, let_go = os.pipe()

    def create() -> None:
        file = case.create(path)
        kills.write_domain(file, 0, case)
        os.write(notify, b"c")
        os.read(go, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        os.close(let_go)
        with SharedFile.open(path, 1) as file:
            todo = list(kills.pieces(file, 1, case.piece))
            start, end = todo[0]
            file.pwrite(case.payload[start:end], start)
            os.write(notify, b"w")
            os.read(go, 1)  # nothing comes: the end of the pipe
            for start, end in todo[1:]:
                file.pwrite(case.payload[start:end], start)

    creator = kills.start(create)
    os.read(ready, 1)
    writer = kills.start(write)
    os.read(ready, 1)
    os.kill(creator, signal.SIGKILL)
    assert kills.killed(kills.wait_for(creator))

    with SharedFile.recover(path) as file:
        assert {cell.rank for cell in file.missing()} == {1, 2}
        with pytest.raises(kvio.BlockExistsError, match="rank 1"):
            file.pwrite(b"x", file.domain(1)[-1].offset)
        os.close(let_go)
        with SharedFile.open(path, 2) as other:
            kills.write_missing(other, 2, case.payload)
        file.seal(timeout=LONG_S)
        kills.end_well([writer])
    for fd in (ready, notify, go):
        os.close(fd)
    assert kills.check_name(path, case.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(path)


def test_after_an_abort_every_call_of_others_fails(case: Case, disk_path: Path) -> None:
    """Nothing is left in the directory, and a writer that goes on learns that it was aborted."""
    path = disk_path / "f"
    ready, notify = os.pipe()
    go, let_go = os.pipe()

    def write() -> None:
        os.close(let_go)
        file = SharedFile.open(path, 1)
        (start, end), *rest = kills.pieces(file, 1, case.piece)
        file.pwrite(case.payload[start:end], start)
        os.write(notify, b"w")
        os.read(go, 1)
        start, end = rest[0]
        with pytest.raises(kvio.StoreClosedError, match="was aborted"):
            file.pwrite(case.payload[start:end], start)
        with pytest.raises(kvio.StoreClosedError, match="was aborted"):
            file.submit_pwrite(case.payload[start:end], start).result()
        with pytest.raises((kvio.StoreClosedError, kvio.UnsupportedError)):
            file.seal()
        file.close()
        with pytest.raises(kvio.BlockNotFoundError):
            SharedFile.open(path, 1)

    file = case.create(path)
    writer = kills.start(write)
    os.read(ready, 1)
    file.abort()
    assert os.listdir(disk_path) == []
    os.close(let_go)
    kills.end_well([writer])
    with pytest.raises(kvio.StoreClosedError):
        file.pwrite(b"x", 0)
    with pytest.raises(kvio.StoreClosedError):
        file.abort()
    for fd in (ready, notify, go):
        os.close(fd)
    kills.whole_life(path, case)


def race(path: Path, racers: int, create: Callable[[int], SharedFile]) -> list[str]:
    """Let processes create one path at the same moment; what each of them met."""
    go, let_go = os.pipe()
    said, say = os.pipe()
    stay, leave = os.pipe()

    def run(number: int) -> None:
        os.close(let_go)
        os.close(leave)
        os.read(go, 1)
        try:
            file = create(number)
        except kvio.BlockExistsError:
            os.write(say, b"exists\n")
            return
        except kvio.KvioError as exc:
            os.write(say, f"{type(exc).__name__} {exc}\n".encode()[:400])
            return
        os.write(say, b"won\n")
        os.read(stay, 1)
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)
        kills.write_missing(file, None, kills.pattern(file.size))
        file.seal()

    pids = [kills.start(lambda number=number: run(number)) for number in range(racers)]  # type: ignore[misc]
    os.close(let_go)
    os.close(say)
    text = b""
    while text.count(b"\n") < racers and (more := os.read(said, 4096)):
        text += more
    os.close(leave)
    kills.end_well(pids)
    for fd in (go, said, stay):
        os.close(fd)
    return sorted(text.decode().splitlines())


@pytest.mark.parametrize("case", CASES[:6:3], ids=str)
def test_of_creators_of_one_path_exactly_one_wins(case: Case, disk_path: Path) -> None:
    """Whatever they do to each other on the way; the others are notified that the name is taken."""
    for turn in range(20):
        path = disk_path / f"f{turn}"
        outcomes = race(path, 4, lambda number, path=path: case.create(path))  # type: ignore[misc]  # noqa: ARG005
        assert outcomes == ["exists"] * 3 + ["won"], f"turn {turn}"
        assert kills.check_name(path, case.payload)


def test_a_creator_is_not_robbed_of_its_lock(disk_path: Path) -> None:
    """At whichever call it stands while another sweeps: two creators, or one nobody can recover."""
    case = CASES[0]
    path = disk_path / "f"
    ready, notify = os.pipe()
    go, let_go = os.pipe()

    def slow() -> None:
        """Stop between making the map and locking it, for another to sweep."""
        os.close(let_go)
        lock = map_lock

        def slowly(fd: int, byte: int, nbytes: int = 1) -> bool:
            os.write(notify, b".")
            os.read(go, 1)
            return lock(fd, byte, nbytes)

        vars(lifecycle)["lock"] = slowly
        with pytest.raises(kvio.BlockExistsError):
            case.create(path)

    pid = kills.start(slow)
    os.read(ready, 1)
    with case.create(path) as file:
        os.close(let_go)
        kills.end_well([pid])
        kills.write_missing(file, None, case.payload)
        file.seal()
    for fd in (ready, notify, go):
        os.close(fd)
    assert kills.check_name(path, case.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(path)


def test_a_sealed_path_is_not_created_again(disk_path: Path) -> None:
    """It is refused, or replaced whole where that is asked for; until then the old one stands."""
    path, case = disk_path / "f", CASES[0]
    kills.whole_life(path, case)
    with pytest.raises(kvio.BlockExistsError):
        case.create(path)
    other = Case("buffered", "contiguous", 123_456)

    def die_at_rename() -> None:
        with faults.inject("rename", nth=2, error=faults.KILL):
            file = other.create(path, if_exists="replace")
            kills.write_missing(file, None, other.payload)
            file.seal()

    assert kills.killed(kills.in_child(die_at_rename))
    assert kills.check_name(path, case.payload)
    with SharedFile.recover(path) as file:
        file.seal()
    assert kills.check_name(path, other.payload)
    assert sorted(os.listdir(disk_path)) == kills.names_of(path)


def test_the_lost_error_of_a_writer_process_fails_the_seal(case: Case, disk_path: Path) -> None:
    """Its last sync fails and it is gone: the seal names the rank, and there is no file."""
    path = disk_path / "f"

    def work() -> None:
        file = SharedFile.open(path, 1)
        kills.write_domain(file, 1, case)
        with faults.inject("fdatasync", error=errno.EIO), pytest.raises(kvio.StorageError):
            file.close()

    with case.create(path) as file:
        for rank in (0, 2):
            kills.write_domain(file, rank, case)
        assert not kills.killed(kills.in_child(work))
        for _ in range(2):
            with pytest.raises(kvio.StorageError, match="rank 1") as caught:
                file.seal(timeout=LONG_S)
            assert caught.value.errno == errno.EIO
        assert not path.exists()
        file.abort()
    assert os.listdir(disk_path) == []


@pytest.mark.parametrize("end", ["abort", "close", "seal"])
def test_a_thread_that_looks_while_another_ends_it_is_reported_so(
    end: str, disk_path: Path
) -> None:
    """A handle is thread-safe: what it says then is an answer or that it is closed."""
    case = CASES[0]
    errors: list[BaseException] = []

    for turn in range(20):
        path = disk_path / f"f{turn}"
        file = case.create(path)
        kills.write_missing(file, None, case.payload)
        ended = threading.Event()

        def look(file: SharedFile = file, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                try:
                    assert str(file.missing()), file.mode
                    assert f"{file!r} {file.mode} {file.domain(1)} {file.size}"
                except kvio.StoreClosedError:
                    pass
                except Exception as exc:  # noqa: BLE001  # the main thread shows it
                    errors.append(exc)

        lookers = [threading.Thread(target=look) for _ in range(2)]
        for thread in lookers:
            thread.start()
        getattr(file, end)()
        file.close()
        ended.set()
        for thread in lookers:
            thread.join()
    assert errors == []
