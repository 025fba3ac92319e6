"""Runs every bar side by side and prints which of them hold.

    python benchmarks/bars.py [--dir DIR] [--only NAME] [--rounds 15] [--budget 120] [--out FILE]

Contenders are interleaved round by round; figures are medians with quartiles. Nothing here is a
test: a bar that does not hold is printed as such, and the exit status is 0 all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.cases import CASES
from benchmarks.ground import Ground
from benchmarks.measure import Bench, Row

_HEAD = ("bar", "what", "kvio", "median (IQR)", "against", "median (IQR)", "unit", "ratio",
         "IQR of ratios", "wanted", "holds")  # fmt: skip


def main() -> None:
    """Run what the command line asks for."""
    arguments = _arguments()
    names = [name for name in CASES if not arguments.only or name in arguments.only]
    rows: list[Row] = []
    with Ground(Path(arguments.dir)) as ground:
        facts = machine.facts(ground.root)
        print(machine.line(facts), flush=True)
        bench = Bench(
            ground, arguments.rounds, arguments.budget / (12 * len(names)), arguments.scale
        )
        for name in names:
            rows += _run(name, CASES[name], bench)
        facts["load_after"] = os.getloadavg()
        facts["writeback_kib_max"] = [max(x) for x in zip(*ground.writeback_kib, strict=True)]
    print(f"\n{_table(rows)}")
    _save(Path(arguments.out), facts, vars(arguments), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where to measure")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this bar; repeatable")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds, at least")
    parser.add_argument("--budget", type=_seconds, default=0.0, help="go on for this many seconds")
    parser.add_argument("--scale", type=float, default=1.0, help="blocks per round; less to smoke")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parser.add_argument("--out", default=f"results/bars-{stamp}.json", help="the JSON file")
    return parser.parse_args()


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def _run(name: str, case: Callable[[Bench], Iterator[Row]], bench: Bench) -> list[Row]:
    rows = []
    started = time.monotonic()
    for row in case(bench):
        print(_line(row), flush=True)
        rows.append(row)
    print(f"# {name}: {time.monotonic() - started:.0f} s", flush=True)
    return rows


def _holds(row: Row) -> str:
    return "" if row.holds is None else "yes" if row.holds else "NO"


def _line(row: Row) -> str:
    note = f"  [{row.note}]" if row.note else ""
    return (
        f"{row.bar:11} {row.what:38} {row.ours}: {row.kvio}  {row.against}: {row.baseline} "
        f"{row.unit}  -> {row.value} [{row.pairs}] {row.wanted} {_holds(row)}{note}"
    )


def _table(rows: list[Row]) -> str:
    lines = [_HEAD, tuple("-" * len(head) for head in _HEAD), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    ours, theirs = str(row.kvio), str(row.baseline)
    return (
        row.bar, row.what, row.ours, ours, row.against, theirs, row.unit, row.value, row.pairs,
        row.wanted, _holds(row),
    )  # fmt: skip


def _save(path: Path, facts: dict[str, Any], arguments: dict[str, Any], rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": facts,
        "arguments": arguments,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    print(f"every sample: {path}")


if __name__ == "__main__":
    main()
