"""A dataset of blocks in a module that spawned workers can import."""

from __future__ import annotations

from typing import Any

import torch

Dataset: Any = torch.utils.data.Dataset


class Samples(Dataset):  # type: ignore[misc, unused-ignore]
    """Samples of four numbers."""

    def __init__(self, store: Any, keys: list[str]) -> None:
        self.store = store
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.empty(4)
        self.store.read_block_into(self.keys[index], sample)
        return sample
