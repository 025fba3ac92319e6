"""The shared-file scenario says what it measured: every number follows from recorded samples."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.judging import MET, MISSED, judge
from benchmarks.harness.measure import Sample, summarise
from benchmarks.scenarios.shared_file import scenario
from benchmarks.scenarios.shared_file.contenders import (
    C_DIRECT,
    CONTENDERS,
    DURABLE,
    FILES_DIRECT,
    IOR,
    KINDS,
    PROCESSES,
    SHAPES,
    SHARED_DIRECT,
    SHARED_HOLE,
    THREADS,
    WRITE,
    Case,
    blocks,
    transfers,
)
from kvio import MiB
from tests.benchmarks.running import COMMAND


def run_command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    command = (*COMMAND, "shared-file", *map(str, arguments))
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, disk_parent: Path) -> Path:
    """Run it once by its command: every contender, processes and threads, two rounds."""
    results = tmp_path_factory.mktemp("results")
    with tempfile.TemporaryDirectory(prefix="kvio-test-", dir=disk_parent) as root:
        where = ("--root", root, "--results", results, "--max-bytes", "4MiB", "--shapes", "ior")
        done = run_command(*where, "--writers", "2", "--rounds", "2", "--budget", "1h")
        assert done.returncode == 0, done.stderr
        assert os.listdir(root) == []
    (results / "said").write_text(done.stdout)
    return results


def recorded(results: Path) -> Any:
    return json.loads((results / "shared-file.json").read_text())


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


def _of(samples: list[Any], operation: str, subject: str, name: str) -> list[Any]:
    """Find the samples of a contender at a place, in the order of rounds."""
    wanted = (operation, subject, name)
    own = [s for s in samples if (s["operation"], s["subject"], s["contender"]) == wanted]
    return sorted(own, key=lambda s: int(s["round"]))


def _speed(sample: Any) -> float:
    return float(sample["block_nbytes"] * len(sample["latencies_s"]) / sample["wall_s"])


def _left_out(record: Any) -> set[str]:
    return {
        name
        for name in CONTENDERS
        if any(note.startswith(f"left out: {name}: ") for note in record["notes"])
    }


def test_every_contender_takes_part_in_every_case(ran: Path) -> None:
    """In every round, with processes and with threads, and every byte is read back and right."""
    record = recorded(ran)
    names = set(CONTENDERS) - _left_out(record)
    assert names >= {"shared buffered", "shared hybrid", "files posix-tmpfile", "python buffered"}
    expected = set()
    for name in names - set(IOR):
        operations = [DURABLE] if CONTENDERS[name].way == "store" else [WRITE, DURABLE]
        subjects = ("2 processes, ior", "2 threads, ior")
        expected |= set(itertools.product([name], subjects, operations, (0, 1)))

    samples = [s for s in record["samples"] if s["contender"] not in IOR]
    took_part = [(s["contender"], s["subject"], s["operation"], s["round"]) for s in samples]
    assert len(took_part) == len(set(took_part))
    assert set(took_part) == expected
    assert all(sample["intact"] is True for sample in samples)


def test_a_sample_counts_all_calls_of_all_writers(ran: Path) -> None:
    """A trial moves all its bytes; no call takes longer than the whole; durable comes after."""
    samples = recorded(ran)["samples"]
    for sample in samples:
        assert len(sample["latencies_s"]) * sample["block_nbytes"] == 4 * MiB
        assert min(sample["latencies_s"]) > 0
        assert max(sample["latencies_s"]) <= sample["wall_s"] + 1e-6
        if sample["contender"] in IOR:
            continue
        facts = sample["facts"]
        assert len(facts["writer_s"]) == facts["writers"] == 2
        if sample["operation"] == DURABLE and CONTENDERS[sample["contender"]].way != "store":
            assert sample["wall_s"] >= max(facts["writer_s"])
            assert sample["wall_s"] == pytest.approx(facts["synced_s"] + (facts["seal_s"] or 0))
        sealed = sample["contender"].startswith("shared ")
        assert (facts["seal_s"] is not None) is sealed
        assert bool(sample["modes"]) is sealed


def test_the_tables_follow_from_the_samples(ran: Path) -> None:
    """Rates, ratios, spread, seals and CPU are computed anew here."""
    record = recorded(ran)
    samples, tables = record["samples"], _tables((ran / "shared-file.md").read_text())
    for operation in (WRITE, DURABLE):
        rows = tables[operation]
        assert len(rows) == len(
            {(s["contender"], s["subject"]) for s in samples if s["operation"] == operation}
        )
        for row in rows:
            own = _of(samples, operation, row["writers"], row["contender"])
            assert row["MB/s"] == f"{statistics.median(map(_speed, own)) / 1e6:.0f}"
            floor = _of(samples, operation, row["writers"], C_DIRECT)
            if floor:
                ratios = [_speed(a) / _speed(b) for a, b in zip(own, floor, strict=True)]
                assert row["x C direct"] == f"{statistics.median(ratios):.2f}"
            facts = [s["facts"] for s in own]
            if operation == WRITE:
                spread = [max(f["writer_s"]) / min(f["writer_s"]) for f in facts]
                assert row["slowest/fastest"] == f"{statistics.median(spread):.2f}"
                continue
            if row["contender"].startswith("shared"):
                seal = statistics.median(f["seal_s"] for f in facts)
                assert row["seal ms"] == f"{seal * 1e3:.1f}"
            if row["contender"] not in IOR:
                user = statistics.median(f["user_s"] * 256 for f in facts)
                assert row["user s/GiB"] == f"{user:.3f}"


def test_what_is_printed_is_what_is_written(ran: Path) -> None:
    """Notes, and a line per claim, are on standard output too, and the plot is a PNG."""
    said, record = (ran / "said").read_text(), recorded(ran)
    assert all(line in said for line in (*record["notes"], *record["conclusions"]))
    assert len(record["conclusions"]) == len(scenario.SCENARIO.claims)
    if importlib.util.find_spec("matplotlib"):
        assert (ran / "shared-file.png").read_bytes().startswith(b"\x89PNG")


def test_one_memory_node_is_reported(ran: Path) -> None:
    """Where writers run makes no difference there, and the notes say so; elsewhere they do not."""
    record = recorded(ran)
    reported = any("AFFINITY CANNOT BE MEASURED" in note for note in record["notes"])
    assert reported is (record["options"]["numa_nodes"] == 1)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("writers", [1, 3, 16])
def test_writers_write_every_byte_once(shape: Any, writers: int, *, separate: bool) -> None:
    """Together the whole shared file, or each the whole of its own, and each all of its source."""
    case = Case.within(64 * MiB, shape, kind=PROCESSES, writers=writers)
    files: dict[int, list[tuple[int, int]]] = {}
    for writer in range(writers):
        calls = list(transfers(case, writer, separate=separate))
        assert [call.source for call in calls] == [
            index * case.transfer_bytes for index in range(len(calls))
        ]
        assert sum(call.nbytes for call in calls) == case.writer_bytes
        own = files.setdefault(writer if separate else 0, [])
        own += [(call.offset, call.offset + call.nbytes) for call in calls]
    for extents in files.values():
        extents.sort()
        ends = [end for _, end in extents]
        assert [start for start, _ in extents] == [0, *ends[:-1]]
        assert ends[-1] == (case.writer_bytes if separate else case.total_bytes)


@pytest.mark.parametrize(
    ("shape", "writers", "segments", "block"),
    [("ior", 1, 8, 32 * MiB), ("ior", 16, 8, 2 * MiB), ("custom", 1, 1, 256 * MiB),
     ("custom", 16, 1, 16 * MiB)],
)  # fmt: skip
def test_shapes_are_scaled_to_what_a_trial_may_write(
    shape: str, writers: int, segments: int, block: int
) -> None:
    """Blocks get shorter before there are fewer of them; transfers stay as they are."""
    case = Case.within(256 * MiB, SHAPES[shape], kind=PROCESSES, writers=writers)
    assert (case.segments, case.block_bytes) == (segments, block)
    assert case.transfer_bytes == SHAPES[shape].transfer_bytes
    tiny = Case.within(1, SHAPES[shape], kind=THREADS, writers=2)
    assert (tiny.segments, tiny.block_bytes) == (1, tiny.transfer_bytes)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_writers_blocks_are_its_domain(shape: Any, tmp_path: Path) -> None:
    """What the scenario writes as a rank is what `SharedFile.domain` gives that rank."""
    case = Case.within(48 * MiB, shape, kind=PROCESSES, writers=3)
    with kvio.SharedFile.create(
        tmp_path / "f", case.total_bytes, writers=3, mode="buffered", durability="visible",
        stripe_bytes=case.block_bytes if case.segments > 1 else 0,
    ) as file:  # fmt: skip
        for rank in range(3):
            starts = [start for start, _ in blocks(case, rank, separate=False)]
            assert [extent.offset for extent in file.domain(rank)] == starts
            assert {extent.nbytes for extent in file.domain(rank)} == {case.block_bytes}
        file.abort()


def _sample(
    name: str, seconds: float, *, operation: str = WRITE, index: int = 0, **more: Any
) -> Sample:
    facts = {"writers": 4, "seal_s": None, "synced_s": seconds, **more}
    subject = facts.pop("subject", "4 processes, ior")
    return Sample(
        subject=subject, block_nbytes=MiB, contender=name, checksum=True, operation=operation,
        round=index, wall_s=seconds, latencies_s=[seconds], facts=facts,
    )  # fmt: skip


def _judged(samples: list[Sample], text: str) -> list[tuple[str, float, str]]:
    [claim] = [one for one in scenario.SCENARIO.claims if one.text == text]
    return [
        (one.contender, round(one.found.median, 6), one.verdict) for one in judge([claim], samples)
    ]


ROUNDS = range(12)


def test_a_shared_file_at_its_limit_is_met_and_one_below_is_missed() -> None:
    """By the ratio in the same round, however fast the machine was then."""
    text = "4 writers of a shared file are as fast as with a file each"
    own = [_sample(FILES_DIRECT, 0.95 * 2**index, index=index) for index in ROUNDS]
    at = [_sample(SHARED_DIRECT, 2.0**index, index=index) for index in ROUNDS]
    below = [_sample(SHARED_DIRECT, 2.0**index * 1.001, index=index) for index in ROUNDS]

    assert _judged([*own, *at], text) == [(SHARED_DIRECT, 0.95, MET)]
    assert [verdict for _, _, verdict in _judged([*own, *below], text)] == [MISSED]


def test_four_writers_are_what_the_target_says() -> None:
    """Others are measured, and held against no such limit."""
    text = "4 writers are 1.3 times as fast into preallocated blocks"
    for writers, expected in ((8, []), (4, [(SHARED_DIRECT, 1.3, MET)])):
        pair = [
            _sample(name, seconds, index=index, writers=writers)
            for index in ROUNDS
            for name, seconds in ((SHARED_DIRECT, 1.0), (SHARED_HOLE, 1.3))
        ]
        assert _judged(pair, text) == expected


def test_the_papers_claims_are_judged() -> None:
    """Direct by buffered of many writers, one file by several, preallocated by not."""
    speeds = {SHARED_DIRECT: 1.0, "shared buffered": 2.0, FILES_DIRECT: 0.9}
    speeds |= {"python direct": 1.0, "python direct, not preallocated": 1.5}
    samples = [
        _sample(name, seconds, index=index, writers=8, operation=operation)
        for index in ROUNDS
        for name, seconds in speeds.items()
        for operation in (WRITE, DURABLE)
    ]
    found = {
        one.claim.text.partition(":")[0]: one.verdict
        for one in judge(scenario.SCENARIO.claims, samples)
        if "(paper)" in one.claim.text
    }

    assert found == {
        "8 writers and more of one file": MET,
        "one shared file is written as fast as a file per writer (paper)": MISSED,
        "preallocation makes direct writes of several writers faster (paper)": MET,
    }


@pytest.mark.parametrize("name", [SHARED_DIRECT, "shared buffered"])
@pytest.mark.parametrize("packed_first", [True, False])
def test_placements_are_compared_in_the_same_round(name: str, *, packed_first: bool) -> None:
    """The paper spreads direct writers and packs a few buffered ones; others are not judged."""
    seconds = {scenario.PACKED: 1.0, scenario.SPREAD: 0.8, "core/spread": 0.1}
    placements = list(seconds) if packed_first else [*reversed(seconds)]
    samples = [
        _sample(
            name, seconds[placement] * 2.0**index, index=index, placement=placement,
            subject=f"4 processes, ior, {placement}",
        )
        for index in ROUNDS
        for placement in placements
    ]  # fmt: skip
    samples += [_sample(name, 0.1, index=index, placement="") for index in ROUNDS]
    assert not _of_placements(samples)

    scenario.compare_placements(samples)
    ratios = [s.facts[scenario.BY_PACKED] for s in samples if scenario.BY_PACKED in s.facts]
    assert ratios == pytest.approx([1.25] * len(ROUNDS))
    expected = MET if name == SHARED_DIRECT else MISSED
    assert _of_placements(samples) == [(name, f"4 processes, ior, {scenario.SPREAD}", expected)]


def _of_placements(samples: list[Sample]) -> list[tuple[str, str, str]]:
    claims = [one for one in scenario.SCENARIO.claims if "over sockets" in one.text]
    assert len(claims) == 2
    return [(one.contender, one.place.subject, one.verdict) for one in judge(claims, samples)]


def test_a_seal_is_held_against_what_comes_before_it() -> None:
    """Small is good; threads, whose only sync it is, are not judged."""
    text = "a seal is a small share of a durable write"

    def sealed(seal_s: float, **more: Any) -> list[tuple[str, float, str]]:
        facts = {"operation": DURABLE, "seal_s": seal_s, "synced_s": 1.0, **more}
        return _judged([_sample(SHARED_DIRECT, 1.0, index=i, **facts) for i in ROUNDS], text)

    assert sealed(0.05) == [(SHARED_DIRECT, 0.05, MET)]
    assert sealed(0.051) == [(SHARED_DIRECT, 0.051, MISSED)]
    assert sealed(0.5, subject="4 threads, ior") == []


def test_efficiency_is_against_the_fewest_writers_of_the_same_kind() -> None:
    """Twice the writers at the same rate is one half; threads do not count for processes."""
    samples = [
        _sample(C_DIRECT, 1.0, subject="1 process, ior"),
        _sample(C_DIRECT, 1.0, subject="2 processes, ior"),
        _sample(C_DIRECT, 9.0, subject="2 threads, ior"),
    ]
    summaries = summarise(samples, C_DIRECT)
    found = {s.subject: scenario.efficiency(s, summaries) for s in summaries}
    assert found == {"1 process, ior": 1.0, "2 processes, ior": 0.5, "2 threads, ior": None}


def test_a_case_says_where_its_writers_run() -> None:
    """Placements are curves of their own."""
    names = {
        str(Case("ior", kind, 2, MiB, MiB, 1, placement))
        for kind in KINDS
        for placement in ("", "core/pack")
    }
    assert len(names) == 4
    assert scenario.group_of("2 processes, ior, core/pack") == "processes, ior, core/pack"
    assert scenario.group_of("1 process, ior") == scenario.group_of("16 processes, ior")
