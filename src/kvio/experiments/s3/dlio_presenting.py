"""What a run through DLIO leaves: one record, its tables and its plot."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvio.experiments.machine import Machine
from kvio.experiments.measure import Sample, Summary, summarise
from kvio.experiments.plot import size_text
from kvio.experiments.record import Record, present
from kvio.experiments.s3.dlio_plan import CONTENDERS, STOCK
from kvio.experiments.s3.dlio_tables import elapsed_speed, tables, window_speed
from kvio.experiments.s3.drawing import COLOURS, Panel, draw_panels
from kvio.experiments.s3.order import LIBRARIES, library_of
from kvio.experiments.s3.plan import LIBRARIES as PART_LIBRARIES
from kvio.experiments.s3.plan import PROCESSES, SCALE, THREADS
from kvio.experiments.s3.server import Medium

NAME: Final = "s3-dlio"
TITLE: Final = "Objects that DLIO generates through kvio and five S3 libraries"
_STOCK_COLOUR: Final = "#7f7f7f"
#: What is drawn of a library: a suffix of its name, what is measured, the line.
_LINES: Final = (
    ("dlio", window_speed, "-"),
    ("kvio", window_speed, "--"),
    ("dlio", elapsed_speed, ":"),
)
#: Of the same three as bars.
_HATCHES: Final = (None, "//", "..")
_LEGEND: Final = (
    ("via DLIO, window", "-"),
    ("direct harness, window", "--"),
    ("via DLIO, elapsed", ":"),
)


def show(
    samples: Sequence[Sample],
    *,
    machine: Machine,
    medium: Medium,
    options: dict[str, Any],
    notes: list[str],
    results: Path | None,
) -> None:
    """Print tables, and leave JSON, Markdown and PNG; of nothing, say that it is nothing."""
    if not samples:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
        return
    record = Record(
        experiment=NAME,
        title=TITLE,
        machine=machine,
        file_system=medium,
        options=options,
        notes=notes,
        samples=samples,
        summaries=summarise(samples, STOCK, CONTENDERS),
    )
    present(record, tables(samples), results, partial(_draw, samples))


def _draw(
    samples: Sequence[Sample],
    summaries: Sequence[Summary],  # noqa: ARG001  # the samples know more
    *,
    title: str,
    footnote: str,
    path: Path,
) -> str | None:
    return draw_panels(
        _panels(samples),
        lambda: list(zip(*_legend(samples), strict=True)),
        nothing="no part has anything to draw",
        heading=f"{title}\n{footnote}",
        path=path,
    )


def _panels(samples: Sequence[Sample]) -> list[Panel]:
    made: list[Panel] = []

    def own(part: str) -> list[Sample]:
        return [sample for sample in samples if part in sample.facts["parts"]]

    for part, title, over in (
        (THREADS, "By write threads", "threads"),
        (PROCESSES, "By processes of 8 threads", "processes"),
    ):
        if chosen := own(part):
            made.append((title, partial(_lines, samples=chosen, over=over)))
    if chosen := own(PART_LIBRARIES):
        title = "By library at 32 threads: window via DLIO; direct (hatched); elapsed (dotted)"
        made.append((title, partial(_bars, chosen)))
        made.append(("CPU of a run at 32 threads", partial(_cpu, chosen)))
    if chosen := own(SCALE):
        few = statistics.mode(int(sample.facts["threads"]) for sample in chosen)
        at_few = [sample for sample in chosen if sample.facts["threads"] == few]
        draw = partial(_lines, samples=at_few, over="object_nbytes")
        made.append((f"By object size, {few} threads", draw))
    return made


def _lines(axes: Any, *, samples: Sequence[Sample], over: str) -> None:
    ticks = sorted({sample.facts[over] for sample in samples})
    stock = [sample for sample in samples if sample.contender == STOCK]
    _line(axes, stock, over, window_speed, {"color": _STOCK_COLOUR, "ls": "-"})
    for library in LIBRARIES:
        for kind, measure, line in _LINES:
            own = [sample for sample in samples if sample.contender == f"{library} {kind}"]
            _line(axes, own, over, measure, {"color": COLOURS[library], "ls": line})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size_text(n) if over == "object_nbytes" else str(n) for n in ticks])
    axes.set_xlabel(over.replace("object_nbytes", "object size"))
    axes.set_ylabel("MB/s")


def _line(
    axes: Any,
    samples: Sequence[Sample],
    over: str,
    measure: Callable[[Sample], float],
    style: dict[str, Any],
) -> None:
    speeds: dict[int, list[float]] = {}
    for sample in samples:
        speeds.setdefault(sample.facts[over], []).append(measure(sample) / 1e6)
    x = sorted(speeds)
    if x:
        axes.plot(x, [statistics.median(speeds[at]) for at in x], marker="o", ms=3.5, **style)
        low, high = [min(speeds[at]) for at in x], [max(speeds[at]) for at in x]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.08, lw=0)


def _bars(samples: Sequence[Sample], axes: Any) -> None:
    """Draw for every library its window via DLIO, that of the direct harness, and elapsed."""
    found = {library_of(sample.contender) for sample in samples} - {STOCK}
    names = [library for library in LIBRARIES if library in found]
    for at, library in enumerate(names):
        for shift, (kind, measure, _) in enumerate(_LINES):
            own = [measure(s) / 1e6 for s in samples if s.contender == f"{library} {kind}"]
            if own:
                middle = statistics.median(own)
                axes.bar(
                    at + (shift - 1) * 0.27,
                    middle,
                    0.25,
                    yerr=[[middle - min(own)], [max(own) - middle]],
                    color=COLOURS[library],
                    hatch=_HATCHES[shift],
                    edgecolor="white",
                    capsize=2,
                )
    axes.set_xticks(range(len(names)), names)
    axes.set_yscale("log")
    axes.set_ylabel("MB/s")


def _cpu(samples: Sequence[Sample], axes: Any) -> None:
    """Draw what of a run's processor time is DLIO's alone, and what storing adds."""
    own = {
        name: statistics.median(s.facts["process_cpu_s"] for s in samples if s.contender == name)
        for name in dict.fromkeys(sample.contender for sample in samples)
    }
    names = [name for name in CONTENDERS if name in own]
    for at, name in enumerate(names):
        alone = min(own.get(STOCK, 0.0), own[name]) if name.endswith(" dlio") else 0.0
        colour = _STOCK_COLOUR if name == STOCK else COLOURS[library_of(name)]
        axes.bar(at, alone, color=_STOCK_COLOUR)
        axes.bar(at, own[name] - alone, bottom=alone, color=colour)
    labels = [name.replace(" dlio", "\nvia DLIO").replace(" kvio", "\ndirect") for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=8)
    axes.set_ylabel("CPU s")


def _legend(samples: Sequence[Sample]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    found = {library_of(sample.contender) for sample in samples}
    colours = {STOCK: _STOCK_COLOUR, **COLOURS}
    names = [name for name in (STOCK, *LIBRARIES) if name in found]
    handles = [Line2D([], [], color=colours[name], lw=3) for name in names]
    handles += (Line2D([], [], color="#000000", ls=line) for _, line in _LEGEND)
    return handles, [*names, *(label for label, _ in _LEGEND)]
