"""The suite passes in worlds that lack something, and none of its tests vanishes there."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Final

import pytest

from tests.faults.sizes import FULL, size
from tests.faults.totals import Tally
from tests.faults.without import worlds
from tests.faults.without.worlds import UID, World

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
_NEWER: Final = r"needs cachestat|needs RWF_DONTCACHE"
#: Reasons for which a test may be skipped that passes in the plain world, by world.
LACKING: Final = {
    "O_TMPFILE and newer": _NEWER,
    "newer calls": _NEWER,
    "root": r"needs root|needs fanotify|losetup|mount",
    "a disk: tmpfs": r"tmpfs has no durable writes|not a disk|tmpfs accepts O_DIRECT",
    "a disk: FUSE": r"fuse|FUSE|needs \d+ GiB",
    "a disk: overlay": r"overlay|needs \d+ GiB",
    "proc": r"needs fanotify|losetup|mount|/proc",
}
#: They look for O_TMPFILE in strace's log; the last counts the inodes of a tmpfs, where a link,
#: which stands in for renameat2's flags, takes one more.
_NAMED: Final = (
    r"test_the_kernel_sees_the_publish_protocol|test_a_descriptor_that_failed_is_never_synced"
    r"|test_exhausted_inodes"
)
#: Tests whose own means a world takes away: not what they test.
SUBJECTS: Final = {
    "O_TMPFILE": _NAMED,
    "links": _NAMED,
    "a disk: FUSE": _NAMED,
    # They list their descriptors by /proc, or read there what the kernel knows of a process.
    "proc": r"descriptor|leak|fork|mountinfo",
}

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
    """Give the outcomes of the plain run, made once for all workers."""
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


def pattern(table: dict[str, str], world: World) -> re.Pattern[str]:
    """Find what a table has for a world; else what nothing matches."""
    found = (text for name, text in table.items() if world.name.startswith(name))
    return re.compile(next(found, r"(?!)"))


def vanished(world: World, plain: dict[str, str], found: dict[str, str]) -> list[str]:
    """List the tests that passed in the plain world and did not in this one, and why."""
    lacking, subject = pattern(LACKING, world), pattern(SUBJECTS, world)
    lost = []
    for test, was in plain.items():
        now = found.get(test, "not run")
        if was != "passed" or now == "passed" or subject.search(test):
            continue
        if not (now.startswith("skipped") and lacking.search(now)):
            lost.append(f"{test}: {now}")
    return [*lost, *(f"{test}: a test of its own" for test in found if test not in plain)]


@pytest.mark.timeout(3300)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
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
    tally.add(states=passed)
    print(f"without {world.name}: {passed} of {usual} passed, {skipped} skipped")

    assert usual > 20
    lost = vanished(world, plain, found)
    assert not lost, f"{len(lost)} tests:\n" + "\n".join(lost[:40])
