"""What each rank of test_torch_dcp_ranks runs: ``ranks.py ACTION ROOT``."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import kvio
from kvio.connectors.torch_dcp import KvioReader, KvioStager, KvioWriter

#: Typed as torch means it to be used, not as its modules export.
dcp: Any = torch.distributed.checkpoint
WHOLE = torch.arange(84, dtype=torch.float32).view(12, 7)


def state_of(placement: Placement, whole: torch.Tensor, step: int) -> dict[str, Any]:
    """Make this rank's part of a state."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "sharded": distribute_tensor(whole, mesh, [placement]),
        "everywhere": whole[0].clone(),
        "step": step,
        f"of rank {dist.get_rank()}": torch.full((3,), float(dist.get_rank())),
    }


def save(store: kvio.Store) -> None:
    """Save once, then five times while going on."""
    writer = KvioWriter(store, "run", block_bytes=100)
    dcp.save(state_of(Shard(0), WHOLE, 1), storage_writer=writer)
    stager = KvioStager()
    state = state_of(Shard(0), WHOLE * 0, 2)
    local = state["sharded"].to_local()
    saves = []
    for step in range(2, 7):
        local.fill_(step)
        state["step"] = step
        saves.append(dcp.async_save(state, storage_writer=writer, async_stager=stager))
    for saving in saves:
        saving.result()
    check(store, Replicate(), WHOLE * 0 + 6, 6)
    dcp.save(state_of(Shard(0), WHOLE, 7), storage_writer=writer)


def check(store: kvio.Store, placement: Placement, whole: torch.Tensor, step: int) -> None:
    """Load into tensors that lie otherwise than those saved."""
    state = state_of(placement, whole * 0 - 1, 0)
    dcp.load(state, storage_reader=KvioReader(store, "run"))
    assert isinstance(state["sharded"], DTensor)
    assert torch.equal(state["sharded"].full_tensor(), whole)
    assert torch.equal(
        state[f"of rank {dist.get_rank()}"], torch.full((3,), float(dist.get_rank()))
    )
    assert state["step"] == step


class Broken:
    """A store whose writes fail on one rank."""

    def __init__(self, store: kvio.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def submit_write(
        self, key: str, data: Any, *, if_exists: Any = "keep", timeout: float | None = None
    ) -> Any:
        if dist.get_rank() == 1:
            raise kvio.StorageFullError("no room", key=key)
        return self._store.submit_write(key, data, if_exists=if_exists, timeout=timeout)


def fail(store: kvio.Store) -> None:
    """Save where one rank cannot; every rank must hear of it."""
    try:
        dcp.save(state_of(Shard(0), WHOLE + 1, 8), storage_writer=KvioWriter(Broken(store), "run"))
    except CheckpointException as exc:
        ((rank, (error, _)),) = exc.failures.items()
        assert (rank, type(error)) == (1, kvio.StorageFullError)
    else:
        raise AssertionError("the save did not fail")
    check(store, Shard(0), WHOLE, 7)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    action, root = sys.argv[1:]
    with kvio.open_store("posix-tmpfile", root=root, durability="durable") as opened:
        if action == "save":
            save(opened)
        elif action == "load":
            check(opened, Shard(1), WHOLE, 7)
        else:
            fail(opened)
    os.write(1, f"rank {os.environ['RANK']} done\n".encode())  # at once, or ranks' lines mix
    dist.destroy_process_group()
