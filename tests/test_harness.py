"""What the tests themselves rest on: their timeouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_STUCK = """
import threading

def test_stuck():
    threading.Event().wait()
"""


def test_all_threads_are_printed_before_a_test_times_out(tmp_path: Path) -> None:
    """The traceback of every thread comes before the timeout, whatever the timeout is."""
    (tmp_path / "test_stuck.py").write_text(_STUCK)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", "--timeout", "1", str(tmp_path / "test_stuck.py")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "Timeout (0:00:00.900000)!" in done.stderr, done.stdout + done.stderr
    assert "test_stuck.py" in done.stderr
    assert "Failed: Timeout (>1.0s)" in done.stdout
