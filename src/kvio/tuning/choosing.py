"""Compute a calibration from median times with pure functions.

A mode replaces the default only for sizes where it is clearly faster, and every step in the table
has a cost, so that noise causes no steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal, TypeAlias

from kvio.policies import BY_SIZE, CACHE_AWARE, Calibration, Step
from kvio.tuning.measuring import Cell
from kvio.types import IOMode, KiB

Direction: TypeAlias = Literal["write", "read"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("write", "read")

#: The cost of a mode other than the default, per size: it must be 5 % faster.
NON_DEFAULT_COST: Final = math.log(1.05)
#: The cost of a step that the default does not have: it must save 10 % of the time of one size.
STEP_COST: Final = math.log(1.10)


def default_steps(direction: Direction) -> tuple[Step, ...]:
    """Return the steps used without calibration.

    For reads these are the steps for cold blocks, because cold reads are measured.
    """
    return BY_SIZE.write[1] if direction == "write" else CACHE_AWARE.read[1]


def medians(row: Sequence[Cell], direction: Direction) -> dict[int, dict[IOMode, float]]:
    """Return the median seconds per block by size and mode; a size with few rounds has none."""
    return {
        cell.nbytes: {mode: median(seconds) for mode, seconds in cell.samples(direction).items()}
        if cell.measured
        else {}
        for cell in row
    }


def choose(
    seconds: Mapping[int, Mapping[IOMode, float]], default: Sequence[Step]
) -> tuple[Step, ...]:
    """Return the steps with the least cost for median seconds by size and mode.

    The cost is summed over all sizes: the logarithm of how much slower the mode is than the best
    mode of the size, plus `NON_DEFAULT_COST` if it is not the default, plus `STEP_COST` for every
    step that the default does not have. A size without medians keeps the default.
    """
    sizes = sorted(seconds)
    if not sizes:
        return tuple(default)
    best: dict[IOMode, tuple[float, list[IOMode]]] = {
        mode: (cost, [mode]) for mode, cost in _costs(seconds[sizes[0]], default, sizes[0]).items()
    }
    for before, nbytes in itertools.pairwise(sizes):
        default_pair = (mode_at(default, before), mode_at(default, nbytes))
        best = {
            mode: min(
                (
                    so_far
                    + cost
                    + (mode is not path[-1] and (path[-1], mode) != default_pair) * STEP_COST,
                    [*path, mode],
                )
                for so_far, path in best.values()
            )
            for mode, cost in _costs(seconds[nbytes], default, nbytes).items()
        }
    return _merge(list(zip(sizes, min(best.values())[1], strict=True)), default)


def calibrate(rows: Mapping[int, Sequence[Cell]], reason: str, *, cold: bool) -> Calibration:
    """Return the calibration for cells by concurrency; ignore reads that were not *cold*."""

    def table(direction: Direction) -> dict[int, tuple[Step, ...]]:
        default = default_steps(direction)
        if direction == "read" and not cold:
            return {1: default}
        return {
            concurrency: choose(medians(row, direction), default)
            for concurrency, row in rows.items()
            if concurrency == 1 or any(cell.measured for cell in row)
        }

    return Calibration(write=table("write"), read=table("read"), reason=reason)


def crossings(row: Sequence[Cell], direction: Direction) -> list[int]:
    """Return the geometric means of adjacent sizes with different modes, if over 2x apart."""
    steps = choose(medians(row, direction), default_steps(direction))
    return [
        math.isqrt(below.nbytes * above.nbytes)
        for below, above in itertools.pairwise(row)
        if above.nbytes > 2 * below.nbytes
        and mode_at(steps, below.nbytes) is not mode_at(steps, above.nbytes)
    ]


def mode_at(steps: Sequence[Step], nbytes: int) -> IOMode:
    """Return the mode of a size."""
    for step in steps:
        if step.below_nbytes is None or nbytes < step.below_nbytes:
            return step.mode
    return IOMode.BUFFERED


def _costs(
    seconds: Mapping[IOMode, float], default: Sequence[Step], nbytes: int
) -> dict[IOMode, float]:
    """Return the cost of each mode at one size, in logarithms of time."""
    default_mode = mode_at(default, nbytes)
    if not seconds:
        return {default_mode: 0.0}
    least = min(seconds.values())
    return {
        mode: math.log(value / least) + (mode is not default_mode) * NON_DEFAULT_COST
        for mode, value in seconds.items()
    }


def _merge(chosen: Sequence[tuple[int, IOMode]], default: Sequence[Step]) -> tuple[Step, ...]:
    steps = []
    for (below, mode), (above, next_mode) in itertools.pairwise(chosen):
        if mode is not next_mode:
            steps.append(Step(_threshold(below, mode, above, next_mode, default), mode))
    return (*steps, Step(None, chosen[-1][1]))


def _threshold(
    below: int, mode: IOMode, above: int, next_mode: IOMode, default: Sequence[Step]
) -> int:
    """Return the threshold of a step: the default's if it has this step, else the middle (log)."""
    if (mode_at(default, below), mode_at(default, above)) == (mode, next_mode):
        for step in default:
            if step.below_nbytes is not None and below < step.below_nbytes <= above:
                return step.below_nbytes
    return -(-math.isqrt(below * above) // KiB) * KiB
