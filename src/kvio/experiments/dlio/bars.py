"""What kvio must reach beside stock DLIO, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from kvio.experiments.dlio.order import EPOCH, GENERATION, REFERENCE, STOCK, TMPFILE
from kvio.experiments.measure import Sample
from kvio.experiments.table import Table


class Bar(NamedTuple):
    """A time that may be at most so much of another contender's in the same round."""

    text: str
    operation: str
    contender: str
    other: str
    limit: float


BARS: Final = (
    Bar("generation by local_fs, the same loader", GENERATION, TMPFILE, REFERENCE, 1.05),
    Bar("epoch by local_fs, the same loader", EPOCH, TMPFILE, REFERENCE, 1.05),
    Bar("epoch by stock: local_fs and DLIO's own loader", EPOCH, TMPFILE, STOCK, 1.0),
    Bar("kvio's loader by DLIO's own, both on local_fs", EPOCH, REFERENCE, STOCK, 1.0),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One bar at one workload: the times' ratios, a round each."""

    bar: Bar
    subject: str
    ratios: list[float]

    @property
    def reached(self) -> float:
        """The median over rounds."""
        return median(self.ratios)

    @property
    def met(self) -> bool:
        """It is not more than the bar says."""
        return self.reached <= self.bar.limit


def ratios_of(
    samples: Sequence[Sample], operation: str, contender: str, other: str
) -> dict[str, list[float]]:
    """Give time by time in the same round, of each workload in which both were measured."""
    other_s = {
        (s.subject, s.round): s.wall_s
        for s in samples
        if (s.operation, s.contender) == (operation, other)
    }
    found: dict[str, list[float]] = {}
    for s in samples:
        place = (s.subject, s.round)
        if (s.operation, s.contender) == (operation, contender) and place in other_s:
            found.setdefault(s.subject, []).append(s.wall_s / other_s[place])
    return found


def judge(samples: Sequence[Sample]) -> list[Judged]:
    """Hold what was measured against every bar, wherever both sides of it were measured."""
    return [
        Judged(bar, subject, ratios)
        for bar in BARS
        for subject, ratios in ratios_of(samples, bar.operation, bar.contender, bar.other).items()
    ]


def table(judged: Sequence[Judged]) -> Table:
    """Set every bar beside what was reached."""
    headings = ("time", "of", "workload", "at most", "reached", "range", "rounds", "verdict")
    rows = [
        (
            one.bar.text,
            one.bar.contender,
            one.subject,
            f"{one.bar.limit:g}",
            f"{one.reached:.2f}",
            f"{min(one.ratios):.2f}-{max(one.ratios):.2f}",
            str(len(one.ratios)),
            "met" if one.met else "MISSED",
        )
        for one in judged
    ]
    ends = [i for i in range(len(judged) - 1) if judged[i].bar is not judged[i + 1].bar]
    return Table(
        title="What must be reached",
        headings=headings,
        rows=rows,
        right=frozenset(headings[3:-1]),
        rule_after=frozenset(ends),
    )


def verdicts(judged: Sequence[Judged]) -> list[str]:
    """Say of every bar, in a line, whether it is met, and the worst of it."""
    lines = []
    for bar in BARS:
        own = [one for one in judged if one.bar is bar]
        if not own:
            lines.append(f"bar: {bar.contender}, {bar.text}: NOT MEASURED")
            continue
        missed = [one for one in own if not one.met]
        worst = max(own, key=lambda one: one.reached)
        verdict = f"MISSED in {len(missed)} of {len(own)}" if missed else "met"
        lines.append(
            f"bar: {bar.contender}, {bar.text}, at most {bar.limit:g}: {verdict}; "
            f"most {worst.reached:.2f} ({worst.subject})"
        )
    return lines
