"""One HTML page of runs, with their plots in it, and two runs side by side."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.harness.intervals import ALPHA
from benchmarks.harness.measure import Sample, summarise
from benchmarks.harness.plot import size_text
from benchmarks.harness.table import Table
from kvio import ConfigError

#: Options of a run that may differ between runs that are compared.
_OF_ONE_RUN: Final = frozenset({"root", "results", "budget_s", "max_rounds", "loop"})
_VERSIONS: Final = ("kernel", "python", "kvio", "numpy")
_STYLE: Final = (
    "body{font:14px/1.45 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:left;"
    "border-bottom:1px solid #ddd}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "img{max-width:100%}pre{background:#f6f6f6;padding:.7em;overflow:auto}"
)


class Place(NamedTuple):
    """What was measured: the speeds of two runs are compared where all of it is the same."""

    experiment: str
    subject: str
    block_nbytes: int
    operation: str
    contender: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run's JSON file; *content* is what `Record` wrote."""

    path: Path
    content: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """The scenario's name."""
        return str(self.content["experiment"])

    def speeds(self) -> dict[Place, list[float]]:
        """Return the bytes a second of every round, or else the median alone."""
        found: dict[Place, list[float]] = {}
        for one in self.content.get("samples", ()):
            speed = one["block_nbytes"] * len(one["latencies_s"]) / one["wall_s"]
            found.setdefault(self._place(one), []).append(speed)
        if not found:
            for one in self.content["summaries"]:
                found[self._place(one)] = [float(one["bytes_per_s"])]
        return found

    def _place(self, one: Mapping[str, Any]) -> Place:
        return Place(
            self.experiment,
            str(one["subject"]),
            int(one["block_nbytes"]),
            str(one["operation"]),
            str(one["contender"]),
        )


