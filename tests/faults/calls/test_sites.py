"""Every system call site, in every operation, fails in every way: the table is complete."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from tests.faults.calls.benches import BENCHES, AnyBench
from tests.faults.calls.fault_kinds import every_cell, every_fault, faults_at, kind_of
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally
from tests.posix import faultlab
from tests.posix.test_syscall_faults import KINDS, BrokenPromiseError, Fault
from tests.sharedfile import test_faults as lives

#: Faults of one operation in a slice, drawn at random; and all of them.
FAULTS = size(8, 1 << 20)
#: Calls of one site that fail one by one; beyond them only the last.
CALLS = 12


@pytest.fixture(autouse=True)
def _all_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check of shared files know the errors that its own tests leave out."""
    for error, kind in KINDS.items():
        monkeypatch.setitem(lives.KINDS, error, kind)


@pytest.fixture
def root(disk_path: Path) -> Path:
    """Return an empty directory on a disk, where there is one."""
    return make_root(disk_path, "root")


def make_root(parent: Path, name: str) -> Path:
    """Make a directory that a store takes as its root."""
    path = parent / name
    path.mkdir(mode=0o700)
    return path


def try_all(bench: AnyBench, name: str, root: Path, todo: Iterator[Fault]) -> Iterator[Fault]:
    """Yield the faults that came to pass; fail with all promises that were broken."""
    problems = []
    for fault in todo:
        try:
            fired = bench.trial(fault)
        except (BrokenPromiseError, AssertionError, kvio.KvioError, OSError) as exc:
            problems.append(f"{fault}: {str(exc) or exc!r:.300}")
            bench.close()
            for temporary in faultlab.temporaries(root):
                temporary.unlink()
            bench = BENCHES[name](root)
        else:
            if fired:
                yield fault
    bench.close()
    assert not problems, f"{name}: {len(problems)} promises broken:\n" + "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_a_call_that_fails_costs_the_operation_at_most(name: str, root: Path, tally: Tally) -> None:
    """Whatever call fails in whatever way: truth, a typed error, no leak, and the next works."""
    try:
        bench = BENCHES[name](root)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    todo = list(every_fault(bench.calls(), CALLS))
    if len(todo) > FAULTS:
        todo = random.Random(f"{seed()} {name}").sample(todo, FAULTS)
    fired = list(try_all(bench, name, root, iter(todo)))
    tally.add(faults=len(fired), torn=0, lost=0)
    print(f"{name}: {len(fired)} of {len(todo)} faults came to pass (seed {seed()})")

    missed = [str(fault) for fault in todo if fault not in fired]
    assert not missed, f"did not come to pass: {missed}"


def table(disk_path: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Count the calls of every operation by site, and say which the file system cannot do."""
    counts, skipped = {}, []
    for number, (name, make) in enumerate(BENCHES.items()):
        try:
            bench = make(make_root(disk_path, f"t{number}"))
        except kvio.UnsupportedError as exc:
            skipped.append(f"{name}: {exc}")
            continue
        counts[name] = bench.calls()
        bench.close()
    return counts, skipped


def printed(counts: dict[str, dict[str, int]]) -> str:
    """Lay out the table of sites and operations."""
    sites = list(faults.sites())
    width = max(map(len, counts))
    lines = [
        " " * width + "".join(f"{number:4d}" for number in range(1, len(sites) + 1)),
        *(
            f"{name:{width}}" + "".join(f"{seen[site] or '.':>4}" for site in sites)
            for name, seen in counts.items()
        ),
        *(
            f"{number:4d} {site}: in {sum(bool(seen[site]) for seen in counts.values())}"
            for number, site in enumerate(sites, 1)
        ),
    ]
    return "\n".join(lines)


@pytest.mark.slow
def test_every_site_fails_in_every_way(disk_path: Path, tally: Tally) -> None:
    """No site is left out by the operations, and no cell of sites and faults stays empty."""
    counts, skipped = table(disk_path)
    print(printed(counts))
    reached = {site for seen in counts.values() for site, calls in seen.items() if calls}
    missed = set(faults.sites()) - reached
    if missed and skipped:
        pytest.skip(f"sites {sorted(missed)} need what this file system lacks: {skipped}")
    assert not missed, f"no operation of the campaign passes through {sorted(missed)}"
    cells = set()
    for site in faults.sites():
        # The one with the fewest calls passes there most surely, and is fast.
        name = min(
            (name for name, seen in counts.items() if seen[site]),
            key=lambda name: sum(counts[name].values()),
        )
        root = make_root(disk_path, f"c-{site}")
        bench = BENCHES[name](root)
        cells |= {(site, kind_of(f)) for f in try_all(bench, name, root, faults_at(site, 1))}
    tally.add(sites=len(reached), faults=len(cells))
    print(f"{len(cells)} of {len(every_cell())} cells; all operations: {FULL}")

    assert cells == every_cell()
