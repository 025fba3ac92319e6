"""Stands in for tensorflow.compat.v1.logging."""

from __future__ import annotations

ERROR = 40


def set_verbosity(level: int) -> None:
    """Leave it: there is nothing that logs."""
    del level
