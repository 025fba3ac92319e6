"""The machines of the tests, each built once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.placement.trees import SHAPES, build


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the root of each machine; a test that changes one makes it again."""
    base = tmp_path_factory.mktemp("machines")
    return {
        name: build(base / f"{index}", shape) for index, (name, shape) in enumerate(SHAPES.items())
    }
