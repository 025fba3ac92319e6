"""Which loads go through DLIO, what counts as an error, and what the tables make of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import judging
from benchmarks.harness.judging import MET, MISSED
from benchmarks.harness.measure import Sample, summarise
from benchmarks.harness.table import Table
from benchmarks.scenarios.s3 import dlio, plan
from benchmarks.scenarios.s3.dlio import CONTENDERS, STOCK, Load
from benchmarks.scenarios.s3.libraries import PUT


class TestThePlan:
    """Which loads there are, and what DLIO is asked for."""

    def test_npy_files_are_within_half_a_percent(self) -> None:
        """What numpy writes for the record length is what the plan says, near what is wanted."""
        for wanted in (plan.OBJECT_NBYTES, *plan.SIZES):
            side = int(np.sqrt(dlio.side_of("npy", wanted) ** 2))  # as DLIO takes the root
            file = io.BytesIO()
            np.save(file, np.zeros((side, side, 1), np.uint8))

            assert len(file.getvalue()) == dlio.object_nbytes("npy", wanted)
            assert abs(len(file.getvalue()) / wanted - 1) < 0.005

    def test_jpegs_are_within_one_percent(self) -> None:
        """The noise that DLIO draws, as Pillow stores it, is as long as is wanted."""
        image = pytest.importorskip("PIL.Image")
        for wanted in (plan.OBJECT_NBYTES, *plan.SIZES[:4]):
            side = dlio.side_of("jpeg", wanted)
            noise = np.random.RandomState(10).randint(255, size=(side, side), dtype=np.uint8)
            file = io.BytesIO()
            image.fromarray(noise).save(file, format="JPEG", bits=8)

            assert abs(len(file.getvalue()) / wanted - 1) < 0.01

    def test_the_smallest_objects_have_a_record(self) -> None:
        """DLIO is never asked for nothing."""
        assert dlio.side_of("npy", 1) == 1
        assert dlio.side_of("jpeg", 1) == 8

    def test_a_load_of_two_parts_is_taken_once(self) -> None:
        """32 threads are of parts 1 and 2, 8 of 1 and of one process in 3; reads are nowhere."""
        loads = _loads("1", "2", "3", "4", "get")
        at = {(x.case.nbytes, x.case.threads, x.case.processes): x for x in loads}

        assert len(at) == len(loads)
        own = dlio.object_nbytes("npy", plan.OBJECT_NBYTES)
        assert {plan.THREADS, plan.LIBRARIES, plan.SCALE} == set(at[own, 32, 1].parts)
        assert {plan.THREADS, plan.PROCESSES, plan.SCALE} == set(at[own, 8, 1].parts)
        assert {processes for _, _, processes in at} == {1, 2, 4, 8}
        assert {load.case.operations for load in loads} == {(PUT,)}
        assert {n // 1000 for n, _, _ in at} == {65, 322, 1048, 4194, 16777}

    def test_processes_share_a_fixed_total(self) -> None:
        """However many they are, they make as many objects."""
        loads = [load for load in _loads("3") if load.case.processes > 1]

        assert len(loads) == 3
        assert {load.objects for load in loads} == {400}

    def test_without_mpirun_there_is_one_process(self) -> None:
        """No load of more is planned."""
        assert {load.case.processes for load in _loads("3", most_ranks=1)} == {1}

    def test_a_short_budget_has_fewer_loads(self) -> None:
        """The first level that fits is taken; what never fits is the last."""

        def chosen(budget_s: float) -> int:
            return len(
                dlio.choose(
                    dlio.GENERATED, ["boto3"], form="npy", objects=400, most_ranks=8,
                    budget_s=budget_s,
                )[0]
            )  # fmt: skip

        assert chosen(1e6) == len(_loads("1", "2", "3", "4"))
        assert chosen(1e6) > chosen(300) > chosen(60) == chosen(1) > 3


def _loads(*parts: str, most_ranks: int = 8) -> list[Load]:
    whole = dlio.DLIO_LEVELS[0]
    return dlio.loads_of(parts, whole, form="npy", objects=400, most_ranks=most_ranks)


class _Holder:
    """Holds what it is given, in the place of an inspector."""

    def __init__(self, held: dict[str, bytes]) -> None:
        self.held = held

    def holds(self, key: str, payload: bytes) -> bool:
        return self.held[key].startswith(payload)


class TestErrors:
    """Objects that are not as they must be, each counted once."""

    @pytest.mark.parametrize(
        ("changed", "errors"),
        [
            ({}, 0),
            ({"p/data/a": None}, 1),
            ({"p/data/a": b"12"}, 1),
            ({"p/data/a": b"124"}, 1),
            ({"p/data/b": None, "p/data/a": b"1"}, 2),
            ({"p/data/c": b""}, 1),
        ],
    )
    def test_missing_short_other_and_extra_ones(
        self, changed: dict[str, bytes | None], errors: int, tmp_path: Path
    ) -> None:
        """None stands for one that is missing."""
        (tmp_path / "a").write_bytes(b"123")
        expected = dlio.Expected({"a": 3, "b": 4}, {"a": tmp_path / "a"})
        given = {"p/data/a": b"123", "p/data/b": b"1234", **changed}
        held = {key: data for key, data in given.items() if data is not None}
        sizes = {key: len(data) for key, data in held.items()}

        assert dlio.errors_of(_Holder(held), sizes, "p", expected) == errors


class TestTables:
    """Numbers of samples that are made up."""

    def test_window_elapsed_and_ratio_are_what_they_say(self) -> None:
        """A load of 100 MB: 0.5 s of window, 2 s of process; the direct harness needs 0.25 s."""
        made = [
            _made(STOCK, 1.0, process_s=2.0, cpu_s=1.5),
            _made("boto3 dlio", 0.5, process_s=2.0, cpu_s=3.5),
            _made("boto3 kvio", 0.25, process_s=0.5, cpu_s=1.0),
        ]
        speeds, cpu, *_ = _tables(made)

        row = dict(zip(speeds.headings, speeds.rows[1], strict=True))
        assert (row["MB/s"], row["direct MB/s"]) == ("200", "400")
        assert row["via DLIO : direct"] == "0.50"
        assert row["MiB/s of elapsed"] == f"{100e6 / 2 / (1 << 20):.0f}"
        assert (row["elapsed s"], row["direct elapsed s"]) == ("2.00", "0.50")
        assert (row["objects"], row["errors"]) == ("100", "0")
        row = dict(zip(cpu.headings, cpu.rows[1], strict=True))
        assert (row["start s"], row["generate s"], row["store s"]) == ("1.00", "0.50", "2.00")
        assert (row["user s"], row["system s"], row["direct s"]) == ("2.50", "1.00", "1.00")

    def test_efficiency_is_of_ideal(self) -> None:
        """Two processes at 1.5 times the speed of one are 0.75 of ideal."""
        made = [
            _made(name, seconds, process_s=process_s, processes=processes, part=plan.PROCESSES)
            for processes, seconds, process_s in ((1, 0.6, 2.0), (2, 0.4, 4.0))
            for name in (STOCK, "boto3 dlio")
        ]
        table = next(t for t in _tables(made) if "efficiency" in t.title)

        assert table.title.startswith("Scaling efficiency")
        assert table.rows == [("boto3", "2", "1", "0.75", "0.25", "")]

    def test_ratios_are_of_the_same_round_and_have_an_interval(self) -> None:
        """The machine gets faster by the round; the direct harness is twice as fast in each."""
        made = [
            replace(_made(name, wall_s / (1 + at)), round=at)
            for at in range(6)
            for name, wall_s in (("boto3 dlio", 2.0), ("boto3 kvio", 1.0))
        ]
        table = _tables(made)[0]

        row = dict(zip(table.headings, table.rows[0], strict=True))
        assert (row["rounds"], row["via DLIO : direct"]) == ("6", "0.50 [0.50, 0.50]")

    def test_claims_are_decided_by_window_and_by_elapsed_time(self) -> None:
        """A library of half the window and the same process differs by the window alone."""
        made = [
            replace(_made(name, wall_s), round=at)
            for at in range(6)
            for name, wall_s in ((STOCK, 0.5), ("boto3 dlio", 2.0), ("obstore dlio", 1.0))
        ]
        judged = judging.judge(dlio.claims(made), made)

        assert [(one.contender, one.rival) for one in judged] == [
            ("boto3 dlio", "obstore dlio")
        ] * 2
        found = {one.claim.text: one.verdict for one in judged}
        assert found == {
            "2: the libraries are equally fast at 32 threads, by elapsed time": MET,
            "2: the libraries are equally fast at 32 threads, by the window": MISSED,
        }

    def test_a_direct_load_that_was_cut_short_has_no_elapsed_time(self) -> None:
        """Its rate stands, its whole time would be of fewer objects."""
        made = [_made("boto3 dlio", 0.5), _made("boto3 kvio", 0.25, cut_short=True)]
        table = _tables(made)[0]

        named = dict(zip(table.headings, table.rows[0], strict=True))
        assert (named["direct MB/s"], named["direct elapsed s"]) == ("400", "")


def _tables(samples: list[Sample]) -> list[Table]:
    return dlio.tables(summarise(samples, STOCK, CONTENDERS), samples)


def _made(
    name: str,
    wall_s: float,
    *,
    process_s: float = 1.0,
    cpu_s: float = 1.0,
    processes: int = 1,
    part: str = plan.LIBRARIES,
    cut_short: bool = False,
) -> Sample:
    facts: dict[str, Any] = {
        "parts": [part], "threads": 8, "processes": processes, "object_nbytes": 1_000_000,
        "process_wall_s": process_s, "process_cpu_s": cpu_s, "user_s": cpu_s - 1, "system_s": 1.0,
        "server_s": None, "cut_short": cut_short,
    }  # fmt: skip
    if not name.endswith("kvio"):
        facts |= {"objects": 100, "bytes": 100_000_000, "errors": 0, "start_cpu_s": 1.0}
    return Sample(
        subject=f"{part}: {processes} x 8 threads", block_nbytes=1_000_000, contender=name,
        checksum=False, operation=PUT, round=0, wall_s=wall_s, latencies_s=[wall_s / 100] * 100,
        facts=facts,
    )  # fmt: skip