def load(folder: Path) -> list[Recorded]:
    """Find every run below a folder, in the order of their paths.

    A run that was killed left its samples alone; it is among them, and says so.

    Raises:
        ConfigError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    runs = [run for path in sorted(folder.rglob("*.json")) if (run := _load_one(path))]
    runs += [
        run for path in sorted(folder.rglob("*.samples.jsonl")) if (run := _load_unfinished(path))
    ]
    if not runs:
        raise ConfigError(f"{folder}: no results of a benchmark in it")
    return runs


def _load_one(path: Path) -> Recorded | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            return None
        run = Recorded(path, content)
        run.speeds()
        _ = content["title"], content["notes"], content["machine"]["utc"], content["file_system"]
        _ = content["summaries"]
    except (ValueError, KeyError, TypeError):
        return None  # some other JSON
    return run


def _load_unfinished(path: Path) -> Recorded | None:
    """Read the samples of a run that did not end; a line that was cut is left out."""
    lines = list(_whole_lines(path))
    if len(lines) < 2:
        return None
    head, *samples = lines
    try:
        made = [Sample(**one) for one in samples]
        content = {
            **head,
            "notes": [f"UNFINISHED: the run was killed after {len(made)} samples"],
            "samples": samples,
            "summaries": [asdict(one) for one in summarise(made, str(head["reference"]))],
        }
        _ = content["title"], content["machine"]["utc"], content["file_system"]
    except (KeyError, TypeError):
        return None
    return Recorded(path, content)


def _whole_lines(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def differences(before: Sequence[Recorded], after: Sequence[Recorded]) -> list[str]:
    """List what makes runs of the same scenario unlike: machine, file system, options."""
    found = []
    others = {run.experiment: run for run in after}
    for run in before:
        other = others.get(run.experiment)
        if other is None:
            continue
        for name, old in _circumstances(run).items():
            new = _circumstances(other).get(name)
            if old != new:
                found.append(f"{run.experiment}: {name} is {old!r} before and {new!r} after")
    return found


def _circumstances(run: Recorded) -> dict[str, Any]:
    machine, options = run.content["machine"], run.content.get("options", {})
    memory = machine.get("memory_bytes")
    return {
        "processor": machine.get("processor"),
        "number of processors": machine.get("processors_usable"),
        "memory in GiB": None if memory is None else round(memory / (1 << 30)),
        "file system": run.content["file_system"].get("kind"),
        **{f"option {n}": value for n, value in options.items() if n not in _OF_ONE_RUN},
    }


def versions(before: Sequence[Recorded], after: Sequence[Recorded]) -> list[str]:
    """List versions that differ, which is what a comparison may be about."""
    found = []
    for name in _VERSIONS:
        old, new = (
            {str(run.content["machine"].get(name)) for run in runs} for runs in (before, after)
        )
        if old != new:
            found.append(f"{name}: {', '.join(sorted(old))} before, {', '.join(sorted(new))} after")
    return found


def compare(
    before: Sequence[Recorded], after: Sequence[Recorded], *, allow_different: bool = False
) -> Table:
    """Set what both measured side by side, the largest slowdown first.

    A row is called slower or faster if a rank test of its rounds (Mann and Whitney) says so at 5 %
    for all rows together. Rounds of two runs are not pairs: whatever else differed between the runs
    is in it, too.

    Raises:
        ConfigError: the runs are unlike, or have no measurement in common.
    """
    unlike = differences(before, after)
    if unlike and not allow_different:
        raise ConfigError(
            f"the runs are unlike: {'; '.join(unlike)}; --allow-different compares them anyway"
        )
    old = {place: speeds for run in before for place, speeds in run.speeds().items()}
    new = {place: speeds for run in after for place, speeds in run.speeds().items()}
    common = [place for place in old if place in new]
    if not common:
        raise ConfigError("the two folders have no measurement in common")
    ratio = {place: median(new[place]) / median(old[place]) for place in common}
    headings = (
        "experiment", "subject", "size", "operation", "contender", "rounds", "MB/s before",
        "MB/s after", "verdict", "after / before",
    )  # fmt: skip
    rows = [
        (
            place.experiment,
            place.subject,
            size_text(place.block_nbytes),
            place.operation,
            place.contender,
            f"{len(old[place])}, {len(new[place])}",
            f"{median(old[place]) / 1e6:.3g}",
            f"{median(new[place]) / 1e6:.3g}",
            _changed(old[place], new[place], ALPHA / len(common)),
            f"{ratio[place]:.2f}",
        )
        for place in sorted(common, key=lambda one: ratio[one])
    ]
    return Table(
        title="Before and after", headings=headings, rows=rows, right=frozenset(headings[5:])
    )


def _changed(before: Sequence[float], after: Sequence[float], alpha: float) -> str:
    pairs = math.comb(len(before) + len(after), len(before))
    if 2 / pairs > alpha:
        return "too few rounds"
    if rank_test(before, after) > alpha:
        return "no difference shown"
    return "slower" if median(after) < median(before) else "faster"


def rank_test(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the two-sided probability of as unequal ranks, if both come from one distribution.

    Exact, by counting how many choices of ranks have each sum; a tie counts half.
    """
    wins = sum((one > other) + 0.5 * (one == other) for one in left for other in right)
    most = len(left) * len(right)
    counts = _win_counts(len(left), len(right))
    extreme = min(wins, most - wins)
    tail = sum(count for number, count in enumerate(counts) if number <= extreme)
    return min(1.0, 2 * tail / sum(counts))


def _win_counts(m: int, n: int) -> list[int]:
    """Count the orders of m and n values by the pairs in which one of the m is the larger."""
    # The coefficients of the Gaussian binomial: a product of (1 - q^(n+i)) / (1 - q^i).
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for at in range(m * n, n + i - 1, -1):
            counts[at] -= counts[at - n - i]
        for at in range(i, m * n + 1):
            counts[at] += counts[at - i]
    return counts


def page(runs: Sequence[Recorded], comparison: Table | None = None) -> str:
    """Make one HTML page that needs no other file."""
    parts = [_html_table(comparison)] if comparison else []
    parts += [_section(run) for run in runs]
    title = "kvio benchmarks"
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
    said = "".join(f"<li>{html.escape(str(one))}</li>" for one in content.get("conclusions", ()))
    return (
        f"<h2>{html.escape(str(content['title']))}</h2>"
        f"<p>{html.escape(str(content['machine']['utc']))}</p><ul>{said}</ul><ul>{notes}</ul>"
        f"{told}"
        f"<details><summary>machine</summary><pre>{html.escape(facts)}</pre></details>"
    )


def _own_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Make the table of a scenario whose results are no speeds."""
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
