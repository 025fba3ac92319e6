"""Interleaved rounds, medians, ratios, and the rows of the table."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from benchmarks.ground import Ground

KiB: Final = 1 << 10
MiB: Final = 1 << 20

#: Runs one round of one contender, tidies up after it, and gives the seconds that count.
Contender = Callable[[], float]
Unit = Literal["us", "ms", "MiB/s", "MiB"]


@dataclass(frozen=True, slots=True)
class Bench:
    """What every case is given: where to run, how often, and how long to go on."""

    ground: Ground
    rounds: int
    case_budget_s: float
    scale: float

    def count(self, wanted: int) -> int:
        """Scale a number of blocks down for a smoke run."""
        return max(2, int(wanted * self.scale))

    def interleave(self, contenders: Mapping[str, Contender]) -> dict[str, list[float]]:
        """Run all contenders in every round, each time in another order; one round to warm up.

        At least *rounds* rounds, and more until the case's share of the budget is spent.
        """
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        order = list(contenders)
        shuffle = random.Random(11).shuffle
        end_s = time.monotonic() + self.case_budget_s
        for number in range(10_000):
            if number > self.rounds and time.monotonic() > end_s:
                break
            shuffle(order)
            for name in order:
                gc.collect()
                seconds = contenders[name]()
                self.ground.settle()
                if number:
                    samples[name].append(seconds)
        return samples


@dataclass(frozen=True, slots=True)
class Summary:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}..{_short(self.high)})"


def summarize(values: list[float]) -> Summary:
    """Give median and quartiles."""
    if len(values) < 2:
        return Summary(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: kvio against something, and whether the bar holds.

    *holds* is None where the line only informs. *pairs* are the quartiles of the ratios within
    each round, which drift of the machine does not reach.
    """

    bar: str
    what: str
    unit: Unit
    kvio: Summary
    baseline: Summary
    ours: str
    against: str
    value: str
    pairs: str
    wanted: str
    holds: bool | None
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)


def time_bar(
    bar: str,
    what: str,
    samples: dict[str, list[float]],
    names: tuple[str, str],
    *,
    at_most: float | None,
    unit: Unit = "us",
    note: str = "",
) -> Row:
    """Judge times by their ratio: kvio may take *at_most* so many times the baseline's."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    ours, theirs = samples[names[0]], samples[names[1]]
    kvio, baseline = (summarize([x * scale for x in xs]) for xs in (ours, theirs))
    ratio = kvio.median / baseline.median
    pairs = summarize([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(
        bar=bar, what=what, unit=unit, kvio=kvio, baseline=baseline,
        ours=names[0], against=names[1],
        value=f"{ratio:.2f}x", pairs=f"{pairs.low:.2f}..{pairs.high:.2f}",
        wanted="" if at_most is None else f"<= {at_most:.2f}x",
        holds=None if at_most is None else ratio <= at_most, note=note,
        samples={name: samples[name] for name in names},
    )  # fmt: skip


def above_bar(
    bar: str,
    what: str,
    samples: dict[str, list[float]],
    names: tuple[str, str],
    *,
    at_most_us: float,
) -> Row:
    """Judge times by their difference: kvio may take *at_most_us* more than the baseline."""
    ours, theirs = samples[names[0]], samples[names[1]]
    kvio, baseline = (summarize([x * 1e6 for x in xs]) for xs in (ours, theirs))
    above = kvio.median - baseline.median
    pairs = summarize([(a - b) * 1e6 for a, b in zip(ours, theirs, strict=True)])
    return Row(
        bar=bar, what=what, unit="us", kvio=kvio, baseline=baseline,
        ours=names[0], against=names[1],
        value=f"{above:+.1f} us", pairs=f"{pairs.low:+.1f}..{pairs.high:+.1f}",
        wanted=f"<= +{at_most_us:.0f} us", holds=above <= at_most_us,
        samples={name: samples[name] for name in names},
    )  # fmt: skip


def rate_bar(
    bar: str,
    what: str,
    samples: dict[str, list[float]],
    names: tuple[str, str],
    *,
    nbytes: int,
    at_least: float | None,
    note: str = "",
) -> Row:
    """Judge rates: kvio must reach *at_least* this part of the baseline's."""
    ours, theirs = samples[names[0]], samples[names[1]]
    kvio, baseline = (summarize([nbytes / MiB / x for x in xs]) for xs in (ours, theirs))
    ratio = kvio.median / baseline.median
    pairs = summarize([b / a for a, b in zip(ours, theirs, strict=True)])
    return Row(
        bar=bar, what=what, unit="MiB/s", kvio=kvio, baseline=baseline,
        ours=names[0], against=names[1],
        value=f"{ratio:.2f}", pairs=f"{pairs.low:.2f}..{pairs.high:.2f}",
        wanted="" if at_least is None else f">= {at_least:.2f}",
        holds=None if at_least is None else ratio >= at_least, note=note,
        samples={name: samples[name] for name in names},
    )  # fmt: skip


def limit_bar(
    bar: str,
    what: str,
    measured: Summary,
    ours: str,
    *,
    unit: Unit,
    at_most: float,
    samples: dict[str, list[float]],
    note: str = "",
) -> Row:
    """Judge one figure by a limit."""
    return Row(
        bar=bar, what=what, unit=unit, kvio=measured, baseline=Summary(at_most, at_most, at_most),
        ours=ours, against="limit", value=f"{measured.median:.1f} {unit}",
        pairs=f"{measured.low:.1f}..{measured.high:.1f}", wanted=f"<= {at_most:.0f} {unit}",
        holds=measured.median <= at_most, note=note, samples=samples,
    )  # fmt: skip


def size_text(nbytes: int) -> str:
    """Write a size with its unit."""
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
