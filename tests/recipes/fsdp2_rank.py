"""What each rank of test_fsdp2 runs beside the page's program: ``fsdp2_rank.py BEFORE AFTER``.

It loads a checkpoint that must have step *before* (none for 0), in which every tensor has values
that follow from its name and the step, and saves one with step *after*.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import kvio

sys.path.insert(0, os.fspath(Path.cwd()))  # the page's program is in the working directory

import train  # type: ignore[import-not-found, unused-ignore]


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a state with its path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{name}/{key}")
    elif isinstance(state, torch.Tensor):
        yield name, state


def expected(name: str, step: int, like: torch.Tensor) -> torch.Tensor:
    """Make the values of a whole tensor: bits at random, from its name and the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def main(before: int, after: int) -> None:
    """Load and compare, then fill and save."""
    dist.init_process_group("gloo")
    model, optimizer = train.build()
    with kvio.open_store(train.STORE) as store:
        assert train.load(store, model, optimizer) == before
        sharded = 0
        if before:
            for name, tensor in tensors(train.state_of(model, optimizer, 0)):
                sharded += isinstance(tensor, DTensor)
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(whole, expected(name, before, whole)), name
            assert sharded == 12, sharded  # four parameters, and two moments of each
        else:
            train.train(model, optimizer)  # so that the optimizer has a state
        with torch.no_grad():
            for name, tensor in tensors(train.state_of(model, optimizer, 0)):
                values = expected(name, after, tensor)
                if isinstance(tensor, DTensor):
                    placed = distribute_tensor(values, tensor.device_mesh, tensor.placements)
                    tensor.to_local().copy_(placed.to_local())
                else:
                    tensor.copy_(values)
        train.save(store, model, optimizer, after)
    os.write(1, f"rank {dist.get_rank()} done\n".encode())  # at once, or ranks' lines mix
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
