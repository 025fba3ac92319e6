"""Grouped bars of throughput, drawn where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvio.experiments.measure import Summary


def draw(summaries: Sequence[Summary], *, title: str, footnote: str, path: Path) -> str | None:
    """Write a PNG with one panel an operation; None, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
    operations = list(dict.fromkeys(s.operation for s in summaries))
    figure = Figure(figsize=(11, 3.2 * len(operations) + 1.2), layout="constrained")
    panels = figure.subplots(len(operations), squeeze=False)[:, 0]
    for operation, axes in zip(operations, panels, strict=True):
        _panel(axes, [s for s in summaries if s.operation == operation], operation)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=130)
    return None


def _panel(axes: object, summaries: Sequence[Summary], operation: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    subjects = list(dict.fromkeys((s.subject, s.block_nbytes) for s in summaries))
    contenders = list(dict.fromkeys(s.contender for s in summaries))
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        own = [s for s in summaries if s.contender == contender]
        left = (index + 0.5) * width - 0.4
        axes.bar(
            [subjects.index((s.subject, s.block_nbytes)) + left for s in own],
            [s.bytes_per_s / 1e6 for s in own],
            width,
            yerr=_spread(own),
            label=contender,
            color=_colour(contender, contenders),
            alpha=1.0 if own[0].checksum else 0.55,
            capsize=2,
            error_kw={"lw": 0.8},
        )
    axes.set_xticks(
        range(len(subjects)), [f"{name}\n{nbytes / (1 << 20):.3g} MiB" for name, nbytes in subjects]
    )
    axes.set_title(operation, loc="left", fontsize=10)
    axes.set_ylabel("MB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _spread(summaries: Sequence[Summary]) -> tuple[list[float], list[float]]:
    return (
        [(s.bytes_per_s - s.slowest_bytes_per_s) / 1e6 for s in summaries],
        [(s.fastest_bytes_per_s - s.bytes_per_s) / 1e6 for s in summaries],
    )


def _colour(contender: str, contenders: Sequence[str]) -> str:
    """Give one colour to a backend with and without checksums."""
    families = list(dict.fromkeys(name.partition(",")[0] for name in contenders))
    return f"C{families.index(contender.partition(',')[0])}"
