"""The holes of torch's own writer, and that kvio's has none of them: the same test for both.

torch 2.15. A stock case that passes one day fails as an unexpected pass: the hole is closed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from .dcp import ALONE, CheckpointException, Kvio, MakesDirectory, Stock, cause_of, dcp, torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(ALONE),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),  # the stock writer's
]


def both(hole: str) -> pytest.MarkDecorator:
    """Run a test with torch's writer, where it must fail for a reason, and with kvio's."""
    stock = pytest.mark.xfail(strict=True, raises=AssertionError, reason=hole)
    cases = [pytest.param(Stock, marks=stock, id="stock"), pytest.param(Kvio, id="kvio")]
    return pytest.mark.parametrize("kind", cases)


def value_of(kind: Any, name: str) -> float:
    """Load a checkpoint's tensor, whose elements must be one value."""
    state = {"a": torch.full((1000,), -1.0)}
    dcp.load(state, storage_reader=kind.reader(name))
    assert state["a"].unique().numel() == 1
    return float(state["a"][0])


@both("DefaultStager copies into the storages that an upload still reads")
def test_a_staged_state_is_not_overwritten_while_it_is_uploaded(kind: Any, tmp_path: Path) -> None:
    """A checkpoint holds what the state was when it was staged, though another was staged since."""
    kind = kind(tmp_path)
    stager, state, go_on = kind.stager(), {"a": torch.zeros(1000)}, threading.Event()
    slow = kind.writer("first")
    slow.before_write = go_on.wait
    first = dcp.async_save(state, storage_writer=slow, async_stager=stager)
    state["a"].fill_(2)
    second = dcp.async_save(state, storage_writer=kind.writer("second"), async_stager=stager)
    go_on.set()
    first.result()
    second.result()
    stager.close()

    assert (value_of(kind, "first"), value_of(kind, "second")) == (0, 2)


class PowerCutError(Exception):
    """The machine crashed at this point."""


def cut() -> None:
    """Simulate a crash."""
    raise PowerCutError


@both("data files are overwritten in place, under the older checkpoint's metadata")
def test_a_killed_save_keeps_the_older_checkpoint(kind: Any, tmp_path: Path) -> None:
    """Data without a manifest changes no existing checkpoint."""
    kind = kind(tmp_path)
    dcp.save({"a": torch.ones(1000)}, storage_writer=kind.writer("run"))
    dying = kind.writer("run")
    dying.before_finish = cut
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.full((1000,), 2.0)}, storage_writer=dying)
    if not isinstance(cause_of(caught), PowerCutError):
        raise caught.value

    assert value_of(kind, "run") == 1


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed.checkpoint as dcp
from pathlib import Path
if sys.argv[2] == "Stock":
    writer = dcp.FileSystemWriter(Path(sys.argv[3]) / "run")
else:
    import kvio
    from kvio.connectors.torch_dcp import KvioWriter
    store = kvio.open_store("posix-tmpfile", root=sys.argv[3], durability="durable")
    writer = KvioWriter(store, "run")
dcp.save({"a": torch.ones(1000)}, storage_writer=writer)
"""


@pytest.mark.slow
@both("only files are synced: after a power cut their names may be gone")
def test_directories_are_synced(kind: Any, real_disk: Path) -> None:
    """Every directory that holds a part of the checkpoint is synced, so its names survive."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    root, log = real_disk / "root", real_disk / "trace"
    root.mkdir()
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-c", SCRIPT, source, kind.__name__, str(root)]
    strace = ["strace", "-f", "-y", "-o", str(log), "-e", "trace=fsync,fdatasync"]
    done = subprocess.run([*strace, *command], capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr:
        pytest.skip(f"strace is not allowed to trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    synced = set(re.findall(r"fsync\(\d+<([^>]*)>\) *= 0", log.read_text()))
    holding = {str(path.parent) for path in root.rglob("*") if path.is_file()}

    assert holding
    assert holding <= synced


@both("each async_save has a thread of its own, and they are not ordered")
def test_two_asynchronous_saves_are_ordered(kind: Any, tmp_path: Path) -> None:
    """The checkpoint has the state saved last, also if the save before was slow."""
    kind = kind(tmp_path)
    stager = kind.stager() if isinstance(kind, Kvio) else None  # torch makes one a save
    go_on = threading.Event()
    slow = kind.writer("run")
    slow.before_write = go_on.wait
    saves = [
        dcp.async_save({"a": torch.ones(1000)}, storage_writer=slow, async_stager=stager),
        dcp.async_save(
            {"a": torch.full((1000,), 2.0)}, storage_writer=kind.writer("run"), async_stager=stager
        ),
    ]
    # It may overtake, if it can: torch's own will, however slowly.
    concurrent.futures.wait(saves[1:], timeout=1 if isinstance(kind, Kvio) else 60)
    go_on.set()
    for saving in saves:
        saving.result()

    assert value_of(kind, "run") == 2


@both(".metadata is a pickle")
def test_metadata_cannot_run_code(kind: Any, tmp_path: Path) -> None:
    """A user who can write metadata cannot make a reader execute code."""
    ran = tmp_path / "ran"
    kind = kind(tmp_path / "root")
    dcp.save({"a": torch.ones(1000)}, storage_writer=kind.writer("run"))
    kind.replace_metadata("run", pickle.dumps(MakesDirectory(ran)))
    with pytest.raises((CheckpointException, AssertionError)):
        value_of(kind, "run")

    assert not ran.exists()


@both("the default load planner unpickles whatever is there")
def test_items_cannot_run_code(kind: Any, tmp_path: Path) -> None:
    """A user who can write data cannot execute code in a reader with weights_only=True."""
    ran = tmp_path / "ran"
    kind = kind(tmp_path / "root")
    dcp.save({"item": MakesDirectory(ran)}, storage_writer=kind.writer("run"))
    with contextlib.suppress(CheckpointException):
        dcp.load({"item": None}, storage_reader=kind.reader("run"))

    assert not ran.exists()


def rank_writer(root: Path, rank: int) -> Any:
    """Make torch's writer as rank *rank* of a job has it."""

    class Writer(dcp.FileSystemWriter):  # type: ignore[misc, unused-ignore]
        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_writer(*args, **{**kwargs, "rank": rank})

    return Writer(root)


def test_without_collectives_a_checkpoint_is_a_mix_of_two_saves(tmp_path: Path) -> None:
    """Why KvioWriter refuses use_collectives=False: no rank knows whether all have finished.

    Torch's own writer publishes each rank's metadata by itself. A rank that is killed in the second
    save leaves its first, beside the second of the others, and nothing can tell.
    """
    for rank, step in ((0, 1), (1, 1), (0, 2)):  # rank 1 is killed before it saves again
        state = {f"rank {rank}": torch.full((9,), float(step))}
        dcp.save(state, storage_writer=rank_writer(tmp_path, rank), use_collectives=False)
    found = []
    for rank in (0, 1):
        reader = dcp.FileSystemReader(tmp_path)
        metadata = reader.read_metadata(rank=rank)
        (name,) = metadata.state_dict_metadata
        (stored,) = metadata.storage_data.values()
        value = torch.load((tmp_path / stored.relative_path), weights_only=True)
        found.append((name, value[0].item()))

    assert found == [("rank 0", 2), ("rank 1", 1)]
