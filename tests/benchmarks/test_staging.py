"""The staging experiment says what it measured: every number follows from the recorded samples."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.judging import MET, MISSED, UNDECIDED, judge
from benchmarks.harness.measure import Sample
from benchmarks.harness.run import Limits, Progress
from benchmarks.scenarios.staging import scenario
from benchmarks.scenarios.staging.contenders import (
    ACCEPT,
    CONTENDERS,
    DRAIN,
    FILES,
    MEMCPY,
    READ,
    STORES,
    TIERS,
    WRITE,
    JobSpec,
)
from benchmarks.scenarios.staging.scenario import Case
from kvio import KiB, MiB
from tests.benchmarks.running import COMMAND

SIZES = (64 * KiB, MiB)


def run_small(root: Path, results: Path, **options: Any) -> int:
    limits = Limits(root=root, results=results, max_rounds=1, max_bytes=MiB)
    return scenario.run(limits, **{"ranks": (1,), "sizes": (64 * KiB,), **options})


def recorded(results: Path) -> Any:
    return json.loads((results / "staging.json").read_text())


def run_command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    command = (*COMMAND, "staging", *map(str, arguments))
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, disk_parent: Path) -> Path:
    """Run it once by its command: every contender, two ranks, two sizes, two rounds."""
    results = tmp_path_factory.mktemp("results")
    with tempfile.TemporaryDirectory(prefix="kvio-test-", dir=disk_parent) as root:
        where = ("--root", root, "--results", results, "--max-bytes", "2MiB", "--budget", "1h")
        done = run_command(*where, "--ranks", "2", "--sizes", "64KiB,1MiB", "--rounds", "2")
        assert done.returncode == 0, done.stderr
        assert os.listdir(root) == []
    (results / "said").write_text(done.stdout)
    return results


def _tables(markdown: str) -> dict[str, list[dict[str, str]]]:
    """Read every table by its title, a row by its headings."""
    found: dict[str, list[dict[str, str]]] = {}
    for part in markdown.split("\n## ")[1:]:
        title, _, *lines = part.strip().splitlines()
        cells = [[c.strip() for c in line[1:-1].split("|")] for line in lines if line]
        found[title.partition(":")[0]] = [
            dict(zip(cells[0], row, strict=True)) for row in cells[2:]
        ]
    return found


def _of(samples: list[Any], operation: str, row: dict[str, str], name: str) -> list[Any]:
    """Find the samples of a contender at the place of a row, in the order of rounds."""
    nbytes = {"64 KiB": 64 * KiB, "1 MiB": MiB}[row["size"]]
    ranks = "1 rank" if row["ranks"] == "1" else f"{row['ranks']} ranks"
    wanted = (ranks, nbytes, operation, name)
    own = [
        s
        for s in samples
        if (s["subject"], s["block_nbytes"], s["operation"], s["contender"]) == wanted
    ]
    return sorted(own, key=lambda s: int(s["round"]))


def _speed(sample: Any) -> float:
    return float(sample["block_nbytes"] * len(sample["latencies_s"]) / sample["wall_s"])


def _percentile(samples: list[Any], percent: int) -> float:
    ordered = sorted(one for sample in samples for one in sample["latencies_s"])
    return float(ordered[math.ceil(percent * len(ordered) / 100) - 1])


def _ratio(mine: list[Any], theirs: list[Any]) -> float:
    by_round = {s["round"]: _speed(s) for s in theirs}
    return statistics.median(_speed(s) / by_round[s["round"]] for s in mine)


def _kinds(record: Any) -> list[str]:
    """Name the contenders that this medium has."""
    left_out = [note for note in record["notes"] if note.startswith("left out: ")]
    return [
        n for n in CONTENDERS if not any(note.startswith(f"left out: {n}:") for note in left_out)
    ]


def test_every_contender_takes_part_in_every_case(ran: Path) -> None:
    """Each in its own operations, every round, and every byte that was stored or read is right."""
    record = recorded(ran)
    names = _kinds(record)
    assert set(names) >= {MEMCPY, "tier tmpfile", "posix-tmpfile", FILES[0]}
    expected = set()
    for name in names:
        operations = {WRITE}
        operations |= {ACCEPT, READ} if name == MEMCPY or name in TIERS else set()
        operations |= {DRAIN} if name in TIERS or name in STORES else set()
        operations |= {READ} if name == FILES[0] else set()
        expected |= set(itertools.product([name], ["2 ranks"], SIZES, operations, [0, 1]))

    samples = record["samples"]
    took_part = [
        (s["contender"], s["subject"], s["block_nbytes"], s["operation"], s["round"])
        for s in samples
    ]
    assert len(took_part) == len(set(took_part))
    assert set(took_part) == expected
    for sample in samples:
        assert sample["intact"] is (None if sample["operation"] == ACCEPT else True)


def test_a_sample_counts_all_blocks_of_all_ranks(ran: Path) -> None:
    """A turn moves as much as it may; no call takes longer than the whole, nor ends after it."""
    for sample in recorded(ran)["samples"]:
        assert len(sample["latencies_s"]) * sample["block_nbytes"] == 2 * MiB
        assert min(sample["latencies_s"]) > 0
        assert max(sample["latencies_s"]) <= sample["wall_s"] + 1e-6
        if sample["operation"] not in (ACCEPT, READ):
            assert sample["facts"]["settled_s"] >= sample["wall_s"] - 1e-6
            safe = "durable_s" in sample["facts"]
            assert safe is (sample["contender"] != MEMCPY)
        took_s = sample["facts"].get("settled_s", sample["wall_s"])
        assert 0 <= sample["facts"]["cpu_s"] <= (os.cpu_count() or 1) * took_s + 0.5


def test_the_tables_follow_from_the_samples(ran: Path) -> None:
    """Rates, percentiles, variation, time until durable and CPU are computed anew here."""
    record = recorded(ran)
    samples, tables = record["samples"], _tables((ran / "staging.md").read_text())
    for operation in (WRITE, ACCEPT, DRAIN, READ):
        rows = tables[operation]
        assert len(rows) == len(
            {
                (s["contender"], s["subject"], s["block_nbytes"])
                for s in samples
                if s["operation"] == operation
            }
        )
        for row in rows:
            own = _of(samples, operation, row, row["contender"])
            assert row["MB/s"] == f"{statistics.median(map(_speed, own)) / 1e6:.0f}"
            times = [one for s in own for one in s["latencies_s"]]
            if operation != DRAIN:
                assert row["p50 ms"] == f"{_percentile(own, 50) * 1e3:.2f}"
                assert row["p95 ms"] == f"{_percentile(own, 95) * 1e3:.2f}"
                assert row["p99 ms"] == f"{_percentile(own, 99) * 1e3:.2f}"
                spread = statistics.pstdev(times) / statistics.fmean(times)
                assert row["CV"] == f"{spread:.2f}"
                floor = _of(samples, operation, row, MEMCPY)
                assert row["x memcpy"] == f"{_ratio(own, floor):.2f}"
            if operation in (WRITE, DRAIN) and row["contender"] != MEMCPY:
                until = statistics.median(s["facts"]["durable_s"] for s in own)
                assert row["durable s"] == f"{until:.3f}"
            cpu = statistics.median(s["facts"]["cpu_s"] * 1024 / 2 for s in own)
            assert row["CPU s/GiB"] == f"{cpu:.3f}"


def test_every_claim_is_stated_with_its_numbers(ran: Path) -> None:
    """Each comparison's median follows from the samples, and two rounds decide nothing."""
    record = recorded(ran)
    by_place: dict[tuple[Any, ...], dict[int, Any]] = {}
    for s in record["samples"]:
        place = (s["contender"], s["subject"], s["block_nbytes"], s["operation"])
        by_place.setdefault(place, {})[s["round"]] = s
    assert record["claims"]
    for one in record["claims"]:
        timed = "(time)" in one["claim"]
        there = WRITE if timed else one["operation"]
        where = (one["subject"], one["block_nbytes"])
        mine = by_place[(one["contender"], *where, one["operation"])]
        theirs = by_place[(one["rival"], *where, there)]
        ratios = [
            _percentile([mine[n]], 99) / _percentile([theirs[n]], 99)
            if timed
            else _speed(mine[n]) / _speed(theirs[n])
            for n in mine
        ]
        assert one["rounds"] == len(ratios) == 2
        assert one["median"] == pytest.approx(statistics.median(ratios))
        assert one["verdict"] == UNDECIDED
    accepted = {one["block_nbytes"] for one in record["claims"] if "memcpy's speed" in one["claim"]}
    assert accepted >= {MiB}
    assert len(record["conclusions"]) == len(scenario.SCENARIO.claims)
    small = [c for c in record["claims"] if "accepts" in c["claim"] and c["block_nbytes"] < MiB]
    assert small == []


