"""What the tests of the command share: the command itself, a store, a file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvio
from tests.cli.running import SCRIPT


@pytest.fixture(autouse=True)
def command() -> Path:
    """Give the installed command; skip where it or its extra is missing."""
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
    """Give a file of 20 MiB that no block size divides."""
    path = tmp_path / "source.bin"
    path.write_bytes(random.Random(2).randbytes(20 * kvio.MiB + 13))
    return path


@pytest.fixture
def tunable(real_disk: Path) -> Path:
    """Give a directory on a medium with direct I/O."""
    with kvio.open_store("hybrid", root=real_disk) as opened:
        if not opened.capabilities.direct_io:
            pytest.skip("no direct I/O here: nothing to tune")
    return real_disk
