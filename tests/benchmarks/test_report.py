"""The report joins runs on one page and sets two runs side by side."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness import report

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
    """Leave what a run leaves."""
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
    """What a scenario found out about file systems is on the page, without a plot."""
    path = write_run(tmp_path / "a", plot=False) / "hybrid.json"
    table = [{"file system": "ext4", "durable": "y<e>s"}, {"file system": "tmpfs", "durable": "no"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "table": table}))
    page = report.page(report.load(tmp_path))

    assert "<th>file system</th><th>durable</th>" in page
    assert "<td>ext4</td><td>y&lt;e&gt;s</td>" in page
    assert "<td>tmpfs</td><td>no</td>" in page
    assert "no plot" not in page
    assert "MB/s" not in page


def samples(contender: str, *speeds: float) -> list[dict[str, Any]]:
    return [
        {
            "modes": {},
            "facts": {},
            "reasons": [],
            "checksum": True,
            "subject": "one",
            "block_nbytes": 4096,
            "operation": "write",
            "contender": contender,
            "round": number,
            "wall_s": 4096 / speed,
            "latencies_s": [4096 / speed],
            "cached_before": None,
            "intact": None,
        }
        for number, speed in enumerate(speeds)
    ]


def change(folder: Path, **content: Any) -> Path:
    path = folder / "hybrid.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    return folder


def test_two_runs_are_compared_where_both_measured(tmp_path: Path) -> None:
    """The largest slowdown is first, whatever became faster; what only one has is left out."""
    before = report.load(
        write_run(
            tmp_path / "a",
            *(summary("x", 1e6), summary("y", 2e6), summary("z", 1e6), summary("gone", 1e6)),
        )
    )
    after = report.load(
        write_run(
            tmp_path / "b",
            *(summary("x", 9e6), summary("y", 1e6), summary("z", 1e6 / 23), summary("new", 1e6)),
        )
    )
    rows = report.compare(before, after).rows

    assert [(row[4], row[-1]) for row in rows] == [("z", "0.04"), ("y", "0.50"), ("x", "9.00")]
    assert {row[-2] for row in rows} == {"too few rounds"}


def test_a_change_is_called_one_where_rounds_show_it(tmp_path: Path) -> None:
    """By their ranks: not a median that moved among rounds that vary as much."""
    steady = [1e6 + n for n in range(9)]
    wild = [1e6 * (1 + n % 2) for n in range(9)]
    old = samples("slower", *steady) + samples("faster", *steady) + samples("same", *wild)
    new = samples("slower", *(s / 1.1 for s in steady))
    new += samples("faster", *(s * 1.1 for s in steady)) + samples("same", *wild[1:], wild[0])
    folders = [
        change(write_run(tmp_path / name), samples=own) for name, own in (("a", old), ("b", new))
    ]
    rows = report.compare(*map(report.load, folders)).rows

    assert {row[4]: row[-2] for row in rows} == {
        "slower": "slower",
        "same": "no difference shown",
        "faster": "faster",
    }


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (5, 4), (6, 6)])
def test_the_rank_test_counts_every_order(m: int, n: int) -> None:
    """Its probabilities are those found by going through all orders."""
    wins = [
        sum(i > j for i in chosen for j in set(range(m + n)) - set(chosen))
        for chosen in itertools.combinations(range(m + n), m)
    ]
    for found in set(wins):
        left = next(
            chosen
            for chosen in itertools.combinations(range(m + n), m)
            if sum(i > j for i in chosen for j in set(range(m + n)) - set(chosen)) == found
        )
        right = sorted(set(range(m + n)) - set(left))
        extreme = min(found, m * n - found)
        expected = min(1.0, 2 * sum(w <= extreme for w in wins) / len(wins))
        assert report.rank_test(left, right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"machine": {"utc": "", "processor": "other"}}, "processor is None before"),
        ({"machine": {"utc": "", "processors_usable": 3}}, "number of processors"),
        ({"file_system": {"kind": "xfs"}}, "file system is 'ext4' before and 'xfs' after"),
        ({"options": {"max_bytes": 7}}, "option max_bytes is 9 before and 7 after"),
    ],
)
def test_unlike_runs_are_refused(tmp_path: Path, content: dict[str, Any], named: str) -> None:
    """With what is unlike, and the option that compares them all the same."""
    before = report.load(
        change(write_run(tmp_path / "a", summary("x", 1e6)), options={"max_bytes": 9, "root": "/a"})
    )
    same = {"options": {"max_bytes": 9, "root": "/b"}}
    after = report.load(change(write_run(tmp_path / "b", summary("x", 1e6)), **{**same, **content}))
    with pytest.raises(kvio.ConfigError, match=named) as refused:
        report.compare(before, after)

    assert "--allow-different" in str(refused.value)
    assert len(report.compare(before, after, allow_different=True).rows) == 1


def test_other_versions_are_said_and_compared(tmp_path: Path) -> None:
    """They are what a comparison is about."""
    runs = [
        report.load(
            change(
                write_run(tmp_path / name, summary("x", 1e6)), machine={"utc": "", "kvio": version}
            )
        )
        for name, version in (("a", "0.1"), ("b", "0.2"))
    ]

    assert len(report.compare(*runs).rows) == 1
    assert report.versions(*runs) == ["kvio: 0.1 before, 0.2 after"]


def test_a_run_that_was_killed_is_reported_from_its_samples(tmp_path: Path) -> None:
    """What it had written down, but for a line that was cut."""
    head = {
        "experiment": "hybrid",
        "title": "T",
        "reference": "x",
        "machine": {"utc": ""},
        "file_system": {"kind": "ext4"},
        "options": {},
    }
    lines = [json.dumps(one) for one in (head, *samples("x", 1e6, 2e6), *samples("y", 3e6))]
    path = tmp_path / "hybrid.samples.jsonl"
    path.write_text("\n".join(lines)[:-7])
    [run] = report.load(tmp_path)

    assert [len(speeds) for speeds in run.speeds().values()] == [2]
    assert "UNFINISHED: the run was killed after 2 samples" in report.page([run])
    path.write_text("")
    with pytest.raises(kvio.ConfigError, match="no results"):
        report.load(tmp_path)


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
    with pytest.raises(kvio.ConfigError, match="no results"):
        report.load(folder)
    with pytest.raises(kvio.ConfigError, match="no such folder"):
        report.load(tmp_path / "missing")
