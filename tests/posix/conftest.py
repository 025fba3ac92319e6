"""What holds for every test of the POSIX backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.posix import faultlab


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    """Fail a test that leaves a file or directory open, which a later test would lack."""
    before = faultlab.open_descriptors()
    yield
    after = faultlab.open_descriptors()
    left = {fd: path for fd, path in after.items() if fd not in before and path.startswith("/")}
    assert not left, f"left open: {left}"
