"""Decide from paired rounds whether a claim holds: met, missed or undecided.

Contenders are compared within a round, where the machine is the same for both: the ratios of a
round, one per round, are the data, and `harness.intervals` says where their median lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from benchmarks.harness.intervals import ALPHA, Interval, interval, least_rounds
from benchmarks.harness.measure import Sample
from benchmarks.harness.plot import size_text
from benchmarks.harness.table import Table

MET: Final = "met"
MISSED: Final = "MISSED"
UNDECIDED: Final = "undecided"


def _speed(sample: Sample) -> float | None:
    return sample.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence about contenders that rounds can support or contradict.

    Attributes:
        text: the claim in the words of its source.
        pairs: a contender, and the rival by whose value its own is divided in every round; a rival
            "" stands for none: the contender's value itself is held against the limits.
        at_least, at_most: limits of the ratio (or of the value); both: it must lie within.
        operations: where it is said; empty: everywhere.
        rival_operation: of the rival, where that is another one.
        where: which samples it is about.
        value: what is compared; None: not known for this sample.
    """

    text: str
    pairs: Sequence[tuple[str, str]]
    at_least: float = -math.inf
    at_most: float = math.inf
    operations: Sequence[str] = ()
    rival_operation: str = ""
    where: Callable[[Sample], bool] = lambda _: True
    value: Callable[[Sample], float | None] = _speed

    @property
    def limit(self) -> str:
        """Write the limits as a table does."""
        if self.at_most == math.inf:
            return f">= {self.at_least:.3g}"
        if self.at_least == -math.inf:
            return f"<= {self.at_most:.3g}"
        return f"{self.at_least:.3g} to {self.at_most:.3g}"


class Place(NamedTuple):
    """Where contenders are compared."""

    subject: str
    block_nbytes: int
    operation: str

    def __str__(self) -> str:
        return ", ".join((self.subject, size_text(self.block_nbytes), self.operation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One comparison of a claim: of one pair at one place."""

    claim: Claim
    place: Place
    contender: str
    rival: str
    found: Interval
    verdict: str


def judge(
    claims: Sequence[Claim], samples: Sequence[Sample], *, busy: bool = False
) -> list[Judged]:
    """Hold samples against claims, wherever both sides of a comparison were measured.

    A comparison is met if its interval lies within the limits. It is missed if the interval lies
    outside, and one that is wider: of all comparisons of a claim together at most `ALPHA` are to
    be missed by chance. All are undecided if the machine was *busy* with other programs.
    """
    return [one for claim in claims for one in _judge(claim, samples, busy=busy)]


def _judge(claim: Claim, samples: Sequence[Sample], *, busy: bool) -> list[Judged]:
    values: dict[tuple[str, Place], dict[int, float]] = {}
    names = {name for pair in claim.pairs for name in pair}
    for sample in samples:
        if sample.contender in names and claim.where(sample):
            value = claim.value(sample)
            if value is not None:
                place = Place(sample.subject, sample.block_nbytes, sample.operation)
                values.setdefault((sample.contender, place), {})[sample.round] = value
    compared = []
    for contender, rival in claim.pairs:
        for (name, place), own in values.items():
            if name != contender or (claim.operations and place.operation not in claim.operations):
                continue
            theirs = place._replace(operation=claim.rival_operation or place.operation)
            if ratios := _ratios(own, values.get((rival, theirs), {}) if rival else None):
                compared.append((place, contender, rival, ratios))
    judged = []
    for place, contender, rival, ratios in compared:
        found, wider = interval(ratios), interval(ratios, ALPHA / len(compared))
        judged.append(
            Judged(
                claim=claim,
                place=place,
                contender=contender,
                rival=rival,
                found=found,
                verdict=UNDECIDED if busy else _verdict(claim, found, wider),
            )
        )
    return judged


def _ratios(own: Mapping[int, float], rival: Mapping[int, float] | None) -> list[float]:
    """List the ratio of every round that both took part in; without a rival, the values."""
    if rival is None:
        return list(own.values())
    return [value / rival[number] for number, value in own.items() if rival.get(number)]


def _verdict(claim: Claim, found: Interval, wider: Interval) -> str:
    if found.is_bounded and claim.at_least <= found.low and found.high <= claim.at_most:
        return MET
    if wider.is_bounded and (wider.high < claim.at_least or wider.low > claim.at_most):
        return MISSED
    return UNDECIDED


def as_json(one: Judged) -> dict[str, object]:
    """Describe a comparison for the record."""
    found = one.found
    bounds = {"low": found.low, "high": found.high} if found.is_bounded else {}
    return {
        "claim": one.claim.text,
        "contender": one.contender,
        "limit": one.claim.limit,
        **one.place._asdict(),
        "rival": one.rival,
        "rounds": found.rounds,
        "median": found.median,
        **bounds,
        "verdict": one.verdict,
    }


def table(judged: Sequence[Judged]) -> Table:
    """Set every claim beside what was found, comparison by comparison."""
    headings = ("claim", "limit", "where", "contender", "by", "rounds", "median [95 %]", "verdict")
    rows = [
        (
            one.claim.text,
            one.claim.limit,
            str(one.place),
            one.contender,
            one.rival,
            str(one.found.rounds),
            str(one.found),
            one.verdict,
        )
        for one in judged
    ]
    ends = [i for i, (one, after) in enumerate(pairwise(judged)) if one.claim is not after.claim]
    return Table(
        title="Claims",
        headings=headings,
        rows=rows,
        right=frozenset({"limit", "rounds"}),
        rule_after=frozenset(ends),
    )


def sentences(claims: Sequence[Claim], judged: Sequence[Judged]) -> list[str]:
    """Write one line for each claim: its verdict, and the comparison that is farthest from it."""
    return [_sentence(claim, [one for one in judged if one.claim is claim]) for claim in claims]


def _sentence(claim: Claim, judged: Sequence[Judged]) -> str:
    head = f"claim: {claim.text} ({claim.limit})"
    if not judged:
        return f"{head}: NOT MEASURED"
    counts = {word: sum(one.verdict == word for one in judged) for word in (MET, MISSED, UNDECIDED)}
    worst = min(judged, key=lambda one: _margin(claim, one.found.median))
    pair = f"{worst.contender} by {worst.rival}" if worst.rival else worst.contender
    names = f"{pair}, " if len(claim.pairs) > 1 else ""
    least = f"; farthest: {worst.found} ({names}{worst.place}, {worst.found.rounds} rounds)"
    if len(judged) == counts[MET]:
        verdict = MET
    elif counts[MISSED]:
        verdict = MISSED
    else:
        verdict = UNDECIDED
        needed = least_rounds(len(judged))
        if any(one.found.rounds < needed for one in judged):
            least += f"; {needed} rounds decide"
    if len(judged) > 1:
        verdict += f" ({', '.join(f'{n} {word}' for word, n in counts.items() if n)})"
    return f"{head}: {verdict}{least}"


def _margin(claim: Claim, value: float) -> float:
    """Return how far inside the limits a value is, as a share of the limit; negative outside."""
    above = value / claim.at_least - 1 if math.isfinite(claim.at_least) else math.inf
    below = 1 - value / claim.at_most if math.isfinite(claim.at_most) else math.inf
    return min(above, below)
