"""A process killed between any two system calls leaves whole blocks and nothing a sweep misses."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from tests.posix import faultlab
from tests.posix.scenarios import SCENARIOS, Scenario, given

WRITES = tuple(s for s in SCENARIOS if s.new is not None or s.deletes)
#: More calls of one site than any write makes.
MOST_CALLS = 40


def in_child(work: Callable[[], None]) -> int:
    """Run *work* in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def killed(status: int) -> bool:
    """Return whether a child was killed; one that neither died of it nor succeeded is a failure."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed instead of being killed"
    return False


def die_in(scenario: Scenario, root: Path, site: str, nth: int) -> bool:
    """Run a scenario in a child that is killed at a call; False if it never came to that."""

    def work() -> None:
        with scenario.open(root) as store, faults.inject(site, nth=nth, error=faults.KILL):
            scenario.run(store)

    return killed(in_child(work))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def undisturbed(scenario: Scenario, root: Path) -> dict[str, int]:
    """Count a scenario's calls by site, or skip where the file system cannot do it."""
    scenario.arrange(root)
    try:
        store = scenario.open(root)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    with store, faults.inject("read", nth=1 << 30) as fault:
        scenario.run(store)
        return {name: fault.seen[number] for name, number in faults.sites().items()}


def check_after_death(scenario: Scenario, root: Path, where: str) -> int:
    """Whole old or new blocks, temporaries that a sweep removes; the number of those."""
    for key in scenario.keys:
        stored = faultlab.peek(root, key, layout=scenario.layout)
        assert stored in scenario.allowed_after_failure(), f"{where}: a torn block"
    left = faultlab.temporaries(root)
    with kvio.open_store("posix-tmpfile", root=root, layout=_layout(scenario)) as store:
        swept = store.sweep()
        assert sorted(swept) == [str(path) for path in left], f"{where}: the sweep missed some"
        assert not faultlab.temporaries(root), where
        for key in scenario.keys:
            stored = faultlab.peek(root, key, layout=scenario.layout)
            assert store.contains(key) == (stored is not None)
        if scenario.moves:
            check_moved(scenario, root, store, where)
    return len(left)


def check_moved(scenario: Scenario, root: Path, store: kvio.Store, where: str) -> None:
    """The file that was moved is there, or it is the block; moving it again completes it."""
    (key,) = scenario.keys
    file = given(root)
    if file.exists():
        store.write_file(key, file, move=True, if_exists="replace")
        assert not file.exists(), where
        assert faultlab.peek(root, key, layout=scenario.layout) == scenario.new, where
    stored = faultlab.peek(root, key, layout=scenario.layout)
    assert stored in (scenario.new, scenario.standing), where
    assert stored is not None, f"{where}: neither the file nor the block is there"


def _layout(scenario: Scenario) -> kvio.types.Layout:
    return "plain" if scenario.layout == "plain" else "block"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", WRITES, ids=lambda s: s.name)
def test_death_at_any_call_leaves_whole_blocks(
    scenario: Scenario, root: Path, record_property: Callable[[str, object], None]
) -> None:
    """SIGKILL at the n-th call of each site: old or new, whole; leftovers are found by a sweep."""
    deaths = 0
    named = 0

    for site, seen in undisturbed(scenario, root).items():
        for nth in range(1, min(seen, MOST_CALLS) + 1):
            scenario.arrange(root)
            if die_in(scenario, root, site, nth):
                deaths += 1
                named += check_after_death(scenario, root, f"killed at {site} call {nth}")
    record_property("deaths", deaths)
    print(f"{scenario.name}: {deaths} deaths, {named} named temporaries left and swept")

    assert deaths >= 3
    if scenario.options.get("publish") == "rename":
        assert named, "a named temporary must have been left somewhere"


@pytest.mark.parametrize("nth", [1, 2])
def test_an_anonymous_inode_leaves_nothing(root: Path, nth: int) -> None:
    """Killed between writing its bytes and linking its name, a new block leaves no file."""

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("standing", b"here")
            with faults.inject("link", nth=nth, error=faults.KILL):
                store.write_blocks([("k1", b"x" * 70_000), ("k2", b"y" * 70_000)])

    assert killed(in_child(work))
    files = {path.name for path in root.rglob("*") if path.is_file()}
    assert files == {"standing"} | ({"k1"} if nth == 2 else set())


def leave_temporary(root: Path) -> Path:
    """Let a child die between writing a named temporary and renaming it; the temporary."""

    def work() -> None:
        store = kvio.open_store("posix-tmpfile", root=root, options={"publish": "rename"})
        with faults.inject("rename", error=faults.KILL):
            store.write_block("k", b"data")

    assert killed(in_child(work))
    (left,) = faultlab.temporaries(root)
    return left


def test_a_killed_opener_leaves_nothing_a_sweep_misses(root: Path) -> None:
    """What a process that died while probing the root left there is swept too."""
    left = leave_temporary(root)
    probe = left.rename(root / left.name)

    with kvio.open_store("posix-tmpfile", root=root) as store:
        swept = store.sweep()

    assert swept == [str(probe)]
    assert not probe.exists()


def test_a_living_writer_is_not_swept(root: Path) -> None:
    """What a living process of this host wrote lately stays until the process is dead."""
    left = leave_temporary(root)
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    try:
        being_written = faultlab.of_writer(left, pid)
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert store.sweep() == []
            assert being_written.exists()
            os.close(ends[1])
            os.waitpid(pid, 0)
            assert store.sweep() == [str(being_written)]
    finally:
        os.close(ends[0])


def test_another_hosts_temporaries_are_swept_by_age(root: Path) -> None:
    """A writer on another host cannot be asked: only a temporary idle for long is swept."""
    left = leave_temporary(root)
    host = left.name.removeprefix(faultlab.TEMP_MARK).split("-")[0]
    foreign = left.rename(left.with_name(left.name.replace(host, "f" * len(host))))

    with kvio.open_store("posix-tmpfile", root=root) as store:
        assert store.sweep() == []
        assert foreign.exists()
        os.utime(foreign, (1_000_000_000, 1_000_000_000))
        assert store.sweep() == [str(foreign)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"publish": "rename"}], ids=["tmpfile", "rename"])
def test_death_at_a_random_moment_leaves_whole_blocks(root: Path, options: dict[str, str]) -> None:
    """A process that replaces blocks for ever is killed thirty times: every block is whole."""
    versions = [faultlab.pattern(seed, 2_000_000) for seed in range(3)]
    keys = [f"k{i}" for i in range(4)]
    dice = random.Random(7)

    for _ in range(30):
        ends = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ends[0])
            store = kvio.open_store("posix-tmpfile", root=root, options=options)
            while True:
                for version in versions:
                    for key in keys:
                        store.write_block(key, version, if_exists="replace")
                        os.write(ends[1], b".")
        os.close(ends[1])
        for _ in range(dice.randrange(1, 12)):
            os.read(ends[0], 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ends[0])
        for key in keys:
            assert faultlab.peek(root, key) in (None, *versions)
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.sweep()
        assert all(store.verify_block(key).ok for key in store.list_keys())
    assert not faultlab.temporaries(root)
