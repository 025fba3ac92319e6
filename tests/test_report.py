"""The report joins runs on one page and sets two runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.experiments import report

PNG = b"\x89PNG\r\n\x1a\n"


def summary(contender: str, speed: float) -> dict[str, Any]:
    return {
        "subject": "<one> & only",
        "block_nbytes": 4096,
        "operation": "write",
        "contender": contender,
        "bytes_per_s": speed,
        "p50_s": 0.001,
        "p99_s": 0.002,
        "ratio": None,
    }


def write_run(folder: Path, *summaries: dict[str, Any], plot: bool = True) -> Path:
    """Leave what an experiment leaves."""
    folder.mkdir()
    content = {
        "experiment": "hybrid",
        "title": "Bandwidth <b>",
        "notes": ["a note with <script>"],
        "machine": {"utc": "2026-01-01T00:00:00Z"},
        "file_system": {"kind": "ext4"},
        "summaries": summaries,
    }
    (folder / "hybrid.json").write_text(json.dumps(content))
    if plot:
        (folder / "hybrid.png").write_bytes(PNG)
    return folder


def test_a_page_stands_alone(tmp_path: Path) -> None:
    """Plots are inside, nothing is fetched, and no text becomes markup."""
    runs = report.load(write_run(tmp_path / "a", summary("x", 1e6)))
    page = report.page(runs)

    assert "data:image/png;base64,iVBORw0KGgo=" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script>" not in page
    assert "Bandwidth &lt;b&gt;" in page
    assert "&lt;one&gt; &amp; only" in page


def test_a_run_without_a_plot_is_still_reported(tmp_path: Path) -> None:
    """The plot is an extra."""
    runs = report.load(write_run(tmp_path / "a", summary("x", 1e6), plot=False))

    assert "no plot" in report.page(runs)


def test_a_run_without_speeds_shows_its_own_table(tmp_path: Path) -> None:
    """What an experiment found out about file systems is on the page, without a plot."""
    path = write_run(tmp_path / "a", plot=False) / "hybrid.json"
    table = [{"file system": "ext4", "durable": "y<e>s"}, {"file system": "tmpfs", "durable": "no"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "table": table}))
    page = report.page(report.load(tmp_path))

    assert "<th>file system</th><th>durable</th>" in page
    assert "<td>ext4</td><td>y&lt;e&gt;s</td>" in page
    assert "<td>tmpfs</td><td>no</td>" in page
    assert "no plot" not in page
    assert "MB/s" not in page


def test_two_runs_are_compared_where_both_measured(tmp_path: Path) -> None:
    """The largest change is first; what only one has is left out."""
    before = report.load(
        write_run(tmp_path / "a", summary("x", 1e6), summary("y", 2e6), summary("gone", 1e6))
    )
    after = report.load(
        write_run(tmp_path / "b", summary("x", 1.1e6), summary("y", 1e6), summary("new", 1e6))
    )
    rows = report.compare(before, after).rows

    assert [(row[4], row[-1]) for row in rows] == [("y", "0.50"), ("x", "1.10")]


def test_runs_without_anything_in_common_are_refused(tmp_path: Path) -> None:
    """There would be nothing to show."""
    before = report.load(write_run(tmp_path / "a", summary("x", 1e6)))
    after = report.load(write_run(tmp_path / "b", summary("y", 1e6)))
    with pytest.raises(kvio.ConfigError, match="in common"):
        report.compare(before, after)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"experiment": 1}', "\xff"])
def test_other_json_is_passed_over(tmp_path: Path, text: str) -> None:
    """A folder may hold more than results; with nothing else it is refused."""
    folder = write_run(tmp_path / "a", summary("x", 1e6))
    (folder / "other.json").write_text(text, encoding="latin-1")
    assert len(report.load(folder)) == 1
    (folder / "hybrid.json").unlink()
    with pytest.raises(kvio.ConfigError, match="no experiment"):
        report.load(folder)
    with pytest.raises(kvio.ConfigError, match="no such folder"):
        report.load(tmp_path / "missing")
