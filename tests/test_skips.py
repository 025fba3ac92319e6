"""The budget of skips fails a run that skips more, or for another reason, than it may."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import skips

TESTS = textwrap.dedent(
    """
    import pytest

    @pytest.mark.parametrize("n", range(3))
    def test_without_a_tool(n):
        pytest.skip(f"needs tool {n}")

    @pytest.mark.root
    def test_as_root():
        pytest.skip("needs root")

    @pytest.mark.skipif(True, reason="another day")
    def test_marked():
        pass

    def test_that_passes():
        pass
    """
)
ENOUGH = {"needs tool": 3, "needs root": 1, "another day": 1}


def run(tmp_path: Path, most: dict[str, int], *, tests: str = TESTS) -> tuple[int, str]:
    """Run the tests in two workers with limits; the status and the output."""
    (tmp_path / "test_some.py").write_text(tests)
    limits = tmp_path / "limits.toml"
    lines = [f'"{reason}" = {count}' for reason, count in most.items()]
    limits.write_text("\n".join(["[most]", *lines]))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.skips", "-c", os.devnull),
            *("-n", "2", "-W", "ignore", str(tmp_path)),
        ],
        env={**os.environ, skips.VARIABLE: str(limits)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ran.returncode, ran.stdout


def test_what_is_within_its_limits_passes(tmp_path: Path) -> None:
    """As many as are allowed, for reasons that begin as listed."""
    status, said = run(tmp_path, ENOUGH)

    assert status == 0, said
    assert "1 passed, 5 skipped" in said


@pytest.mark.parametrize(
    ("most", "line"),
    [
        ({"needs tool": 2}, "3 skipped, 2 allowed: needs tool"),
        ({"another day": 0}, "1 skipped, 0 allowed: another day"),
        ({"needs tool 1": 0}, "1 skipped, 0 allowed: needs tool 1"),
    ],
)
def test_one_skip_too_many_is_an_error(tmp_path: Path, most: dict[str, int], line: str) -> None:
    """It is named, counted in the last line, and fails the run; the longest reason holds."""
    status, said = run(tmp_path, ENOUGH | most)

    assert status == 1
    assert line in said
    assert "1 error" in said.splitlines()[-1]


def test_a_new_reason_is_an_error(tmp_path: Path) -> None:
    """Also where nothing else ran."""
    status, said = run(
        tmp_path, {}, tests="import pytest\npytest.importorskip('nonesuch', reason='no nonesuch')"
    )

    assert status == 1
    assert "1 skipped, 0 allowed: no nonesuch" in said


def test_what_needs_root_is_marked_so(tmp_path: Path) -> None:
    """Else `-m root` leaves out what other users skip, and it is never run."""
    status, said = run(tmp_path, ENOUGH, tests=TESTS.replace("@pytest.mark.root\n", ""))

    assert status == 1
    assert "test_as_root needs root and is not marked `root`" in said
