"""Handlers of signals while a long call of the C core is under way: see ``signals.c``.

What a handler raises cannot pass through C. It is kept, the C call ends early, and its caller
raises it then.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from kvio._native import _core  # type: ignore[attr-defined]  # built by cffi

ffi: Any = _core.ffi
lib: Any = _core.lib

#: What handlers have raised in calls of the main thread that have not ended yet.
raised: list[BaseException] = []


def _keep(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    raised.append(error)


@ffi.def_extern(error=1, onerror=_keep)  # type: ignore[untyped-decorator]
def kvio_run_handlers() -> int:
    """Do nothing: the interpreter runs handlers whenever it begins a function."""
    return 0


def reraise() -> None:
    """Raise what a handler raised during the C call that this thread has just made."""
    if raised and threading.current_thread() is threading.main_thread():
        raise raised.pop()


def _watch_main_thread() -> None:
    lib.kvio_handle_signals(threading.main_thread().ident, lib.kvio_run_handlers)


_watch_main_thread()
os.register_at_fork(after_in_child=_watch_main_thread)
