"""Checkpoints without torch and without kvio: ``numpy.savez`` into a file.

DLIO's own mechanism needs torch. Where torch is absent, the reference uses this one, which writes
the bytes that kvio stores. Only DLIO imports this module, by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing


class PlainCheckpointing(BaseCheckpointing):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Saves states as .npz files."""

    _instance: Any = None

    def __init__(self) -> None:
        super().__init__("npz")

    @classmethod
    def get_instance(cls) -> Self:
        """Return the object of this process."""
        if cls._instance is None:
            cls._instance = cls()
        found: Self = cls._instance
        return found

    def get_tensor(self, size: int) -> Any:
        """Return an array of so many bytes."""
        return np.zeros(size, dtype=np.int8)

    def save_state(self, suffix: str, state: Mapping[str, Any]) -> None:
        """Write one state to a file, as DLIO's own mechanism does."""
        with open(self.get_name(suffix), "wb") as file:
            np.savez(file, **dict(_flat(state)))

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Save every state of this rank."""
        super().checkpoint(epoch, step_number)

    def finalize(self) -> None:
        """Do nothing: no file is open."""


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
