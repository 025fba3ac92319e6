"""Several processes save and load one checkpoint, also if one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .dcp import ALONE, durable_store, load, save, torch

from kvio.connectors.torch_dcp import remove_unfinished, versions  # isort: skip

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings(ALONE)]

RANKS = Path(__file__).with_name("ranks.py")
SOURCE = Path(__file__).parents[2] / "src"


def environment() -> dict[str, str]:
    """Return an environment in which children find kvio and use one thread."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_ranks(action: str, root: Path, *, ranks: int = 2) -> None:
    """Run the ranks of one action to their end."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", str(RANKS), action, str(root)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.split("\n"))[-ranks:] == [f"rank {n} done" for n in range(ranks)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a checkpoint saved by two ranks."""
    root = tmp_path_factory.mktemp("ranks")
    run_ranks("save", root)
    return root


WHOLE = torch.arange(84, dtype=torch.float32).view(12, 7)


def test_two_ranks_load_what_two_saved_in_other_shards(saved: Path) -> None:
    """A tensor saved in rows is loaded in columns, by as many ranks."""
    run_ranks("load", saved)


def test_one_process_loads_what_two_ranks_saved(saved: Path) -> None:
    """A sharded tensor is loaded as one; there are blocks of both ranks."""
    with durable_store(saved) as store:
        state = {
            "sharded": torch.zeros(12, 7),
            "everywhere": torch.zeros(7),
            "of rank 0": torch.ones(3),
            "of rank 1": torch.zeros(3),
            "step": 0,
        }
        loaded = load(store, state)
        ranks = {key.split("/")[2] for key in store.list_keys("run/") if "rank-" in key}
        left = remove_unfinished(store, "run", dry_run=True)

    assert torch.equal(loaded["sharded"], WHOLE)
    assert torch.equal(loaded["everywhere"], WHOLE[0])
    assert (loaded["of rank 0"].sum(), loaded["of rank 1"].sum(), loaded["step"]) == (0, 3, 7)
    assert ranks == {"rank-00000", "rank-00001"}
    assert left == []


def test_one_rank_that_fails_fails_the_save_of_all(saved: Path) -> None:
    """Every rank raises an error, and the older checkpoint is kept."""
    run_ranks("fail", saved)


KILLED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import kvio, torch, torch.distributed.checkpoint as dcp
from kvio.connectors.torch_dcp import KvioWriter

class Killed:
    def __init__(self, store, at):
        self.store, self.at = store, at
    def __getattr__(self, name):
        if name.startswith("submit_"):
            raise AttributeError(name)
        return getattr(self.store, name)
    def write_block(self, key, data, *, if_exists):
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.store.write_block(key, data, if_exists=if_exists)
    def delete_block(self, key):
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.store.delete_block(key)

store = kvio.open_store("posix-tmpfile", root=sys.argv[1], durability="durable")
state = {"a": torch.full((100,), 2.0), "b": torch.full((100,), 2.0)}
writer = KvioWriter(Killed(store, int(sys.argv[2])), "run", block_bytes=1)
dcp.save(state, storage_writer=writer)
"""
#: Which write or removal the saver is killed before, and which save is the checkpoint then.
STEPS = {
    "the first block": (1, 1),
    "the second block": (2, 1),
    "the save's own manifest": (3, 1),
    "the manifest": (4, 1),
    "the first removal": (5, 2),
    "the last removal": (7, 2),
}


@pytest.mark.parametrize("before", STEPS)
def test_a_killed_saver_leaves_a_whole_checkpoint(before: str, real_disk: Path) -> None:
    """Killed between any two steps, a saver leaves the older checkpoint or the newer, whole."""
    at, expected = STEPS[before]
    with durable_store(real_disk) as store:
        save(store, {"a": torch.ones(100), "b": torch.ones(100)}, level="durable", block_bytes=1)
    command = [sys.executable, "-c", KILLED, str(real_disk), str(at)]
    done = subprocess.run(command, env=environment(), capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with durable_store(real_disk) as store:
        loaded = load(store, {"a": torch.zeros(100), "b": torch.zeros(100)})
        save(store, {"a": torch.full((100,), 3.0)}, level="durable")
        unfinished = remove_unfinished(store, "run")
        (version,) = versions(store, "run")
        left = {key.split("/")[1] for key in store.list_keys("run/")}

    assert loaded["a"].unique().tolist() == loaded["b"].unique().tolist() == [expected]
    assert expected == 1 or unfinished == []  # a removal is made up for by the next save
    assert left == {"manifest", version}
