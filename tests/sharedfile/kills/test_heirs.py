"""Who may take over a file: one, when its creator is gone, and nobody who does not own it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile
from tests.posix.children import become, need_root
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES

BUFFERED = CASES[0]
ODD = next(case for case in CASES if str(case) == "buffered-odd-sizes")


def test_it_is_refused_while_the_creator_lives(disk_path: Path) -> None:
    """In this process and in others; the creator's file is not touched by it."""
    path = disk_path / "f"
    with BUFFERED.create(path) as file:
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)

        def work() -> None:
            with pytest.raises(kvio.BlockExistsError, match="is being written"):
                SharedFile.recover(path)

        assert not kills.killed(kills.in_child(work))
        kills.write_missing(file, None, BUFFERED.payload)
        file.seal()
    assert kills.check_name(path, BUFFERED.payload)


def test_one_of_two_recoverers_takes_over(disk_path: Path) -> None:
    """The other is notified that the file is being written."""
    path = disk_path / "f"
    kills.leave_half(path, BUFFERED)
    with SharedFile.recover(path) as file:
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)
        file.abort()
    assert os.listdir(disk_path) == []


@pytest.mark.slow
def test_of_many_recoverers_one_takes_over(disk_path: Path) -> None:
    """The others are notified that it is being written, or find it sealed; it is sealed once."""
    for turn in range(10):
        path = disk_path / f"f{turn}"
        kills.leave_half(path, BUFFERED)
        go, let_go = os.pipe()

        def work(path: Path = path, go: int = go, let_go: int = let_go) -> None:
            os.close(let_go)
            os.read(go, 1)
            try:
                file = SharedFile.recover(path)
            except kvio.BlockExistsError:
                return
            with file:
                if file.mode is not None:
                    kills.write_missing(file, None, BUFFERED.payload)
                    file.seal()
                    path.with_name(f"{path.name}-by-{os.getpid()}").touch(exist_ok=False)

        pids = [kills.start(work) for _ in range(4)]
        os.close(let_go)
        kills.end_well(pids)
        os.close(go)
        assert kills.check_name(path, BUFFERED.payload)
        assert len(list(disk_path.glob(f"f{turn}-by-*"))) == 1
    assert not [name for name in os.listdir(disk_path) if name.startswith(".")]


def test_a_child_does_not_keep_its_dead_parents_locks(disk_path: Path) -> None:
    """A creator's forked child lives on: the file can be taken over all the same."""
    path = disk_path / "f"
    stay, leave = os.pipe()
    said, say = os.pipe()

    def create() -> None:
        file = BUFFERED.create(path)
        kills.write_domain(file, 0, BUFFERED)
        if os.fork() == 0:
            os.close(leave)
            with pytest.raises(kvio.StoreClosedError, match="parent"):
                file.pwrite(b"x", 0)
            os.write(say, b"r")
            os.read(stay, 1)
            os._exit(0)
        os.read(said, 1)
        os.kill(os.getpid(), 9)

    assert kills.killed(kills.in_child(create))
    with SharedFile.recover(path) as file:
        assert kills.write_missing(file, None, BUFFERED.payload) < BUFFERED.size
        file.seal()
    for fd in (stay, leave, said, say):
        os.close(fd)
    assert kills.check_name(path, BUFFERED.payload)


def test_a_child_that_ends_leaves_its_parents_file_alone(disk_path: Path) -> None:
    """Neither its locks nor its names go with the child; the parent seals."""
    path = disk_path / "f"
    with BUFFERED.create(path) as file:
        kills.write_domain(file, 0, BUFFERED)

        def leave() -> None:
            with pytest.raises(kvio.StoreClosedError):
                file.abort()
            file.close()

        assert not kills.killed(kills.in_child(leave))
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)
        kills.write_missing(file, None, BUFFERED.payload)
        file.seal()
    assert kills.check_name(path, BUFFERED.payload)


@pytest.mark.root
@pytest.mark.parametrize("site", ["rename", "fsync_dir"])
def test_who_is_not_root_recovers_what_is_read_only(site: str, disk_path: Path) -> None:
    """Killed after the file was made read-only, a seal can be done again by its owner."""
    need_root()
    path = disk_path / "f"
    disk_path.chmod(0o777)

    def seal_and_die() -> None:
        become(65534)
        nth = 2 if site == "rename" else 1
        with faults.inject(site, nth=nth, error=faults.KILL):
            kills.whole_life(path, ODD)

    def go_on() -> None:
        become(65534)
        with SharedFile.recover(path) as file:
            if file.mode is not None:
                assert file.missing() == []
                file.seal()
        assert kills.check_name(path, ODD.payload)
        assert sorted(os.listdir(disk_path)) == kills.names_of(disk_path / "f")

    assert kills.killed(kills.in_child(seal_and_die))
    assert not kills.killed(kills.in_child(go_on))


@pytest.mark.root
def test_another_users_file_is_left_alone(disk_path: Path) -> None:
    """Neither written nor recovered nor removed by whoever else may write to the directory."""
    need_root()
    path = disk_path / "f"
    disk_path.chmod(0o777)
    kills.leave_half(path, BUFFERED)

    def meddle() -> None:
        become(65534)
        refused = (kvio.AccessDeniedError, kvio.BlockExistsError)
        with pytest.raises(refused):
            SharedFile.recover(path)
        with pytest.raises(refused):
            SharedFile.open(path, 0)
        with pytest.raises(refused):
            BUFFERED.create(path)

    assert not kills.killed(kills.in_child(meddle))
    kills.second_life(path, BUFFERED)
    assert kills.check_name(path, BUFFERED.payload)
