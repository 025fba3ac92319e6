"""Stores in a forked child process: threads, locks and descriptors are renewed there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that can be renewed in a child process."""

    def _after_fork(self) -> None: ...


_LIVE: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(store: Forked) -> None:
    """Renew *store* in every child that is forked while it is open."""
    _LIVE.add(store)


def forget(store: Forked) -> None:
    """Stop renewing *store*, which is closed."""
    _LIVE.discard(store)


def _renew_in_child() -> None:
    for store in tuple(_LIVE):
        store._after_fork()  # noqa: SLF001  # the method of the protocol


os.register_at_fork(after_in_child=_renew_in_child)
