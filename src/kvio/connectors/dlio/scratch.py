"""Create temporary directories, and remove those of killed processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import Final

_PREFIX: Final = "kvio-dlio-"


def make(purpose: str, *, parent: str | None = None) -> str:
    """Create a directory with this process's id in its name; first remove those of dead processes.

    Raises:
        OSError: the parent directory is not writable.
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
