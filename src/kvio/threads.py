"""Starting threads where the system may have none left."""

from __future__ import annotations

import errno
import threading

from kvio.errors import TransientStorageError


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        TransientStorageError: a limit on memory or threads is reached; the thread never ran.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:  # pthread_create(3) failed
        raise not_started(thread.name, exc) from exc


def not_started(name: str, reason: BaseException) -> TransientStorageError:
    """Return the error of a thread that could not be started."""
    return TransientStorageError(
        f"thread {name!r} could not be started ({reason}): the process is at a limit of its memory "
        "or of its threads (ulimit -v, ulimit -u, the control group's memory.max or pids.max)",
        errno=errno.EAGAIN,
    )
