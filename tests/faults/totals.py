"""What a campaign did, in numbers: counted by tests, summed over processes, shown in one line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

#: The property of a test's report that holds its counts.
PROPERTY: Final = "faults"
#: What is counted, in the order of the line; the others belong to `_PAIRS`. `states` are those of
#: disks after a power cut, `tests` those of the suite in a world that lacks something, `rounds`
#: calls against a process that changes names, `names` hostile keys and paths.
NAMES: Final = (
    *("sites", "faults", "states", "shutdowns", "cuts", "kills", "receipts", "lost", "torn"),
    *("tests", "rounds", "names", "flips", "detected", "requests", "fuzzed"),
    *("deadlines", "on_time", "mutants", "caught"),
)
_PAIRS: Final = (
    ("caught", "mutants", "mutants caught"),
    ("detected", "flips", "rot detected"),
    ("on_time", "deadlines", "deadlines kept within 10 %"),
)
#: What all of the campaign has at least, where the machine can do it.
LEAST: Final = {
    "states": 20_000,
    "shutdowns": 2_000,
    "cuts": 30,
    "kills": 1_000,
    "flips": 100_000,
    "fuzzed": 1_000_000,
}
_VERDICTS: Final = ("lost", "torn")


class Tally:
    """The counts of one test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """Count, by the names of `NAMES`; a verdict of zero is a count too."""
        unknown = sorted(set(counts) - set(NAMES))
        assert not unknown, f"not counted: {unknown}"
        for name, number in counts.items():
            self.counts[name] += number


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add counts of many tests."""
    total: Counter[str] = Counter()
    for one in counts:
        for name, number in one.items():
            total[name] += number
    return {name: total[name] for name in NAMES if name in total}


def below(total: Mapping[str, int]) -> list[str]:
    """Return the counts that are lower than those of the whole campaign."""
    return [
        f"{total.get(name, 0):,} {name}, not {least:,}"
        for name, least in LEAST.items()
        if total.get(name, 0) < least
    ]


def line(total: Mapping[str, int], skipped: Mapping[str, int], failed: int = 0) -> str:
    """Return a campaign in one line, with what failed tests had counted."""
    paired = {name for one in _PAIRS for name in one[:2]}
    plain = [
        f"{total[name]:,} {name}"
        for name in NAMES
        if name in total and name not in paired and name not in _VERDICTS
    ]
    verdicts = [f"{name} {total[name]:,}" for name in _VERDICTS if name in total]
    pairs = [
        f"{title} {total.get(first, 0):,}/{total[second]:,}"
        for first, second, title in _PAIRS
        if second in total
    ]
    reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.items())
    gone = f"skipped {sum(skipped.values())}" + (f": {reasons}" if reasons else "")
    reported = ", ".join(plain) + (f": {', '.join(verdicts)}" if verdicts else "")
    first = [f"FAILED {failed}"] if failed else []
    return "; ".join([*first, reported, *pairs, gone])


def write(path: Path, total: Mapping[str, int], skipped: Mapping[str, int], **more: object) -> None:
    """Write a campaign down as JSON."""
    record = {**more, "totals": dict(total), "skipped": dict(skipped)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
