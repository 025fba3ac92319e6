"""What test_torch_dcp_process runs: torch's own saving process, with each of its stagers."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import kvio
from kvio.connectors.torch_dcp import KvioReader, KvioStager, KvioWriter, versions

#: Typed as torch means it to be used, not as its modules export.
dcp: Any = torch.distributed.checkpoint


def save(store: kvio.Store, name: str, stager: Any, value: float, **options: Any) -> None:
    """Save in torch's process and wait for it."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    state = {"a": torch.full((5000,), value), "step": value, "inner": {"lr": 0.1}}
    started = dcp.async_save(
        state,
        storage_writer=KvioWriter(store, name, **options),
        async_stager=stager,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    getattr(started, "upload_completion", started).result()


def check(store: kvio.Store, name: str, value: float) -> None:
    """Load and compare."""
    state: dict[str, Any] = {"a": torch.zeros(5000), "step": 0, "inner": {"lr": 0}}
    dcp.load(state, storage_reader=KvioReader(store, name))
    assert torch.equal(state["a"], torch.full((5000,), value))
    assert (state["step"], state["inner"]) == (value, {"lr": 0.1})


def main(root: str) -> None:
    """Save with each stager, then where it must fail."""
    # Pinned, shared, staged by a thread, copied without blocking.
    choices = [(False, True, False, False), (False, True, True, False)]
    if torch.cuda.is_available():
        choices += [(True, True, True, True), (True, False, False, False)]
    stagers = [KvioStager(), *(DefaultStager(StagingOptions(*choice)) for choice in choices)]
    with kvio.open_store("posix-tmpfile", root=root) as store:
        for number, stager in enumerate(stagers):
            for value in (1.0, 2.0):
                save(store, f"run-{number}", stager, value, level="visible")
                check(store, f"run-{number}", value)
            assert len(versions(store, f"run-{number}")) == 1
        try:
            save(store, "run-0", KvioStager(), 3.0)  # durable, which this store is not
        except dcp.api.CheckpointException as exc:
            ((error, _),) = exc.failures.values()
            assert isinstance(error, kvio.UnsupportedError), error
        else:
            raise AssertionError("the save did not fail")
        check(store, "run-0", 2.0)
    with kvio.open_store("memory") as store:
        try:
            save(store, "run", KvioStager(), 1.0, level="visible")
        except kvio.UnsupportedError as exc:
            if "cannot go to another process" not in str(exc):
                raise
        else:
            raise AssertionError("a store in memory was taken to another process")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    [root] = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(root) / 'group'}", rank=0, world_size=1
    )
    main(root)
    os.write(1, b"saved in another process\n")
    dist.destroy_process_group()
