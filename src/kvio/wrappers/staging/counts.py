"""The counters that a tier increments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counts since a tier was made; its lock guards them."""

    accepted: int = 0
    accepted_bytes: int = 0
    kept: int = 0
    absorbed: int = 0
    drained: int = 0
    drained_bytes: int = 0
    passed_through: int = 0
    retries: int = 0
    failed: int = 0
