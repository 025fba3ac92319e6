"""What the tier must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple, TypeAlias

from kvio.experiments.measure import Sample, percentile
from kvio.experiments.plot import size_text
from kvio.experiments.staging.order import (
    ACCEPT,
    BAR_BYTES,
    DRAIN,
    MEMCPY,
    READ,
    SAFE,
    TIERS,
    WRITE,
    store_of,
)
from kvio.experiments.table import Table

#: Operation, ranks, bytes of a block.
Place: TypeAlias = tuple[str, str, int]


def direct_of(tier: str) -> str:
    """Name the direct I/O whose p99 a tier's is held against: with the same durability."""
    return "posix-direct durable" if tier in SAFE else "posix-direct"


class Bar(NamedTuple):
    """Something to be reached in an operation: at least so much of another contender's.

    Attributes:
        other: gives the other contender, and the operation it is measured in.
        of_latency: p99 of the other by that of the tier; else speed by speed.
    """

    text: str
    operation: str
    other: Callable[[str], tuple[str, str]]
    limit: float
    of_latency: bool = False
    from_bytes: int = 0


BARS: Final = (
    Bar("accept by memcpy", ACCEPT, lambda _: (MEMCPY, ACCEPT), 0.85, from_bytes=BAR_BYTES),
    Bar("drain by the backend written directly", DRAIN, lambda tier: (store_of(tier), DRAIN), 0.95),
    Bar(
        "p99 of direct writes by p99 of accept",
        ACCEPT,
        lambda tier: (direct_of(tier), WRITE),
        10.0,
        True,
    ),
    Bar("the same while drains run", WRITE, lambda tier: (direct_of(tier), WRITE), 10.0, True),
    Bar("read of staged blocks by memcpy", READ, lambda _: (MEMCPY, READ), 0.85),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One bar at one place: what each tier reached; None where nothing was measured."""

    bar: Bar
    subject: str
    nbytes: int
    reached: dict[str, float]
    memcpy: float | None

    @property
    def missed(self) -> list[str]:
        """Name the tiers that are below."""
        return [tier for tier, value in self.reached.items() if value < self.bar.limit]


def judge(samples: Sequence[Sample]) -> list[Judged]:
    """Hold what was measured against every bar, wherever both sides of it were measured."""
    judged = []
    for bar in BARS:
        places = dict.fromkeys((s.subject, s.block_nbytes) for s in samples)
        for subject, nbytes in places:
            if nbytes < bar.from_bytes:
                continue
            own = [s for s in samples if (s.subject, s.block_nbytes) == (subject, nbytes)]
            reached = {tier: found for tier in TIERS if (found := _reached(own, tier, bar))}
            if reached:
                floor = _reached(own, MEMCPY, bar) if bar.of_latency else None
                judged.append(Judged(bar, subject, nbytes, reached, floor))
    return judged


def _reached(samples: Sequence[Sample], name: str, bar: Bar) -> float | None:
    other, operation = bar.other(name if name in TIERS else next(iter(TIERS)))
    mine = [s for s in samples if (s.contender, s.operation) == (name, bar.operation)]
    theirs = [s for s in samples if (s.contender, s.operation) == (other, operation)]
    if bar.of_latency:
        return p99(theirs) / p99(mine) if mine and theirs else None
    by_round = {s.round: s.bytes_per_s for s in theirs}
    ratios = [s.bytes_per_s / by_round[s.round] for s in mine if s.round in by_round]
    return median(ratios) if ratios else None


def p99(samples: Sequence[Sample]) -> float:
    """Give p99 of all calls of all rounds."""
    return percentile((one for sample in samples for one in sample.latencies_s), 99)


def table(judged: Sequence[Judged]) -> Table:
    """Set every bar beside what was reached, tier by tier."""
    tiers = [tier for tier in TIERS if any(tier in one.reached for one in judged)]
    headings = ("bar", "at least", "ranks", "size", *tiers, MEMCPY, "verdict")
    rows = [
        (
            one.bar.text,
            f"{one.bar.limit:g}",
            one.subject.partition(" ")[0],
            size_text(one.nbytes),
            *(_number(one.reached.get(tier), one.bar) for tier in tiers),
            _number(one.memcpy, one.bar),
            f"MISSED: {len(one.missed)} of {len(one.reached)}" if one.missed else "met",
        )
        for one in judged
    ]
    ends = [i for i in range(len(judged) - 1) if judged[i].bar.text != judged[i + 1].bar.text]
    return Table(
        title="What the tier must reach",
        headings=headings,
        rows=rows,
        right=frozenset(headings[1:-1]),
        rule_after=frozenset(ends),
    )


def verdicts(judged: Sequence[Judged]) -> list[str]:
    """Say of every bar, in a line, whether it is met, and the worst of it."""
    lines = []
    for bar in BARS:
        own = [one for one in judged if one.bar.text == bar.text]
        if not own:
            lines.append(f"bar: {bar.text} at least {bar.limit:g}: NOT MEASURED")
            continue
        values = [(v, tier, one) for one in own for tier, v in one.reached.items()]
        worst, tier, where = min(values, key=lambda each: each[0])
        missed = sum(len(one.missed) for one in own)
        verdict = "met" if not missed else f"MISSED at {missed} of {len(values)} places"
        at = f"{tier}, {where.subject}, {size_text(where.nbytes)}"
        lines.append(
            f"bar: {bar.text} at least {bar.limit:g}: {verdict}; least {_number(worst, bar)} ({at})"
        )
    return lines


def _number(value: float | None, bar: Bar) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if bar.of_latency else f"{value:.2f}"
