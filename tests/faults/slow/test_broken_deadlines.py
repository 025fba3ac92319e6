"""A kvio whose deadlines do not hold is noticed: a copy of its sources with one line changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import kvio
from tests.faults import sizes
from tests.faults.totals import Tally

_ROOT: Final = Path(__file__).parents[3]
#: The limit of the child's tests distinguishes a deadline that never fires from one that does.
_LIMIT_S: Final = 12

pytestmark = [pytest.mark.slow, pytest.mark.root]


class Change(NamedTuple):
    """A line that is changed, the test that notices it, by which words, and at which size."""

    name: str
    file: str
    before: str
    after: str
    test: str
    words: str
    full: bool = False


CHANGES: Final = (
    Change(
        "a deadline that never fires",
        "core/calls.py",
        "        if not self._win():\n            return False\n",
        "        return False\n",
        "test_every_call_gives_up_at_its_deadline",
        "Timeout",
    ),
    Change(
        "a deadline that fires too early",
        "core/calls.py",
        "deadline = time.monotonic() + limit",
        "deadline = time.monotonic() + limit / 2",
        "test_every_call_gives_up_at_its_deadline",
        "before its",
    ),
    Change(
        "a deadline that is half a second late",
        "core/calls.py",
        "deadline = time.monotonic() + limit",
        "deadline = time.monotonic() + limit + 0.5",
        "test_every_call_gives_up_at_its_deadline",
        "of many are late",
        full=True,  # a slice judges no time; all of it fails at the second that is late
    ),
    Change(
        "a write that timed out is published",
        "core/calls.py",
        "        self.cancel.request()\n",
        "",
        "test_a_slow_server_is_slow_and_no_more",
        "AssertionError",
    ),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_of_the_sources_is_noticed(change: Change, disk_path: Path, tally: Tally) -> None:
    """The tests of media that hang fail in a copy of kvio with one broken line."""
    copy = disk_path / "sources" / "kvio"
    shutil.copytree(Path(kvio.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / change.file
    text = path.read_text()
    assert change.before in text, f"{change.file} has no {change.before!r} any more"
    path.write_text(text.replace(change.before, change.after, 1))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("--timeout", str(_LIMIT_S), "--timeout-method", "thread"),
            *("--kvio-test-dir", str(disk_path), "-k", change.test, "tests/faults/slow"),
        ],
        cwd=_ROOT,
        env={
            **env,
            "PYTHONPATH": str(copy.parent),
            sizes.VARIABLE: "full" if change.full else "slice",
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[1].startswith(f"{disk_path}/"):  # it may have ended in the middle
            subprocess.run(["umount", "-l", line.split()[1]], check=True)
    said = done.stdout + done.stderr
    if "1 skipped" in said:
        pytest.skip(f"{change.test} is skipped here")
    tally.add(mutants=1)
    caught = done.returncode != 0 and change.words in said
    tally.add(caught=int(caught))

    assert caught, f"not noticed ({done.returncode}):\n{said[-3000:]}"
