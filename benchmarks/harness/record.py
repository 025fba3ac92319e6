"""What a run leaves behind: JSON with every sample, Markdown, and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import FileSystem, Machine
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Draw
from benchmarks.harness.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything one run found out, and under which circumstances.

    Attributes:
        notes: how it was measured, and what a reader must know.
        conclusions: what follows from it, a sentence each.
        claims: every comparison that a conclusion rests on.
        more: what only this scenario has to say.
    """

    experiment: str
    title: str
    machine: Machine
    file_system: FileSystem
    options: Mapping[str, Any]
    notes: Sequence[str]
    conclusions: Sequence[str]
    samples: Sequence[Sample]
    summaries: Sequence[Summary]
    claims: Sequence[Mapping[str, Any]] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def circumstances(self) -> list[str]:
        """Describe what was measured on."""
        return [*self.machine.lines(), *self.file_system.lines()]

    def as_json(self) -> str:
        """Write all of it as JSON."""
        content = asdict(self)
        return json.dumps(content | content.pop("more"), indent=1, default=str) + "\n"


def present(
    record: Record,
    tables: Sequence[Table],
    folder: Path,
    draw: Draw | None,
    *,
    details: Sequence[Table] = (),
) -> None:
    """Print a record, its conclusions last, and write it into *folder*.

    Args:
        record: what is presented.
        tables: are printed and written.
        folder: is made where it is missing.
        draw: makes the plot; None: there is none.
        details: tables that are written, not printed.
    """
    out = sys.stdout.write
    out("\n".join([record.title, "", *record.circumstances(), ""]))
    out("".join(f"\n- {note}" for note in record.notes) + "\n\n")
    for table in tables:
        table.show()
    if record.conclusions:
        out("\n".join(record.conclusions) + "\n\n")
    out("\n".join(write_record(record, [*tables, *details], folder, draw)) + "\n")


def write_record(
    record: Record, tables: Sequence[Table], folder: Path, draw: Draw | None
) -> list[str]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png`` into *folder*; return a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / record.experiment
    written = []
    stem.with_suffix(".json").write_text(record.as_json())
    written.append(f"every sample: {stem.with_suffix('.json')}")
    footnote = f"{record.machine.processor}, {record.file_system.kind}; median and range"
    missing: str | None = "no plot: there is nothing to draw"
    if draw is not None:
        path = stem.with_suffix(".png")
        missing = draw(record.summaries, title=record.title, footnote=footnote, path=path)
    stem.with_suffix(".md").write_text(_markdown(record, tables, plotted=missing is None))
    written.append(f"tables:       {stem.with_suffix('.md')}")
    written.append(missing or f"plot:         {stem.with_suffix('.png')}")
    return written


def _markdown(record: Record, tables: Sequence[Table], *, plotted: bool) -> str:
    lines = [f"# {record.title}", "", f"{record.machine.utc}", ""]
    lines += ["```", *record.circumstances(), "```", ""]
    if record.conclusions:
        lines += [*(f"- {sentence}" for sentence in record.conclusions), ""]
    lines += [*(f"- {note}" for note in record.notes), ""]
    if plotted:
        lines += [f"![{record.title}]({record.experiment}.png)", ""]
    for table in tables:
        lines += [table.markdown(), ""]
    return "\n".join(lines)
