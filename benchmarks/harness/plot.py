"""Panels of bars or of lines, drawn where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from benchmarks.harness.measure import Summary

_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
#: One colour per contender, the same in every plot; others take what is left, in order.
_COLOURS: Final = {
    "plain Python": "#7f7f7f",
    "local_fs": "#7f7f7f",
    "buffered": "#1f77b4",
    "posix-tmpfile": "#1f77b4",
    "dontcache": "#17becf",
    "direct": "#ff7f0e",
    "posix-direct": "#ff7f0e",
    "unaligned": "#bcbd22",
    "unaligned 1 thread": "#8c6d31",
    "buffered stream": "#aec7e8",
    "direct stream": "#ffbb78",
    "hybrid": "#2ca02c",
    "hybrid calibrated": "#006d2c",
    "safetensors": "#9467bd",
    "tensorstore": "#8c564b",
    "obstore LocalStore": "#e377c2",
}
_OTHERS: Final = (
    *("#d62728", "#98df8a", "#c49c94", "#dbdb8d", "#000000", "#c5b0d5", "#f7b6d2"),
    *("#3182bd", "#756bb1", "#fdae6b", "#74c476", "#a63603", "#9edae5", "#637939"),
)

#: Writes a PNG of summaries, given a title, footnote and path; None, or why there is none.
Draw: TypeAlias = Callable[..., str | None]


class Point(NamedTuple):
    """A value with its range, at a label (of bars) or a number (of lines)."""

    at: Any
    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram.

    Attributes:
        title: above it.
        unit: of the values.
        points: of every contender, in the order of the legend.
        lines: draw lines over numbers, else bars over labels.
        label: writes the numbers of lines.
        axis: what they are.
        log: values have a logarithmic axis.
    """

    title: str
    unit: str
    points: Mapping[str, Sequence[Point]]
    lines: bool = False
    label: Callable[[Any], str] = str
    axis: str = ""
    log: bool = False


class Look(NamedTuple):
    """How a contender is drawn: its colour, the style of its line and the hatch of its bars."""

    colour: str
    line: str = "-"
    hatch: str | None = None


def draw_panels(
    panels: Sequence[Panel],
    *,
    title: str,
    footnote: str,
    path: Path,
    looks: Mapping[str, Look] | None = None,
    columns: int = 1,
) -> str | None:
    """Draw panels below each other, or in so many columns, with one legend; see `Draw`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _MISSING
    names = list(dict.fromkeys(name for panel in panels for name in panel.points))
    styles = {name: (looks or {}).get(name) or _look(name, names) for name in names}
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(11 if columns == 1 else 13, 3.1 * rows + 1.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, axes in zip(panels, grid, strict=False):
        (_lines if panel.lines else _bars)(axes, panel, styles, names)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_ylabel(panel.unit)
        axes.grid(axis="both" if panel.lines else "y", alpha=0.3)
        axes.set_axisbelow(True)
        if panel.log:
            _plain_log(axes)
        elif panel.lines:
            axes.set_ylim(bottom=0)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in grid[: len(panels)]:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=min(4, len(shown)),
    )
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=120)
    return None


def _plain_log(axes: Any) -> None:
    """Set a logarithmic axis for the values, with numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bars(axes: Any, panel: Panel, styles: Mapping[str, Look], names: Sequence[str]) -> None:
    labels = list(dict.fromkeys(point.at for points in panel.points.values() for point in points))
    own = [name for name in names if panel.points.get(name)]
    width = 0.84 / max(1, len(own))
    for index, name in enumerate(own):
        points = panel.points[name]
        axes.bar(
            [labels.index(point.at) + (index + 0.5) * width - 0.42 for point in points],
            [point.middle for point in points],
            width,
            yerr=(
                [point.middle - point.low for point in points],
                [point.high - point.middle for point in points],
            ),
            label=name,
            color=styles[name].colour,
            hatch=styles[name].hatch,
            edgecolor="white",
            capsize=2,
            error_kw={"lw": 0.8},
        )
    axes.set_xticks(range(len(labels)), labels)


def _lines(axes: Any, panel: Panel, styles: Mapping[str, Look], names: Sequence[str]) -> None:
    for name in names:
        points = sorted(panel.points.get(name, ()))
        if not points:
            continue
        x = [point.at for point in points]
        axes.plot(
            x,
            [point.middle for point in points],
            label=name,
            color=styles[name].colour,
            ls=styles[name].line,
            marker="o",
            ms=3.5,
        )
        axes.fill_between(
            x,
            [point.low for point in points],
            [point.high for point in points],
            color=styles[name].colour,
            alpha=0.08,
            lw=0,
        )
    ticks = sorted({point.at for points in panel.points.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [panel.label(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(panel.axis)


def speed_points(
    summaries: Sequence[Summary], at: Callable[[Summary], Any], unit: float = 1e6
) -> dict[str, list[Point]]:
    """Return the speed of every contender, with the range over rounds, in MB/s by default."""
    found: dict[str, list[Point]] = {}
    for one in summaries:
        speeds = (one.bytes_per_s, one.slowest_bytes_per_s, one.fastest_bytes_per_s)
        middle, low, high = (speed / unit for speed in speeds)
        found.setdefault(one.contender, []).append(Point(at(one), middle, low, high))
    return found


def place_text(summary: Summary) -> str:
    """Write subject and size below each other."""
    return f"{summary.subject}\n{size_text(summary.block_nbytes)}"


def draw_bars(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw MB/s as bars by subject and size, one panel per operation."""
    panels = [
        Panel(title=operation, unit="MB/s", points=speed_points(own, place_text))
        for operation, own in _by_operation(summaries).items()
    ]
    return draw_panels(panels, **where)


def draw_lines(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw MB/s as lines over block sizes on logarithmic axes, one panel per operation."""
    panels = [
        Panel(
            title=operation,
            unit="MB/s",
            points=speed_points(own, lambda one: one.block_nbytes),
            lines=True,
            label=size_text,
            axis="block size",
            log=True,
        )
        for operation, own in _by_operation(summaries).items()
    ]
    return draw_panels(panels, **where)


def _by_operation(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for one in summaries:
        found.setdefault(one.operation, []).append(one)
    return found


def size_text(nbytes: int) -> str:
    """Write a size as people do: ``64 KiB``, ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            number = nbytes / unit
            return f"{number:.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
    return f"{nbytes} B"


def _look(name: str, names: Sequence[str]) -> Look:
    """Choose one colour per backend, hatched where blocks have no checksum or a loader of torch."""
    family, _, variant = name.partition(",")
    line = "--" if name.startswith("hybrid") else "-"
    hatch = "//" if variant else None
    if family in _COLOURS:
        return Look(_COLOURS[family], line, hatch)
    others = dict.fromkeys(c.partition(",")[0] for c in names)
    unknown = [one for one in others if one not in _COLOURS]
    return Look(_OTHERS[unknown.index(family) % len(_OTHERS)], line, hatch)
