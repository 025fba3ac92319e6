"""What the s3 experiment says of numbers: bars, differences, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvio.experiments.measure import Sample
from kvio.experiments.s3 import bars, plan, ratios
from kvio.experiments.s3.order import CONTENDERS, FLOOR, GET, PUT, Order


def _sample(contender: str, megabytes_s: float, index: int, **facts: Any) -> Sample:
    known = {"part": plan.SCALE, "threads": 8, "processes": 1, "user_s": 1.0, "system_s": 0.0}
    return Sample(
        subject=f"{plan.SCALE}: 8 threads", block_nbytes=10**6, contender=contender, checksum=False,
        operation=PUT, round=index, wall_s=1 / megabytes_s, latencies_s=[1 / megabytes_s],
        facts={**known, **facts},
    )  # fmt: skip


class TestVerdicts:
    """What is said of numbers."""

    @pytest.mark.parametrize(
        ("speeds", "expected"),
        [
            ((100, 97, 99), "yes"),
            ((90, 91, 99), "no, but in some round"),
            ((90, 91, 92), "NO"),
        ],
    )
    def test_a_bar_holds_by_the_median_of_paired_rounds(
        self, speeds: tuple[float, ...], expected: str
    ) -> None:
        """A single good round does not make it hold."""
        samples = [_sample("boto3 direct", 100, i) for i in range(3)]
        samples += [_sample("boto3 kvio", speed, i) for i, speed in enumerate(speeds)]
        table = bars.bars(samples)

        assert table is not None
        assert {row[4]: row[7] for row in table.rows}["MB/s of direct"] == expected

    @pytest.mark.parametrize(
        ("values", "differs"),
        [
            ((1.2, 1.3, 1.1), True),
            ((1.2, 1.3, 0.99), False),
            ((1.02, 1.03, 1.01), False),
            ((2.0, 2.0), False),
        ],
    )
    def test_a_difference_needs_every_round(self, values: tuple[float, ...], differs: bool) -> None:  # noqa: FBT001
        """All on one side, the median far enough away, and three rounds at least."""
        assert ratios.Ratio(values).differs is differs

    def test_an_order_survives_its_way(self) -> None:
        """Orders go to their process and back without a change."""
        order = Order(
            contender=FLOOR, endpoint="http://x", bucket="b", region="r", prefix="p", payload="f",
            distinct=2, nbytes=10, count=3, threads=1, operations=(PUT, GET), unsigned=True,
            limit_s=1.0,
        )  # fmt: skip
        assert Order.of(order.line()) == order

    def test_the_first_round_of_everything_fits_or_is_named(self) -> None:
        """With less time there are fewer cases, never more, and the least is said to be less."""
        counts = []
        for budget_s in (1e9, 200, 60, 1):
            cases, thinness = plan.choose(plan.PARTS, CONTENDERS, objects=200, budget_s=budget_s)
            counts.append(len(cases))
            assert bool(thinness.left_out()) == (thinness != plan.LEVELS[0])
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1]

    def test_libraries_of_different_runs_are_compared_by_their_shares_of_the_floor(self) -> None:
        """A faster machine makes no library faster than another."""
        samples = []
        for at, (library, machine) in enumerate((("boto3", 1000), ("minio", 100))):
            for index in range(1000 * at, 1000 * at + 3):
                samples += [
                    _sample(FLOOR, machine, index, part=plan.LIBRARIES),
                    _sample(f"{library} kvio", machine * (0.1, 0.5)[at], index),
                ]
        moved = [replace(s, subject=f"{plan.LIBRARIES}: 32 threads") for s in samples]
        table = bars.hypotheses(moved)

        assert table is not None
        [row] = [row for row in table.rows if row[0].startswith("H0-2")]
        assert row[2] == "REJECTED"
        assert "minio by boto3: 5.00" in row[3]
