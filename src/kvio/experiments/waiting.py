"""Waiting for what a process says, whatever the number of its descriptor."""

from __future__ import annotations

import selectors
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def wait_readable(source: int | _HasDescriptor, timeout_s: float) -> bool:
    """Wait until there is something to read, or the end; False: it took too long.

    select(2) knows no descriptor above 1023, of which a large program may have some.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))
