"""The page that says how to write a backend has one that keeps the contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import snippets

PAGE = "docs/backends.md"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the page's module, its test, and the metadata that pip would write."""
    text = (snippets.TREE / PAGE).read_text(encoding="utf-8")
    [code] = [snippet.code for snippet in snippets.snippets(PAGE)]
    tests = re.search(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    entry = re.search(r"^```toml\n.*?\n(sqlite = .*?)\n```", text, re.DOTALL | re.MULTILINE)
    assert tests is not None
    assert entry is not None
    metadata = tmp_path / "kvio_sqlite-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvio-sqlite\nVersion: 1.0\n")
    target = entry[1].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[kvio.backends]\n{target}\n")
    (tmp_path / "kvio_sqlite.py").write_text(code)
    (tmp_path / "test_sqlite.py").write_text(tests[1])
    return tmp_path


@pytest.mark.slow
def test_the_backend_of_the_page_keeps_the_contract(installed: Path) -> None:
    """All tests of `kvio.testing` that need no access to its storage pass."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite.py")
    done = subprocess.run(
        command,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )

    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed is not None
    assert int(passed[1]) > 70


@pytest.mark.slow
def test_a_backend_that_loses_a_promise_fails(installed: Path) -> None:
    """One that ignores ``if_exists`` does not pass."""
    module = installed / "kvio_sqlite.py"
    honest = 'if row and if_exists == "error":'
    assert honest in module.read_text()
    module.write_text(module.read_text().replace(honest, "if False:"))
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-k", "exist or error", "test_sqlite.py")
    done = subprocess.run(
        (*command, "-p", "no:cacheprovider"),
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1, done.stdout[-3000:]


def test_the_example_is_short() -> None:
    """Under 100 lines, so that it can be read in one go."""
    [code] = [snippet.code for snippet in snippets.snippets(PAGE)]

    assert len(code.splitlines()) < 100
