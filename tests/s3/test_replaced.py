"""Objects that another writer replaces between two requests of one call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3.libraries import LIBRARIES, require
from tests.s3.replacing import CALLS, CHANGES

PASSING = {"whole", "TransientStorageError", "BlockSizeError"}


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_read_of_a_replaced_block_returns_one_version(library: str, layout: str) -> None:
    """Replaced once, it is the old or the new block; replaced always, one of them or an error."""
    require(library)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.s3.replacing", library, layout],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    reported = json.loads(ended.stdout)

    for size in reported["once"].values():
        assert not size["wrong"]
        assert size["replaced"] >= len(CALLS) * len(CHANGES)
    assert set(reported["each time"]) <= PASSING
    assert reported["each time"]["TransientStorageError"]
