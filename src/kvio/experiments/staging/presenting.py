"""The tables and the plot of the staging experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, Final

from kvio import GiB
from kvio.experiments.measure import Sample, Summary, percentile
from kvio.experiments.plot import size_text
from kvio.experiments.staging.order import ACCEPT, CONTENDERS, DRAIN, OPERATIONS, READ, TIERS, WRITE
from kvio.experiments.table import Table

TITLES: Final = {
    WRITE: "write: a checkpoint while drains run, as its writers see it",
    ACCEPT: "accept: into the tier alone, drains held back",
    DRAIN: "drain: from the tier to the store, and the same blocks written directly",
    READ: "read: staged blocks, and their peers",
}
_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
_GREYS: Final = ("#000000",)
_BLUES: Final = ("#9ecae1", "#6baed6", "#3182bd", "#08519c")
_PURPLE: Final = ("#756bb1",)
_REDS: Final = ("#fdd0a2", "#fdae6b", "#f16913", "#a63603")
_GREENS: Final = ("#74c476", "#31a354", "#006d2c")
_COLOURS: Final = dict(zip(CONTENDERS, (*_GREYS, *_BLUES, *_PURPLE, *_REDS, *_GREENS), strict=True))


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Give a table an operation."""
    return [
        _table(operation, own, samples)
        for operation in OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _table(operation: str, summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    columns = _columns(operation)
    headings = ("ranks", "size", "contender", *columns)
    rows = []
    for summary in summaries:
        own = of(summary, samples)
        rows.append(
            (
                summary.subject.partition(" ")[0],
                size_text(summary.block_nbytes),
                summary.contender,
                *(column(summary, own) for column in columns.values()),
            )
        )
    places = [(s.subject, s.block_nbytes) for s in summaries]
    ends = [i for i, (this, after) in enumerate(pairwise(places)) if this != after]
    return Table(
        title=TITLES[operation],
        headings=headings,
        rows=rows,
        right=frozenset(headings) - {"contender"},
        rule_after=frozenset(ends),
    )


def of(summary: Summary, samples: Sequence[Sample]) -> list[Sample]:
    """Give the samples that a summary sums up."""
    place = (summary.subject, summary.block_nbytes, summary.operation, summary.contender)
    return [s for s in samples if (s.subject, s.block_nbytes, s.operation, s.contender) == place]


_Column = Callable[[Summary, Sequence[Sample]], str]


def _columns(operation: str) -> dict[str, _Column]:
    speed: dict[str, _Column] = {
        "MB/s": lambda s, _: f"{s.bytes_per_s / 1e6:.0f}",
        "range": lambda s, _: (
            f"{s.slowest_bytes_per_s / 1e6:.0f}-{s.fastest_bytes_per_s / 1e6:.0f}"
        ),
    }
    calls: dict[str, _Column] = {
        "p50 ms": lambda s, _: f"{s.p50_s * 1e3:.2f}",
        "p95 ms": lambda _, own: f"{percentile(latencies(own), 95) * 1e3:.2f}",
        "p99 ms": lambda s, _: f"{s.p99_s * 1e3:.2f}",
        "CV": lambda _, own: f"{variation(latencies(own)):.2f}",
    }
    safe: dict[str, _Column] = {
        "durable s": lambda _, own: _median(own, "durable_s"),
        "CPU s/GiB": lambda _, own: _median(own, "cpu_s", by_gib=True),
        "machine's": lambda _, own: _median(own, "machine_cpu_s", by_gib=True),
    }
    floor: dict[str, _Column] = {
        "x memcpy": lambda s, _: "" if s.ratio is None else f"{s.ratio:.2f}"
    }
    if operation == WRITE:
        return {**speed, **calls, **safe, **floor}
    if operation == DRAIN:
        return {**speed, **safe}
    return {**speed, **calls, "CPU s/GiB": safe["CPU s/GiB"], **floor}


def latencies(samples: Iterable[Sample]) -> list[float]:
    """Give every call of all rounds."""
    return [one for sample in samples for one in sample.latencies_s]


def variation(values: Sequence[float]) -> float:
    """Give the coefficient of variation: the standard deviation by the mean."""
    return pstdev(values) / fmean(values)


def _median(samples: Sequence[Sample], fact: str, *, by_gib: bool = False) -> str:
    """Give the median over rounds of what a turn took, or what a GiB of it took."""
    found = [
        s.facts[fact] / (s.block_nbytes * len(s.latencies_s) / GiB if by_gib else 1)
        for s in samples
        if fact in s.facts
    ]
    return f"{median(found):.3f}" if found else ""


def draw(
    summaries: Sequence[Summary],
    *,
    samples: Sequence[Sample],
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    """Draw what a writer sees: speed, p50 to p99 of a call, time until durable, and the drain."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _MISSING
    panels: list[tuple[str, str, str, Callable[[Summary], tuple[float, float, float] | None]]] = [
        (WRITE, "rate a writer sees while drains run", "MB/s", _speed),
        (WRITE, "one call while drains run: p50, whisker to p99", "ms", _calls),
        (
            WRITE,
            "a checkpoint until all is durable",
            "s",
            lambda summary: _until_durable(of(summary, samples)),
        ),
        (DRAIN, "drain, and the backend written directly", "MB/s", _speed),
        (READ, "read of staged blocks", "MB/s", _speed),
    ]
    panels = [panel for panel in panels if any(s.operation == panel[0] for s in summaries)]
    figure = Figure(figsize=(12, 2.7 * len(panels) + 1.4), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for (operation, text, unit, value), one in zip(panels, axes, strict=True):
        _bars(one, [s for s in summaries if s.operation == operation], value)
        one.set_title(text, loc="left", fontsize=10)
        one.set_ylabel(unit)
        if operation == WRITE and unit != "s":  # from the disk to memory, and from p50 to p99
            one.set_yscale("log")
        one.grid(axis="y", alpha=0.3)
        one.set_axisbelow(True)
        handles |= {name: h for h, name in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=110)
    return None


def _speed(summary: Summary) -> tuple[float, float, float]:
    speeds = (summary.bytes_per_s, summary.slowest_bytes_per_s, summary.fastest_bytes_per_s)
    return speeds[0] / 1e6, speeds[1] / 1e6, speeds[2] / 1e6


def _calls(summary: Summary) -> tuple[float, float, float]:
    return summary.p50_s * 1e3, summary.p50_s * 1e3, summary.p99_s * 1e3


def _until_durable(samples: Sequence[Sample]) -> tuple[float, float, float] | None:
    found = [sample.facts["durable_s"] for sample in samples if "durable_s" in sample.facts]
    return (median(found), min(found), max(found)) if found else None


def _bars(
    axes: Any,
    summaries: Sequence[Summary],
    value: Callable[[Summary], tuple[float, float, float] | None],
) -> None:
    places = list(dict.fromkeys((s.subject, s.block_nbytes) for s in summaries))
    names = [name for name in CONTENDERS if any(s.contender == name for s in summaries)]
    width = 0.86 / len(names)
    for index, name in enumerate(names):
        own = [
            (places.index((s.subject, s.block_nbytes)), found)
            for s in summaries
            if s.contender == name and (found := value(s)) is not None
        ]
        if own:
            axes.bar(
                [at + (index + 0.5) * width - 0.43 for at, _ in own],
                [middle for _, (middle, _, _) in own],
                width,
                yerr=(
                    [middle - low for _, (middle, low, _) in own],
                    [high - middle for _, (middle, _, high) in own],
                ),
                label=name,
                color=_COLOURS[name],
                hatch="//" if name in TIERS else None,
                edgecolor="white",
                capsize=2,
                error_kw={"lw": 0.8},
            )
    axes.set_xticks(range(len(places)), [f"{name}\n{size_text(n)}" for name, n in places])
