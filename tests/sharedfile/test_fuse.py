"""Shared files whose names are given by links, also on FUSE servers where each is an inode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile, lifecycle
from kvio.sharedfile.names import Names
from kvio.sharedfile.state import SharedState
from tests.faults.without import passthrough
from tests.posix import children, mounts, strace
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, WRITERS, Case
from tests.sharedfile.kills.test_calls import LIVES, Life, calls_of, empty, ends
from tests.sharedfile.test_processes import race

LONG_S = 60.0
#: No FUSE server promises what is durable. Hybrid chooses one of the other modes.
VISIBLE = tuple(
    replace(case, options={**case.options, "durability": "visible"})
    for case in CASES
    if case.mode != "hybrid"
)
BUFFERED = VISIBLE[0]

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(params=["bindfs", "passthrough", "disk"])
def place(request: pytest.FixtureRequest, disk_path: Path) -> Iterator[Path]:
    """Yield a directory where names go by links: one inode for each name, or one for all."""
    children.need_seccomp()
    if request.param == "bindfs":
        with mounts.bindfs(disk_path) as root:
            yield root
    elif request.param == "passthrough":
        with passthrough.mounted(disk_path) as mount:
            yield mount.path
    else:
        yield disk_path


def without_flags(work: Callable[[], None]) -> None:
    """Run *work* in a child whose renames take no flags, and see it end well."""

    def refused() -> None:
        children.refuse((children.NO_RENAME_FLAGS,))
        work()

    assert not kills.killed(kills.in_child(refused))


def write_rank(path: Path, rank: int, case: Case) -> None:
    """Write one rank as a process does."""
    with SharedFile.open(path, rank) as file:
        kills.write_domain(file, rank, case)


@pytest.mark.parametrize("case", VISIBLE, ids=str)
def test_processes_write_side_by_side(place: Path, case: Case) -> None:
    """Every rank joins and counts for the handle that seals; one is killed, and followed."""
    path = place / "f"

    def work() -> None:
        with case.create(path) as file:

            def die() -> None:
                with SharedFile.open(path, 1) as writer:
                    start, end = next(kills.pieces(writer, 1, case.piece))
                    writer.pwrite(case.payload[start:end], start)
                    os.kill(os.getpid(), signal.SIGKILL)

            assert kills.killed(kills.in_child(die))
            pids = [
                kills.start(lambda rank=rank: write_rank(path, rank, case))  # type: ignore[misc]
                for rank in range(WRITERS)
                if rank != 1
            ]
            with SharedFile.open(path, 1) as again:
                with pytest.raises(kvio.BlockExistsError):
                    SharedFile.open(path, 1)
                kills.write_missing(again, 1, case.payload)
            file.seal(timeout=LONG_S)
            kills.end_well(pids)
            assert sorted(os.listdir(place)) == kills.names_of(path)  # though the handle is open

    without_flags(work)
    assert kills.check_name(path, case.payload)


def test_what_the_dead_left_is_gone_on_with(place: Path) -> None:
    """The creator dies in every mode and layout; a recovery seals what it left."""

    def work() -> None:
        for case in VISIBLE:
            path = place / str(case)
            kills.leave_half(path, case)
            kills.second_life(path, case)
            assert kills.check_name(path, case.payload)
            kills.remove(path)

    without_flags(work)
    assert os.listdir(place) == []


def test_of_creators_of_one_path_exactly_one_wins(place: Path) -> None:
    """The others raise BlockExistsError."""

    def work() -> None:
        for turn in range(10):
            path = place / f"f{turn}"
            outcomes = race(path, 4, lambda _, path=path: BUFFERED.create(path))  # type: ignore[misc]
            assert outcomes == ["exists"] * 3 + ["won"], f"turn {turn}"
            assert kills.check_name(path, BUFFERED.payload)

    without_flags(work)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_name_that_is_taken_is_replaced_only_on_demand(place: Path, *, replaces: bool) -> None:
    """What came under the path meanwhile stays, and the seal can be tried again without it."""
    path = place / "f"

    def work() -> None:
        with BUFFERED.create(path, if_exists="replace" if replaces else "error") as file:
            kills.write_missing(file, None, BUFFERED.payload)
            path.write_bytes(b"theirs")
            if not replaces:
                with pytest.raises(kvio.BlockExistsError):
                    file.seal()
                assert path.read_bytes() == b"theirs"
                path.unlink()
            file.seal()

    without_flags(work)
    assert kills.check_name(path, BUFFERED.payload)
    assert os.listdir(place) == ["f"]


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_death_at_any_naming_call_tears_nothing(life: Life, place: Path) -> None:
    """SIGKILL at each link, rename and unlink: what is left is gone on with, or goes."""
    path = place / "f"

    def work() -> None:
        calls = calls_of(life, BUFFERED, place)
        naming = [call for call in calls if call[0] in ("link", "rename", "unlink")]
        assert {site for site, _ in naming} == {"link", "rename", "unlink"} or "abort" in life.name
        for (site, nth), end in zip(naming, ends(), strict=False):
            if life.before:
                life.before(path, BUFFERED)

            def die(site: str = site, nth: int = nth) -> None:
                with faults.inject(site, nth=nth, error=faults.KILL):
                    life.live(path, BUFFERED)

            assert kills.killed(kills.in_child(die)), f"never came to {site} call {nth}"
            kills.check_name(path, BUFFERED.payload)
            said = end(path, BUFFERED)
            assert kills.check_name(path, BUFFERED.payload) == (said != "aborted")
            assert sorted(os.listdir(place)) == kills.names_of(path)
            empty(place)

    without_flags(work)


@pytest.mark.parametrize("nth", [1, 2], ids=["of the map", "of the file"])
def test_a_link_whose_rename_fails_is_taken_back(nth: int, place: Path) -> None:
    """Nothing stands under the name, and the same step succeeds when it is done again."""
    path = place / "f"

    def work() -> None:
        with faults.inject("rename", nth=2 * nth, error=5):
            if nth == 1:
                with pytest.raises(kvio.StorageError):
                    BUFFERED.create(path)
                assert os.listdir(place) == []
            with BUFFERED.create(path) as file:
                kills.write_missing(file, None, BUFFERED.payload)
                if nth == 2:
                    with pytest.raises(kvio.StorageError):
                        file.seal()
                    assert not path.exists()
                    return
                file.seal()

    without_flags(work)


#: Makes a file, stopped by strace when the map has its link and has not been renamed yet.
_CREATOR = """
import os, sys
from tests.posix import children
from tests.sharedfile import kills
from tests.sharedfile.test_fuse import BUFFERED
from pathlib import Path
children.refuse((children.NO_RENAME_FLAGS, children.NO_TMPFILE))  # or a probe would link, too
print(os.getpid(), flush=True)
with BUFFERED.create(Path(sys.argv[1])) as file:
    print("made", flush=True)
    sys.stdin.readline()
    kills.write_missing(file, None, BUFFERED.payload)
    file.seal()
