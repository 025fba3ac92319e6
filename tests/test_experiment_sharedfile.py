"""The shared-file experiment says what it measured: every number follows from recorded samples."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import MiB
from kvio.experiments.measure import Sample, summarise
from kvio.experiments.sharedfile import bars, presenting
from kvio.experiments.sharedfile.order import (
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


def run_command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    script = Path(sys.executable).with_name("kvio")
    if not script.exists():
        pytest.skip("kvio is not installed: no kvio command")
    command = (str(script), "experiment", "shared-file", *map(str, arguments))
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
    """A turn moves all its bytes; no call takes longer than the whole; durable comes after."""
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
    """Notes, among them a line a bar, are on standard output too, and the plot is a PNG."""
    said, notes = (ran / "said").read_text(), recorded(ran)["notes"]
    assert all(note in said for note in notes)
    assert all(any(f"bar: {bar}: " in note for note in notes) for bar in bars.BARS)
    if importlib.util.find_spec("matplotlib"):
        assert (ran / "shared-file.png").read_bytes().startswith(b"\x89PNG")


def test_one_memory_node_is_told(ran: Path) -> None:
    """Where writers run makes no difference there, and the notes say so; elsewhere they do not."""
    record = recorded(ran)
    told = any("AFFINITY CANNOT BE TOLD APART" in note for note in record["notes"])
    assert told is (record["options"]["numa_nodes"] == 1)


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
def test_shapes_are_scaled_to_what_a_turn_may_write(
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
    """What the experiment writes as a rank is what `SharedFile.domain` gives that rank."""
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


def _reached(samples: list[Sample], text: str) -> list[tuple[str, float, bool]]:
    found = [one for one in bars.judge(samples) if one.bar.text == text]
    return [(one.contender, round(one.value, 6), one.met) for one in found]


def test_a_bar_is_met_at_its_limit_and_missed_beyond() -> None:
    """By the median over rounds of the ratio in the same round."""
    text = "a shared file by files of their own"
    own = [_sample(FILES_DIRECT, 0.95 * 2**index, index=index) for index in range(3)]
    at = [_sample(SHARED_DIRECT, 2.0**index, index=index) for index in range(3)]
    below = [_sample(SHARED_DIRECT, 2.0**index * 1.001, index=index) for index in range(3)]

    assert _reached([*own, *at], text) == [(SHARED_DIRECT, 0.95, True)]
    assert [met for _, _, met in _reached([*own, *below], text)] == [False]
    lines = bars.verdicts(bars.judge([*own, *below]))
    assert "MISSED at 1 of 1 places" in lines[0]
    assert all("NOT MEASURED" in line for line in lines[1:])


def test_four_writers_are_what_the_bar_says() -> None:
    """Others are measured, and held against no limit."""
    pair = [_sample(SHARED_DIRECT, 1.0, writers=8), _sample(SHARED_HOLE, 1.0, writers=8)]
    assert bars.judge(pair) == []
    pair = [_sample(SHARED_DIRECT, 1.0), _sample(SHARED_HOLE, 1.3)]
    assert _reached(pair, "preallocated by not preallocated") == [(SHARED_DIRECT, 1.3, True)]


def test_a_seal_is_held_against_what_comes_before_it() -> None:
    """Small is good; threads, whose only sync it is, are not judged."""
    text = "seal by what comes before it"
    good = _sample(SHARED_DIRECT, 1.0, operation=DURABLE, seal_s=0.05, synced_s=1.0)
    bad = _sample(SHARED_DIRECT, 1.0, operation=DURABLE, seal_s=0.051, synced_s=1.0)
    threads = _sample(
        SHARED_DIRECT, 1.0, operation=DURABLE, seal_s=0.5, synced_s=1.0, subject="4 threads, ior"
    )
    assert _reached([good], text) == [(SHARED_DIRECT, 0.05, True)]
    assert _reached([bad], text) == [(SHARED_DIRECT, 0.051, False)]
    assert _reached([threads], text) == []


def test_efficiency_is_against_the_fewest_writers_of_the_same_kind() -> None:
    """Twice the writers at the same rate is one half; threads do not count for processes."""
    samples = [
        _sample(C_DIRECT, 1.0, subject="1 process, ior"),
        _sample(C_DIRECT, 1.0, subject="2 processes, ior"),
        _sample(C_DIRECT, 9.0, subject="2 threads, ior"),
    ]
    summaries = summarise(samples, C_DIRECT)
    found = {s.subject: presenting.efficiency(s, summaries) for s in summaries}
    assert found == {"1 process, ior": 1.0, "2 processes, ior": 0.5, "2 threads, ior": None}


def test_a_case_says_where_its_writers_run() -> None:
    """Placements are curves of their own."""
    names = {
        str(Case("ior", kind, 2, MiB, MiB, 1, placement))
        for kind in KINDS
        for placement in ("", "core/pack")
    }
    assert len(names) == 4
    assert presenting.group_of("2 processes, ior, core/pack") == "processes, ior, core/pack"
    assert presenting.group_of("1 process, ior") == presenting.group_of("16 processes, ior")
