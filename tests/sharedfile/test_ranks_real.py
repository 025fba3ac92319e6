"""`SharedFile.from_comm` with the communicators of mpi4py and torch.distributed, in processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from . import launching, raw
from .ranked import ERRORS, SIZE, payload

RANKS = 3
LONG_S = 120
SCRIPT = Path(__file__).with_name("ranked.py")
pytestmark = pytest.mark.slow


def need_gloo() -> None:
    """Skip where torch, or its gloo, is not installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch (pip install torch)")
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs a torch with gloo")


def commands(kind: str, script: list[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the processes to start, as commands with their environments."""
    if kind == "mpi":
        yield [*launching.mpirun(RANKS), *script], {}
        return
    for rank in range(RANKS):
        yield script, {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}


def in_ranks(kind: str, root: Path, *arguments: str) -> tuple[list[Any], list[int]]:
    """Run the turns of an action; return what each rank said of them, and the exit statuses."""
    (root / "files").mkdir()
    script = [sys.executable, str(SCRIPT), kind, str(root), *arguments]
    with ExitStack() as stack:
        running = []
        for command, env in commands(kind, script):
            process = stack.enter_context(
                subprocess.Popen(
                    command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            running.append(process)
        errors = [process.communicate(timeout=LONG_S)[1] for process in running]
    said = [root / f"rank-{rank}.json" for rank in range(RANKS)]
    statuses = [process.returncode for process in running]
    assert sum(path.exists() for path in said) >= RANKS - 1, "\n".join(errors)[-4000:]
    return [json.loads(path.read_text()) if path.exists() else None for path in said], statuses


@pytest.fixture(params=["mpi", pytest.param("gloo", marks=pytest.mark.torch)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of communicator."""
    if request.param == "gloo":
        need_gloo()
    return str(request.param)


def test_every_rank_writes_its_part(kind: str, disk_path: Path) -> None:
    """The file is whole under its name when rank 0 has sealed it."""
    said, _ = in_ranks(kind, disk_path, "write")

    assert said == [[str(SIZE)], ["written"], ["written"]]
    assert raw.sealed(disk_path / "files" / "f").payload == payload(0, SIZE)


def test_whatever_a_rank_raises_ends_all(kind: str, disk_path: Path) -> None:
    """Every kind of error on every rank: all come back, name the rank, and leave nothing."""
    said, _ = in_ranks(kind, disk_path, "raise")
    turns = [(error, failing) for error in ERRORS for failing in range(RANKS)]

    for rank, mine in enumerate(said):
        assert mine[1::2] == [[]] * len(turns)
        for (error, failing), ended in zip(turns, mine[::2], strict=True):
            name, _, text = ended.partition(": ")
            if rank == failing:
                assert name == error
            else:
                assert name == "RankFailedError"
                assert f"rank {failing} failed" in text
                assert error in text


def test_a_rank_that_is_interrupted_at_any_moment_ends_all(kind: str, disk_path: Path) -> None:
    """Its KeyboardInterrupt is its own; the others fail with it, or had the file before it came."""
    said, _ = in_ranks(kind, disk_path, "interrupt", "1", "40", "100_000")
    ends: list[str] = []

    for turn in zip(*(mine[::2] for mine in said), strict=True):
        failing = turn[0][0]
        others = {ended for rank, (_, ended) in enumerate(turn) if rank != failing}
        assert turn[failing][1] == "KeyboardInterrupt"
        assert others in ({"RankFailedError"}, {"opened"})
        ends.append(*others)
    assert "RankFailedError" in ends
    assert all(left == [] for mine in said for left in mine[1::2])


@pytest.mark.torch
def test_a_rank_that_is_killed_ends_all(disk_path: Path) -> None:
    """Gloo reports the loss; mpirun would end the job. Rank 0 removes what it had made."""
    need_gloo()
    said, statuses = in_ranks("gloo", disk_path, "die")

    assert said[1] is None
    assert statuses[1] == -9
    assert "opened" not in (said[0][0], said[2][0])
    assert os.listdir(disk_path / "files") == []


@pytest.mark.torch
def test_a_group_without_a_backend_for_the_cpu_is_refused(disk_path: Path) -> None:
    """As one of NCCL alone is: every rank says which group to pass."""
    need_gloo()
    said, _ = in_ranks("cuda:gloo", disk_path, "be refused")

    for (reason,) in said:
        assert "no backend for the CPU (cuda:gloo)" in reason
        assert "torch.distributed.new_group(backend='gloo')" in reason
    assert os.listdir(disk_path / "files") == []
