"""From median times to a calibration: pure functions.

A mode takes sizes over from the default only where it is clearly better, and every step in the
table has to pay for itself, so that noise makes none.
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

#: What another mode than the default must gain at a size: 5 % of the time.
LEAVING: Final = math.log(1.05)
#: What one more step in the table must gain over all sizes: 10 % of the time of one.
STEPPING: Final = math.log(1.10)


def default_steps(direction: Direction) -> tuple[Step, ...]:
    """Give the steps that stand without calibration.

    Those of reads where the page cache can be asked: cold reads are what is measured.
    """
    return BY_SIZE.write[1] if direction == "write" else CACHE_AWARE.read[1]


def medians(row: Sequence[Cell], direction: Direction) -> dict[int, dict[IOMode, float]]:
    """Give the median seconds a block by size and mode; nothing for a size with too few rounds."""
    return {
        cell.nbytes: {mode: median(seconds) for mode, seconds in cell.samples(direction).items()}
        if cell.measured
        else {}
        for cell in row
    }


def choose(
    seconds: Mapping[int, Mapping[IOMode, float]], default: Sequence[Step]
) -> tuple[Step, ...]:
    """Turn median seconds by size and mode into steps.

    The modes are those with the least cost over all sizes together: how much slower each is than
    the best of its size, plus `LEAVING` for every size at which it is not the default, plus
    `STEPPING` for every step that the default does not have. A size without medians keeps the
    default.
    """
    sizes = sorted(seconds)
    if not sizes:
        return tuple(default)
    best: dict[IOMode, tuple[float, list[IOMode]]] = {
        mode: (cost, [mode]) for mode, cost in _costs(seconds[sizes[0]], default, sizes[0]).items()
    }
    for before, nbytes in itertools.pairwise(sizes):
        own = (mode_at(default, before), mode_at(default, nbytes))
        best = {
            mode: min(
                (
                    so_far + cost + (mode is not path[-1] and (path[-1], mode) != own) * STEPPING,
                    [*path, mode],
                )
                for so_far, path in best.values()
            )
            for mode, cost in _costs(seconds[nbytes], default, nbytes).items()
        }
    return _merge(list(zip(sizes, min(best.values())[1], strict=True)), default)


def calibrate(rows: Mapping[int, Sequence[Cell]], reason: str, *, cold: bool) -> Calibration:
    """Make the calibration of cells by concurrency; reads that were not *cold* decide nothing."""

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
    """Give the sizes halfway (log) between neighbours of different modes more than 2x apart."""
    steps = choose(medians(row, direction), default_steps(direction))
    return [
        math.isqrt(below.nbytes * above.nbytes)
        for below, above in itertools.pairwise(row)
        if above.nbytes > 2 * below.nbytes
        and mode_at(steps, below.nbytes) is not mode_at(steps, above.nbytes)
    ]


def mode_at(steps: Sequence[Step], nbytes: int) -> IOMode:
    """Look up the mode of a size."""
    for step in steps:
        if step.below_nbytes is None or nbytes < step.below_nbytes:
            return step.mode
    return IOMode.BUFFERED


def _costs(
    seconds: Mapping[IOMode, float], default: Sequence[Step], nbytes: int
) -> dict[IOMode, float]:
    """Say what each mode would cost at one size, in logarithms of time."""
    standing = mode_at(default, nbytes)
    if not seconds:
        return {standing: 0.0}
    least = min(seconds.values())
    return {
        mode: math.log(value / least) + (mode is not standing) * LEAVING
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
    """Put a step between two sizes: where the default has the same one, else halfway (log)."""
    if (mode_at(default, below), mode_at(default, above)) == (mode, next_mode):
        for step in default:
            if step.below_nbytes is not None and below < step.below_nbytes <= above:
                return step.below_nbytes
    return -(-math.isqrt(below * above) // KiB) * KiB
