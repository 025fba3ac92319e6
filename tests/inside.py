"""Whether a thread has come to a function, so that a test can go on exactly then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

LONG_S = 60.0


def wait_until_inside(thread: threading.Thread, function: str) -> None:
    """Return when *thread* is inside a call of *function*, or has ended."""
    late = threading.Event()
    guard = threading.Timer(LONG_S, late.set)
    guard.start()
    try:
        while thread.is_alive() and function not in _functions_of(thread):
            assert not late.is_set(), f"{thread.name} never called {function}"
    finally:
        guard.cancel()


def _functions_of(thread: threading.Thread) -> Iterator[str]:
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
