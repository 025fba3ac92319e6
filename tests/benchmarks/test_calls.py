"""Single calls beside C loops: what is measured, that bytes are compared, what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.run import Limits
from benchmarks.scenarios import calls
from benchmarks.scenarios.calls import (
    BATCH,
    CHECKED,
    DIRECT,
    DRAIN,
    DURABLE,
    FIO,
    HUGE,
    IMPORT,
    LOOKING,
    LOOP,
    ONE_BY_ONE,
    OURS,
    PARTS,
    PROCESS,
    QUEUE,
    READ,
    SINGLE,
    THREADS,
    UNALIGNED,
    WRITE,
    cases_of,
)
from kvio import MiB

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run_small(root: Path, *parts: str, rounds: int = 1) -> int:
    limits = Limits(root=root, results=root / "results", max_rounds=rounds, max_bytes=MiB)
    return calls.run(limits, parts=parts)


def recorded(root: Path) -> Any:
    return json.loads((root / "results" / "calls.json").read_text())


def took_part(root: Path, operation: str) -> set[str]:
    samples = recorded(root)["samples"]
    return {s["contender"] for s in samples if s["operation"] == operation}


@needs_compiler
def test_single_calls_and_batches_are_measured_beside_the_c_loop(
    real_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every contender in every case; the bytes that each read are the right ones."""
    monkeypatch.setattr(calls, "_SINGLE_SIZES", (4096, MiB))
    assert run_small(real_disk, SINGLE, BATCH) == 0

    assert took_part(real_disk, WRITE) == {OURS, CHECKED, LOOP, LOOKING}
    assert took_part(real_disk, READ) == {OURS, CHECKED, LOOP}
    samples = recorded(real_disk)["samples"]
    cases = cases_of([SINGLE, BATCH])
    assert {(s["subject"], s["block_nbytes"], s["operation"]) for s in samples} == {
        (case.subject, case.nbytes, case.operation) for case in cases
    }
    assert {s["intact"] for s in samples if s["operation"] == READ} == {True}
    assert [path.name for path in real_disk.iterdir()] == ["results"]


@needs_compiler
def test_direct_io_is_measured_from_every_kind_of_memory(
    real_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fio where it is installed, else it is named."""
    monkeypatch.setattr(calls, "_DIRECT_SIZES", (MiB,))
    status = run_small(real_disk, DIRECT)
    record = recorded(real_disk)
    if status != 0 or not record["samples"]:
        pytest.skip("no direct I/O here")
    assert {OURS, CHECKED, UNALIGNED, HUGE, LOOP} <= took_part(real_disk, READ)
    reported = any(note.startswith("left out: fio: not installed") for note in record["notes"])
    assert reported == (shutil.which("fio") is None)
    assert (FIO in took_part(real_disk, WRITE)) == (shutil.which("fio") is not None)


@needs_compiler
def test_durable_batches_drains_and_processes_are_measured(real_disk: Path) -> None:
    """Each with what it is compared with, and the facts that its claims rest on."""
    assert run_small(real_disk, DURABLE, DRAIN, PROCESS) == 0

    assert took_part(real_disk, WRITE) == {OURS, ONE_BY_ONE, LOOP, THREADS}
    assert took_part(real_disk, "start") == {IMPORT, QUEUE}
    facts = {s["contender"]: s["facts"] for s in recorded(real_disk)["samples"]}
    assert facts[IMPORT]["import_s"] > 0
    assert facts[QUEUE]["peak_mib"] > 0
    claimed = {one["claim"] for one in recorded(real_disk)["claims"]}
    assert len(claimed) == 4


@needs_compiler
@pytest.mark.parametrize("part", [SINGLE, BATCH])
def test_a_wrong_byte_fails_the_run(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last block alone, although the store reports success."""
    monkeypatch.setattr(calls, "_SINGLE_SIZES", (4096,))
    one, many = kvio.Store.read_block_into, kvio.Store.read_blocks_into

    def wrong(self: kvio.Store, key: str, out: Any, **options: Any) -> int:
        count = one(self, key, out, **options)
        out[-1] ^= key.endswith("000003")
        return count

    def wrong_batch(self: kvio.Store, items: Any, **options: Any) -> Any:
        results = many(self, items, **options)
        items[-1][1][-1] ^= 1
        return results

    monkeypatch.setattr(kvio.Store, "read_block_into", wrong)
    monkeypatch.setattr(kvio.Store, "read_blocks_into", wrong_batch)

    assert run_small(tmp_path, part) == 1
    assert any(f"BYTES DIFFER: {OURS}" in note for note in recorded(tmp_path)["notes"])
    assert not any(f"BYTES DIFFER: {LOOP}" in note for note in recorded(tmp_path)["notes"])


def test_without_a_compiler_kvio_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says which compiler there is not, once per contender."""
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setattr(calls, "_SINGLE_SIZES", (4096,))
    calls._library.cache_clear()
    try:
        assert run_small(tmp_path, SINGLE) == 0
    finally:
        calls._library.cache_clear()

    assert took_part(tmp_path, WRITE) == {OURS, CHECKED}
    reported = [note for note in recorded(tmp_path)["notes"] if "no C compiler" in note]
    assert [note.split(":")[1].strip() for note in reported] == [LOOP, LOOKING] or len(
        reported
    ) == 2


def test_a_queue_holds_no_more_than_it_may(tmp_path: Path) -> None:
    """A process that submits eight times as much grows by little more than the queue."""
    result = calls._fill_queue(tmp_path)

    assert 0 < result.facts["peak_mib"] < 2 * 256


def test_a_mistake_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """An unknown part, and a disk without room."""
    with pytest.raises(kvio.ConfigError, match="unknown part 'drian'"):
        run_small(tmp_path, "drian")
    with pytest.raises(kvio.ConfigError, match="less --max-bytes"):
        calls.run(Limits(root=tmp_path, max_bytes=1 << 60), parts=PARTS)
    assert list(tmp_path.iterdir()) == []
