"""What holds for every test of the POSIX backends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.posix import children, faultlab


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    """Fail a test that leaves a file or directory open, which a later test would lack."""
    before = faultlab.open_descriptors()
    yield
    after = faultlab.open_descriptors()
    left = {fd: path for fd, path in after.items() if fd not in before and path.startswith("/")}
    assert not left, f"left open: {left}"


@pytest.fixture
def public(disk_parent: Path) -> Iterator[Path]:
    """A directory that every user may pass through, as pytest's own are not."""
    children.need_root()
    path = Path(tempfile.mkdtemp(prefix="kvio-test-public-", dir=disk_parent))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
