"""Tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from kvio import GiB
from kvio.experiments.measure import Sample, percentile
from kvio.experiments.plot import size_text
from kvio.experiments.s3 import ratios
from kvio.experiments.s3.bars import bars, best_threads, hypotheses
from kvio.experiments.s3.order import CONTENDERS, FLOOR, GET, HEAD, LIBRARIES, LIST, PUT
from kvio.experiments.s3.plan import LIBRARIES as PART_LIBRARIES
from kvio.experiments.s3.plan import PROCESSES, READS, REAL, SCALE, THREADS
from kvio.experiments.s3.ratios import Rounds
from kvio.experiments.table import Table

_TITLES: Final = {
    THREADS: "1. Write threads",
    PART_LIBRARIES: "2. Libraries at 32 threads",
    READS: "Reads at 32 threads",
    PROCESSES: "3. Processes of 8 threads each",
    SCALE: "4. Object sizes and threads",
    REAL: "On a real server",
}
_HEADINGS: Final = (
    "load", "size", "operation", "contender", "MB/s", "range", "p50 ms", "p99 ms", "x floor",
    "user s/GiB", "system s/GiB", "cores", "server s/GiB", "process s",
)  # fmt: skip
_RIGHT: Final = frozenset(_HEADINGS) - {"load", "operation", "contender"}


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Make every table there is something for."""
    made = [_part(samples, part) for part in _TITLES]
    made += [_scaling(samples), _best(samples), _calls(samples), bars(samples), hypotheses(samples)]
    return [table for table in made if table is not None]


def _part(samples: Sequence[Sample], part: str) -> Table | None:
    own = [s for s in samples if s.facts["part"] == part and s.operation not in (HEAD, LIST)]
    groups = ratios.grouped(own)
    if not groups:
        return None
    order = sorted(
        groups,
        key=lambda key: (
            key[0][2],
            key[0][1],
            _first(groups[key]).facts["processes"],
            _first(groups[key]).facts["threads"],
            CONTENDERS.index(key[1]),
        ),
    )
    rows = [_row(groups[key], groups.get((key[0], FLOOR))) for key in order]
    ends = [at for at, (this, after) in enumerate(pairwise(order)) if this[0] != after[0]]
    return Table(
        title=_TITLES[part], headings=_HEADINGS, rows=rows, right=_RIGHT, rule_after=frozenset(ends)
    )


def _row(rounds: Rounds, floor: Rounds | None) -> tuple[str, ...]:
    samples = list(rounds.values())
    first = samples[0]
    speeds = [sample.bytes_per_s / 1e6 for sample in samples]
    latencies = [seconds * 1e3 for sample in samples for seconds in sample.latencies_s]
    against = ratios.ratio(rounds, floor, ratios.speed)
    return (
        first.subject.partition(": ")[2],
        size_text(first.block_nbytes),
        first.operation,
        first.contender,
        f"{statistics.median(speeds):.0f}",
        f"{min(speeds):.0f}-{max(speeds):.0f}",
        f"{percentile(latencies, 50):.2f}",
        f"{percentile(latencies, 99):.2f}",
        "" if against is None else f"{against.median:.2f}",
        f"{statistics.median(s.facts['user_s'] / _gib(s) for s in samples):.2f}",
        f"{statistics.median(s.facts['system_s'] / _gib(s) for s in samples):.2f}",
        f"{statistics.median(ratios.cpu_s(s) / s.wall_s for s in samples):.2f}",
        server_s_per_gib(samples),
        _process_s(samples),
    )


def _process_s(samples: Sequence[Sample]) -> str:
    walls = [s.facts["process_wall_s"] for s in samples if "process_wall_s" in s.facts]
    return f"{statistics.median(walls):.2f}" if walls else ""


def server_s_per_gib(samples: Sequence[Sample]) -> str:
    """Divide sums, since the kernel tells another process's time in steps of 10 ms."""
    known = [sample for sample in samples if sample.facts["server_s"] is not None]
    if not known:
        return ""
    return f"{sum(s.facts['server_s'] for s in known) / sum(map(_gib, known)):.2f}"


