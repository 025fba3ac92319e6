"""The campaign notices a kvio that is broken: by a lying C library, or in a copy of its sources.

Needs a C compiler (Debian package gcc) for the first, strace for some of them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import kvio
from tests.faults.calls.benches import STORES
from tests.faults.calls.killing import HONEST, VARIANTS
from tests.faults.calls.test_traced import Injection, check_injected, observe, strangers
from tests.faults.calls.tracing import Traced
from tests.faults.calls.trial import BROKEN
from tests.faults.totals import Tally

_ROOT: Final = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library that lies."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (Debian package gcc)")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-O1", "-fPIC", "-shared"]
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def tried(work: Path, names: tuple[str, ...], **env: str) -> tuple[int, str]:
    """Try operations in a process of its own; its status and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.calls.trial", str(work), *names],
        cwd=_ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


class Lie(NamedTuple):
    """What the C library lies about, where that shows, and by which words."""

    name: str
    operations: tuple[str, ...]
    words: str


LIES: Final = (
    Lie("short-writes-are-ignored", ("replace",), r"in unseal|AssertionError"),
    Lie("errors-of-linkat-are-ignored", ("write new, buffered",), r"but it holds nothing"),
    Lie("descriptors-leak", ("write new, buffered",), r"descriptors leaked"),
    Lie("temporaries-are-left", ("write by rename",), r"left behind|left something"),
    Lie("replaced-in-place", ("replace",), r"in unseal|AssertionError"),
)
#: By which operation, and by which words. A durable block is linked where there is a journal alone.
SEEN_BY_STRACE: Final = {
    "nobody-waits-for-the-disk": ("write durable", "fdatasync: the kernel saw 0, the table 1"),
    "directories-are-not-synced": ("write durable", "fsync: the kernel saw 0, the table 1"),
    "a-call-beside-the-table": ("write new, buffered", "access"),
}


def test_nothing_is_noticed_where_nothing_is_broken(shim: Path, disk_path: Path) -> None:
    """With a C library that does not lie the same trials pass: they can pass."""
    names = tuple({name: None for lie in LIES for name in lie.operations})

    assert tried(disk_path, names, LD_PRELOAD=str(shim), KVIO_LIE_NOW="none") == (0, "\n")


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_noticed_by_the_trials(
    lie: Lie, shim: Path, disk_path: Path, tally: Tally
) -> None:
    """A core that ignores, leaks or tears breaks promises that are looked at."""
    status, said = tried(disk_path, lie.operations, LD_PRELOAD=str(shim), KVIO_LIE_NOW=lie.name)
    caught = status == BROKEN and re.search(lie.words, said) is not None
    tally.add(mutants=1, caught=int(caught))

    assert caught, f"not noticed ({status}):\n{said}"


@pytest.mark.parametrize("lie", SEEN_BY_STRACE)
def test_a_lie_is_noticed_by_strace(lie: str, shim: Path, disk_path: Path, tally: Tally) -> None:
    """A core that does not ask the kernel what its table says it asks, or asks more, is noticed."""
    operation, words = SEEN_BY_STRACE[lie]
    traced = Traced(disk_path, LD_PRELOAD=str(shim), KVIO_LIE=lie)
    try:
        if reason := traced.prepare(operation):
            pytest.skip(f"the temporary directory's file system lacks it: {reason}")
        answer, listed = observe(traced, operation)
        found = strangers(operation, listed, answer["calls"])
    finally:
        traced.close()
    caught = any(words in line for line in found)
    tally.add(mutants=1, caught=int(caught))

    assert caught, found


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_sync_whose_failure_is_ignored_is_noticed(
    call: str, shim: Path, disk_path: Path, tally: Tally
) -> None:
    """A core that does not hear what the kernel says of a sync gives a receipt over nothing."""
    (scenario,) = (scenario for scenario in STORES if scenario.name == "write durable")
    lie = f"errors-of-{call}-are-ignored"
    traced = Traced(disk_path, LD_PRELOAD=str(shim), KVIO_LIE=lie)
    try:
        if reason := traced.prepare(scenario.name):
            pytest.skip(f"the temporary directory's file system lacks it: {reason}")
        _, needed = observe(traced, scenario.name)
        found, injected = check_injected(scenario, Injection(call, 1, errno.EIO), traced, needed)
    finally:
        traced.close()
    caught = injected == 1 and any(f"calls of {call} 0 succeeded" in line for line in found)
    tally.add(mutants=1, caught=int(caught))

    assert caught, found


def test_what_a_kill_shows_of_broken_protocols_is_noticed(
    shim: Path, disk_path: Path, tally: Tally
) -> None:
    """Names before bytes, receipts before renames and deletions: seen by the kills, each of them.

    The same kills of what is not broken notice nothing.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.calls.killing", str(disk_path)],
        cwd=_ROOT,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(said, indent=2))
    alarms = {name for name, words in said.items() if words and name.endswith(HONEST)}
    missed = {name for name, words in said.items() if not words and not name.endswith(HONEST)}
    tally.add(mutants=len(VARIANTS), caught=len(VARIANTS) - len(missed))

    assert len(said) == 2 * len(VARIANTS)
    assert not alarms, f"broken, they say, without a lie: {alarms}"
    assert not missed, f"not noticed: {missed}"


class Change(NamedTuple):
    """A line of kvio's sources that is changed in a copy, and what notices it."""

    name: str
    file: str
    before: str
    after: str
    operations: tuple[str, ...]
    words: str


CHANGES: Final = (
    Change(
        "a bounce buffer is not given back",
        "backends/posix/engine.py",
        "self.bounce.give(",
        "(lambda _: None)(",
        ("write new, direct, bounced",),
        "bounce buffer was not given back",
    ),
    Change(
        "a full disk is a matter of permissions",
        "errors.py",
        "(errno.ENOSPC, errno.EDQUOT, errno.EFBIG), StorageFullError",
        "(errno.ENOSPC, errno.EDQUOT, errno.EFBIG), AccessDeniedError",
        ("write durable",),
        "not the right error",
    ),
    Change(
        "a directory's sync may fail",
        "backends/posix/quick.py",
        "    if not answer.status:",
        "    if not answer.status or answer.site == lib.KVIO_SITE_FSYNC_DIR:",
        ("write durable",),
        "success is reported, but of 1 calls of fsync_dir 0 succeeded",
    ),
    Change(
        "a shared file's sync may fail",
        "_native/files.py",
        "    check(lib.kvio_file_sync(current_fault(), fd))",
        "    lib.kvio_file_sync(current_fault(), fd)",
        ("shared file, buffered-contiguous",),
        "sealed over a sync that failed",
    ),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_of_the_sources_is_noticed(change: Change, disk_path: Path, tally: Tally) -> None:
    """A copy of kvio with one broken line does not pass the trials."""
    copy = disk_path / "sources" / "kvio"
    shutil.copytree(Path(kvio.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / change.file
    text = path.read_text()
    assert change.before in text, f"{change.file} has no {change.before!r} any more"
    path.write_text(text.replace(change.before, change.after))
    work = disk_path / "work"
    work.mkdir()
    status, said = tried(work, change.operations, PYTHONPATH=str(copy.parent))
    caught = status == BROKEN and change.words in said
    tally.add(mutants=1, caught=int(caught))

    assert caught, f"not noticed ({status}):\n{said}"
