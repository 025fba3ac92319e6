"""Where the programs of these tests store their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root directory on a disk."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    return path
