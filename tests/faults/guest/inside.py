"""What programs in the guest share: telling the host, modules, mounts, and the end of it all.

The root is this machine's tree, read-only; ``/run`` and ``/mnt`` are memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_POWER_OFF: Final = 0x4321FEDC
_FINIT_MODULE: Final = 313  # x86_64
_MODULES: Final = "/usr/lib/uml/modules"
#: The guest's first disk is /dev/ubdb.
DISK_LETTERS: Final = "bcdefgh"
_libc = ctypes.CDLL(None, use_errno=True)


def device(number: int) -> str:
    """Name a disk."""
    return f"/dev/ubd{DISK_LETTERS[number]}"


class Line:
    """The serial line to the host; lines of several threads do not mix."""

    def __init__(self) -> None:
        self._fd = os.open("/dev/ttyS0", os.O_WRONLY | os.O_NOCTTY)
        self._lock = threading.Lock()

    def report(self, text: str) -> None:
        """Send one line."""
        data = text.encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def main(work: Callable[[Line], None]) -> None:
    """Do the work of a guest's first process, and switch the machine off."""
    try:
        work(Line())
    except BaseException:  # noqa: BLE001  # the console is the last place to say it
        traceback.print_exc()
    finally:
        os.sync()
        _libc.reboot(_POWER_OFF)


def observe(line: Line, cases: Mapping[str, Callable[[], Any]]) -> None:
    """Print the result of each case, or how it failed: a line of JSON each."""
    for name, case in cases.items():
        try:
            reported = {"name": name, "seen": case()}
        except BaseException:  # noqa: BLE001  # the host shows it
            reported = {"name": name, "error": traceback.format_exc()}
        line.report(json.dumps(reported))


def run(*command: str) -> str:
    """Run a program and give what it printed.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def mount(source: str, target: str, kind: str, options: str = "") -> str:
    """Mount a file system on a directory that is made for it, and give its name."""
    os.makedirs(target, exist_ok=True)
    more = ("-o", options) if options else ()
    run("mount", "-t", kind, *more, source, target)
    return target


def load(*names: str) -> None:
    """Load kernel modules and what they depend on: there may be no kmod here.

    Raises:
        OSError: the kernel took one not.
    """
    assert platform.machine() == "x86_64"
    base = Path(_MODULES, os.uname().release)
    needs: dict[str, list[str]] = {}
    for entry in (base / "modules.dep").read_text().splitlines():
        path, _, rest = entry.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).stem.replace("-", "_"): path for path in needs}
    for name in names:
        path = by_name[name.replace("-", "_")]
        for module in (*reversed(needs[path]), path):
            _insert(base / module)


def _insert(module: Path) -> None:
    fd = os.open(module, os.O_RDONLY)
    try:
        if _libc.syscall(_FINIT_MODULE, fd, b"", 0):
            number = ctypes.get_errno()
            if number != errno.EEXIST:
                raise OSError(number, os.strerror(number), str(module))
    finally:
        os.close(fd)
