"""The suite passes in worlds that lack something, and none of its tests vanishes there."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Final

import pytest

from tests.faults.sizes import FULL, size
from tests.faults.totals import Tally
from tests.faults.without import excuses, probe, worlds
from tests.faults.without.outcomes import STUBBORN
from tests.faults.without.worlds import UID, World
from tests.posix import children

CALLS: Final = (
    *("rename-flags", "openat2", "io-uring", "rwf-flags", "statx", "copy-range"),
    *("cachestat", "sync-range"),
)
_WORLDS: Final = (
    # These are the slice; each of the others lacks a part of what they lack.
    World("O_TMPFILE and newer calls", ("tmpfile", *CALLS)),
    World("proc and AT_EMPTY_PATH", ("empty-path",), proc=False),
    World("root and AT_EMPTY_PATH", ("empty-path",), uid=UID),
    World("a disk: FUSE", place=worlds.fuse),
    World("O_TMPFILE", ("tmpfile",)),
    World("AT_EMPTY_PATH", ("empty-path",)),
    World("links of open files", ("empty-path", "follow")),
    World("newer calls", CALLS),
    World("vectored calls with flags, fallocate", ("vectors2", "fallocate")),
    World("proc", proc=False),
    World("root", uid=UID),
    World("a disk: overlay", place=worlds.overlay),
    World("a disk: tmpfs", place=worlds.memory),
)
#: FUSE takes too long for a slice; media that hang are FUSE's there.
WORLDS: Final = _WORLDS[: size(3, len(_WORLDS))]
_SOME: Final = (
    "tests/test_conformance.py::TestPosix",
    *("-k", "hybrid-tmpfile-block-visible and not large and not readers and not fork"),
)
_ALL: Final = ("tests/test_conformance.py",)
#: What of the POSIX backend's own tests asks for what a world may lack: its subject is the lack.
_POSIX: Final = (
    "tests/posix",
    *(
        "--ignore",
        "tests/posix/test_fallbacks.py",
        "--ignore",
        "tests/posix/test_syscall_faults.py",
    ),
    *("--ignore", "tests/posix/test_kill.py"),
)
TESTS: Final = (*_ALL, *_POSIX) if FULL else _SOME
pytestmark = pytest.mark.slow


@pytest.fixture
def nosupport(disk_path: Path) -> Path:
    """Build the program that refuses calls."""
    disk_path.chmod(0o755)
    return worlds.build("nosupport.c", disk_path / "nosupport")


@pytest.fixture
def plain(
    tmp_path_factory: pytest.TempPathFactory, nosupport: Path, disk_path: Path
) -> dict[str, str]:
    """Return the outcomes of the plain run, made once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    if shared.name.startswith("popen-"):
        shared = shared.parent
    result = shared / "kvio-plain.json"
    with (shared / "kvio-plain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            work = disk_path / "plain"
            work.mkdir()
            result.write_text(json.dumps(worlds.run(World("nothing"), nosupport, work, TESTS)))
    outcomes: dict[str, str] = json.loads(result.read_text())
    return outcomes


def vanished(world: World, plain: dict[str, str], found: dict[str, str]) -> list[str]:
    """List the tests that passed in the plain world and did not in this one, and why."""
    ended = {test: found.get(test, "not run") for test, was in plain.items() if was == "passed"}
    lost = [
        f"{test}: {now}"
        for test, now in ended.items()
        if now != "passed" and not excuses.excused(world.name, test, now)
    ]
    return [*lost, *(f"{test}: a test of its own" for test in found if test not in plain)]


@pytest.mark.timeout(3300)
@pytest.mark.parametrize(
    "world",
    [pytest.param(world, marks=[pytest.mark.root] * world.needs_root) for world in WORLDS],
    ids=lambda world: world.name,
)
def test_the_suite_passes_without(
    world: World, nosupport: Path, plain: dict[str, str], disk_path: Path, tally: Tally
) -> None:
    """What passes in the plain world passes here, unless the world's lack is the reason."""
    world.check()
    work = disk_path / "work"
    work.mkdir()
    if world.place is None:
        found = worlds.run(world, nosupport, work, TESTS)
    else:
        with world.place(work) as mounted:
            (mounted / "in").mkdir()
            found = worlds.run(world, nosupport, mounted / "in", TESTS)
    passed = sum(end == "passed" for end in found.values())
    skipped = sum(end.startswith("skipped") for end in found.values())
    usual = sum(end == "passed" for end in plain.values())
    failed = len(found) - passed - skipped
    tally.add(tests=passed)
    print(
        f"without {world.name}: {passed} of {usual} passed, {skipped} skipped, "
        f"{failed} failed for want of their own means"
    )

    assert usual > 20
    lost = vanished(world, plain, found)
    assert not lost, f"{len(lost)} tests:\n" + "\n".join(lost[:40])


def test_a_store_without_the_fallback_is_caught(
    nosupport: Path, plain: dict[str, str], disk_path: Path, tally: Tally
) -> None:
    """One that insists on O_TMPFILE fails where there is none: the suite does ask for blocks."""
    tally.add(mutants=1)
    world = World("O_TMPFILE", ("tmpfile",))
    world.check()
    work = disk_path / "work"
    work.mkdir()
    found = worlds.run(world, nosupport, work, _SOME, **{STUBBORN: "1"})
    lost = vanished(world, {test: plain[test] for test in found}, found)

    tally.add(caught=int(bool(lost)))
    assert lost


@pytest.mark.parametrize("refusal", probe.TRIALS)
def test_a_refusal_that_does_not_bite_is_caught(
    refusal: str, nosupport: Path, disk_path: Path, tally: Tally
) -> None:
    """What is refused is not there, and is found where nothing or another call is refused."""
    children.need_seccomp()
    other = "memfd"
    assert worlds.found_there([str(nosupport), refusal], disk_path, [refusal]) == ""
    found = worlds.found_there([str(nosupport), other], disk_path, [refusal])
    if not found:
        pytest.skip(f"this kernel or file system has no {refusal} by itself")

    tally.add(mutants=1, caught=int(found == refusal))
    assert found == refusal
