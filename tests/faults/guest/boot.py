"""A User-Mode Linux guest that runs this machine's programs, read-only, on disks of its own.

Needs the Debian package user-mode-linux. What the guest reports goes through its first serial line
into a pipe: a line that has reached this process is known, whatever becomes of the guest.

Killing the guest is a power cut for whatever was in its memory. Its disks are files: what it had
written to them stays in the page cache of this machine, so a write that was not flushed is not
lost; cuts below the disk's own cache are for the tests at block level.
"""

from __future__ import annotations

import os
import platform
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from tests.faults.guest.inside import DISK_LETTERS

PACKAGE: Final = "user-mode-linux"
REPOSITORY: Final = Path(__file__).parents[3]
#: A boot takes three seconds on an idle machine, and a case waits for up to four minutes: nothing
#: but a failure is silent for so long.
SILENT_S: Final = 300.0
_PROGRAM: Final = "linux.uml"
_INIT: Final = """\
#!/bin/sh
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /run
mount -t tmpfs none /mnt
stty -F /dev/ttyS0 raw -echo
exec </dev/null >/dev/console 2>&1
cd {where}
{environment}
exec {command}
"""


def need_guest() -> str:
    """Find the program that is the guest's kernel, or skip."""
    if platform.machine() != "x86_64":
        pytest.skip(f"no User-Mode Linux for {platform.machine()}")
    found = shutil.which(_PROGRAM)
    if found is None:
        pytest.skip(f"needs {_PROGRAM} (Debian package {PACKAGE})")
    if reason := _cannot_run(found):
        pytest.skip(f"{_PROGRAM} does not run on this processor: {reason}")
    return found


@cache
def _cannot_run(program: str) -> str:
    """Start a guest that ends at once; return why no process runs in it, or an empty string.

    A kernel that does not know all registers of the processor cannot switch to a process.
    """
    kernel = [program, "mem=64M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]
    done = subprocess.run(
        [*kernel, "init=/bin/true", "con=null,fd:1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=SILENT_S,
        check=False,
    )
    said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    return next((line.strip() for line in said if "ptrace set fp regs failed" in line), "")


class Guest:
    """A running machine; leaving the context ends it.

    Args:
        work: a directory of our own.
        module: a module below ``tests`` that the guest's Python runs as its first process.
        arguments: of that.
        disks: images, that of `inside.device` 0 first.
        environment: of the guest's Python.
        memory_mib: how much memory it has.
    """

    def __init__(
        self,
        work: Path,
        module: str,
        arguments: Sequence[str] = (),
        *,
        disks: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        memory_mib: int = 512,
    ) -> None:
        self._program = need_guest()
        self._work = work
        self._init = work / "init"
        self._console = work / "console"
        self._rest = b""
        self._write_init(module, arguments, environment or {})
        self._pipe, there = os.pipe()
        try:
            self._process = self._start(there, disks, memory_mib)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(there)

    def _write_init(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        given = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(REPOSITORY),
            **environment,
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
        text = _INIT.format(
            where=shlex.quote(str(REPOSITORY)),
            environment="\n".join(exports),
            command=shlex.join([sys.executable, "-m", module, *arguments]),
        )
        self._init.write_text(text)
        self._init.chmod(0o700)

    def _start(self, pipe: int, disks: Sequence[Path], memory_mib: int) -> subprocess.Popen[bytes]:
        with self._console.open("wb") as console:
            fd = console.fileno()
            kernel = [
                *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
                *(f"mem={memory_mib}M", f"init={self._init}", "loglevel=4"),
                *("con=null", f"con0=null,fd:{fd}", "ssl=null", f"ssl0=null,fd:{pipe}"),
                *(f"uml_dir={self._work}/", f"umid=guest-{os.getpid()}"),
                *(f"ubd{letter}={disk}" for letter, disk in zip(DISK_LETTERS, disks, strict=False)),
            ]
            return subprocess.Popen(
                [self._program, *kernel],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                pass_fds=(fd, pipe),
                start_new_session=True,
            )

    def lines(self, limit_s: float = SILENT_S) -> Iterator[str]:
        """Yield what the guest reports, line by line, until it ends; fail when it falls silent."""
        while True:
            *whole, self._rest = self._rest.split(b"\n")
            yield from (line.decode() for line in whole)
            if not select.select([self._pipe], [], [], limit_s)[0]:
                pytest.fail(f"the guest was silent for {limit_s:.0f} s\n{self.console}")
            more = os.read(self._pipe, 1 << 16)
            if not more:
                return
            self._rest += more

    def cut(self) -> list[str]:
        """Take the power away; what had reached this process's pipe by then."""
        self._kill()
        said, self._rest = self._rest, b""
        while more := os.read(self._pipe, 1 << 16):
            said += more
        return [line.decode() for line in said.split(b"\n")[:-1]]

    def _kill(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def console(self) -> str:
        """What its kernel and its programs printed, the end of it."""
        return self._console.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()
        os.close(self._pipe)
