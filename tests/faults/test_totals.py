"""The line of totals says what was counted, and what was left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.faults import reporting, totals


def test_counts_of_tests_are_added_and_reported_in_one_line() -> None:
    """Zero is reported where it is a verdict; pairs are reported as n of m; reasons are counted."""
    total = totals.summed(
        [
            {"states": 1200, "receipts": 30, "lost": 0, "torn": 0},
            {"states": 34, "mutants": 5, "caught": 4},
        ]
    )

    assert totals.line(total, {"no loop devices": 2, "no UML": 1}) == (
        "1,234 states, 30 receipts: lost 0, torn 0; mutants caught 4/5; "
        "skipped 3: no loop devices (2); no UML (1)"
    )


def test_failures_come_first() -> None:
    """A test that failed has not counted what it found: the line must not look like a good one."""
    reported = totals.line({"receipts": 30, "lost": 0}, {}, failed=2)

    assert reported == "FAILED 2; 30 receipts: lost 0; skipped 0"


def test_what_is_less_than_all_is_reported() -> None:
    """Everything skipped is no campaign."""
    assert "0 kills, not 1,000" in totals.below({})
    assert totals.below(totals.LEAST) == []
    assert totals.below({**totals.LEAST, "cuts": 29}) == ["29 cuts, not 30"]


def test_what_has_no_name_is_not_counted() -> None:
    """A misspelt counter would vanish from the line."""
    with pytest.raises(AssertionError, match="statez"):
        totals.Tally().add(statez=1)


def test_totals_are_written_as_json(tmp_path: Path) -> None:
    """The results file has totals, skips and other facts."""
    path = tmp_path / "deep" / "faults.json"

    totals.write(path, {"cuts": 3}, {}, kernel="6.1")

    assert json.loads(path.read_text()) == {"kernel": "6.1", "totals": {"cuts": 3}, "skipped": {}}


def test_a_misspelt_size_is_no_slice() -> None:
    """All of the campaign must not be a slice because of a letter."""
    run = subprocess.run(
        [sys.executable, "-c", "import tests.faults.sizes"],
        env={**os.environ, "KVIO_FAULTS": "fulll"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode != 0
    assert "'slice' or 'full', not 'fulll'" in run.stderr


def test_a_run_of_pytest_ends_with_the_line(tmp_path: Path) -> None:
    """Counts of tests in several workers come together; the line names the skips."""
    (tmp_path / "test_some.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from tests.faults.conftest import tally

            def test_one(tally):
                tally.add(cuts=3, lost=0)

            def test_two(tally):
                tally.add(cuts=4, kills=2)

            def test_three(tally):
                pytest.skip("no such file system")

            def test_four(tally):
                tally.add(lost=1)
                raise AssertionError("lost")
            """
        )
    )
    results = tmp_path / "faults.json"
    arguments = ("-p", "tests.faults.reporting", "-c", os.devnull, "-n", "2", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, reporting.VARIABLE: str(results)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    reported = json.loads(results.read_text())
    assert (
        "faults: FAILED 1; 7 cuts, 2 kills: lost 1; skipped 1: no such file system (1)"
        in run.stdout
    )
    assert reported["totals"] == {"cuts": 7, "kills": 2, "lost": 1}
    assert reported["failed"] == 1
