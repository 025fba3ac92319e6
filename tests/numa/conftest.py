"""One guest for all tests here."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.numa.machine import Guest, boot


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Guest:
    """Run a guest, and give what it said; skip where there is no kernel for it."""
    kernel = os.environ.get("KVIO_NUMA_KERNEL")
    if kernel is None:
        pytest.skip(
            "needs a kernel for a guest with two memory nodes: nox -s numa downloads Debian's, "
            "KVIO_NUMA_KERNEL names another"
        )
    if platform.machine() != "x86_64":
        pytest.skip(f"needs an x86_64 machine, whose Python the guest runs: {platform.machine()}")
    return boot(Path(kernel), tmp_path_factory.mktemp("guest"))
