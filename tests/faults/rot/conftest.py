"""Where what is damaged lies."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.media import filesystem_of

_SHM: Final = Path("/dev/shm")


@pytest.fixture
def quick_place(tmp_path: Path) -> Iterator[Path]:
    """Yield a fresh directory, in memory where there is one: a reader is tested, not a disk."""
    if not os.access(_SHM, os.W_OK) or filesystem_of(_SHM) != "tmpfs":
        path = tmp_path / "place"
        path.mkdir(mode=0o700)
    else:
        path = Path(tempfile.mkdtemp(prefix="kvio-rot-", dir=_SHM))
    yield path
    shutil.rmtree(path)
