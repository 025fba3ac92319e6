"""A build that cannot succeed says first, in one line, what to install."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

TREE = Path(__file__).parent.parent


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvio_setup", TREE / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_missing_where_the_core_was_built(setup: ModuleType) -> None:
    """This machine has built it."""
    assert setup.missing() is None


@pytest.mark.parametrize("call", ["get_path", "get_config_h_filename"])
def test_a_header_of_python_that_is_missing_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Python.h and pyconfig.h come with python3-dev, which no other package brings."""
    monkeypatch.setattr(sysconfig, call, lambda *_: "/nonexistent")

    assert "lacks /nonexistent" in setup.missing()
    assert "apt install gcc python3-dev" in setup.missing()


def test_a_build_without_a_compiler_ends_at_once() -> None:
    """The message is the last line, and names what CC names."""
    ended = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=TREE,
        env={**os.environ, "CC": "/nonexistent/cc -O2"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: kvio has a C core")
    assert "'/nonexistent/cc'" in line
    assert "apt install gcc python3-dev" in line
