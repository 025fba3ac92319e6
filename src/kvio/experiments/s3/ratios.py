"""Two contenders in the same rounds: what one is of the other, and what may be said of that."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvio import GiB
from kvio.experiments.measure import Sample

#: Rounds without which nothing is decided, and how far from 1 a median must be to count.
ROUNDS: Final = 3
MARGIN: Final = 0.05

#: Subject, size and operation.
Place: TypeAlias = tuple[str, int, str]
Measure: TypeAlias = Callable[[Sample], float]
#: Contenders at a place, their samples by round.
Rounds: TypeAlias = Mapping[int, Sample]


def place_of(sample: Sample) -> Place:
    """Say where a sample belongs."""
    return sample.subject, sample.block_nbytes, sample.operation


def grouped(samples: Iterable[Sample]) -> dict[tuple[Place, str], dict[int, Sample]]:
    """Sort samples by place and contender, and by round."""
    groups: defaultdict[tuple[Place, str], dict[int, Sample]] = defaultdict(dict)
    for sample in samples:
        groups[place_of(sample), sample.contender][sample.round] = sample
    return dict(groups)


def speed(sample: Sample) -> float:
    """Give bytes a second."""
    return sample.bytes_per_s


def calls_per_s(sample: Sample) -> float:
    """Give calls a second."""
    return len(sample.latencies_s) / sample.wall_s


def cpu_s_per_gib(sample: Sample) -> float:
    """Give the client's processor seconds in the window by GiB of payload."""
    return cpu_s(sample) / (sample.block_nbytes * len(sample.latencies_s) / GiB)


def cpu_s(sample: Sample) -> float:
    """Give the client's processor seconds in the window."""
    return float(sample.facts["user_s"] + sample.facts["system_s"])


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratios of the rounds in which both took part; at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Give the middle one."""
        return statistics.median(self.values)

    @property
    def decided(self) -> bool:
        """Tell whether there are enough rounds to say anything."""
        return len(self.values) >= ROUNDS

    @property
    def differs(self) -> bool:
        """Tell whether every round lies on one side of 1, and the median well away from it."""
        one_side = min(self.values) > 1 or max(self.values) < 1
        return self.decided and one_side and abs(self.median - 1) > MARGIN

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f}-{max(self.values):.2f})"


def ratio(above: Rounds | None, below: Rounds | None, measure: Measure) -> Ratio | None:
    """Divide round by round; None where they have none in common, or nothing was taken."""
    if above is None or below is None:
        return None
    values = [
        measure(above[index]) / measure(below[index])
        for index in above
        if index in below and measure(below[index]) > 0
    ]
    return Ratio(tuple(values)) if values else None


def middle(rounds: Rounds, measure: Measure) -> float:
    """Give the median over rounds."""
    return statistics.median(map(measure, rounds.values()))


def in_order(values: Iterable[str], order: Sequence[str]) -> list[str]:
    """Give each value once, in a known order."""
    found = set(values)
    return [value for value in order if value in found]
