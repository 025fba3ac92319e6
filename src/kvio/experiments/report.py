"""One HTML page of runs, with their plots in it, and two runs side by side."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvio import ConfigError
from kvio.experiments.plot import size_text
from kvio.experiments.table import Table

#: Experiment, subject, block bytes, operation, contender.
Place: TypeAlias = tuple[str, str, int, str, str]

_STYLE: Final = (
    "body{font:14px/1.45 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:left;"
    "border-bottom:1px solid #ddd}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "img{max-width:100%}pre{background:#f6f6f6;padding:.7em;overflow:auto}"
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One experiment's JSON file; *content* is what `Record` wrote."""

    path: Path
    content: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """The experiment's name."""
        return str(self.content["experiment"])

    def speeds(self) -> dict[Place, float]:
        """Give the median bytes a second of every line of its tables."""
        return {
            (
                self.experiment,
                str(one["subject"]),
                int(one["block_nbytes"]),
                str(one["operation"]),
                str(one["contender"]),
            ): float(one["bytes_per_s"])
            for one in self.content["summaries"]
        }


def load(folder: Path) -> list[Recorded]:
    """Find every run below a folder, in the order of their paths.

    Raises:
        ConfigError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    runs = [run for path in sorted(folder.rglob("*.json")) if (run := _load_one(path))]
    if not runs:
        raise ConfigError(f"{folder}: no experiment's JSON in it")
    return runs


def _load_one(path: Path) -> Recorded | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        run = Recorded(path, content)
        run.speeds()
        _ = content["title"], content["notes"], content["machine"]["utc"], content["file_system"]
    except (ValueError, KeyError, TypeError):
        return None  # some other JSON
    return run


def compare(before: Sequence[Recorded], after: Sequence[Recorded]) -> Table:
    """Put what both measured side by side, the largest change first.

    Raises:
        ConfigError: they have no measurement in common.
    """
    old = {place: speed for run in before for place, speed in run.speeds().items()}
    new = {place: speed for run in after for place, speed in run.speeds().items()}
    common = [place for place in old if place in new]
    if not common:
        raise ConfigError("the two folders have no measurement in common")
    common.sort(key=lambda place: -abs(new[place] / old[place] - 1))
    headings = (
        "experiment", "subject", "size", "operation", "contender", "MB/s before", "MB/s after",
        "after / before",
    )  # fmt: skip
    rows = [
        (
            experiment,
            subject,
            size_text(nbytes),
            operation,
            contender,
            f"{old[place] / 1e6:.0f}",
            f"{new[place] / 1e6:.0f}",
            f"{new[place] / old[place]:.2f}",
        )
        for place in common
        for experiment, subject, nbytes, operation, contender in [place]
    ]
    return Table(
        title="Before and after", headings=headings, rows=rows, right=frozenset(headings[5:])
    )


def page(runs: Sequence[Recorded], comparison: Table | None = None) -> str:
    """Make one HTML page that needs no other file."""
    parts = [_html_table(comparison)] if comparison else []
    parts += [_section(run) for run in runs]
    title = "kvio experiments"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _section(run: Recorded) -> str:
    content = run.content
    notes = "".join(f"<li>{html.escape(str(note))}</li>" for note in content["notes"])
    facts = json.dumps({name: content[name] for name in ("machine", "file_system")}, indent=1)
    told = _html_table(_own_table(content["table"])) if content.get("table") else ""
    if content["summaries"]:
        told += _plot(run.path.with_suffix(".png")) + _html_table(_speeds(run))
    return (
        f"<h2>{html.escape(str(content['title']))}</h2>"
        f"<p>{html.escape(str(content['machine']['utc']))}</p><ul>{notes}</ul>"
        f"{told}"
        f"<details><summary>machine</summary><pre>{html.escape(facts)}</pre></details>"
    )


def _own_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Make the table of an experiment whose results are no speeds."""
    return Table(title="", headings=tuple(rows[0]), rows=[tuple(row.values()) for row in rows])


def _plot(path: Path) -> str:
    if not path.is_file():
        return "<p>no plot</p>"
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def _speeds(run: Recorded) -> Table:
    headings = ("subject", "size", "operation", "contender", "MB/s", "p50 ms", "p99 ms", "ratio")
    rows = [
        (
            str(one["subject"]),
            size_text(one["block_nbytes"]),
            str(one["operation"]),
            str(one["contender"]),
            f"{one['bytes_per_s'] / 1e6:.0f}",
            f"{one['p50_s'] * 1e3:.3g}",
            f"{one['p99_s'] * 1e3:.3g}",
            "" if one["ratio"] is None else f"{one['ratio']:.2f}",
        )
        for one in run.content["summaries"]
    ]
    return Table(title="", headings=headings, rows=rows, right=frozenset(headings[4:]))


def _html_table(table: Table) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        marked = (
            f'<{tag} class="n">' if heading in table.right else f"<{tag}>"
            for heading in table.headings
        )
        return "".join(
            f"{mark}{html.escape(cell)}</{tag}>" for mark, cell in zip(marked, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    heading = f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
    return f"{heading}<table><tr>{cells('th', table.headings)}</tr>{body}</table>"