def test_what_is_printed_is_what_is_written(ran: Path) -> None:
    """The plot is a PNG, and the tables and notes are on standard output too."""
    said = (ran / "said").read_text()
    record = recorded(ran)
    for note in (*record["notes"], *record["conclusions"]):
        assert note in said
    if importlib.util.find_spec("matplotlib"):
        assert (ran / "staging.png").read_bytes().startswith(b"\x89PNG")


def _sample(name: str, operation: str, seconds: float, *, index: int = 0) -> Sample:
    return Sample(
        subject="8 ranks", block_nbytes=MiB, contender=name, checksum=True, operation=operation,
        round=index, wall_s=seconds, latencies_s=[seconds],
    )  # fmt: skip


def test_a_tier_at_the_limit_of_memcpy_is_met_and_one_below_missed() -> None:
    """By the ratio in the same round, however fast the machine was then."""
    rounds = range(12)
    floor = [_sample(MEMCPY, ACCEPT, 0.85 * 2**index, index=index) for index in rounds]
    tier = [_sample("tier tmpfile", ACCEPT, 2.0**index, index=index) for index in rounds]
    other = [_sample("tier direct", ACCEPT, 1.001 * 2.0**index, index=index) for index in rounds]
    found = judge(scenario.SCENARIO.claims, [*floor, *tier, *other])

    assert {one.contender: one.verdict for one in found} == {
        "tier tmpfile": MET,
        "tier direct": MISSED,
    }


