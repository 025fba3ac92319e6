"""Timing calls, and what is kept and said of the times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from benchmarks.harness.intervals import interval

T = TypeVar("T")

_Place: TypeAlias = tuple[str, int, str]

#: Operations, as tables and plots name them.
WRITE: Final = "write"
WRITTEN_BACK: Final = "write + writeback"
HOT: Final = "read, hot"
COLD: Final = "read, cold"


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What calls returned, how long each took, and all of them from first to last."""

    results: list[T]
    latencies_s: list[float]
    wall_s: float


def time_calls(calls: Sequence[Callable[[], T]], threads: int) -> Timed[T]:
    """Run the calls in order, on *threads* threads where that is more than one."""
    if threads == 1:
        return _collect(lambda: [_time_one(call) for call in calls])
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.001] * threads))  # starting threads is not what is timed
        return _collect(lambda: list(pool.map(_time_one, calls)))


def _time_one(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _collect(run: Callable[[], list[tuple[T, float]]]) -> Timed[T]:
    start = time.perf_counter()
    pairs = run()
    wall = time.perf_counter() - start
    return Timed([result for result, _ in pairs], [seconds for _, seconds in pairs], wall)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One contender, one operation, one round.

    Attributes:
        subject: what was stored and how: a model's name, a number of threads.
        block_nbytes: payload bytes of one call.
        modes: blocks by I/O mode, empty where it was not reported.
        reasons: why, each once.
        cached_before: fraction of the stored bytes in the page cache when the clock started.
        intact: every byte that was read is the one that was written; None for writes.
        facts: what only this experiment knows, for its tables and the JSON.
    """

    subject: str
    block_nbytes: int
    contender: str
    checksum: bool
    operation: str
    round: int
    wall_s: float
    latencies_s: list[float]
    modes: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    cached_before: float | None = None
    intact: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes by time from the first call to the end of the last."""
        return self.block_nbytes * len(self.latencies_s) / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All rounds of one contender and operation; times in seconds, speeds in bytes a second.

    Attributes:
        ratio: of the speed to that of the reference, the median over rounds of both; *ratio_low*
            and *ratio_high* bound the true median with a probability of 95 %, None: there were too
            few rounds.
    """

    subject: str
    block_nbytes: int
    contender: str
    checksum: bool
    operation: str
    rounds: int
    calls: int
    bytes_per_s: float
    slowest_bytes_per_s: float
    fastest_bytes_per_s: float
    p50_s: float
    p99_s: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    modes: dict[str, int]
    reasons: list[str]
    cached_before: float | None


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that *percent* of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarise(
    samples: Sequence[Sample], reference: str, order: Sequence[str] = ()
) -> list[Summary]:
    """Sum up by subject, block size, operation and contender.

    In order of first appearance, contenders in the given *order*, since trials have none.

    The ratio is the median, over rounds that both took part in, of the speed by that of the
    *reference* contender in the same round.
    """
    groups: dict[tuple[_Place, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((_place(sample), sample.contender), []).append(sample)
    by_round = {(_place(s), s.round): s for s in samples if s.contender == reference}
    places = list(dict.fromkeys(place for place, _ in groups))
    known = list(dict.fromkeys((*order, *(name for _, name in groups))))
    ranks = {name: rank for rank, name in enumerate(known)}
    keys = sorted(groups, key=lambda key: (places.index(key[0]), ranks[key[1]]))
    return [_sum_up(groups[key], by_round) for key in keys]


def _place(sample: Sample) -> _Place:
    return sample.subject, sample.block_nbytes, sample.operation


def _sum_up(group: list[Sample], references: dict[tuple[_Place, int], Sample]) -> Summary:
    first = group[0]
    latencies = [seconds for sample in group for seconds in sample.latencies_s]
    speeds = [sample.bytes_per_s for sample in group]
    ratios = [
        sample.bytes_per_s / references[key].bytes_per_s
        for sample in group
        if (key := (_place(sample), sample.round)) in references
    ]
    between = interval(ratios) if ratios else None
    cached = [sample.cached_before for sample in group if sample.cached_before is not None]
    return Summary(
        subject=first.subject,
        block_nbytes=first.block_nbytes,
        contender=first.contender,
        checksum=first.checksum,
        operation=first.operation,
        rounds=len(group),
        calls=len(latencies),
        bytes_per_s=statistics.median(speeds),
        slowest_bytes_per_s=min(speeds),
        fastest_bytes_per_s=max(speeds),
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        ratio=between.median if between else None,
        ratio_low=between.low if between and between.is_bounded else None,
        ratio_high=between.high if between and between.is_bounded else None,
        modes=_added(sample.modes for sample in group),
        reasons=list(dict.fromkeys(reason for sample in group for reason in sample.reasons)),
        cached_before=statistics.median(cached) if cached else None,
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, Any] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
