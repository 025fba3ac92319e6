"""Scenario mlperf_kv: its arguments, its claims, and a short run of the real program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.judging import judge
from benchmarks.harness.measure import Sample, summarise
from benchmarks.harness.run import Limits
from benchmarks.scenarios.mlperf_kv import scenario as this
from benchmarks.scenarios.mlperf_kv import trace
from kvio import ConfigError, GiB, UnsupportedError
from tests.benchmarks.running import run
from tests.connectors.mlperf_kv import real


def _load() -> this.Load:
    return this.Load(users=4, tokens=(512, 2048), duration_s=10, storage_bytes=GiB)


def _summary(gib: float, read_ms: float, write_ms: float) -> dict[str, Any]:
    """Return what the program reports of a trial, as far as it is looked at."""
    return {
        "elapsed_time": 10.0,
        "avg_throughput_tokens_per_sec": 100.0 * gib,
        "storage_throughput_tokens_per_sec": 50.0,
        "total_requests": 10,
        "cache_stats": {
            "storage_read_p95_ms": read_ms,
            "storage_write_p95_ms": write_ms,
            "tier_storage_kv_bytes_read_gb": 0.8 * gib,
            "tier_storage_kv_bytes_written_gb": 0.2 * gib,
        },
    }


def _samples(rounds: int = 8) -> list[Sample]:
    samples: list[Sample] = []
    for index in range(rounds):
        wobble = 1 + index / 100
        for name, gib, read_ms, write_ms in (
            ("stock", 5, 100, 200),
            ("posix-tmpfile", 6, 90, 190),
            ("posix-direct", 10, 50, 100),
            ("hybrid", 7, 110, 100),
        ):
            report = _summary(gib * wobble, read_ms, write_ms)
            samples += this._samples(_load(), name, index, report, 3.0)
    return samples


def test_speeds_are_those_of_the_storage_tier() -> None:
    """Bytes read and written by the time that elapsed."""
    tier, read, write = this._samples(_load(), "hybrid", 0, _summary(20, 30, 40), 5.0)

    assert tier.bytes_per_s == pytest.approx(2 * GiB)
    assert tier.facts["cpu_s_per_gib"] == 0.25
    assert (read.wall_s, write.wall_s) == (0.03, 0.04)


def test_claims_are_decided_by_rounds() -> None:
    """More bytes and less time are met, 1.4 times is not 1.5, and a slower read is missed."""
    judged = judge(this.SCENARIO.claims, _samples())
    verdicts = {(one.claim.text, one.contender): one.verdict for one in judged}

    faster = "the storage tier moves more bytes a second than stock's"
    assert {verdicts[faster, name] for name in this.BACKENDS} == {"met"}
    assert verdicts["hybrid moves 1.5 times the bytes a second of stock's", "hybrid"] == "MISSED"
    assert verdicts["read p95 is less than stock's", "hybrid"] == "MISSED"
    assert verdicts["read p95 is less than stock's", "posix-direct"] == "met"
    assert verdicts["write p95 is less than stock's", "posix-tmpfile"] == "met"


def test_a_table_for_the_tier_and_one_for_each_latency() -> None:
    """With the ratio to stock's, which is 1 for stock itself."""
    samples = _samples()
    tables = this.tables(summarise(samples, "stock", this.CONTENDERS), samples)

    assert [len(table.rows) for table in tables] == [4, 4, 4]
    assert tables[0].rows[0][3].startswith("1.00")
    assert tables[0].rows[2][3].startswith("2.00")
    assert tables[1].rows[2][5].startswith("0.50")


def test_a_report_without_a_storage_tier_is_a_failed_trial() -> None:
    """As of a program that stopped before it wrote anything."""
    with pytest.raises(this.TrialFailedError, match="storage tier"):
        list(this._samples(_load(), "stock", 0, {}, 1.0))


def test_the_trace_notices_a_wrong_byte() -> None:
    """And a wrong shape; it compares what is read with what was written."""
    import numpy as np

    class Tier:
        def __init__(self) -> None:
            self.data: Any = None

        def write(self, _: str, data: Any) -> None:
            self.data = data.copy()

        def read(self, _: str) -> tuple[Any, None]:
            return self.data, None

    tier = Tier()
    compared = trace.Compared(tier)
    compared.write("key", np.arange(6))
    compared.read("key")
    assert compared.wrong == 0
    tier.data = tier.data.reshape(2, 3)
    compared.read("key")
    tier.data = tier.data.reshape(6)
    tier.data[5] = 0
    compared.read("key")
    assert (compared.wrong, compared.reads) == (2, 3)


def test_mistakes_are_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program, a folder without it, unknown contenders, and numbers that cannot be."""
    limits = Limits(root=tmp_path, max_bytes=1)
    monkeypatch.delenv("KVIO_MLPERF_KV", raising=False)
    with pytest.raises(UnsupportedError, match="KVIO_MLPERF_KV"):
        this.run(limits)
    with pytest.raises(ConfigError, match=r"kv-cache\.py"):
        this.run(limits, program=tmp_path)
    (tmp_path / "kv-cache.py").touch()
    for wrong in (
        {"contenders": ["nvme"]},
        {"users": 0},
        {"duration_s": 0},
        {"tokens": (0, 1)},
        {"tokens": (2, 1)},
    ):
        with pytest.raises(ConfigError):
            this.run(limits, program=tmp_path, **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["kv-cache.py"]


@pytest.mark.slow
def test_a_short_run_of_the_real_program(disk_path: Path, tmp_path: Path) -> None:
    """A round on stock and one backend: equal bytes, and a record with what was reported."""
    done = run(
        *("mlperf_kv", "--program", real.folder(), "--root", disk_path, "--rounds", 1),
        *("--duration", 3, "--tokens", "64,256", "--max-bytes", "128MiB", "--users", 2),
        *("--contenders", "hybrid", "--results", tmp_path / "results"),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results" / "mlperf_kv.json").read_text())
    found = {(one["contender"], one["operation"]) for one in record["samples"]}
    assert found == {
        (name, operation)
        for name in ("stock", "hybrid")
        for operation in (this.TIER, this.READ, this.WRITE, this.TRACE)
    }
    traces = [one for one in record["samples"] if one["operation"] == this.TRACE]
    assert [one["intact"] for one in traces] == [True, True]
    assert len({one["facts"]["digest"] for one in traces}) == 1
    assert list(disk_path.iterdir()) == []
