"""What the samples say: values that are compared, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, mode
from typing import Any, Final, TypeAlias

from benchmarks.harness.columns import (
    CONTENDER,
    P50_MS,
    P99_MS,
    RANGE,
    RATIO,
    ROUNDS,
    SIZE,
    SPEED,
    Column,
    fact,
    median_of,
    number,
    samples_of,
    table_of,
)
from benchmarks.harness.intervals import interval
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Look, Panel, Point, draw_panels, size_text
from benchmarks.harness.table import Table
from benchmarks.scenarios.s3.libraries import (
    CONTENDERS,
    FLOOR,
    GET,
    HEAD,
    KINDS,
    LIST,
    PUT,
    kind_of,
    library_of,
)
from benchmarks.scenarios.s3.plan import LIBRARIES as PART_LIBRARIES
from benchmarks.scenarios.s3.plan import PROCESSES, READS, REAL, SCALE, THREADS
from kvio import GiB

#: Reads a number from a sample; None: it has none.
Measure: TypeAlias = Callable[[Sample], float | None]
#: Returns the points that a sample adds to a panel: the name in the legend, and the value.
Values: TypeAlias = Callable[[Sample], Iterable[tuple[str, float]]]

TITLES: Final = {
    THREADS: "1. Write threads",
    PART_LIBRARIES: "2. Libraries at 32 threads",
    READS: "Reads at 32 threads",
    PROCESSES: "3. Processes of 8 threads each",
    SCALE: "4. Object sizes and threads",
    REAL: "On a real server",
}
COLOURS: Final = {
    FLOOR: "#000000",
    "boto3": "#d62728",
    "minio": "#ff7f0e",
    "obstore": "#e377c2",
    "s3dlio": "#2ca02c",
    "torch": "#9467bd",
}
_LINES: Final = {FLOOR: ":", "kvio": "-", "kvio block": "-.", "direct": "--", "defaults": ":"}
#: Bars stand for a kind, with the library below them.
BARS: Final = (
    Look("#303030"),
    Look("#707070", hatch=".."),
    Look("#a0a0a0", hatch="//"),
    Look("#d0d0d0", hatch="xx"),
)
_LOOKS: Final = {
    **{name: Look(COLOURS[library_of(name)], _LINES[kind_of(name)]) for name in CONTENDERS},
    **dict(zip(KINDS, BARS, strict=True)),
}


# ---- values of samples ----


def parts_of(sample: Sample) -> Sequence[str]:
    """Return the parts that a sample belongs to; through DLIO that can be several."""
    parts: Sequence[str] = sample.facts.get("parts") or [sample.facts["part"]]
    return parts


def speed(sample: Sample) -> float:
    """Return bytes a second."""
    return sample.bytes_per_s


def gib(sample: Sample) -> float:
    """Return the payload of all calls in GiB."""
    return sample.block_nbytes * len(sample.latencies_s) / GiB


def cpu_s(sample: Sample) -> float:
    """Return the client's processor seconds in the window."""
    return float(sample.facts["user_s"] + sample.facts["system_s"])


def cpu_s_per_gib(sample: Sample) -> float:
    """Return the client's processor seconds in the window by GiB of payload."""
    return cpu_s(sample) / gib(sample)


def beside(
    samples: Iterable[Sample], is_base: Callable[[Sample], bool], measure: Measure
) -> Measure:
    """Return what divides a sample's value by that of a base, of the same contender and round.

    The base is the load with another number of threads or processes; size and operation are the
    same.
    """
    bases = {_key(sample): measure(sample) for sample in samples if is_base(sample)}

    def ratio(sample: Sample) -> float | None:
        base, value = bases.get(_key(sample)), measure(sample)
        return value / base if base and value is not None else None

    return ratio


def _key(sample: Sample) -> tuple[str, int, str, int]:
    return sample.contender, sample.block_nbytes, sample.operation, sample.round


def scaling(samples: Sequence[Sample], measure: Measure) -> Measure:
    """Return what computes the share of the ideal that several processes reach, by one."""
    by_one = beside(
        samples, lambda s: PROCESSES in parts_of(s) and s.facts["processes"] == 1, measure
    )

    def share(sample: Sample) -> float | None:
        ratio = by_one(sample)
        return None if ratio is None else ratio / float(sample.facts["processes"])

    return share


