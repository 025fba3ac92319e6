"""Save DLIO's checkpoints as blocks, with or without torch."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import numpy as np
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing

from kvio.connectors.dlio import blocks
from kvio.connectors.dlio.settings import key_of

_DTYPES: Final = {
    "int8": "i1",
    "uint8": "u1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "fp16": "f2",
    "float16": "f2",
    "bf16": "u2",
    "bfloat16": "u2",
    "fp32": "f4",
    "float32": "f4",
    "fp64": "f8",
    "float64": "f8",
}


#: Whether DLIO asks for tensors by ``get_tensor_core``, and loads checkpoints; 2.0.0 does neither.
LOADS: Final = hasattr(BaseCheckpointing, "load_checkpoint")


class _Checkpointing(BaseCheckpointing):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """Base of both mechanisms: one object per process; DLIO decides the order of states."""

    _instance: Any = None

    @classmethod
    def get_instance(cls) -> Self:
        """Return the object of this process."""
        if not isinstance(cls._instance, cls):
            cls._instance = cls()
        found: Self = cls._instance
        return found

    def get_tensor(self, length: int, datatype: str = "int8") -> Any:
        """Return *length* elements: zeros in DLIO 2.0.0, random ones in later releases."""
        if LOADS:
            return super().get_tensor(length, datatype)
        return self.get_tensor_core(length, datatype, randomize=False)

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Save every state of this rank, in DLIO 2.0.0."""
        super().checkpoint(epoch, step_number)

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Save every state of this rank."""
        super().save_checkpoint(epoch, step_number)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Load every state of this rank."""
        super().load_checkpoint(epoch, step_number)

    def set_madvise_mergeable(self, tensor: object) -> bool:
        """Return False: memory is not changed."""
        del tensor
        return False

    def finalize(self) -> None:
        """Do nothing: no resource is open."""


class NumpyCheckpointing(_Checkpointing):
    """Saves states as .npz files; needs no torch."""

    def __init__(self) -> None:
        super().__init__("npz")

    def get_tensor_core(self, length: int, datatype: str = "int8", randomize: bool = True) -> Any:  # noqa: FBT001
        """Return an array of *length* random elements, or zeros."""
        dtype = np.dtype(_DTYPES[datatype])
        if not randomize:
            return np.zeros(length, dtype=dtype)
        random = np.random.default_rng()
        if dtype.kind == "f":
            return random.random(length, dtype=np.float32).astype(dtype, copy=False)
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True)

    def save_state(self, suffix: str, state: Mapping[str, Any], fsync: bool = False) -> None:  # noqa: FBT001
        """Store one state as a block, with the durability of its store."""
        del fsync
        out = io.BytesIO()
        np.savez(out, **dict(_flat(state)))
        blocks.write_checkpoint(key_of(self.get_name(suffix)), out.getbuffer())

    def load_state(self, suffix: str, state: dict[str, Any]) -> None:
        """Read all arrays of one state."""
        block = blocks.read_checkpoint(key_of(self.get_name(suffix)))
        with np.load(io.BytesIO(block), allow_pickle=False) as arrays:
            state.update(_nested({name: arrays[name] for name in arrays.files}))


class TorchCheckpointing(_Checkpointing):
    """Saves states with ``torch.save``, like DLIO's own mechanism."""

    def __init__(self) -> None:
        super().__init__("pt")

    def get_tensor_core(self, length: int, datatype: str = "int8", randomize: bool = True) -> Any:  # noqa: FBT001
        """Return a tensor of *length* random elements, or zeros."""
        import torch

        dtype = getattr(torch, _TORCH_NAMES.get(datatype, datatype))
        if not randomize:
            return torch.zeros(length, dtype=dtype)
        if dtype.is_floating_point:
            return torch.rand(length, dtype=dtype)
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (length,), dtype=dtype)

    def save_state(self, suffix: str, state: Mapping[str, Any], fsync: bool = False) -> None:  # noqa: FBT001
        """Store one state as a block, with the durability of its store."""
        import torch

        del fsync
        out = io.BytesIO()
        torch.save(state, out)
        blocks.write_checkpoint(key_of(self.get_name(suffix)), out.getbuffer())

    def load_state(self, suffix: str, state: dict[str, Any]) -> None:
        """Read one state with torch's restricted unpickler."""
        import torch

        block = blocks.read_checkpoint(key_of(self.get_name(suffix)))
        state.update(torch.load(io.BytesIO(block), weights_only=True))


_TORCH_NAMES: Final = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path, array in arrays.items():
        *folders, name = path.split("/")
        target = state
        for folder in folders:
            target = target.setdefault(folder, {})
        target[name] = array
    return state
