"""A process killed between any two steps of a shared file leaves no torn name.

A few calls of each kind of life; KVIO_KILLS=1000 kills at that many of each, or at all there are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvio
from kvio._native import faults
from kvio.sharedfile import SharedFile
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, Case

KILLS = int(os.environ.get("KVIO_KILLS", "4"))
_SEED = int(os.environ.get("KVIO_KILLS_SEED", "1"))

pytestmark = pytest.mark.slow


class Life(NamedTuple):
    """What the process does that is killed, and what another did before it."""

    name: str
    live: Callable[[Path, Case], None]
    before: Callable[[Path, Case], None] | None = None


LIVES = (
    Life("create-write-seal", kills.whole_life),
    Life("create-write-abort", kills.short_life),
    Life("recover-write-seal", kills.second_life, before=kills.leave_half),
)


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return an empty directory."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


def calls_of(life: Life, case: Case, root: Path) -> list[tuple[str, int]]:
    """Count a life's calls by site, undisturbed; each once."""
    refusal = kills.need_direct(case, root)
    if refusal:
        pytest.skip(f"the temporary directory's file system lacks it: {refusal}")
    path = root / "f"
    if life.before:
        life.before(path, case)
    with faults.inject("read", nth=1 << 30) as fault:
        life.live(path, case)
        seen = {name: fault.seen[number] for name, number in faults.sites().items()}
    empty(root)
    return [(site, nth) for site, times in seen.items() for nth in range(1, times + 1)]


def empty(root: Path) -> None:
    """Remove what a life left."""
    for path in root.iterdir():
        path.unlink()


def chosen(calls: list[tuple[str, int]], seed: str) -> list[tuple[str, int]]:
    """Choose calls to be killed at: those that are rare first, for there steps change."""
    dice = random.Random(f"{_SEED} {seed}")
    writes = [call for call in calls if call[0] == "write"]
    others = [call for call in calls if call[0] != "write"]
    few = min(KILLS, len(calls))
    share = min(len(others), max(few - len(writes), -(-few * 2 // 3)))
    return dice.sample(others, share) + dice.sample(writes, few - share)


def go_on(path: Path, case: Case) -> str:
    """Do what is left to do after a death: go on and seal, or begin anew."""
    try:
        file = SharedFile.recover(path)
    except kvio.BlockNotFoundError:
        assert os.listdir(path.parent) == [], "there was something"
        kills.whole_life(path, case)
        return "begun anew"
    with file:
        if file.mode is None:
            return "sealed already"
        assert not path.exists(), "it can be read while it is written"
        kills.write_missing(file, None, case.payload)
        file.seal()
    return "went on"


def give_up(path: Path, case: Case) -> str:
    """Remove what there is after a death; nothing but a sealed file may be left."""
    try:
        with SharedFile.recover(path) as file:
            sealed = file.mode is None
            if not sealed:
                file.abort()
    except kvio.BlockNotFoundError:
        sealed = False
    assert sorted(os.listdir(path.parent)) == (kills.names_of(path) if sealed else [])
    assert kills.check_name(path, case.payload) == sealed
    return "sealed already" if sealed else "aborted"


def ends() -> Iterator[Callable[[Path, Case], str]]:
    """Yield what to do after each death, in turn."""
    while True:
        yield go_on
        yield give_up


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_death_at_any_call_tears_nothing(life: Life, case: Case, root: Path) -> None:
    """SIGKILL at the n-th call of each site: no torn name, and recover and abort do their work."""
    path = root / "f"
    outcomes: dict[str, int] = {}
    deaths = 0
    seed = f"{life.name} {case}"

    for (site, nth), end in zip(chosen(calls_of(life, case, root), seed), ends(), strict=False):
        if life.before:
            life.before(path, case)

        def work(site: str = site, nth: int = nth) -> None:
            with faults.inject(site, nth=nth, error=faults.KILL):
                life.live(path, case)

        assert kills.killed(kills.in_child(work)), f"never came to {site} call {nth}"
        deaths += 1
        where = f"killed at {site} call {nth}, then {end.__name__}"
        try:
            kills.check_name(path, case.payload)
            said = end(path, case)
            assert kills.check_name(path, case.payload) == (said != "aborted")
            assert sorted(os.listdir(root)) == kills.names_of(path)
        except (AssertionError, kvio.KvioError) as exc:
            exc.add_note(where)
            raise
        outcomes[said] = outcomes.get(said, 0) + 1
        empty(root)
    print(f"{seed}: {deaths} deaths: {outcomes}")
    assert deaths >= min(KILLS, 4)
