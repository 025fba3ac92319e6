"""SIGKILL at every system call: whole blocks, receipts that hold, leftovers that a sweep finds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from tests.faults.calls.benches import STORES
from tests.faults.calls.fault_kinds import counted
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.posix import faultlab
from tests.posix.scenarios import Scenario
from tests.posix.test_kill import check_after_death, in_child, killed
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, Case
from tests.sharedfile.kills.test_calls import LIVES, Life, calls_of, chosen, empty, give_up, go_on

WRITES = tuple(s for s in STORES if s.new is not None or s.deletes)
#: Calls of one site at which a scenario is killed, in all of the campaign.
MOST_CALLS = 40
#: Kills of one scenario, and of one life of a shared file.
KILLS = size(1, 1 << 20)
FILE_KILLS = size(1, 24)
#: Lives of shared files; in a slice some, so that each kind of life comes to its turn.
PLACES = [(life, case) for life in LIVES for case in CASES][:: size(4, 1)]

pytestmark = pytest.mark.slow


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return an empty directory on a disk, where there is one."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


def open_used(scenario: Scenario, root: Path, content: bytes) -> kvio.Store:
    """Open a store and write a block that has its receipt."""
    store = scenario.open(root)
    receipt = store.write_block("receipted", content, if_exists="replace")
    assert receipt.level == scenario.level
    return store


def calls(scenario: Scenario, root: Path) -> list[tuple[str, int]]:
    """List a scenario's calls, as a process makes them that has just opened the store."""
    scenario.arrange(root)
    try:
        with open_used(scenario, root, b"") as store:
            scenario.run(store)  # what a scenario finds, but for the first time, are directories
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    scenario.arrange(root)
    with open_used(scenario, root, b"") as store, counted() as seen:
        scenario.run(store)
        return [
            (site, nth)
            for site, times in seen().items()
            for nth in range(1, min(times, MOST_CALLS) + 1)
        ]


def die(scenario: Scenario, root: Path, site: str, nth: int, lie: str = "none") -> int:
    """Kill a process at a call, and see what it left; how many temporaries that were.

    *lie*: what the broken variants' C library reports, where that is loaded.
    """
    scenario.arrange(root)
    before = faultlab.pattern(nth, 3000 + nth)
    where = f"killed at {site} call {nth}"

    def work() -> None:
        with open_used(scenario, root, before) as store:
            os.environ["KVIO_LIE"] = lie
            with faults.inject(site, nth=nth, error=faults.KILL):
                scenario.run(store)

    assert killed(in_child(work)), f"never came to {site} call {nth}"
    stands = faultlab.peek(root, "receipted", layout=scenario.layout)
    assert stands == before, f"{where}: a receipt given before does not hold"
    left = check_after_death(scenario, root, where)
    with scenario.open(root) as store:
        for key in ("receipted", *scenario.keys):
            stored = faultlab.peek(root, key, layout=scenario.layout)
            assert loaded(store, key) == stored, f"{where}: the next process reads something else"
        ends = scenario.run(store) if not scenario.deletes else {}
        failed = [e for e in ends.values() if isinstance(e, Exception)]
        taken = [e for e in failed if isinstance(e, kvio.BlockExistsError)]
        assert failed == taken, f"{where}: the next process fails: {failed}"
    return left


def loaded(store: kvio.Store, key: str) -> bytes | None:
    """Read a block through a store."""
    try:
        return bytes(store.read_block(key))
    except kvio.BlockNotFoundError:
        return None


@pytest.mark.parametrize("scenario", WRITES, ids=lambda s: s.name)
def test_death_at_a_call_leaves_whole_blocks(scenario: Scenario, root: Path, tally: Tally) -> None:
    """Old or new, whole; what had its receipt before stands; a sweep finds the rest."""
    todo = calls(scenario, root)
    few = random.Random(f"{seed()} {scenario.name}").sample(todo, min(KILLS, len(todo)))
    assert few
    left = sum(die(scenario, root, site, nth) for site, nth in few)
    tally.add(kills=len(few), receipts=len(few), lost=0, torn=0)
    print(f"{scenario.name}: {len(few)} deaths, {left} temporaries left and swept (seed {seed()})")


def die_in_life(
    life: Life, case: Case, path: Path, site: str, nth: int, *, seal: bool, lie: str = "none"
) -> None:
    """Kill a process at a call of a shared file's life, see what it left, and end that."""
    if life.before:
        life.before(path, case)

    def work() -> None:
        os.environ["KVIO_LIE"] = lie
        with faults.inject(site, nth=nth, error=faults.KILL):
            life.live(path, case)

    assert kills.killed(kills.in_child(work)), f"never came to {site} call {nth}"
    kills.check_name(path, case.payload)
    end = go_on if seal else give_up
    said = end(path, case)
    whole = kills.check_name(path, case.payload)
    assert whole == (said != "aborted"), f"killed at {site} call {nth}, {end.__name__}: {said}"
    empty(path.parent)


@pytest.mark.parametrize(("life", "case"), PLACES, ids=lambda one: getattr(one, "name", str(one)))
def test_death_in_the_life_of_a_shared_file(
    life: Life, case: Case, root: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """No torn name; whoever recovers goes on with it, or removes all of it."""
    monkeypatch.setattr("tests.sharedfile.kills.test_calls.KILLS", FILE_KILLS)
    todo = chosen(calls_of(life, case, root), f"{seed()} {life.name} {case}")
    for number, (site, nth) in enumerate(todo):
        die_in_life(life, case, root / "f", site, nth, seal=number % 2 == 1)
    tally.add(kills=len(todo) * (2 if life.before else 1), torn=0)

    assert len(todo) >= min(FILE_KILLS, 6)
