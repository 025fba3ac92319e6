"""Fixtures for the tests of the command: the command, a store, a file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvio
from tests.cli.running import SCRIPT


@pytest.fixture(autouse=True)
def command() -> Path:
    """Return the installed command; skip if it or its extra is missing."""
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    pytest.importorskip("rich", reason="the extra cli is not installed: no rich")
    if not SCRIPT.exists():
        pytest.skip("kvio is not installed: no kvio command")
    return SCRIPT


@pytest.fixture
def store(disk_path: Path) -> Path:
    path = disk_path / "store"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file of 20 MiB + 13 bytes, a multiple of no block size."""
    path = tmp_path / "source.bin"
    path.write_bytes(random.Random(2).randbytes(20 * kvio.MiB + 13))
    return path


@pytest.fixture
def tunable(real_disk: Path) -> Path:
    """Return a directory on a file system with direct I/O."""
    with kvio.open_store("hybrid", root=real_disk) as opened:
        if not opened.capabilities.direct_io:
            pytest.skip("no direct I/O here: nothing to tune")
    return real_disk
