"""Directories of a process, removed by the next one if their own was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import Final

_PREFIX: Final = "kvio-dlio-"


def make(purpose: str, *, parent: str | None = None) -> str:
    """Make a directory named by this process; first remove those of processes that are gone.

    Raises:
        OSError: the parent cannot be written.
    """
    parent = tempfile.gettempdir() if parent is None else parent
    prefix = f"{_PREFIX}{purpose}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            owner = name.removeprefix(prefix).partition("-")[0]
            if name.startswith(prefix) and owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent)


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
