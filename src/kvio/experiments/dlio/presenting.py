"""The tables and the plot of the DLIO experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvio.experiments.dlio.bars import ratios_of
from kvio.experiments.dlio.order import (
    CHECKPOINT,
    CONTENDERS,
    EPOCH,
    GENERATION,
    OPERATIONS,
    REFERENCE,
    has_own_loader,
)
from kvio.experiments.measure import Sample, Summary
from kvio.experiments.plot import size_text
from kvio.experiments.table import Table

TITLES: Final = {
    GENERATION: "generation: DLIO makes the samples and stores them",
    EPOCH: "epoch: DLIO reads every sample once, all of them in the page cache before",
    CHECKPOINT: "checkpoint: every rank saves its states",
}
_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
_COLOURS: Final = {
    "local_fs": "#7f7f7f",
    "posix-tmpfile": "#1f77b4",
    "posix-direct": "#ff7f0e",
    "hybrid": "#2ca02c",
    "s3+boto3": "#9467bd",
    "s3+minio": "#8c564b",
    "s3+obstore": "#e377c2",
    "s3+s3dlio": "#17becf",
    "s3+torch": "#d62728",
}
_Column = Callable[[Sequence[Sample]], str]


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Give a table an operation."""
    return [
        _table(operation, own)
        for operation in OPERATIONS
        if (own := [s for s in samples if s.operation == operation])
    ]


def _table(operation: str, samples: Sequence[Sample]) -> Table:
    columns = _columns(operation)
    headings = ("workload", "contender", "rounds", "s", "range", "/ local_fs", *columns)
    rows = []
    places = _places(samples)
    for subject, name in places:
        own = [s for s in samples if (s.subject, s.contender) == (subject, name)]
        times = [s.wall_s for s in own]
        ratios = ratios_of(samples, operation, name, REFERENCE).get(subject)
        rows.append(
            (
                f"{subject}, {size_text(own[0].block_nbytes)}",
                name,
                str(len(own)),
                f"{median(times):.3f}",
                f"{min(times):.3f}-{max(times):.3f}",
                f"{median(ratios):.2f}" if ratios else "",
                *(column(own) for column in columns.values()),
            )
        )
    return Table(
        title=TITLES[operation],
        headings=headings,
        rows=rows,
        right=frozenset(headings[2:]),
        rule_after=frozenset(i for i, (a, b) in enumerate(pairwise(places)) if a[0] != b[0]),
    )


def _places(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """List workloads as they first appeared, and their contenders in the order of tables."""
    subjects = list(dict.fromkeys(s.subject for s in samples))
    found = {(s.subject, s.contender) for s in samples}
    return [(subject, n) for subject in subjects for n in CONTENDERS if (subject, n) in found]


def _columns(operation: str) -> dict[str, _Column]:
    rate: dict[str, _Column] = {
        "MB/s": lambda own: f"{median(s.bytes_per_s for s in own) / 1e6:.0f}"
    }
    whole: dict[str, _Column] = {
        "process s": lambda own: _fact(own, "process_s", ".2f"),
        "CPU s": lambda own: f"{median(_cpu_s(s) for s in own):.2f}",
    }
    if operation == GENERATION:
        return {**rate, "PUT window s": lambda own: _fact(own, "put_window_s", ".3f"), **whole}
    if operation == CHECKPOINT:
        return {**rate, **whole}
    return {
        "samples/s": lambda own: _fact(own, "samples_per_s", ".0f"),
        "AU %": lambda own: _fact(own, "au_percent", ".1f"),
        "I/O MB/s": lambda own: _fact(own, "io_mb_per_s", ".0f"),
        **whole,
    }


def _cpu_s(sample: Sample) -> float:
    return float(sample.facts["user_s"] + sample.facts["system_s"])


def _fact(samples: Sequence[Sample], name: str, form: str) -> str:
    found = [s.facts[name] for s in samples if s.facts.get(name) is not None]
    return format(median(found), form) if found else ""


def draw(
    summaries: Sequence[Summary],
    *,
    samples: Sequence[Sample],
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    """Draw times as grouped bars by workload, one panel an operation."""
    del summaries
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _MISSING
    operations = [name for name in OPERATIONS if any(s.operation == name for s in samples)]
    figure = Figure(figsize=(11, 2.9 * len(operations) + 1.4), layout="constrained")
    panels = figure.subplots(len(operations), squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for operation, axes in zip(operations, panels, strict=True):
        _bars(axes, [s for s in samples if s.operation == operation])
        axes.set_title(TITLES[operation], loc="left", fontsize=10)
        axes.set_ylabel("seconds (less is better)")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        handles |= {name: h for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=110)
    return None


def _bars(axes: Any, samples: Sequence[Sample]) -> None:
    places = _places(samples)
    subjects = list(dict.fromkeys(subject for subject, _ in places))
    names = [name for name in CONTENDERS if any(s.contender == name for s in samples)]
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        at = [subjects.index(subject) for subject, one in places if one == name]
        times = [
            sorted(s.wall_s for s in samples if (s.subject, s.contender) == (subjects[i], name))
            for i in at
        ]
        middle = [median(one) for one in times]
        axes.bar(
            [i + (index + 0.5) * width - 0.42 for i in at],
            middle,
            width,
            yerr=(
                [m - one[0] for m, one in zip(middle, times, strict=True)],
                [one[-1] - m for m, one in zip(middle, times, strict=True)],
            ),
            label=name,
            color=_COLOURS[name.split()[0]],
            hatch="//" if has_own_loader(name) else None,
            edgecolor="white",
            capsize=2,
            error_kw={"lw": 0.8},
        )
    axes.set_xticks(range(len(subjects)), subjects)
