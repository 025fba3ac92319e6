"""What an experiment leaves behind: JSON with every sample, Markdown, and a plot."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvio.experiments.machine import FileSystem, Machine
from kvio.experiments.measure import Sample, Summary
from kvio.experiments.plot import Draw, draw_bars
from kvio.experiments.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything one run found out, and under which circumstances."""

    experiment: str
    title: str
    machine: Machine
    file_system: FileSystem
    options: dict[str, Any]
    notes: list[str]
    samples: Sequence[Sample]
    summaries: Sequence[Summary]

    def circumstances(self) -> list[str]:
        """Say what was measured on."""
        return [*self.machine.lines(), *self.file_system.lines()]


def present(
    record: Record, tables: Sequence[Table], results: Path | None, draw: Draw = draw_bars
) -> Path:
    """Print a record and write it into *results*, or a folder of its own below ``results/``."""
    out = sys.stdout.write
    out("\n".join([record.title, "", *record.circumstances(), ""]))
    out("".join(f"\n- {note}" for note in record.notes) + "\n\n")
    for table in tables:
        table.show()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = results or Path("results") / f"{record.experiment}-{stamp}-{os.getpid()}"
    out("\n".join(write_record(record, tables, folder, draw)) + "\n")
    return folder


def write_record(
    record: Record, tables: Sequence[Table], folder: Path, draw: Draw = draw_bars
) -> list[str]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png`` into *folder*; say what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / record.experiment
    said = []
    stem.with_suffix(".json").write_text(json.dumps(asdict(record), indent=1) + "\n")
    said.append(f"every sample: {stem.with_suffix('.json')}")
    footnote = f"{record.machine.processor}, {record.file_system.kind}; median and range"
    missing = draw(
        record.summaries, title=record.title, footnote=footnote, path=stem.with_suffix(".png")
    )
    stem.with_suffix(".md").write_text(_markdown(record, tables, plotted=missing is None))
    said.append(f"tables:       {stem.with_suffix('.md')}")
    said.append(missing or f"plot:         {stem.with_suffix('.png')}")
    return said


def _markdown(record: Record, tables: Sequence[Table], *, plotted: bool) -> str:
    lines = [f"# {record.title}", "", f"{record.machine.utc}", ""]
    lines += ["```", *record.circumstances(), "```", ""]
    lines += [f"- {note}" for note in record.notes] + [""]
    if plotted:
        lines += [f"![{record.title}]({record.experiment}.png)", ""]
    for table in tables:
        lines += [table.markdown(), ""]
    return "\n".join(lines)
