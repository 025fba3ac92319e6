"""Writes that hang, and what they were given."""

from __future__ import annotations

import threading
from typing import Self

from kvio.testing.fakes import WrappedStore
from kvio.types import Parts

from .controlled import LONG_S, ControlledBackend


class Hung:
    """Lets the first write of each of some keys hang while the context lasts, and looks at it.

    Attributes:
        parts: what those writes were given, by key.
    """

    def __init__(self, store: WrappedStore[ControlledBackend], *keys: str) -> None:
        self.parts: dict[str, Parts] = {}
        self._go = threading.Event()
        self._keys = keys
        store.wrapper.on_begin = self._begin

    def _begin(self, key: str, parts: Parts) -> None:
        if key in self._keys and key not in self.parts:
            self.parts[key] = parts
            assert self._go.wait(LONG_S)

    def sees(self, key: str) -> bytes:
        """Read what a call that hangs would write now."""
        return b"".join(self.parts[key])

    def let_go(self) -> None:
        """Let them end."""
        self._go.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