"""


class Creator:
    """A process that stands between the link of a new map and the rename that follows it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process, self._pid = process, int(process.stdout.readline())

    def come_to(self, path: Path) -> None:
        """Wait until the map of a file has its link."""
        while not kills.map_of(path).exists():
            assert self._process.poll() is None, "the creator ended"

    def go_on(self) -> None:
        """Let it make the file."""
        assert self._process.stdout is not None
        os.kill(self._pid, signal.SIGCONT)
        assert self._process.stdout.readline() == "made\n"

    def seal(self) -> None:
        """Let it write and seal."""
        self._process.communicate("\n", timeout=LONG_S)
        assert self._process.returncode == 0

    def end(self) -> None:
        """Kill it if it is there."""
        if self._process.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            self._process.communicate()


@contextmanager
def stopped_creator(path: Path, log: Path) -> Iterator[Creator]:
    """Start a process that makes a file, and let it stop halfway."""
    options = ("-e", "trace=linkat", "-e", "inject=linkat:signal=SIGSTOP:when=1")
    with subprocess.Popen(
        [*strace.command(log, *options), sys.executable, "-c", _CREATOR, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        creator = Creator(process)
        try:
            creator.come_to(path)
            yield creator
        finally:
            creator.end()


def test_a_creator_that_is_giving_the_map_its_name_is_left_alone(
    place: Path, tmp_path: Path
) -> None:
    """No other process joins, makes or takes over its file; then it is written and sealed."""
    path = place / "f"
    with stopped_creator(path, tmp_path / "log") as creator:
        with pytest.raises(kvio.BlockNotFoundError, match="not ready"):
            SharedFile.open(path, 0)
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            BUFFERED.create(path)
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)
        creator.go_on()
        SharedFile.open(path, 0).close()
        creator.seal()

    assert kills.check_name(path, BUFFERED.payload)
    assert os.listdir(place) == ["f"]


def test_a_map_that_was_opened_by_its_link_is_opened_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery does not take the file from its creator, which has gone on since."""
    path = place / "f"
    open_map, opened = lifecycle.find_shared_state, list[bool]()
    with stopped_creator(path, tmp_path / "log") as creator:

        def slowly(names: Names) -> SharedState:
            shared = open_map(names)
            if not opened:
                opened.append(True)
                creator.go_on()
            return shared

        monkeypatch.setattr(lifecycle, "find_shared_state", slowly)
        with pytest.raises(kvio.BlockExistsError, match="is being written"):
            SharedFile.recover(path)
        creator.seal()

    assert opened
    assert kills.check_name(path, BUFFERED.payload)