def _gib(sample: Sample) -> float:
    return sample.block_nbytes * len(sample.latencies_s) / GiB


def _scaling(samples: Sequence[Sample]) -> Table | None:
    groups = ratios.grouped(s for s in samples if s.facts["part"] == PROCESSES)
    rows = []
    for name in ratios.in_order((name for _, name in groups), CONTENDERS):
        own = {
            _first(rounds).facts["processes"]: rounds
            for (_, contender), rounds in groups.items()
            if contender == name
        }
        for count in sorted(own):
            found = ratios.ratio(own[count], own.get(1), ratios.speed)
            if found is not None:
                speed = ratios.middle(own[count], ratios.speed) / 1e6
                cut = any(sample.facts["cut_short"] for sample in own[count].values())
                told = f"{found.median / count:.2f}"
                rows.append((name, str(count), f"{speed:.0f}", told, "yes" if cut else ""))
    if not rows:
        return None
    headings = ("contender", "processes", "MB/s", "actual / ideal", "cut short")
    return Table(
        title="Scaling efficiency", headings=headings, rows=rows, right=frozenset(headings[1:4])
    )


def _best(samples: Sequence[Sample]) -> Table | None:
    groups = ratios.grouped(samples)
    rows = []
    for library in LIBRARIES:
        for operation in (PUT, GET):
            for nbytes, (best, own) in best_threads(groups, library, operation).items():
                speeds = {count: ratios.middle(own[count], ratios.speed) for count in sorted(own)}
                enough = next(c for c, speed in speeds.items() if speed >= 0.95 * speeds[best])
                told = ", ".join(f"{c}: {speed / 1e6:.0f}" for c, speed in speeds.items())
                rows.append(
                    (library, operation, size_text(nbytes), str(best), str(enough), told)
                )  # fmt: skip
    if not rows:
        return None
    headings = ("library", "operation", "size", "best threads", "95 % with", "MB/s by threads")
    return Table(
        title="The best thread count (kvio)",
        headings=headings,
        rows=rows,
        right=frozenset(headings[2:5]),
    )


def _calls(samples: Sequence[Sample]) -> Table | None:
    groups = ratios.grouped(s for s in samples if s.operation in (HEAD, LIST))
    if not groups:
        return None
    rows = []
    for place, name in sorted(groups, key=lambda key: (key[0][2], key[0], _rank(key[1]))):
        rounds = groups[place, name]
        against = ratios.ratio(rounds, groups.get((place, FLOOR)), ratios.calls_per_s)
        times = _milliseconds(rounds.values())
        rows.append((
            place[2],
            place[0],
            size_text(_first(rounds).facts["object_nbytes"]),
            name,
            f"{ratios.middle(rounds, ratios.calls_per_s):.0f}",
            f"{percentile(times, 50):.2f}",
            f"{percentile(times, 99):.2f}",
            "" if against is None else f"{against.median:.2f}",
            f"{_cpu_us(rounds.values()):.0f}",
        ))  # fmt: skip
    headings = (
        "operation", "load", "size", "contender", "calls/s", "p50 ms", "p99 ms", "x floor",
        "client CPU us/call",
    )  # fmt: skip
    return Table(
        title="HEAD, and LIST of at most 100 names",
        headings=headings,
        rows=rows,
        right=frozenset(headings[4:]) | {"size"},
    )


def _milliseconds(samples: Iterable[Sample]) -> list[float]:
    return [seconds * 1e3 for sample in samples for seconds in sample.latencies_s]


def _cpu_us(samples: Iterable[Sample]) -> float:
    return statistics.median(ratios.cpu_s(s) / len(s.latencies_s) * 1e6 for s in samples)


def _rank(name: str) -> int:
    return CONTENDERS.index(name)


def _first(rounds: Rounds) -> Sample:
    return next(iter(rounds.values()))
