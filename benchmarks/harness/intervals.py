"""Where a median lies, as far as some rounds can tell.

Of n values the interval from the k-th smallest to the k-th largest covers the true median with a
probability that the binomial distribution gives exactly, whatever the distribution of the values is
(H. A. David, Order Statistics, 7.1; it is the interval of the sign test). There is none below six
rounds: five rounds of two equal contenders agree in their direction in 1 of 16 runs. A bootstrap of
so few values has no such guarantee: it finds a difference between equal contenders in 24 % of runs
of three rounds, and in 10 % of nine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

#: How often equal contenders may be found to differ.
ALPHA: Final = 0.05


class Interval(NamedTuple):
    """The median of some rounds, and where the true median is with a probability of 1 - alpha."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def is_bounded(self) -> bool:
        """There were enough rounds for an interval."""
        return self.low > -math.inf

    def __str__(self) -> str:
        if self.is_bounded:
            return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.median:.2f}"


def interval(values: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the median of *values* and its distribution-free interval.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    ordered = sorted(values)
    middle, k = statistics.median(ordered), _rank(len(ordered), alpha)
    if k == 0:
        return Interval(middle, -math.inf, math.inf, len(ordered))
    return Interval(middle, ordered[k - 1], ordered[-k], len(ordered))


def _rank(rounds: int, alpha: float) -> int:
    """Return the largest k with P(fewer than k of *rounds* fair coins) <= alpha / 2."""
    tail, k = 0.0, 0
    while k < rounds:
        tail += math.comb(rounds, k) / 2**rounds
        if tail > alpha / 2:
            break
        k += 1
    return k


def least_rounds(comparisons: int = 1, alpha: float = ALPHA) -> int:
    """Return how many rounds a verdict needs where a claim makes so many comparisons."""
    return math.ceil(math.log2(2 * comparisons / alpha))
