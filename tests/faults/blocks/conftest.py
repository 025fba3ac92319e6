"""What the tests of this folder run: compiled once for all of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import mutants
from tests.faults.blocks import disk


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the disk that keeps a log and fails on request."""
    return disk.build(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def mutant_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the broken protocols."""
    return mutants.build(tmp_path_factory.mktemp("mutants"))
