"""Saves in torch's own process arrive, or fail with an error that says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .dcp import ALONE, torch
from .test_torch_dcp_ranks import environment

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings(ALONE)]

SCRIPT = Path(__file__).with_name("process_saver.py")


def test_saves_in_another_process_arrive_with_every_stager(tmp_path: Path) -> None:
    """AsyncCheckpointerType.PROCESS saves what was staged; its errors come back as kvio's.

    Pinned memory takes part where there is a CUDA device. A store in memory, which the other
    process would have for itself, is refused by name.
    """
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "saved in another process" in done.stdout
