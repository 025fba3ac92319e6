"""Failing system calls on purpose, for tests: the n-th call of a site fails, or kills, or is short.

Not part of the public interface. Outside `inject` the C core pays one comparison a call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvio._native import _core  # type: ignore[attr-defined]  # built by cffi

ffi: Any = _core.ffi
lib: Any = _core.lib
KILL: int = lib.KVIO_FAULT_KILL
HALF: int = lib.KVIO_TRANSFER_HALF

_lock = threading.Lock()
_active: list[Any] = []
#: Faults that are over: calls of other threads may still be counting in them.
_over: list[Any] = []


def current_fault() -> Any:
    """Return the fault of new calls, or NULL."""
    return _active[-1] if _active else ffi.NULL


def sites() -> dict[str, int]:
    """Name every system call site of the C core."""
    return {
        name.removeprefix("KVIO_SITE_").lower(): getattr(lib, name)
        for name in dir(lib)
        if name.startswith("KVIO_SITE_") and name != "KVIO_SITE_NONE"
    }


@contextmanager
def inject(
    site: str, *, nth: int = 1, times: int = 1, error: int = 0, transfer: int | None = None
) -> Iterator[Any]:
    """Let calls *nth* to *nth* + *times* - 1 of *site* fail with *error* or move *transfer* bytes.

    Yields the fault; its ``seen`` counts calls by site, whether they failed or not.
    """
    cut = lib.KVIO_TRANSFER_ALL if transfer is None else transfer
    fault = ffi.new("kvio_fault *", (sites()[site], nth, times, error, cut))
    with _lock:
        _active.append(fault)
        lib.kvio_set_fault(fault)
    try:
        yield fault
    finally:
        with _lock:
            _active.remove(fault)
            lib.kvio_set_fault(current_fault())
            _over.append(fault)
