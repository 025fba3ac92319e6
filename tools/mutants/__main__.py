"""``python -m tools.mutants``: draw mutants, run them, print what became of them."""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tools.mutants.generating import draw
from tools.mutants.lists import equivalents, handmade
from tools.mutants.mutant import Mutant
from tools.mutants.recording import Reached, record
from tools.mutants.running import Place, Pool
from tools.mutants.tree import AREAS, digest, sources

CACHE: Final = Path("results/mutants")
RESULTS: Final = Path("results/mutants.jsonl")
_COUNTED: Final = ("killed", "timeout", "survived", "equivalent")
_NONE: Final = ("not compiling", "same code")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=600, metavar="N", help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1, help="draws others")
    parser.add_argument("--only", default="", metavar="PATH", help="files that begin with PATH")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin none after this")
    parser.add_argument("--workers", type=int, default=2, help="mutants at once")
    parser.add_argument(
        "--reach", type=float, default=30.0, metavar="SECONDS", help="tests tried on each mutant"
    )
    parser.add_argument(
        "--again", action="store_true", help="run those that survived once more, and no others"
    )
    parser.add_argument(
        "--record", nargs="*", default=[], metavar="FILE", help="record files of tests again"
    )
    parser.add_argument("--report", action="store_true", help="only print the table")
    return parser.parse_args(given)


class Results:
    """What became of each mutant, a line in a file as soon as it is known."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.known: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, str] = {}
        path = root / RESULTS
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for text in path.read_text().splitlines():
                line = json.loads(text)
                self.known[line["key"]] = line
        self.file = path.open("a", encoding="utf-8")

    def version(self, path: str) -> str:
        """Hash a file: what was found about other contents of it does not count."""
        if path not in self._digests:
            self._digests[path] = digest(self.root, [path])
        return self._digests[path]

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        """Return what is known of a mutant."""
        line = self.known.get(mutant.key)
        return line if line and line["version"] == self.version(mutant.path) else None

    def add(self, mutant: Mutant, found: dict[str, Any]) -> None:
        """Write down what became of a mutant."""
        line = {"key": mutant.key, "version": self.version(mutant.path), **asdict(mutant), **found}
        with self.lock:
            self.known[mutant.key] = line
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()


def sample(
    root: Path, paths: Sequence[str], results: Results, options: argparse.Namespace
) -> Iterator[Mutant]:
    """Yield the drawn mutants, those that are none included, until each file has its share."""
    place: Place | None = None
    drawing = draw(root, paths, count=options.sample, seed=options.seed, only=options.only)
    for _, share, made in drawing:
        found = 0
        for mutant in made:
            if found >= share:
                break
            known = results.of(mutant)
            if known is None:
                place = place or Place(root, root / CACHE / "drawing")
                with place.changed(mutant) as none:
                    known = {"status": none or "drawn"}
                results.add(mutant, known)
            found += known["status"] not in _NONE
            yield mutant


def table(results: Results, mutants: Sequence[Mutant], equivalent: set[str]) -> str:
    """Lay out how many mutants of each area became what."""
    counts = {area: Counter[str]() for area in AREAS}
    for mutant in mutants:
        known = results.of(mutant)
        status = known["status"] if known else "drawn"
        if status == "survived" and mutant.key in equivalent:
            status = "equivalent"
        counts[mutant.area][status] += 1
    head = ("area", "drawn", "not compiling", "same code", "killed", "timeout", "equivalent")
    rows: list[tuple[str, ...]] = [(*head, "survived", "not run", "score")]
    total = sum(counts.values(), Counter[str]())
    for area, of in [*counts.items(), ("all", total)]:
        caught = of["killed"] + of["timeout"]
        judged = caught + of["survived"]
        score = f"{caught / judged:.3f}" if judged else "-"
        numbers = (of[name] for name in (*head[2:], "survived", "drawn"))
        rows.append((area, str(of.total()), *map(str, numbers), score))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def main() -> int:
    """Run; 1 if a mutant made by hand survived or the score is below 0.95."""
    options = arguments()
    root = Path.cwd()
    hand, listed = handmade(root), equivalents(root)
    results = Results(root)
    hand = [mutant for mutant in hand if mutant.path.startswith(options.only)]
    reached = record(root, root / CACHE, workers=options.workers, only=options.record)
    paths = [path for path in sources(root) if path in reached.files()]
    for path in sorted({*sources(root)}.difference(paths)):
        sys.stdout.write(f"not mutated: {path}, of which the tests reach nothing here\n")
    drawn = [*hand, *sample(root, paths, results, options)]
    part, parts = (int(number) for number in options.shard.split("/"))
    drawn = [mutant for mutant in drawn if int(mutant.key, 16) % parts == part % parts]
    equivalent = {m.key for m in drawn if any(entry.matches(m) for entry in listed)}
    if not options.report:
        run(root, reached, results, drawn, equivalent, options)
    survived = [m for m in drawn if (results.of(m) or {}).get("status") == "survived"]
    for mutant in sorted(survived, key=lambda mutant: (mutant.path, mutant.line)):
        if mutant.key not in equivalent:
            how = (results.of(mutant) or {}).get("how", "")
            sys.stdout.write(f"survived: {mutant.path}:{mutant.line} ({how})\n")
            for sign, text in (("-", mutant.before), ("+", mutant.after)):
                sys.stdout.write("".join(f"    {sign}{line}\n" for line in text.splitlines()))
    generated = [mutant for mutant in drawn if mutant not in hand]
    alive = [mutant.rule for mutant in survived if mutant in hand]
    sys.stdout.write(f"\nby hand: {len(hand) - len(alive)} of {len(hand)} killed {alive or ''}\n")
    sys.stdout.write(f"generated, seed {options.seed}:\n{table(results, generated, equivalent)}\n")
    judged = [
        status
        for mutant in generated
        if (status := (results.of(mutant) or {}).get("status")) in _COUNTED
        and mutant.key not in equivalent
    ]
    good = not judged or judged.count("survived") <= 0.05 * len(judged)
    return 0 if good and not alive else 1


def run(
    root: Path,
    reached: Reached,
    results: Results,
    drawn: Sequence[Mutant],
    equivalent: set[str],
    options: argparse.Namespace,
) -> None:
    """Run what has not been run."""
    again = "survived" if options.again else "drawn"
    todo = [
        mutant
        for mutant in drawn
        if mutant.key not in equivalent
        and (results.of(mutant) or {"status": "drawn"})["status"] == again
    ]
    # By hand first; a part of the rest says something of all of it.
    by_hand = [mutant for mutant in todo if mutant.rule.startswith("by hand")]
    rest = [mutant for mutant in todo if mutant not in by_hand]
    random.Random(options.seed).shuffle(rest)
    if not todo:
        return
    began = time.monotonic()

    def done(mutant: Mutant, found: dict[str, Any]) -> None:
        results.add(mutant, found)
        what = f"{found['status']} ({found.get('how', '')}, {found.get('seconds', 0)} s)"
        sys.stderr.write(f"{mutant.path}:{mutant.line}: {what}\n")
        if options.budget and time.monotonic() - began > options.budget:
            pool.stop.set()

    pool = Pool(root, root / CACHE, reached, reach_s=options.reach, done=done)
    pool.run([*by_hand, *rest], workers=options.workers)


if __name__ == "__main__":
    sys.exit(main())
