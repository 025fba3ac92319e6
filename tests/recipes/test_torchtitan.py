"""docs/recipes/torchtitan.md is true: torchtitan's own manager saves to a store and loads."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from .running import require, run, write_program

require("torch", "torchtitan")

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = "docs/recipes/torchtitan.md"
RANK = Path(__file__).with_name("torchtitan_rank.py")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_manager_saves_with_two_ranks_and_loads_with_one(mode: str, real_disk: Path) -> None:
    """Model, optimizer and schedule are as they were; no file is made beside the store."""
    (real_disk / "ckpt").mkdir()
    (real_disk / RANK.name).write_text(RANK.read_text(encoding="utf-8"), encoding="utf-8")
    instead = {"/mnt/ckpt": f"{real_disk}/ckpt"}
    write_program(PAGE, real_disk, name="kvio_train.py", instead=instead)

    saved = run(real_disk / RANK.name, "save", mode, ranks=2)
    loaded = run(real_disk / RANK.name, "load", mode, ranks=1)

    assert len(saved) == 1
    assert saved == loaded


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_still_has_no_place_for_a_writer() -> None:
    """When it has one, the page's subclass is no longer needed."""
    from torchtitan.components.checkpoint import CheckpointManager

    assert "storage_writer" not in inspect.signature(CheckpointManager.__init__).parameters
    assert "storage_writer" not in inspect.signature(CheckpointManager.dcp_save).parameters
