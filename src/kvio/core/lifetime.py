"""What happens to open stores when the process forks, drops them or ends."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from kvio.errors import KvioError


class Forked(Protocol):
    """An object that can be renewed in a child process."""

    def _after_fork(self) -> None: ...


_STORES: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch_forks(store: Forked) -> None:
    """Renew *store* in every child that is forked while it is open."""
    _STORES.add(store)


def forget_forks(store: Forked) -> None:
    """Stop renewing *store*, which is closed."""
    _STORES.discard(store)


def _renew_in_child() -> None:
    for store in tuple(_STORES):
        store._after_fork()  # noqa: SLF001  # the method of the protocol


os.register_at_fork(after_in_child=_renew_in_child)


# --------------------------------------------------------------------------------------------------
# Work that was accepted and is not done when the program ends, or drops the store.
#
# As with `concurrent.futures`, a program that ends waits for submitted work; but no longer than
# ``KVIO_EXIT_TIMEOUT_S`` seconds (60), after which a warning names the work that was not done.
# The program's own threads and exit handlers have ended by then, except handlers registered
# before kvio was imported. A child of `multiprocessing` runs no exit handlers: it waits after its
# last thread has ended.


_LOG: Final = logging.getLogger("kvio")
_VARIABLE: Final = "KVIO_EXIT_TIMEOUT_S"
_DEFAULT_S: Final = 60.0


class Accepting(Protocol):
    """An object that accepts work and does it later."""

    def finish(self, deadline: float) -> None:
        """Wait until all accepted work is done, or until *deadline* (`time.monotonic`)."""

    def unfinished(self) -> str | None:
        """Describe the accepted work that is not done or failed in `finish`; None if all is."""


#: With the process of each: a forked child has none of its parent's work.
_LIVE: Final[weakref.WeakKeyDictionary[Accepting, int]] = weakref.WeakKeyDictionary()
_last: Final[list[Callable[[], None]]] = []
_finished_in = 0


def watch(one: Accepting) -> None:
    """Finish the work that *one* has accepted before this process ends."""
    _LIVE[one] = os.getpid()


def last(call: Callable[[], None]) -> None:
    """Call a function at the end of the program, after all work was waited for."""
    _last.append(call)


def dropped(
    one: object, text: str, close: Callable[[], None], *, at_once: bool = False, warns: bool = True
) -> None:
    """Warn, in a finaliser, that an object was not closed, and close it.

    It is closed on another thread, unless *at_once*: a finaliser may run wherever memory is
    allocated, and this thread may hold a lock that closing needs.

    It is None when the interpreter has cleared this module at its end, and some object that
    outlives modules, as torch has, still held *one*: the system closes everything then.
    """
    try:
        if warns:
            text = f"{text} was dropped, not closed"
            warnings.warn(text, ResourceWarning, stacklevel=3, source=one)
    finally:
        if sys.is_finalizing():
            pass  # no thread can be started any more, and the system closes everything
        elif at_once:
            close()
        else:
            thread = threading.Thread(
                target=_close, args=(close,), name="kvio-dropped", daemon=True
            )
            with suppress(RuntimeError):  # the program ends, and `_finish` waits for the work
                thread.start()


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except KvioError as exc:
        _LOG.warning("kvio: %s", exc)


def _at_exit() -> None:
    try:
        _finish()
    finally:
        for call in _last:
            call()


def _finish() -> None:
    global _finished_in
    here = os.getpid()
    if _finished_in == here:
        return
    _finished_in = here
    alive = [one for one in (ref() for ref in _LIVE.keyrefs()) if one is not None]
    ours = [one for one in alive if _LIVE.get(one) == here]
    seconds = _timeout_s()
    deadline = time.monotonic() + seconds
    why = f"it waited up to {seconds:g} s for them ({_VARIABLE})"
    try:
        for one in reversed(ours):  # those made last use those made before
            one.finish(deadline)
    except BaseException:  # the handler of a signal raised it
        why = "a signal ended the wait for them"
        raise
    finally:
        for text in filter(None, [one.unfinished() for one in ours]):
            _LOG.warning("kvio: %s were not done when the program ended; %s", text, why)


def _timeout_s() -> float:
    text = os.environ.get(_VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_S
    except ValueError:
        seconds = math.nan
    if seconds >= 0:
        return min(seconds, threading.TIMEOUT_MAX)
    _LOG.warning("kvio: %s must be a number of seconds, not %r", _VARIABLE, text)
    return _DEFAULT_S


def _finish_in_child() -> None:
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        _finish()


atexit.register(_at_exit)
#: Not public, but where `concurrent.futures` waits; `multiprocessing` runs it in its children.
threading._register_atexit(_finish_in_child)  # type: ignore[attr-defined]  # noqa: SLF001
