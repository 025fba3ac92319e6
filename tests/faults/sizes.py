"""How much of the campaign runs: a slice beside the other tests, all of it in ``nox -s faults``."""

from __future__ import annotations

import os
from typing import Final

import pytest

#: ``slice`` or ``full``.
VARIABLE: Final = "KVIO_FAULTS"
_ASKED: Final = os.environ.get(VARIABLE, "slice")
FULL: Final = _ASKED == "full"
if _ASKED not in ("slice", "full"):
    raise pytest.UsageError(f"{VARIABLE} is 'slice' or 'full', not {_ASKED!r}")


def size(few: int, many: int) -> int:
    """Return the first number for a slice, the second for all of it."""
    return many if FULL else few


def seed() -> int:
    """Return what random choices are drawn from; ``KVIO_FAULTS_SEED`` repeats or varies a run."""
    asked = os.environ.get("KVIO_FAULTS_SEED", "1")
    try:
        return int(asked)
    except ValueError:
        raise pytest.UsageError(f"KVIO_FAULTS_SEED is a number, not {asked!r}") from None