def test_latency_is_held_against_direct_io() -> None:
    """p99 of accept by p99 of a write past the page cache, while drains run and while not."""
    rounds = range(12)
    samples = [
        _sample(name, operation, seconds, index=index)
        for index in rounds
        for name, operation, seconds in (
            ("posix-direct", WRITE, 1.0),
            ("posix-direct durable", WRITE, 9.0),
            ("tier direct", ACCEPT, 0.1),
            ("tier direct", WRITE, 0.125),
        )
    ]
    found = judge(scenario.SCENARIO.claims, samples)

    assert [(one.place.operation, one.found.median, one.verdict) for one in found] == [
        (ACCEPT, 0.1, MET),
        (WRITE, 0.125, MISSED),
    ]


def test_no_two_blocks_have_one_name() -> None:
    """Keys differ by trial, operation, rank and number, and are keys of kvio."""

    def spec(rank: int, tag: str) -> JobSpec:
        return JobSpec(
            contender=MEMCPY, root="", tag=tag, rank=rank, nbytes=1, count=1, drain_threads=1,
            checksum=True,
        )  # fmt: skip

    keys = [
        spec(rank, tag).key(operation, index)
        for rank in range(16)
        for tag in ("a/1x1/0", "a/1x1/1")
        for operation in (ACCEPT, WRITE)
        for index in range(3)
    ]
    assert len(set(keys)) == len(keys)
    assert all(map(kvio.types.is_key, keys))


@pytest.mark.parametrize(
    ("ranks", "nbytes", "count"), [(1, MiB, 8), (8, MiB, 1), (16, MiB, 1), (2, 4 * KiB, 256)]
)
def test_ranks_share_what_a_turn_may_write(ranks: int, nbytes: int, count: int) -> None:
    """Whole blocks each, one at least, and not endlessly many."""
    assert Case.within(8 * MiB, ranks=ranks, nbytes=nbytes) == Case(ranks, nbytes, count)


def children() -> list[int]:
    """List the processes that this one began, the youngest last."""
    tasks = Path("/proc/self/task")
    found: list[int] = []
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def test_a_rank_that_dies_is_a_named_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it took part in is lost by name, others are measured with new ranks, and exit is 1."""
    before = set(children())
    steps: list[str] = []

    def say(_: Progress, step: str) -> None:
        if "tier tmpfile" in step:
            youngest = [pid for pid in children() if pid not in before][-1]
            os.kill(youngest, signal.SIGKILL)
        steps.append(step)

    monkeypatch.setattr(Progress, "say", say)
    names = [MEMCPY, "tier tmpfile", "posix-tmpfile", FILES[0]]

    assert run_small(tmp_path, tmp_path / "r", ranks=(3,), contenders=names) == 1
    record = recorded(tmp_path / "r")
    assert {s["contender"] for s in record["samples"]} == {MEMCPY, "posix-tmpfile", FILES[0]}
    reported = [note for note in record["notes"] if "died" in note]
    assert (
        "LOST: tier tmpfile, 3 ranks, 64 KiB, round 1: rank 2 died: killed by SIGKILL" in reported
    )
    assert any(note.startswith("left out: tier tmpfile: rank 2 died") for note in reported)
    assert "rank 2 died" in capsys.readouterr().out
    assert set(children()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
