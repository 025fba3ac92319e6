"""The guest's first program: mounts what is needed, lets everything be observed, and ends it all.

Each result is a line of JSON on the second serial line. Nothing is judged here.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable
from typing import Any, Final

_RESTART: Final = 0x01234567  # QEMU ends instead: -no-reboot
_MOUNTS: Final = (
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("devtmpfs", "/dev", "devtmpfs"),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2"),
    ("/dev/nvme0n1p1", "/disk", "ext4"),
)
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Observe everything, each for itself, and switch the machine off."""
    try:
        for source, target, kind in _MOUNTS:
            mount(source, target, kind)
        from tests.numa import observations

        with open("/dev/ttyS1", "w", encoding="ascii") as results:
            for observe in observations.ALL:
                print(json.dumps(_outcome(observe)), file=results, flush=True)
    except BaseException:  # noqa: BLE001  # the console is the last place to say it
        traceback.print_exc()
    finally:
        os.sync()
        _libc.reboot(_RESTART)


def mount(source: str, target: str, kind: str) -> None:
    """Mount a file system.

    Raises:
        OSError: it cannot be mounted.
    """
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source}: {os.strerror(number)}", target)


def _outcome(observe: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"name": observe.__name__, "seen": observe()}
    except BaseException:  # noqa: BLE001  # the host shows it
        return {"name": observe.__name__, "error": traceback.format_exc()}
