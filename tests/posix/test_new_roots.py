"""A root that a durable store makes is durable itself: its own name is synced, before any block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.posix import strace
from tests.posix.strace import where

_TRACED: Final = "mkdir,mkdirat,linkat,renameat2,fsync"
_SCRIPT: Final = """
import sys, kvio
with kvio.open_store(
    "posix-tmpfile", root=sys.argv[1], durability=sys.argv[2], options={"create": True}
) as store:
    store.write_block("k", b"x" * 9000)
"""


def traced(root: Path, durability: str) -> list[str]:
    """Let a child make a root and write a block; the calls that name things and sync them."""
    log = root.parents[1] / "trace"
    command = strace.command(log, "-y", "-e", f"trace={_TRACED}")
    done = subprocess.run(
        [*command, sys.executable, "-c", _SCRIPT, str(root), durability],
        capture_output=True,
        text=True,
    )
    if "UnsupportedError" in done.stderr:
        pytest.skip(f"the file system is not durable: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.parametrize("durability", ["durable", "visible"])
def test_a_new_root_is_synced_in_its_parent(real_disk: Path, durability: str) -> None:
    """After it is made and before the first block has a name; a store that promises less waits not.

    So is what was missing above it.

    Fails where the sync is left out: the root could be lost with all its durable blocks.
    """
    lines = traced(real_disk / "above" / "root", durability)
    named = where(lines, r'(linkat|renameat2)\(.*"k"')
    assert named
    for parent, name in ((real_disk, "above"), (real_disk / "above", "root")):
        path = re.escape(str(parent))
        made = where(lines, rf'mkdir(at)?\(.*"{path}/{name}"')
        synced = where(lines, rf"fsync\(\d+<{path}>\) *= 0")
        assert len(made) == 1
        if durability == "visible":
            assert not synced
        else:
            assert synced, f"the name of the new {name} is never synced"
            assert made[0] < synced[0] < named[0]
