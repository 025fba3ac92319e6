"""A directory shown by a FUSE server of our own, which can be stopped, continued, or slow.

Needs libfuse3 (Debian packages libfuse3-dev, fuse3, pkg-config, gcc), /dev/fuse and root.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.posix import children

_SOURCE: Final = Path(__file__).with_name("passthrough.c")
_PACKAGES: Final = "Debian packages libfuse3-dev, fuse3, pkg-config, gcc"
_LONG_S: Final = 60


class Passthrough:
    """A mounted directory and its server.

    Attributes:
        path: where it is mounted.
        below: the directory itself, which shows the same files whatever the server does.
    """

    def __init__(self, path: Path, below: Path, control: mmap.mmap, pid: int) -> None:
        self.path = path
        self.below = below
        self._control = control
        self._pid = pid

    @property
    def delay_ms(self) -> int:
        """So many milliseconds later is every write and every sync done."""
        return int(struct.unpack_from("=I", self._control)[0])

    @delay_ms.setter
    def delay_ms(self, value: int) -> None:
        struct.pack_into("=I", self._control, 0, value)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let every call hang in the kernel while the context lasts."""
        os.kill(self._pid, signal.SIGSTOP)
        try:
            while not self._all_stopped():
                pass  # a thread on another processor goes on until it hears of it
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    def _all_stopped(self) -> bool:
        states = []
        for task in Path(f"/proc/{self._pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
                states.append(task.read_text().rpartition(")")[2].split()[0])
        return set(states) == {"T"}


def _build(work: Path) -> Path:
    for needed in ("pkg-config", "cc", "fusermount3"):
        if shutil.which(needed) is None:
            pytest.skip(f"needs {needed} ({_PACKAGES})")
    asked = ["pkg-config", "--cflags", "--libs", "fuse3"]
    reported = subprocess.run(asked, capture_output=True, text=True)
    if reported.returncode:
        pytest.skip(f"needs libfuse3 ({_PACKAGES})")
    program = work / "passthrough"
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-O1"]
    command = ["cc", *flags, "-o", str(program), str(_SOURCE), *reported.stdout.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@contextmanager
def mounted(work: Path, *options: str) -> Iterator[Passthrough]:
    """Show a fresh directory below *work* by FUSE; skip where that cannot be."""
    children.need_root()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    program = _build(work)
    below, path, control = work / "below", work / "fuse", work / "control"
    below.mkdir()
    path.mkdir()
    control.write_bytes(bytes(mmap.PAGESIZE))
    with control.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    command = [str(program), str(below), str(control), str(path), "-f"]
    server = subprocess.Popen(
        [*command, "-o", ",".join(("allow_other,default_permissions", *options))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        device = below.stat().st_dev
        while path.stat().st_dev == device and server.poll() is None:
            pass  # it mounts within milliseconds, or ends
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"FUSE does not work here: {server.stderr.read().decode().strip():.200}")
        yield Passthrough(path, below, memory, server.pid)
    finally:
        if server.poll() is None:
            os.kill(server.pid, signal.SIGCONT)
        subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)
        server.kill()
        server.communicate(timeout=_LONG_S)
        memory.close()
