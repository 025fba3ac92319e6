"""Worlds that lack something, and running tests in them in a process of its own.

Needs a C compiler (Debian package gcc); root, FUSE (libfuse3-dev, fuse3) or overlayfs for some.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.faults.without import passthrough
from tests.faults.without.outcomes import FILESYSTEM, VARIABLE
from tests.media import filesystem_of
from tests.posix import children

_ROOT: Final = Path(__file__).parents[3]
#: Nobody in particular.
UID: Final = 1000
#: What others mounted on loop devices is let go of, or it would stay in use.
_NO_PROC: Final = (
    "mount --make-rprivate /; "
    "awk '$0 ~ / - [^ ]+ \\/dev\\/loop/ { print $5 }' /proc/self/mountinfo "
    "| xargs -r -n 1 umount -l; "
    'umount -l /proc; exec "$@"'
)


class World(NamedTuple):
    """What is missing, and how a program is run there.

    Attributes:
        refusals: what `nosupport.c` refuses.
        place: where the files are, if not on the disk: a context around a directory.
        uid: who runs it.
        proc: /proc is there.
    """

    name: str
    refusals: tuple[str, ...] = ()
    place: Callable[[Path], AbstractContextManager[Path]] | None = None
    uid: int = 0
    proc: bool = True

    def command(self, nosupport: Path) -> list[str]:
        """Return what comes before a program's own command."""
        before = []
        if not self.proc:
            before += ["unshare", "-m", "sh", "-ec", _NO_PROC, "sh"]
        if self.refusals:
            before += [str(nosupport), ",".join(self.refusals)]
        if self.uid:
            before += ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return before

    @property
    def lacking(self) -> list[str]:
        """What `probe` must not find."""
        others = [*([] if self.proc else ["proc"]), *([f"uid={self.uid}"] if self.uid else [])]
        return [*self.refusals, *others]

    @property
    def needs_root(self) -> bool:
        """Mounts, and being somebody else."""
        return not self.proc or bool(self.uid) or self.place is not None

    def check(self) -> None:
        """Skip where this cannot be made, naming what is missing."""
        children.need_seccomp()
        if self.needs_root:
            children.need_root()
        needed = [*([] if self.proc else ["unshare"]), *(["setpriv"] if self.uid else [])]
        for program in needed:
            if shutil.which(program) is None:
                pytest.skip(f"needs {program} (Debian package util-linux)")


@contextmanager
def memory(work: Path) -> Iterator[Path]:
    """Mount a tmpfs."""
    with _mounted(work / "tmpfs", "-t", "tmpfs", "-o", "size=1g", "none") as path:
        yield path


@contextmanager
def overlay(work: Path) -> Iterator[Path]:
    """Mount an overlay; files are made in its upper directory."""
    for name in ("lower", "upper", "work"):
        (work / name).mkdir()
    options = f"lowerdir={work}/lower,upperdir={work}/upper,workdir={work}/work"
    with _mounted(work / "overlay", "-t", "overlay", "-o", options, "none") as path:
        yield path


@contextmanager
def fuse(work: Path) -> Iterator[Path]:
    """Mount a directory by FUSE."""
    with passthrough.mounted(work) as mount:
        yield mount.path


@contextmanager
def _mounted(path: Path, *arguments: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount {arguments[1]} here: {done.stderr.strip():.200}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def build(source: str, target: Path, *libraries: str) -> Path:
    """Compile a C program that lies beside this file."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (Debian package gcc)")
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-O1"]
    path = Path(__file__).with_name(source)
    command = [compiler, *flags, "-o", str(target), str(path), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    target.chmod(0o755)
    return target


def found_there(before: Sequence[str], directory: Path, lacking: Sequence[str]) -> str:
    """Name what is there of what should be lacking, where a program is run like that."""
    probe = [*before, sys.executable, "-m", "tests.faults.without.probe", str(directory)]
    done = subprocess.run([*probe, *lacking], cwd=_ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def run(
    world: World, nosupport: Path, work: Path, tests: Sequence[str], **more: str
) -> dict[str, str]:
    """Run tests in a world, below a directory, with more environment; how each ended."""
    outcomes = work / "outcomes.json"
    files = work / "files"
    files.mkdir()
    for path in (work, files):
        os.chown(path, world.uid or os.geteuid(), -1)
    before = world.command(nosupport)
    trial = [*before, sys.executable, "-c", "import kvio._native, pytest"]
    can = subprocess.run(trial, cwd=_ROOT, capture_output=True, text=True, check=False)
    if can.returncode and world.uid:
        pytest.skip(f"user {world.uid} cannot use this Python: {can.stderr.strip()[-120:]}")
    there = found_there(before, files, world.lacking)
    assert not there, f"{world.name}: {there} is there"
    command = [
        *before,
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.faults.without.outcomes"),
        *("-p", "no:cacheprovider", "--kvio-test-dir", str(files), "--basetemp", f"{files}/tmp"),
        *tests,
    ]
    env = {**os.environ, VARIABLE: str(outcomes), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(work)}
    env |= {FILESYSTEM: filesystem_of(files), "HYPOTHESIS_STORAGE_DIRECTORY": str(files), **more}
    env.pop("PYTEST_ADDOPTS", None)
    for name in [name for name in env if name.startswith("PYTEST_XDIST")]:
        del env[name]
    done = subprocess.run(
        command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=3000, check=False
    )
    assert outcomes.exists(), f"{world.name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    found: dict[str, str] = json.loads(outcomes.read_text())
    return found
