"""Which loads go through DLIO, what counts as an error, and what the tables make of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvio.experiments.measure import Sample
from kvio.experiments.s3 import (
    dlio_plan,
    dlio_runs,
    dlio_tables,
    dlio_turns,
    plan,
)
from kvio.experiments.s3.dlio_plan import STOCK, Load
from kvio.experiments.s3.order import PUT


class TestThePlan:
    """Which loads there are, and what DLIO is asked for."""

    def test_npy_files_are_within_half_a_percent(self) -> None:
        """What numpy writes for the record length is what the plan says, near what is wanted."""
        for wanted in (plan.OBJECT_NBYTES, *plan.SIZES):
            side = int(np.sqrt(dlio_plan.side_of("npy", wanted) ** 2))  # as DLIO takes the root
            file = io.BytesIO()
            np.save(file, np.zeros((side, side, 1), np.uint8))

            assert len(file.getvalue()) == dlio_plan.object_nbytes("npy", wanted)
            assert abs(len(file.getvalue()) / wanted - 1) < 0.005

    def test_jpegs_are_within_one_percent(self) -> None:
        """The noise that DLIO draws, as Pillow stores it, is as long as is wanted."""
        image = pytest.importorskip("PIL.Image")
        for wanted in (plan.OBJECT_NBYTES, *plan.SIZES[:4]):
            side = dlio_plan.side_of("jpeg", wanted)
            noise = np.random.RandomState(10).randint(255, size=(side, side), dtype=np.uint8)
            file = io.BytesIO()
            image.fromarray(noise).save(file, format="JPEG", bits=8)

            assert abs(len(file.getvalue()) / wanted - 1) < 0.01

    def test_the_smallest_objects_have_a_record(self) -> None:
        """DLIO is never asked for nothing."""
        assert dlio_plan.side_of("npy", 1) == 1
        assert dlio_plan.side_of("jpeg", 1) == 8

    def test_a_load_of_two_parts_is_taken_once(self) -> None:
        """32 threads are of parts 1 and 2, 8 of 1 and of one process in 3; reads are nowhere."""
        loads = _loads("1", "2", "3", "4", "get")
        at = {(x.case.nbytes, x.case.threads, x.case.processes): x for x in loads}

        assert len(at) == len(loads)
        own = dlio_plan.object_nbytes("npy", plan.OBJECT_NBYTES)
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
                dlio_plan.choose(
                    dlio_plan.GENERATED, ["boto3"], form="npy", objects=400, most_ranks=8,
                    budget_s=budget_s,
                )[0]
            )  # fmt: skip

        assert chosen(1e6) == len(_loads("1", "2", "3", "4"))
        assert chosen(1e6) > chosen(300) > chosen(60) == chosen(1) > 3


def _loads(*parts: str, most_ranks: int = 8) -> list[Load]:
    whole = dlio_plan.DLIO_LEVELS[0]
    return dlio_plan.loads_of(parts, whole, form="npy", objects=400, most_ranks=most_ranks)


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
        expected = dlio_runs.Expected({"a": 3, "b": 4}, {"a": tmp_path / "a"})
        given = {"p/data/a": b"123", "p/data/b": b"1234", **changed}
        held = {key: data for key, data in given.items() if data is not None}
        sizes = {key: len(data) for key, data in held.items()}

        assert dlio_turns.errors_of(_Holder(held), sizes, "p", expected) == errors


class TestTables:
    """Numbers of samples that are made up."""

    def test_window_elapsed_and_ratio_are_what_they_say(self) -> None:
        """A load of 100 MB: 0.5 s of window, 2 s of process; the direct harness needs 0.25 s."""
        made = [
            _made(STOCK, 1.0, process_s=2.0, cpu_s=1.5),
            _made("boto3 dlio", 0.5, process_s=2.0, cpu_s=3.5),
            _made("boto3 kvio", 0.25, process_s=0.5, cpu_s=1.0),
        ]
        speeds, cpu, *_ = dlio_tables.tables(made)

        row = dict(zip(speeds.headings, speeds.rows[1], strict=True))
        assert (row["MB/s"], row["direct MB/s"]) == ("200", "400")
        assert row["via DLIO : direct"] == "0.50 (0.50-0.50)"
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
        table = next(t for t in dlio_tables.tables(made) if "efficiency" in t.title)

        assert table.title.startswith("Scaling efficiency")
        assert table.rows == [("boto3", "2", "0.75 (0.75-0.75)", "0.25 (0.25-0.25)", "")]

    def test_hypotheses_are_decided_by_window_and_by_elapsed_time(self) -> None:
        """A library of half the window and the same process is another by the window alone."""
        made = [
            replace(_made(name, wall_s), round=at)
            for at in range(3)
            for name, wall_s in ((STOCK, 0.5), ("boto3 dlio", 2.0), ("obstore dlio", 1.0))
        ]
        found = {
            table.title: table.rows
            for table in dlio_tables.tables(made)
            if table.title.startswith("Null hypotheses")
        }

        (by_elapsed, by_window) = found.values()
        assert next(iter(found)).endswith("by elapsed time, as the original")
        assert by_elapsed[0][1:3] == ("boto3, obstore", "not rejected")
        assert by_window[0][1:3] == ("boto3, obstore", "REJECTED")

    def test_a_direct_load_that_was_cut_short_has_no_elapsed_time(self) -> None:
        """Its rate stands, its whole time would be of fewer objects."""
        made = [_made("boto3 dlio", 0.5), _made("boto3 kvio", 0.25, cut_short=True)]
        (row, *_) = dlio_tables.tables(made)[0].rows

        named = dict(zip(dlio_tables.tables(made)[0].headings, row, strict=True))
        assert (named["direct MB/s"], named["direct elapsed s"]) == ("400", "")


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
