"""A broken protocol is broken in what its name says, and in nothing else; seen by strace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.faults import mutants

#: Publish a file in each of both ways: anonymous and linked, named and renamed.
_PROGRAM: Final = """
import os, sys
directory = os.open(sys.argv[1], os.O_RDONLY)
file = os.open(sys.argv[1], os.O_TMPFILE | os.O_WRONLY, 0o600)
os.write(file, b"bytes")
os.fdatasync(file)
os.link(f"/proc/self/fd/{file}", "linked", dst_dir_fd=directory, follow_symlinks=True)
os.fsync(directory)
file = os.open(".kvio-tmp-1", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory)
os.write(file, b"bytes")
os.fdatasync(file)
os.rename(".kvio-tmp-1", "renamed", src_dir_fd=directory, dst_dir_fd=directory)
os.fsync(directory)
"""
_LINK: Final = ["sync", "link", "sync directory"]
_RENAME: Final = ["sync", "rename", "sync directory"]
#: What the kernel is asked to do, by variant; the empty one is no variant at all.
_DOES: Final = {
    "": [*_LINK, *_RENAME],
    "no_directory_sync": ["sync", "link", "sync", "rename"],
    "no_file_sync": ["link", "sync directory", "rename", "sync directory"],
    "rename_without_sync": [*_LINK, "rename", "sync directory"],
    "no_sync": ["link", "rename"],
    "link_before_sync": ["link", "sync", "sync directory", "rename", "sync", "sync directory"],
    "retry_failed_sync": [*_LINK, *_RENAME],
}
_WORDS: Final = {"fdatasync": "sync", "linkat": "link", "fsync": "sync directory"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the broken protocols."""
    return mutants.build(tmp_path_factory.mktemp("mutants"))


def calls(library: Path, variant: str, directory: Path, *injected: str) -> list[str]:
    """List what the kernel is asked to do about files of a directory."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    preload = mutants.environment(library, variant) if variant else {}
    trace = directory / "trace"
    root = directory / "root"
    root.mkdir()
    asked = "trace=fsync,fdatasync,linkat,rename,renameat,renameat2"
    command = ["strace", "-qq", "-y", "-o", str(trace), "-e", asked, *injected]
    command += [f"-E{name}={value}" for name, value in preload.items()]
    command += [sys.executable, "-c", _PROGRAM, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace is not allowed to trace here: {done.stderr.strip():.200}")
    assert done.returncode == 0 or injected, done.stderr
    lines = [line for line in trace.read_text().splitlines() if str(root) in line]
    names = [re.match(r"\w+", line) for line in lines]
    return [_WORDS.get(name[0], "rename") for name in names if name]


@pytest.mark.slow
@pytest.mark.parametrize("variant", _DOES, ids=lambda name: name or "none")
def test_a_variant_breaks_what_it_says(variant: str, library: Path, real_disk: Path) -> None:
    """Syncs are left out or moved, and everything else is as without the library."""
    assert calls(library, variant, real_disk) == _DOES[variant]


@pytest.mark.slow
def test_a_failed_sync_is_made_again(library: Path, real_disk: Path) -> None:
    """The first sync fails: the program hears of it, unless it is made a second time."""
    injected = ("-e", "inject=fdatasync:error=EIO:when=1")
    trusted = calls(library, "retry_failed_sync", real_disk, *injected)

    assert trusted == ["sync", *_DOES[""]]


def test_a_misspelt_variant_runs_nothing(library: Path) -> None:
    """A variant that does not exist would be a mutant that nobody can catch."""
    preload = {"LD_PRELOAD": str(library), mutants.VARIABLE: "no_such"}
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        env={**os.environ, **preload},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "no_such" in done.stderr
