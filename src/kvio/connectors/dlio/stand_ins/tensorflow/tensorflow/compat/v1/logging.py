"""Stub of tensorflow.compat.v1.logging."""

from __future__ import annotations

ERROR = 40


def set_verbosity(level: int) -> None:
    """Do nothing: there is no logger."""
    del level
