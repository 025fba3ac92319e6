"""Measure the fastest I/O mode per size on one mount, to calibrate the hybrid backend."""

from __future__ import annotations

from kvio.tuning.choosing import choose
from kvio.tuning.measuring import MIN_ROUNDS, SIZES, Cell, Report
from kvio.tuning.run import Tuning, load, save, scratch_directory, tune

__all__ = [
    "MIN_ROUNDS",
    "SIZES",
    "Cell",
    "Report",
    "Tuning",
    "choose",
    "load",
    "save",
    "scratch_directory",
    "tune",
]
