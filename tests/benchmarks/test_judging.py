"""Verdicts are calibrated: equal contenders are not distinguished, different ones are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest

from benchmarks.harness.intervals import ALPHA, interval, least_rounds
from benchmarks.harness.judging import (
    MET,
    MISSED,
    UNDECIDED,
    Claim,
    judge,
    sentences,
    table,
)
from benchmarks.harness.measure import Sample

COMPARISONS = 1000
#: P(more than this many of 1,000 with a probability of 5 % each) is below 1 %.
MOST_APART = 67


def sample(contender: str, number: int, wall_s: float, *, size: int = 4096) -> Sample:
    return Sample(
        subject="case",
        block_nbytes=size,
        contender=contender,
        checksum=False,
        operation="write",
        round=number,
        wall_s=wall_s,
        latencies_s=[wall_s],
    )


def even(rng: random.Random) -> float:
    """A time with the noise of a quiet machine."""
    return rng.lognormvariate(0, 0.05)


def bursts(rng: random.Random) -> float:
    """A time that is now and then five times as long, as on a shared machine."""
    return rng.lognormvariate(0, 0.3) * (5 if rng.random() < 0.1 else 1)


def simulate(
    rng: random.Random, names: Sequence[str], rounds: int, noise: Callable[[random.Random], float]
) -> list[Sample]:
    """Rounds of equal contenders on a machine that drifts; the drift is common to a round."""
    drift = [math.exp(0.3 * math.sin(number / 3)) for number in range(rounds)]
    return [
        sample(name, number, drift[number] * noise(rng))
        for number in range(rounds)
        for name in names
    ]


@pytest.mark.parametrize("noise", [even, bursts])
@pytest.mark.parametrize("rounds", [3, 6, 9, 15])
def test_equal_contenders_are_seldom_reported_apart(
    rounds: int, noise: Callable[[random.Random], float]
) -> None:
    """In at most 5 % of 1,000 comparisons, with the tolerance of the binomial distribution."""
    rng = random.Random(20261124 + rounds)
    faster = Claim(text="a is faster than b", pairs=[("a", "b")], at_least=1.0)
    apart = 0
    for _ in range(COMPARISONS):
        [one] = judge([faster], simulate(rng, "ab", rounds, noise))
        apart += one.verdict in (MET, MISSED)

    assert apart <= MOST_APART
    assert (apart > 0) == (rounds >= least_rounds())


def test_the_better_of_several_equal_rivals_is_no_bar() -> None:
    """The claim "not slower than the better of two" is missed in at most 5 % of equal contenders.

    The ratio to the faster of the two in each round misses it in half of them.
    """
    rng = random.Random(20261125)
    claim = Claim(text="as fast as the better", pairs=[("a", "b"), ("a", "c")], at_least=1.0)
    missed = by_maximum = 0
    for _ in range(COMPARISONS):
        samples = simulate(rng, "abc", 9, even)
        missed += any(one.verdict == MISSED for one in judge([claim], samples))
        speed = {(s.contender, s.round): s.bytes_per_s for s in samples}
        ratios = [speed["a", n] / max(speed["b", n], speed["c", n]) for n in range(9)]
        by_maximum += median(ratios) < 1

    assert missed <= MOST_APART
    assert by_maximum > 500


def test_a_difference_is_found() -> None:
    """A contender that takes 20 % longer misses "not slower" in most runs of nine rounds."""
    rng = random.Random(20261126)
    claim = Claim(text="not slower", pairs=[("a", "b")], at_least=1.0)
    missed = 0
    for _ in range(200):
        samples = [
            sample(name, number, even(rng) * (1.2 if name == "a" else 1.0))
            for number in range(9)
            for name in "ab"
        ]
        missed += judge([claim], samples)[0].verdict == MISSED

    assert missed > 180


@pytest.mark.parametrize("rounds", range(1, 30))
def test_an_interval_covers_the_median_as_often_as_it_says(rounds: int) -> None:
    """By counting every order of signs: exact, and no narrower interval would do."""
    values = list(range(rounds))
    found = interval([float(v) for v in values])
    if not found.is_bounded:
        assert rounds < least_rounds()
        assert 2 / 2**rounds > ALPHA
        return
    k = int(found.low) + 1
    missed = 2 * sum(math.comb(rounds, below) for below in range(k)) / 2**rounds
    more = missed + 2 * math.comb(rounds, k) / 2**rounds

    assert missed <= ALPHA < more
    assert found.low <= found.median <= found.high


def test_five_rounds_decide_nothing() -> None:
    """Six are the fewest for one comparison, and more for more."""
    assert (least_rounds(), least_rounds(2), least_rounds(16)) == (6, 7, 10)
    claim = Claim(text="faster", pairs=[("a", "b")], at_least=1.0)
    for rounds, verdict in ((5, UNDECIDED), (6, MET)):
        samples = [sample("a", n, 1.0) for n in range(rounds)]
        samples += [sample("b", n, 3.0) for n in range(rounds)]
        assert judge([claim], samples)[0].verdict == verdict
    assert judge([claim], samples, busy=True)[0].verdict == UNDECIDED


def test_within_means_that_the_interval_lies_inside() -> None:
    """Not that the median does."""
    claim = Claim(text="same", pairs=[("a", "b")], at_least=0.97, at_most=1.03)
    rivals = [sample("b", n, 1.0) for n in range(6)]
    inside = [sample("a", n, 1 + (n - 3) / 200) for n in range(6)]
    wide = [sample("a", n, 1 + (n - 3) / 50) for n in range(6)]
    outside = [sample("a", n, 1.2) for n in range(6)]

    assert [judge([claim], [*own, *rivals])[0].verdict for own in (inside, wide, outside)] == [
        MET,
        UNDECIDED,
        MISSED,
    ]


def test_a_value_is_held_against_its_limit_without_a_rival() -> None:
    """And only where the claim is said."""
    claim = Claim(
        text="short",
        pairs=[("a", "")],
        at_most=2.0,
        where=lambda s: s.block_nbytes == 1,
        value=lambda s: s.wall_s,
    )
    samples = [
        sample("a", n, seconds, size=int(seconds)) for n in range(6) for seconds in (1.0, 3.0)
    ]

    [one] = judge([claim], samples)
    assert (one.place.block_nbytes, one.verdict) == (1, MET)


def test_only_rounds_of_both_count() -> None:
    """A contender that was left out of a round is compared in the others."""
    claim = Claim(text="faster", pairs=[("a", "b")], at_least=1.0)
    samples = [sample("a", n, 1.0) for n in range(8)] + [sample("b", n, 2.0) for n in range(2, 9)]

    assert judge([claim], samples)[0].found.rounds == 6
    assert judge([claim], samples[:8]) == []


def test_every_claim_has_a_line_and_a_row_a_comparison() -> None:
    """What was not measured is said, and how many rounds would decide what is not decided."""
    met = Claim(text="faster", pairs=[("a", "b")], at_least=1.0)
    missed = Claim(text="slower", pairs=[("a", "b")], at_most=1.0)
    absent = Claim(text="nobody", pairs=[("c", "b")], at_least=1.0)
    samples = [sample("a", n, 1.0) for n in range(6)] + [sample("b", n, 2.0) for n in range(6)]
    judged = judge([met, missed, absent], samples)
    lines = sentences([met, missed, absent], judged)

    assert lines == [
        "claim: faster (>= 1): met; farthest: 2.00 [2.00, 2.00] (case, 4 KiB, write, 6 rounds)",
        "claim: slower (<= 1): MISSED; farthest: 2.00 [2.00, 2.00] (case, 4 KiB, write, 6 rounds)",
        "claim: nobody (>= 1): NOT MEASURED",
    ]
    assert [row[-1] for row in table(judged).rows] == [MET, MISSED]
    few = [s for s in samples if s.round < 4]
    assert sentences([met], judge([met], few))[0].endswith("4 rounds); 6 rounds decide")
