"""How much of the campaign runs: a slice beside the other tests, all of it in ``nox -s faults``."""

from __future__ import annotations

import os
from typing import Final

#: ``slice`` or ``full``.
VARIABLE: Final = "KVIO_FAULTS"
FULL: Final = os.environ.get(VARIABLE, "slice") == "full"


def size(few: int, many: int) -> int:
    """Give the first number for a slice, the second for all of it."""
    return many if FULL else few


def seed() -> int:
    """Give what random choices are drawn from; ``KVIO_FAULTS_SEED`` repeats or varies a run."""
    return int(os.environ.get("KVIO_FAULTS_SEED", "1"))
