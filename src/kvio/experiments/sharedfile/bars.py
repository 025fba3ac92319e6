"""What shared files must reach, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from kvio.experiments.measure import Sample
from kvio.experiments.plot import size_text
from kvio.experiments.sharedfile.order import (
    C_DIRECT,
    DURABLE,
    FILES_DIRECT,
    OPERATIONS,
    SHARED_BARE,
    SHARED_DIRECT,
    SHARED_HOLE,
    WRITE,
)
from kvio.experiments.table import Table


class Bar(NamedTuple):
    """Something to be reached, by the median over rounds.

    Attributes:
        names: of whom.
        other: whose speed in the same round it is held against; empty: the share of a seal in the
            rest of a durable write, which is to be small.
        writers: 0: however many.
    """

    text: str
    names: tuple[str, ...]
    other: str
    limit: float
    writers: int = 0
    operations: tuple[str, ...] = OPERATIONS

    @property
    def small(self) -> bool:
        """The limit is one from above."""
        return not self.other

    def is_met(self, reached: float) -> bool:
        """Tell on which side of the limit a value is."""
        return reached <= self.limit if self.small else reached >= self.limit

    def __str__(self) -> str:
        return f"{self.text} at {'most' if self.small else 'least'} {self.limit:.2f}"


_DIRECT: Final = (SHARED_DIRECT, SHARED_BARE)
BARS: Final = (
    Bar("a shared file by files of their own", (SHARED_DIRECT,), FILES_DIRECT, 0.95, 4),
    Bar("preallocated by not preallocated", (SHARED_DIRECT,), SHARED_HOLE, 1.3, 4, (WRITE,)),
    Bar("kvio by the C program", _DIRECT, C_DIRECT, 1 / 1.05),
    Bar(
        "seal by what comes before it",
        ("shared buffered", *_DIRECT, "shared hybrid"),
        "",
        0.05,
        operations=(DURABLE,),
    ),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One bar at one place: what one contender reached, in so many rounds."""

    bar: Bar
    operation: str
    contender: str
    subject: str
    nbytes: int
    total_bytes: int
    reached: list[float]

    @property
    def value(self) -> float:
        """The median over rounds."""
        return median(self.reached)

    @property
    def met(self) -> bool:
        """Whether that is enough."""
        return self.bar.is_met(self.value)

    @property
    def place(self) -> str:
        """Say where."""
        return f"{self.contender}, {self.subject}, {size_text(self.nbytes)}, {self.operation}"


def judge(samples: Sequence[Sample]) -> list[Judged]:
    """Hold what was measured against every bar, wherever both sides of it were measured."""
    judged = []
    for bar in BARS:
        places = dict.fromkeys((s.subject, s.block_nbytes) for s in samples)
        for place in places:
            own = [s for s in samples if (s.subject, s.block_nbytes) == place]
            if bar.writers and own[0].facts["writers"] != bar.writers:
                continue
            for operation in bar.operations:
                there = [s for s in own if s.operation == operation]
                judged += [_judge(bar, operation, name, there) for name in bar.names]
    return [one for one in judged if one is not None]


def _judge(bar: Bar, operation: str, name: str, samples: Sequence[Sample]) -> Judged | None:
    mine = [s for s in samples if s.contender == name]
    reached = [_seal_share(s) for s in mine] if bar.small else _ratios(mine, bar.other, samples)
    found = [value for value in reached if value is not None]
    if not found:
        return None
    first = mine[0]
    total = first.block_nbytes * len(first.latencies_s)
    return Judged(bar, operation, name, first.subject, first.block_nbytes, total, found)


def _ratios(mine: Sequence[Sample], other: str, samples: Sequence[Sample]) -> list[float | None]:
    by_round = {s.round: s.bytes_per_s for s in samples if s.contender == other}
    return [s.bytes_per_s / by_round[s.round] for s in mine if s.round in by_round]


def _seal_share(sample: Sample) -> float | None:
    """Give it where every writer had synced before; threads leave that to the seal."""
    seal_s = sample.facts["seal_s"]
    if seal_s is None or "thread" in sample.subject:
        return None
    return float(seal_s / sample.facts["synced_s"])


def table(judged: Sequence[Judged]) -> Table:
    """Set every bar beside what was reached, place by place."""
    headings = ("bar", "limit", "writers", "transfer", "bytes", "operation", "contender")
    numbers = ("reached", "least", "most", "rounds")
    rows = [
        (
            one.bar.text,
            f"{'<=' if one.bar.small else '>='} {one.bar.limit:.2f}",
            one.subject,
            size_text(one.nbytes),
            size_text(one.total_bytes),
            one.operation,
            one.contender,
            f"{one.value:.3f}",
            f"{min(one.reached):.3f}",
            f"{max(one.reached):.3f}",
            str(len(one.reached)),
            "met" if one.met else "MISSED",
        )
        for one in judged
    ]
    ends = [i for i in range(len(judged) - 1) if judged[i].bar.text != judged[i + 1].bar.text]
    return Table(
        title="What shared files must reach",
        headings=(*headings, *numbers, "verdict"),
        rows=rows,
        right=frozenset({"limit", "transfer", "bytes", *numbers}),
        rule_after=frozenset(ends),
    )


def verdicts(judged: Sequence[Judged]) -> list[str]:
    """Say of every bar, in a line, whether it is met, and the worst of it."""
    lines = []
    for bar in BARS:
        own = [one for one in judged if one.bar is bar]
        if not own:
            lines.append(f"bar: {bar}: NOT MEASURED")
            continue
        worst = (max if bar.small else min)(own, key=lambda one: one.value)
        missed = sum(not one.met for one in own)
        verdict = f"MISSED at {missed} of {len(own)} places" if missed else "met"
        lines.append(f"bar: {bar}: {verdict}; worst {worst.value:.3f} ({worst.place})")
    return lines
