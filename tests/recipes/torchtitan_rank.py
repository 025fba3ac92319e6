"""What each rank of test_torchtitan runs beside the page's program: ``… save|load MODE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Checkpoint, LRScheduler

sys.path.insert(0, os.fspath(Path.cwd()))  # the page's program is in the working directory

import kvio_train  # type: ignore[import-not-found, unused-ignore]


class Progress:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Numbers(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """A dataset that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((16,), float(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main(action: str, mode: str) -> None:
    """Save steps 2, 4 and 6 and keep two, or load the newest and compare."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 4))
    fully_shard(model)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.01})
    progress = Progress()
    dataset = Numbers()
    schedulers = build_lr_schedulers(optimizers, LRScheduler(warmup_steps=2), 100)
    manager = kvio_train.KvioCheckpoints(
        dataloader=ParallelAwareDataloader(
            dataset, dp_rank=dist.get_rank(), dp_world_size=dist.get_world_size(), batch_size=2
        ),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        checkpoint_config=Checkpoint(
            enable=True,
            interval=2,
            keep_latest_k=2,
            async_mode=mode,
            last_save_model_only=False,
            enable_ft_dataloader_checkpoints=False,
            exclude_from_loading=["dataloader"] if action == "load" else [],
        ),
        sd_adapter=None,
        base_folder="out",
    )
    if action == "save":
        assert not manager.load()
        for progress.step in range(1, 7):
            model(torch.ones(2, 16)).square().mean().backward()
            optimizers.step()
            optimizers.zero_grad()
            schedulers.step()
            manager.save(progress.step, last_step=progress.step == 6)
        assert manager.load(4)
        assert progress.step == 4
        assert manager.load()
        manager._purge_stale_checkpoints()
        dist.barrier()
        assert manager.steps() == [4, 6], manager.steps()
    else:
        assert manager.load()
        assert progress.step == 6
    weights: list[Any] = list(model.parameters())
    kept: list[Any] = [v for n, v in sorted(optimizers.state_dict().items()) if "exp_avg" in n]
    total, moments = (
        sum(float(tensor.full_tensor().double().sum()) for tensor in tensors)
        for tensors in (weights, kept)
    )
    rate = schedulers.schedulers[0].get_last_lr()
    if dist.get_rank() == 0:
        os.write(1, f"{progress.step} {total!r} {moments!r} {rate}\n".encode())
    manager.close()
    assert not Path("out").exists()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