def interval_text(samples: Iterable[Sample], measure: Measure) -> str:
    """Write the median over rounds with its interval; empty: there is no value."""
    values = [value for sample in samples if (value := measure(sample)) is not None]
    if not values:
        return ""
    found = interval(values)
    return str(found) if found.is_bounded else f"{found.median:.2f}"


# ---- tables ----


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make every table that has a row."""
    made = [_part(part, summaries, samples) for part in TITLES]
    made += [_scaling(summaries, samples), _thread_counts(summaries, samples)]
    made += [_calls(summaries, samples)]
    return [table for table in made if table.rows]


def in_part(
    part: str, summaries: Sequence[Summary], samples: Sequence[Sample]
) -> list[tuple[Summary, Sample]]:
    """List the summaries of a part, by size, processes and threads, with a sample of each."""
    found = [(one, samples_of(one, samples)[0]) for one in summaries]
    return sorted(
        ((one, first) for one, first in found if part in parts_of(first)),
        key=lambda pair: (
            pair[0].operation,
            pair[0].block_nbytes,
            pair[1].facts["processes"],
            pair[1].facts["threads"],
        ),
    )


def load_text(summary: Summary, _: Sequence[Sample]) -> str:
    """Write the threads and processes of a load: a column."""
    return summary.subject.partition(": ")[2]


def _part(part: str, summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    rows = [
        one for one, _ in in_part(part, summaries, samples) if one.operation not in (HEAD, LIST)
    ]
    columns: dict[str, Column] = {
        "load": load_text,
        "size": SIZE,
        "operation": lambda one, _: one.operation,
        "contender": CONTENDER,
        "rounds": ROUNDS,
        "MB/s": SPEED,
        "range": RANGE,
        "p50 ms": P50_MS,
        "p99 ms": P99_MS,
        "x floor": RATIO,
        "user s/GiB": _median(lambda s: s.facts["user_s"] / gib(s)),
        "system s/GiB": _median(lambda s: s.facts["system_s"] / gib(s)),
        "cores": _median(lambda s: cpu_s(s) / s.wall_s),
        "server s/GiB": _server_s_per_gib,
        "process s": fact("process_wall_s"),
    }
    return table_of(TITLES[part], rows, samples, columns, left=("load", "operation", "contender"))


def _median(measure: Measure, form: str = ".2f") -> Column:
    return lambda _, own: number(median_of(own, measure), form)


def _server_s_per_gib(_: Summary, own: Sequence[Sample]) -> str:
    """Divide sums, since the kernel reports the time of another process in steps of 10 ms."""
    known = [sample for sample in own if sample.facts["server_s"] is not None]
    if not known:
        return ""
    return f"{sum(s.facts['server_s'] for s in known) / sum(map(gib, known)):.2f}"


def _scaling(summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    share = scaling(samples, speed)
    found = in_part(PROCESSES, summaries, samples)
    rows = sorted((one for one, _ in found), key=lambda one: CONTENDERS.index(one.contender))
    columns: dict[str, Column] = {
        "contender": CONTENDER,
        "processes": lambda _, own: str(own[0].facts["processes"]),
        "rounds": ROUNDS,
        "MB/s": SPEED,
        "actual / ideal": lambda _, own: interval_text(own, share),
        "cut short": lambda _, own: "yes" if any(s.facts["cut_short"] for s in own) else "",
    }
    made = table_of("Scaling efficiency", rows, samples, columns, left=("contender", "cut short"))
    return replace(made, rule_after=frozenset())


def _thread_counts(summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    """Set the medians of all thread counts side by side; the claims say what differs."""
    found: dict[tuple[str, str, int], dict[int, Summary]] = {}
    for one, first in in_part(SCALE, summaries, samples):
        if kind_of(one.contender) == "kvio" and one.operation in (PUT, GET):
            place = (one.contender, one.operation, one.block_nbytes)
            found.setdefault(place, {})[first.facts["threads"]] = one
    rows = []
    for (contender, operation, nbytes), counts in sorted(found.items(), key=_library_first):
        if len(counts) < 2:
            continue
        best = max(counts, key=lambda count: counts[count].bytes_per_s)
        most = counts[best].bytes_per_s
        enough = next(n for n, one in counts.items() if one.bytes_per_s >= 0.95 * most)
        speeds = ", ".join(f"{n}: {one.bytes_per_s / 1e6:.0f}" for n, one in counts.items())
        library, rounds = library_of(contender), min(one.rounds for one in counts.values())
        rows.append((
            library, operation, size_text(nbytes), str(rounds), str(best), str(enough), speeds,
        ))  # fmt: skip
    headings = (
        "library", "operation", "size", "rounds", "best threads", "95 % with", "MB/s by threads",
    )  # fmt: skip
    return Table(
        title="The best thread count by medians (kvio)",
        headings=headings,
        rows=rows,
        right=frozenset(headings[2:6]),
    )


def _library_first(item: tuple[tuple[str, str, int], Any]) -> tuple[int, bool, int]:
    contender, operation, nbytes = item[0]
    return CONTENDERS.index(contender), operation == GET, nbytes


def _calls(summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    rows = [one for one in summaries if one.operation in (HEAD, LIST)]
    rows.sort(key=lambda one: (one.operation, one.subject, one.block_nbytes))
    columns: dict[str, Column] = {
        "operation": lambda one, _: one.operation,
        "load": lambda one, _: one.subject,
        "size": SIZE,
        "contender": CONTENDER,
        "rounds": ROUNDS,
        "calls/s": _median(lambda s: len(s.latencies_s) / s.wall_s, ".0f"),
        "p50 ms": P50_MS,
        "p99 ms": P99_MS,
        "x floor": RATIO,
        "client CPU us/call": _median(lambda s: cpu_s(s) / len(s.latencies_s) * 1e6, ".0f"),
    }
    return table_of(
        "HEAD, and LIST of at most 100 names",
        rows,
        samples,
        columns,
        left=("operation", "load", "contender"),
    )


# ---- plots ----


def draw(
    samples: Sequence[Sample],
    _: Sequence[Summary],
    *,
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    """Draw throughput over threads, processes and sizes, and processor time by library."""
    ordered = sorted(samples, key=lambda sample: CONTENDERS.index(sample.contender))

    def own(part: str, operation: str) -> list[Sample]:
        return [s for s in ordered if part in parts_of(s) and s.operation == operation]

    def speeds(sample: Sample) -> list[tuple[str, float]]:
        return [(sample.contender, sample.bytes_per_s / 1e6)]

    def cpu(sample: Sample) -> list[tuple[str, float]]:
        return [(kind_of(sample.contender), cpu_s_per_gib(sample))]

    panels = line_panel(own(THREADS, PUT), "PUT, by threads", "threads", speeds)
    for part, operation in ((PART_LIBRARIES, PUT), (READS, GET)):
        name = f"{operation}, 32 threads: CPU s/GiB of the client"
        panels += bar_panel(own(part, operation), name, "CPU s/GiB", cpu)
    panels += line_panel(own(PROCESSES, PUT), "PUT, by processes", "processes", speeds)
    for operation in (PUT, GET):
        name = f"{operation}, by object size"
        panels += line_panel(own(SCALE, operation), name, "object_nbytes", speeds)
    if not panels:
        return "no plot: neither PUT nor GET was measured"
    return draw_panels(panels, title=title, footnote=footnote, path=path, looks=_LOOKS)


def line_panel(samples: Sequence[Sample], title: str, over: str, values: Values) -> list[Panel]:
    """Return a panel of lines over a fact of the samples, in MB/s; none without samples.

    Over sizes it is of the number of threads that most samples have.
    """
    if not samples:
        return []
    sizes = over == "object_nbytes"
    if sizes:
        few = mode(int(sample.facts["threads"]) for sample in samples)
        samples = [sample for sample in samples if sample.facts["threads"] == few]
        title = f"{title}, {few} threads"
    panel = Panel(
        title=title,
        unit="MB/s",
        points=_points(samples, lambda sample: int(sample.facts[over]), values),
        lines=True,
        label=size_text if sizes else str,
        axis="object size" if sizes else over,
        log=True,
    )
    return [panel]


def bar_panel(
    samples: Sequence[Sample], title: str, unit: str, values: Values, *, log: bool = False
) -> list[Panel]:
    """Return a panel of bars by library; none without samples."""
    if not samples:
        return []
    points = _points(samples, lambda sample: library_of(sample.contender), values)
    return [Panel(title=title, unit=unit, points=points, log=log)]


def _points(
    samples: Sequence[Sample], at: Callable[[Sample], Any], values: Values
) -> dict[str, list[Point]]:
    """Return the median and range of values by name and place."""
    found: dict[str, dict[Any, list[float]]] = {}
    for sample in samples:
        for name, value in values(sample):
            found.setdefault(name, {}).setdefault(at(sample), []).append(value)
    return {
        name: [Point(place, median(own), min(own), max(own)) for place, own in places.items()]
        for name, places in found.items()
    }
