"""SIGKILL at every system call: whole blocks, receipts that hold, leftovers that a sweep finds."""

from __future__ import annotations

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
    """Give an empty directory on a disk, where there is one."""
    path = disk_path / "root"
    path.mkdir(mode=0o700)
    return path


def calls(scenario: Scenario, root: Path) -> list[tuple[str, int]]:
    """List a scenario's calls, as a process makes them that has just opened the store."""
    scenario.arrange(root)
    try:
        store = scenario.open(root)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's medium lacks it: {exc}")
    with store, counted() as seen:
        scenario.run(store)
        return [
            (site, nth)
            for site, times in seen().items()
            for nth in range(1, min(times, MOST_CALLS) + 1)
        ]


@pytest.mark.parametrize("scenario", WRITES, ids=lambda s: s.name)
def test_death_at_a_call_leaves_whole_blocks(scenario: Scenario, root: Path, tally: Tally) -> None:
    """Old or new, whole; what had its receipt before stands; a sweep finds the rest."""
    todo = calls(scenario, root)
    deaths = left = 0
    durable = "durable" if scenario.options.get("durability") == "durable" else "visible"
    for site, nth in random.Random(f"{seed()} {scenario.name}").sample(todo, min(KILLS, len(todo))):
        scenario.arrange(root)
        before = faultlab.pattern(nth, 3000 + nth)

        def work(site: str = site, nth: int = nth, before: bytes = before) -> None:
            with scenario.open(root) as store:
                receipt = store.write_block("receipted", before, if_exists="replace")
                assert receipt.level == durable
                with faults.inject(site, nth=nth, error=faults.KILL):
                    scenario.run(store)

        if not killed(in_child(work)):
            continue
        deaths += 1
        where = f"killed at {site} call {nth}"
        stands = faultlab.peek(root, "receipted", layout=scenario.layout)
        assert stands == before, f"{where}: a receipt given before does not hold"
        left += check_after_death(scenario, root, where)
        with scenario.open(root) as store:
            ends = scenario.run(store) if not scenario.deletes else {}
            failed = [e for e in ends.values() if isinstance(e, Exception)]
            taken = [e for e in failed if isinstance(e, kvio.BlockExistsError)]
            assert failed == taken, f"{where}: the next process fails: {failed}"
    tally.add(kills=deaths, receipts=deaths, lost=0, torn=0)
    print(f"{scenario.name}: {deaths} deaths, {left} temporaries left and swept (seed {seed()})")

    assert deaths >= min(KILLS, len(todo)) // 2


@pytest.mark.parametrize(("life", "case"), PLACES, ids=lambda one: getattr(one, "name", str(one)))
def test_death_in_the_life_of_a_shared_file(
    life: Life, case: Case, root: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """No torn name; whoever recovers goes on with it, or removes all of it."""
    monkeypatch.setattr("tests.sharedfile.kills.test_calls.KILLS", FILE_KILLS)
    path = root / "f"
    deaths = 0
    todo = chosen(calls_of(life, case, root), f"{seed()} {life.name} {case}")
    for site, nth in todo:
        if life.before:
            life.before(path, case)

        def work(site: str = site, nth: int = nth) -> None:
            with faults.inject(site, nth=nth, error=faults.KILL):
                life.live(path, case)

        assert kills.killed(kills.in_child(work)), f"never came to {site} call {nth}"
        deaths += 1
        kills.check_name(path, case.payload)
        end = (go_on, give_up)[deaths % 2]
        said = end(path, case)
        whole = kills.check_name(path, case.payload)
        assert whole == (said != "aborted"), f"killed at {site} call {nth}, {end.__name__}: {said}"
        empty(root)
    tally.add(kills=deaths + bool(life.before) * deaths, torn=0)

    assert deaths == len(todo) >= min(FILE_KILLS, 6)
