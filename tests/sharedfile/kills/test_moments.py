"""Processes killed at random moments: no torn name, and what is left can be gone on with.

A few kills each; KVIO_KILLS=200 for many.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kvio
from kvio.sharedfile import SharedFile
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, WRITERS, Case

KILLS = int(os.environ.get("KVIO_KILLS", "3"))
_SEED = int(os.environ.get("KVIO_KILLS_SEED", "1"))

pytestmark = pytest.mark.slow


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, disk_path: Path) -> Case:
    """Return every case that the file system supports."""
    case: Case = request.param
    refusal = kills.need_direct(case, disk_path)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    return case


def kill_at_random(work: Callable[[int], None], dice: random.Random, most: int) -> None:
    """Let *work*, which writes a byte to a pipe now and then, die some bytes and moments later."""
    read_end, write_end = os.pipe()

    def child() -> None:
        os.close(read_end)
        work(write_end)

    pid = kills.start(child)
    os.close(write_end)
    for _ in range(dice.randrange(1, most)):
        os.read(read_end, 1)
    for _ in range(dice.randrange(60_000)):
        pass  # any point of what it does next
    os.kill(pid, signal.SIGKILL)
    kills.killed(kills.wait_for(pid))
    os.close(read_end)


def finish(path: Path, payload: bytes, *, seal: bool) -> str:
    """Deal with what a dead creator left of one file."""
    stood = kills.check_name(path, payload)
    try:
        with SharedFile.recover(path) as file:
            if file.mode is None:
                return "sealed already"
            assert not stood
            if seal:
                kills.write_missing(file, None, payload)
                file.seal()
            else:
                file.abort()
    except kvio.BlockNotFoundError:
        assert not path.exists()
        return "nothing"
    assert kills.check_name(path, payload) == seal
    return "went on" if seal else "aborted"


def sweep_probes(root: Path) -> None:
    """Check that what a creator left that died while probing goes once it is old."""
    for probe in root.glob(".*.kvio-probe.*"):
        os.utime(probe, (1_000_000_000, 1_000_000_000))
        name = probe.name[1:].partition(".kvio-probe")[0]
        with pytest.raises(kvio.BlockNotFoundError):
            SharedFile.recover(root / name)


def test_a_creator_that_is_killed_tears_nothing(case: Case, disk_path: Path) -> None:
    """It makes file after file with threads; each is absent, whole, or can be gone on with."""
    dice = random.Random(f"{_SEED} {case}")
    outcomes: dict[str, int] = {}

    for kill in range(KILLS):
        root = disk_path / str(kill)
        root.mkdir()

        def work(pipe: int, root: Path = root) -> None:
            for number in range(1000):
                with case.create(root / f"f{number}") as file:
                    os.write(pipe, b"c")
                    done = [
                        file.submit_pwrite(case.payload[start:end], start)
                        for rank in range(WRITERS)
                        for start, end in kills.pieces(file, rank, case.piece)
                    ]
                    for future in done:
                        future.result()
                        os.write(pipe, b"w")
                    file.seal()
                    os.write(pipe, b"s")

        kill_at_random(work, dice, 40)
        for number in range(1000):
            path = root / f"f{number}"
            said = finish(path, case.payload, seal=kill % 2 == 0)
            outcomes[said] = outcomes.get(said, 0) + 1
            if said != "sealed already":
                break
        sweep_probes(root)
        sealed = [path for path in root.iterdir() if path.name[0] == "f"]
        whole = sorted(name for path in sealed for name in kills.names_of(path))
        assert sorted(os.listdir(root)) == whole, "something hidden is left"
    print(f"{case}: {KILLS} creators killed: {outcomes}")


def write_slowly(path: Path, case: Case, pipe: int) -> None:
    """Write what rank 1 owes in thirds, saying so each time."""
    with SharedFile.open(path, 1) as writer:
        os.write(pipe, b"o")
        for _, offset, nbytes in writer.missing(1):
            middle = offset + nbytes // 3
            for start, end in ((offset, middle), (middle, offset + nbytes)):
                writer.pwrite(case.payload[start:end], start)
                os.write(pipe, b"w")
    os.write(pipe, b"e")


def seal_once_whole(file: SharedFile, path: Path, case: Case) -> bool:
    """Seal a file to which nothing is owed any more, and check it."""
    assert not path.exists()
    if file.missing():
        return False
    file.seal()
    file.close()
    assert kills.check_name(path, case.payload)
    kills.remove(path)
    return True


def test_the_rank_of_a_writer_that_is_killed_goes_on(case: Case, disk_path: Path) -> None:
    """Writer after writer of one rank dies; the next goes on, and every file ends whole."""
    dice = random.Random(f"{_SEED} {case} writers")
    path = disk_path / "f"
    sealed = owed = 0

    file: SharedFile | None = None
    for _ in range(KILLS):
        if file is None:
            file = case.create(path)
            for rank in (0, 2):
                kills.write_domain(file, rank, case)
        kill_at_random(lambda pipe: write_slowly(path, case, pipe), dice, 4)
        if seal_once_whole(file, path, case):
            file, sealed = None, sealed + 1
    if file is not None:
        with SharedFile.open(path, 1) as last:
            owed = kills.write_missing(last, 1, case.payload)
        assert seal_once_whole(file, path, case)
    print(f"{case}: {KILLS} writers killed, {sealed} files whole, {owed} bytes left to the last")
    assert os.listdir(disk_path) == []
