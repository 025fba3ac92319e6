"""The tables and the plot of the shared-file experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvio import GiB
from kvio.experiments.measure import Sample, Summary
from kvio.experiments.plot import size_text
from kvio.experiments.sharedfile.order import (
    C_DIRECT,
    C_FILES,
    CONTENDERS,
    DURABLE,
    FILES_DIRECT,
    IOR,
    OPERATIONS,
    SHARED_BARE,
    SHARED_DIRECT,
    SHARED_HOLE,
    WRITE,
)
from kvio.experiments.table import Table

TITLES: Final = {
    WRITE: "write: from the common start to the end of the last call of any",
    DURABLE: "durable: until every writer has synced, and the file is sealed",
}
_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
#: Colour and line: warm is kvio past the page cache, blue through it, green one file each.
_LOOKS: Final = {
    "shared buffered": ("#1f77b4", "-"),
    SHARED_DIRECT: ("#d62728", "-"),
    SHARED_BARE: ("#ff7f0e", "-"),
    SHARED_HOLE: ("#d62728", ":"),
    "shared hybrid": ("#9467bd", "-"),
    FILES_DIRECT: ("#2ca02c", "-"),
    "files posix-tmpfile": ("#98df8a", "-"),
    "files posix-direct": ("#006d2c", "--"),
    "python buffered": ("#17becf", "--"),
    "python buffered, not preallocated": ("#17becf", ":"),
    "python direct": ("#8c564b", "--"),
    "python direct, not preallocated": ("#8c564b", ":"),
    "C buffered": ("#7f7f7f", "-."),
    C_DIRECT: ("#000000", "-."),
    C_FILES: ("#bcbd22", "-."),
    IOR[0]: ("#e377c2", "-."),
    IOR[1]: ("#e377c2", "-"),
}


def writers_of(subject: str) -> int:
    """Read the number that a subject begins with."""
    return int(subject.split()[0])


def group_of(subject: str) -> str:
    """Name what a curve over writers has in common: what runs, what is written, and where."""
    kind, *rest = subject.split(" ", 1)[1].split(", ")
    kind = "processes" if kind.startswith("process") else "threads"
    return ", ".join([kind, *rest])


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Give a table an operation."""
    return [
        _table(operation, own, samples)
        for operation in OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _table(operation: str, summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    columns = _columns(operation, summaries)
    headings = ("writers", "transfer", "contender", *columns)
    rows = []
    for summary in summaries:
        own = of(summary, samples)
        rows.append(
            (
                summary.subject,
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
        right=frozenset({"transfer", *columns}),
        rule_after=frozenset(ends),
    )


def of(summary: Summary, samples: Sequence[Sample]) -> list[Sample]:
    """Give the samples that a summary sums up."""
    place = (summary.subject, summary.block_nbytes, summary.operation, summary.contender)
    return [s for s in samples if (s.subject, s.block_nbytes, s.operation, s.contender) == place]


_Column = Callable[[Summary, Sequence[Sample]], str]


def _columns(operation: str, summaries: Sequence[Summary]) -> dict[str, _Column]:
    speed: dict[str, _Column] = {
        "MB/s": lambda s, _: f"{s.bytes_per_s / 1e6:.0f}",
        "range": lambda s, _: (
            f"{s.slowest_bytes_per_s / 1e6:.0f}-{s.fastest_bytes_per_s / 1e6:.0f}"
        ),
        "efficiency": lambda s, _: _number(efficiency(s, summaries)),
        "x C direct": lambda s, _: _number(s.ratio),
    }
    if operation == WRITE:
        return {
            **speed,
            "slowest/fastest": lambda _, own: _number(_median(own, spread)),
            "p50 ms": lambda s, _: f"{s.p50_s * 1e3:.2f}",
            "p99 ms": lambda s, _: f"{s.p99_s * 1e3:.2f}",
            "in calls": lambda _, own: _number(_median(own, in_calls)),
        }
    return {
        **speed,
        "create ms": lambda _, own: _ms(own, "created_s"),
        "sync ms": lambda _, own: _ms(own, "synced_s", "writer_s"),
        "seal ms": lambda _, own: _ms(own, "seal_s"),
        "user s/GiB": lambda _, own: _number(_median(own, lambda s: _by_gib(s, "user_s")), 3),
        "system s/GiB": lambda _, own: _number(_median(own, lambda s: _by_gib(s, "system_s")), 3),
        "mode": lambda s, _: ", ".join(s.modes),
    }


def efficiency(summary: Summary, summaries: Sequence[Summary]) -> float | None:
    """Divide a rate by that of the fewest writers, times how many more there are."""
    curve = [
        s
        for s in summaries
        if (s.contender, s.operation, s.block_nbytes, group_of(s.subject))
        == (summary.contender, summary.operation, summary.block_nbytes, group_of(summary.subject))
    ]
    fewest = min(curve, key=lambda s: writers_of(s.subject))
    more = writers_of(summary.subject) / writers_of(fewest.subject)
    return summary.bytes_per_s / fewest.bytes_per_s / more if len(curve) > 1 else None


def spread(sample: Sample) -> float | None:
    """Divide the longest time of a writer by the shortest; each writes as much."""
    own = sample.facts.get("writer_s")
    return max(own) / min(own) if own else None


def in_calls(sample: Sample) -> float | None:
    """Give the share of the writers' time that passed inside the calls that write."""
    own = sample.facts.get("writer_s")
    return sum(sample.latencies_s) / sum(own) if own else None


def _by_gib(sample: Sample, fact: str) -> float | None:
    if fact not in sample.facts:
        return None
    return float(sample.facts[fact] / (sample.block_nbytes * len(sample.latencies_s) / GiB))


def _median(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    found = [number for sample in samples if (number := value(sample)) is not None]
    return median(found) if found else None


def _ms(samples: Sequence[Sample], fact: str, after: str | None = None) -> str:
    def value(sample: Sample) -> float | None:
        number = sample.facts.get(fact)
        if number is None:
            return None
        return float(number - (max(sample.facts[after]) if after else 0.0)) * 1e3

    return _number(_median(samples, value), 1)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(summaries: Sequence[Summary], *, title: str, footnote: str, path: Path) -> str | None:
    """Draw MB/s by writers: a curve a contender; a row of panels a shape, a column an operation."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import StrMethodFormatter
    except ImportError:
        return _MISSING
    rows = list(dict.fromkeys((group_of(s.subject), s.block_nbytes) for s in summaries))
    figure = Figure(figsize=(13, 3.4 * len(rows) + 1.8), layout="constrained")
    panels = figure.subplots(len(rows), len(OPERATIONS), squeeze=False)
    handles: dict[str, Any] = {}
    for (group, nbytes), line in zip(rows, panels, strict=True):
        for operation, axes in zip(OPERATIONS, line, strict=True):
            own = [
                s
                for s in summaries
                if (group_of(s.subject), s.block_nbytes, s.operation) == (group, nbytes, operation)
            ]
            _curves(axes, own)
            if operation == WRITE:  # the page cache is memory
                axes.set_yscale("log")
                for axis_set in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                    axis_set(StrMethodFormatter("{x:.0f}"))
            else:
                axes.set_ylim(bottom=0)
            axes.set_title(f"{operation}: {group}, {size_text(nbytes)}", loc="left", fontsize=10)
            handles |= {n: h for h, n in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [name for name in CONTENDERS if name in handles]
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=4)
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=110)
    return None


def _curves(axes: Any, summaries: Sequence[Summary]) -> None:
    for name, (colour, line) in _LOOKS.items():
        own = sorted(
            (s for s in summaries if s.contender == name), key=lambda s: writers_of(s.subject)
        )
        if not own:
            continue
        x = [writers_of(s.subject) for s in own]
        axes.plot(
            x,
            [s.bytes_per_s / 1e6 for s in own],
            label=name,
            color=colour,
            ls=line,
            marker="o",
            ms=3.5,
        )
        axes.fill_between(
            x,
            [s.slowest_bytes_per_s / 1e6 for s in own],
            [s.fastest_bytes_per_s / 1e6 for s in own],
            color=colour,
            alpha=0.07,
            lw=0,
        )
    counts = sorted({writers_of(s.subject) for s in summaries})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("writers")
    axes.set_ylabel("MB/s")
    axes.grid(alpha=0.3, which="both")
    axes.set_axisbelow(True)
