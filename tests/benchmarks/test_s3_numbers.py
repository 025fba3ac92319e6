"""What the S3 scenario says of numbers: claims, shares of the floor, plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.harness import judging
from benchmarks.harness.judging import MET, MISSED, UNDECIDED, Judged
from benchmarks.harness.measure import Sample, summarise
from benchmarks.scenarios.s3 import plan, presenting, scenario
from benchmarks.scenarios.s3.libraries import CONTENDERS, FLOOR, GET, PUT, JobSpec

ROUNDS = 16


def _sample(contender: str, megabytes_s: float, index: int, **facts: Any) -> Sample:
    known = {
        "part": plan.SCALE, "threads": 8, "processes": 1, "user_s": 1.0, "system_s": 0.0,
        "object_nbytes": 10**6, "cut_short": False, "server_s": None,
    }  # fmt: skip
    facts = {**known, **facts}
    return Sample(
        subject=f"{facts['part']}: {facts['processes']} x {facts['threads']} threads",
        block_nbytes=10**6, contender=contender, checksum=False, operation=PUT, round=index,
        wall_s=1 / megabytes_s, latencies_s=[1 / megabytes_s], facts=facts,
    )  # fmt: skip


def _judged(samples: Sequence[Sample], text: str) -> list[Judged]:
    """Return the comparisons of the one claim that begins so."""
    claims = [claim for claim in scenario.claims(samples) if claim.text.startswith(text)]
    assert len(claims) == 1
    return judging.judge(claims, samples)


class TestClaims:
    """What the claims of the original, and those of kvio, make of paired rounds."""

    @pytest.mark.parametrize(
        ("ratio", "wobble", "expected"),
        [(1.00, 0.01, MET), (0.97, 0.2, UNDECIDED), (0.90, 0.01, MISSED)],
    )
    def test_kvio_is_compared_with_the_library_in_the_same_round(
        self, ratio: float, wobble: float, expected: str
    ) -> None:
        """The machine becomes ten times as fast meanwhile; a single good round decides nothing."""
        samples = []
        for index in range(ROUNDS):
            machine = 100 * (1 + index)
            off = ratio + wobble * (-1) ** index
            samples += [
                _sample("boto3 direct", machine, index),
                _sample("boto3 kvio", machine * off, index),
            ]
        [found] = _judged(samples, "kvio is as fast as the library called directly")

        assert (found.contender, found.rival) == ("boto3 kvio", "boto3 direct")
        assert found.verdict == expected

    def test_cpu_is_by_payload(self) -> None:
        """Half the processor seconds of the library are within the limit, however fast it is."""
        samples = []
        for index in range(ROUNDS):
            samples += [
                _sample("boto3 direct", 100, index, user_s=1.0),
                _sample("boto3 kvio", 50, index, user_s=0.5),
            ]
        [found] = _judged(samples, "kvio takes no more CPU")

        assert (found.found.median, found.verdict) == (0.5, MET)

    @pytest.mark.parametrize(
        ("by_32", "expected"), [(1.0, MET), (1.5, MISSED), (0.5, MISSED), (1.04, MET)]
    )
    def test_experiment_1_compares_thread_counts(self, by_32: float, expected: str) -> None:
        """Of the same contender and round, with 8 threads; either direction is a difference."""
        samples = [
            _sample("boto3 kvio", speed * (1 + index), index, part=plan.THREADS, threads=threads)
            for index in range(ROUNDS)
            for threads, speed in ((8, 100), (32, 100 * by_32))
        ]
        [found] = _judged(samples, "1: ")

        assert found.found.median == pytest.approx(by_32)
        assert found.verdict == expected

    def test_experiment_2_compares_every_two_libraries(self) -> None:
        """In the same round."""
        samples = [
            _sample(f"{library} kvio", speed * (1 + index), index, part=plan.LIBRARIES, threads=32)
            for index in range(ROUNDS)
            for library, speed in (("boto3", 100), ("minio", 101), ("torch", 200))
        ]
        found = {(one.contender, one.rival): one.verdict for one in _judged(samples, "2: ")}

        assert found == {
            ("boto3 kvio", "minio kvio"): MET,
            ("boto3 kvio", "torch kvio"): MISSED,
            ("minio kvio", "torch kvio"): MISSED,
        }

    @pytest.mark.parametrize(("speed", "expected"), [(400, MET), (200, MISSED), (1000, MET)])
    def test_experiment_3_compares_with_ideal_scaling(self, speed: float, expected: str) -> None:
        """Four processes at twice the speed of one are half of the ideal."""
        samples = [
            _sample("boto3 kvio", value * (1 + index), index, part=plan.PROCESSES, processes=count)
            for index in range(ROUNDS)
            for count, value in ((1, 100), (4, speed))
        ]
        [found] = _judged(samples, "3: ")

        assert found.found.median == pytest.approx(speed / 400)
        assert found.verdict == expected

    def test_experiment_4_looks_for_a_better_thread_count_at_every_size(self) -> None:
        """One size at which another count is better is enough."""
        samples = []
        for index in range(ROUNDS):
            for nbytes, speeds in ((10**6, {1: 50, 8: 100}), (10**7, {1: 120, 8: 100})):
                samples += [
                    replace(_sample("boto3 kvio", speed, index, threads=n), block_nbytes=nbytes)
                    for n, speed in speeds.items()
                ]
        found = {one.place.block_nbytes: one.verdict for one in _judged(samples, "4: ")}

        assert found == {10**6: MET, 10**7: MISSED}

    def test_libraries_of_different_runs_are_set_beside_the_floor_only(self) -> None:
        """A faster machine makes no library faster: its share of the floor is what is shown."""
        samples = []
        for at, (library, machine) in enumerate((("boto3", 1000), ("minio", 100))):
            for index in range(1000 * at, 1000 * at + ROUNDS):
                samples += [
                    _sample(FLOOR, machine, index, part=plan.LIBRARIES),
                    _sample(
                        f"{library} kvio", machine * (0.1, 0.5)[at], index, part=plan.LIBRARIES
                    ),
                ]
        (table, *_) = presenting.tables(summarise(samples, FLOOR, CONTENDERS), samples)

        rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
        shares = {row["contender"]: row["x floor"] for row in rows}
        assert shares["boto3 kvio"] == "0.10 [0.10, 0.10]"
        assert shares["minio kvio"] == "0.50 [0.50, 0.50]"
        assert _judged(samples, "2: ") == []


class TestTables:
    """Numbers of samples that are made up."""

    def test_scaling_is_of_ideal_in_the_same_round(self) -> None:
        """Two processes at 1.5 times the speed of one are 0.75 of ideal."""
        samples = [
            _sample(
                "boto3 kvio", value * (1 + index), index, part=plan.PROCESSES, processes=count,
                cut_short=count == 2,
            )
            for index in range(ROUNDS)
            for count, value in ((1, 100), (2, 150))
        ]  # fmt: skip
        table = _table(samples, "Scaling efficiency")

        assert [row[1:3] + row[4:] for row in table.rows] == [
            ("1", f"{ROUNDS}", "1.00 [1.00, 1.00]", ""),
            ("2", f"{ROUNDS}", "0.75 [0.75, 0.75]", "yes"),
        ]

    def test_thread_counts_are_side_by_side(self) -> None:
        """The fastest by the median, and the least that comes within 5 % of it."""
        samples = [
            _sample("boto3 kvio", speed, index, threads=threads)
            for index in range(3)
            for threads, speed in ((1, 100), (8, 198), (32, 200))
        ]
        table = _table(samples, "The best thread count")

        [row] = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
        assert (row["best threads"], row["95 % with"], row["rounds"]) == ("32", "8", "3")
        assert row["MB/s by threads"] == "1: 100, 8: 198, 32: 200"


def _table(samples: Sequence[Sample], title: str) -> Any:
    tables = presenting.tables(summarise(samples, FLOOR, CONTENDERS), samples)
    return next(table for table in tables if table.title.startswith(title))


def test_a_job_spec_survives_its_way() -> None:
    """It goes to its process as JSON without a change."""
    spec = JobSpec(
        contender=FLOOR, endpoint="http://x", bucket="b", region="r", prefix="p", payload="f",
        distinct=2, nbytes=10, count=3, threads=1, operations=(PUT, GET), unsigned=True,
        limit_s=1.0,
    )  # fmt: skip
    assert JobSpec.of(json.loads(json.dumps(asdict(spec)))) == spec


def test_the_first_round_of_everything_fits_or_is_named() -> None:
    """With less time there are fewer cases, never more, and the least is said to be less."""
    counts = []
    for budget_s in (1e9, 200, 60, 1):
        cases, thinness = plan.choose(plan.PARTS, CONTENDERS, objects=200, budget_s=budget_s)
        counts.append(len(cases))
        assert bool(thinness.left_out()) == (thinness != plan.LEVELS[0])
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_budget_for_a_verdict_is_spent_on_rounds() -> None:
    """Fewer cases are planned where that gives as many rounds as one comparison needs."""
    cases = plan.cases_of(plan.PARTS, plan.LEVELS[3], objects=200)
    once = sum(case.seconds(CONTENDERS) for case in cases)
    for rounds, fits in ((6.1, True), (5.9, False)):
        chosen, _ = plan.choose(plan.PARTS, CONTENDERS, objects=200, budget_s=rounds * once)
        assert (chosen == cases) is fits
