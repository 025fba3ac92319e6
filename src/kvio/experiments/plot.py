"""Throughput as bars or as lines over sizes, drawn where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvio.experiments.measure import Summary

_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
#: One colour a contender, the same in every plot; others take what is left, in order.
_COLOURS: Final = {
    "plain Python": "#7f7f7f",
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
    "safetensors": "#9467bd",
    "tensorstore": "#8c564b",
    "obstore LocalStore": "#e377c2",
    "hybrid calibrated": "#006d2c",
}
_OTHERS: Final = ("#d62728", "#98df8a", "#c49c94", "#dbdb8d", "#000000", "#c5b0d5", "#f7b6d2")


#: Writes a PNG of summaries, given a title, footnote and path; None, or why there is none.
Draw: TypeAlias = Callable[..., str | None]


def draw_bars(summaries: Sequence[Summary], *, title: str, footnote: str, path: Path) -> str | None:
    """Draw grouped bars by subject, one panel an operation."""
    return _draw(summaries, _bars, title=title, footnote=footnote, path=path)


def draw_lines(
    summaries: Sequence[Summary], *, title: str, footnote: str, path: Path
) -> str | None:
    """Draw lines over block sizes on logarithmic axes, one panel an operation."""
    return _draw(summaries, _lines, title=title, footnote=footnote, path=path)


def _draw(
    summaries: Sequence[Summary],
    panel: Callable[[Any, Sequence[Summary], Sequence[str]], None],
    *,
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _MISSING
    operations = list(dict.fromkeys(s.operation for s in summaries))
    contenders = list(dict.fromkeys(s.contender for s in summaries))
    figure = Figure(figsize=(11, 3.2 * len(operations) + 1.2), layout="constrained")
    panels = figure.subplots(len(operations), squeeze=False)[:, 0]
    for operation, axes in zip(operations, panels, strict=True):
        panel(axes, [s for s in summaries if s.operation == operation], contenders)
        axes.set_title(operation, loc="left", fontsize=10)
        axes.set_ylabel("MB/s")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles))
    )
    figure.suptitle(f"{title}\n{footnote}", fontsize=10)
    figure.savefig(path, dpi=130)
    return None


def _bars(axes: Any, summaries: Sequence[Summary], contenders: Sequence[str]) -> None:
    subjects = list(dict.fromkeys((s.subject, s.block_nbytes) for s in summaries))
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        own = [s for s in summaries if s.contender == contender]
        if not own:
            continue
        left = (index + 0.5) * width - 0.4
        axes.bar(
            [subjects.index((s.subject, s.block_nbytes)) + left for s in own],
            [s.bytes_per_s / 1e6 for s in own],
            width,
            yerr=_spread(own),
            label=contender,
            color=_colour(contender, contenders),
            alpha=0.55 if contender.endswith("no checksum") else 1.0,
            hatch="///" if contender.endswith("tmpfile") and "," in contender else None,
            edgecolor="white",
            capsize=2,
            error_kw={"lw": 0.8},
        )
    axes.set_xticks(
        range(len(subjects)), [f"{name}\n{size_text(nbytes)}" for name, nbytes in subjects]
    )


def _lines(axes: Any, summaries: Sequence[Summary], contenders: Sequence[str]) -> None:
    sizes = sorted({s.block_nbytes for s in summaries})
    for contender in contenders:
        own = sorted(
            (s for s in summaries if s.contender == contender), key=lambda s: s.block_nbytes
        )
        x = [s.block_nbytes for s in own]
        colour = _colour(contender, contenders)
        axes.plot(
            x,
            [s.bytes_per_s / 1e6 for s in own],
            label=contender,
            color=colour,
            marker="o",
            ms=3.5,
            ls="--" if contender.startswith("hybrid") else "-",
        )
        low = [s.slowest_bytes_per_s / 1e6 for s in own]
        axes.fill_between(
            x, low, [s.fastest_bytes_per_s / 1e6 for s in own], color=colour, alpha=0.10, lw=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes])
    axes.set_xlabel("block size")


def size_text(nbytes: int) -> str:
    """Say a size as people do: ``64 KiB``, ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            number = nbytes / unit
            return f"{number:.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
    return f"{nbytes} B"


def _spread(summaries: Sequence[Summary]) -> tuple[list[float], list[float]]:
    return (
        [(s.bytes_per_s - s.slowest_bytes_per_s) / 1e6 for s in summaries],
        [(s.fastest_bytes_per_s - s.bytes_per_s) / 1e6 for s in summaries],
    )


def _colour(contender: str, contenders: Sequence[str]) -> str:
    """Give a backend one colour everywhere, with and without checksums."""
    family = contender.partition(",")[0]
    if family in _COLOURS:
        return _COLOURS[family]
    others = dict.fromkeys(c.partition(",")[0] for c in contenders)
    unknown = [name for name in others if name not in _COLOURS]
    return _OTHERS[unknown.index(family) % len(_OTHERS)]
