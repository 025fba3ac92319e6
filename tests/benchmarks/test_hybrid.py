"""Bandwidth by I/O size: what is measured, what is found, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness.measure import COLD, HOT, WRITE
from benchmarks.harness.run import Limits
from benchmarks.scenarios import hybrid
from kvio import KiB

STORES = ("buffered", "unaligned", "hybrid")
STREAMS = ("buffered stream", "direct stream")


def limits(root: Path, **changes: Any) -> Limits:
    """Keep a run short."""
    settings = {"budget_s": 60.0, "max_bytes": 64 * KiB, "max_rounds": 1, **changes}
    return Limits(root=root, results=root / "results", **settings)


def recorded(root: Path) -> Any:
    return json.loads((root / "results" / "hybrid.json").read_text())


def test_every_contender_does_every_operation_at_every_size(real_disk: Path) -> None:
    """Each sample says how much of the bytes was cached before it, and that they came back."""
    names = (*STORES, *STREAMS)
    status = hybrid.run(limits(real_disk), sizes=(4 * KiB, 16 * KiB), contenders=names)

    assert status == 0
    record = recorded(real_disk)
    able = [name for name in names if not any(name in note for note in record["notes"][8:])]
    assert "buffered" in able
    done = {(s["contender"], s["block_nbytes"], s["operation"]) for s in record["samples"]}
    assert {(n, size, op) for n in able for size in (4096, 16384) for op in hybrid.OPERATIONS} <= (
        done
    )
    reads = [s for s in record["samples"] if s["operation"] in (COLD, HOT)]
    assert all(s["intact"] for s in reads)
    cached = [s["cached_before"] for s in reads if s["operation"] == HOT]
    assert all(fraction is None or fraction > 0.9 for fraction in cached)
    assert (real_disk / "results" / "hybrid.md").read_text().count("## ") == (
        len(hybrid.OPERATIONS) + 1  # and the claims
    )


def test_nothing_is_left_where_it_was_measured(real_disk: Path) -> None:
    """Only the results remain."""
    hybrid.run(limits(real_disk), sizes=(4 * KiB,), contenders=STORES)

    assert [path.name for path in real_disk.iterdir()] == ["results"]


def test_a_wrong_byte_fails_the_run(real_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that loses a byte is named, and the status says so."""
    honest = kvio.Store.read_block_into

    def careless(self: kvio.Store, key: str, out: memoryview) -> int:
        got = honest(self, key, out)
        out[7] ^= 1
        return got

    monkeypatch.setattr(kvio.Store, "read_block_into", careless)

    assert hybrid.run(limits(real_disk), sizes=(4 * KiB,), contenders=("buffered",)) == 1
    assert any("BYTES DIFFER: buffered" in note for note in recorded(real_disk)["notes"])


@pytest.mark.parametrize(
    ("sizes", "contenders", "named"),
    [
        ((5000,), None, "5000"),
        ((), None, "none"),
        ((4096,), ("bufferd",), "bufferd"),
        ((1 << 60,), None, "free"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_made(
    tmp_path: Path, sizes: tuple[int, ...], contenders: tuple[str, ...] | None, named: str
) -> None:
    """A size that cannot be, an unknown name, a disk without room."""
    with pytest.raises(kvio.ConfigError, match=named):
        hybrid.run(limits(tmp_path), sizes=sizes, contenders=contenders)
    assert list(tmp_path.iterdir()) == []


def test_the_crossover_is_where_direct_stays_ahead() -> None:
    """One win among losses is noise, not a crossover."""
    assert hybrid.crossover({1: 0.5, 2: 1.5, 4: 0.9, 8: 1.1, 16: 1.2}) == 8
    assert hybrid.crossover({1: 1.1, 2: 0.9}) is None
    assert hybrid.crossover({1: 1.1, 2: 1.2}) == 1
    assert hybrid.crossover({}) is None


def test_trials_leave_empty_files_and_repeat(real_disk: Path) -> None:
    """Files are emptied, not deleted, and a second trial stores under new names."""
    with kvio.open_store("posix-tmpfile", root=real_disk / "s", options={"create": True}) as store:
        one_contender = hybrid.Contender("buffered", real_disk / "s", 8 * KiB, hybrid.Blocks(store))
        for index in range(2):
            operations = [one.operation for one in one_contender.trial(4 * KiB, index)]
            assert operations[0] == WRITE
    files = [path for path in (real_disk / "s").glob("?/?/*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_size for path in files} == {0}
