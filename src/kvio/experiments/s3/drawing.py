"""Plots: throughput over threads, processor time, scaling, sizes; one colour a library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvio.experiments.measure import Sample, Summary
from kvio.experiments.plot import Draw, size_text
from kvio.experiments.s3 import ratios
from kvio.experiments.s3.order import CONTENDERS, FLOOR, GET, PUT, kind_of, library_of
from kvio.experiments.s3.plan import LIBRARIES, PROCESSES, READS, SCALE, THREADS

_MISSING: Final = "no plot: matplotlib is not installed (pip install 'kvio[plot]')"
COLOURS: Final = {
    FLOOR: "#000000",
    "boto3": "#d62728",
    "minio": "#ff7f0e",
    "obstore": "#e377c2",
    "s3dlio": "#2ca02c",
    "torch": "#9467bd",
}
_LINES: Final = {
    FLOOR: ":", "kvio": "-", "kvio block": "-.", "direct": "--", "defaults": (0, (1, 2)),
}  # fmt: skip
_HATCHES: Final = {FLOOR: None, "kvio": None, "kvio block": "..", "direct": "//", "defaults": "xx"}


#: A title, and what draws below it.
Panel: TypeAlias = tuple[str, Callable[[Any], None]]


def drawer(samples: Sequence[Sample]) -> Draw:
    """Give what draws these samples."""
    return partial(_draw, samples)


def _draw(
    samples: Sequence[Sample],
    summaries: Sequence[Summary],  # noqa: ARG001  # the samples know more
    *,
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    names = ratios.in_order((s.contender for s in samples), CONTENDERS)
    return draw_panels(
        _panels(samples),
        lambda: [(_handle(name), name) for name in names],
        nothing="neither PUT nor GET was measured",
        heading=f"{title}\n{footnote}",
        path=path,
    )


def draw_panels(
    panels: Sequence[Panel],
    legend: Callable[[], Sequence[tuple[Any, str]]],
    *,
    nothing: str,
    heading: str,
    path: Path,
) -> str | None:
    """Draw panels below each other with one legend; or say why there is no plot.

    *legend* makes handles with their names, once matplotlib is known to be there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _MISSING
    if not panels:
        return f"no plot: {nothing}"
    figure = Figure(figsize=(11, 3.4 * len(panels) + 1.6), layout="constrained")
    for (name, draw), axes in zip(
        panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True
    ):
        draw(axes)
        axes.set_title(name, loc="left", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    handles, names = zip(*legend(), strict=True)
    figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)))
    figure.suptitle(heading, fontsize=10)
    figure.savefig(path, dpi=120)
    return None


def _panels(samples: Sequence[Sample]) -> list[Panel]:
    made: list[Panel] = []

    def own(part: str, operation: str) -> list[Sample]:
        return [s for s in samples if s.facts["part"] == part and s.operation == operation]

    if chosen := own(THREADS, PUT):
        made.append(("PUT, by threads", partial(_lines, samples=chosen, over="threads")))
    for part, operation in ((LIBRARIES, PUT), (READS, GET)):
        if chosen := own(part, operation):
            made.append(
                (f"{operation}, 32 threads: CPU s/GiB of the client", partial(_cpu, chosen))
            )
    if chosen := own(PROCESSES, PUT):
        made.append(("PUT, by processes", partial(_lines, samples=chosen, over="processes")))
    for operation in (PUT, GET):
        if chosen := own(SCALE, operation):
            few = _commonest(chosen)
            draw = partial(
                _lines,
                samples=[s for s in chosen if s.facts["threads"] == few],
                over="object_nbytes",
            )
            made.append((f"{operation}, by object size, {few} threads", draw))
    return made


def _commonest(samples: Sequence[Sample]) -> int:
    counts = [int(sample.facts["threads"]) for sample in samples]
    return max(counts, key=counts.count)


def _lines(axes: Any, *, samples: Sequence[Sample], over: str) -> None:
    ticks = sorted({sample.facts[over] for sample in samples})
    for name in ratios.in_order((s.contender for s in samples), CONTENDERS):
        speeds: dict[int, list[float]] = {}
        for sample in samples:
            if sample.contender == name:
                speeds.setdefault(sample.facts[over], []).append(sample.bytes_per_s / 1e6)
        x = sorted(speeds)
        style = {"color": COLOURS[library_of(name)], "ls": _LINES[kind_of(name)]}
        axes.plot(x, [statistics.median(speeds[at]) for at in x], marker="o", ms=3.5, **style)
        axes.fill_between(
            x,
            [min(speeds[at]) for at in x],
            [max(speeds[at]) for at in x],
            color=style["color"],
            alpha=0.08,
            lw=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size_text(n) if over == "object_nbytes" else str(n) for n in ticks])
    axes.set_xlabel(over.replace("object_nbytes", "object size"))
    axes.set_ylabel("MB/s")


def _cpu(samples: Sequence[Sample], axes: Any) -> None:
    names = ratios.in_order((s.contender for s in samples), CONTENDERS)
    for at, name in enumerate(names):
        own = [ratios.cpu_s_per_gib(s) for s in samples if s.contender == name]
        axes.bar(
            at,
            statistics.median(own),
            yerr=[[statistics.median(own) - min(own)], [max(own) - statistics.median(own)]],
            color=COLOURS[library_of(name)],
            hatch=_HATCHES[kind_of(name)],
            edgecolor="white",
            capsize=2,
        )
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=7)
    axes.set_ylabel("CPU s/GiB")


def _handle(name: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=COLOURS[library_of(name)], ls=_LINES[kind_of(name)], lw=2)
