"""Save and load tensors in the safetensors format, without a copy of their bytes.

```python
save(store, "models/tiny", model.state_dict())
model.load_state_dict(load(store, "models/tiny"))
```

A block has the bytes of a file that safetensors would write: a store of ``layout="plain"`` has it
as a file that every reader of the format opens. ``safetensors.torch.save`` and ``load`` copy every
tensor once, since they make and take ``bytes``; here tensors are written from their own memory, and
are views of the memory that the block was read into.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvio import BlockStore
from kvio.abc import WriteReceipt
from kvio.errors import CorruptBlockError, MissingDependencyError, UnsupportedError
from kvio.types import IfExists

try:
    import torch
except ImportError as exc:
    raise MissingDependencyError(
        "kvio.connectors.safetensors needs torch: pip install 'kvio[torch]'"
    ) from exc

__all__ = ["load", "save"]

_ATTRIBUTES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_DTYPES: Final = {
    name: getattr(torch, found) for name, found in _ATTRIBUTES.items() if hasattr(torch, found)
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
#: safetensors takes no longer header.
_MAX_HEADER_BYTES: Final = 100_000_000


def save(
    store: BlockStore,
    key: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    if_exists: IfExists = "replace",
) -> WriteReceipt:
    """Store tensors as one block in the safetensors format, from their own memory.

    Tensors on a device, and views whose elements do not lie in a row, are copied first. *metadata*
    is text for other readers; those of Hugging Face want ``{"format": "pt"}``.

    Raises:
        UnsupportedError: a tensor is sparse or quantized, or the format has no name for its dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    parts: list[Any] = []
    at = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}: "
                "safetensors takes dense tensors with data, of dtypes that it has a name for"
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        shape, end = list(plain.shape), at + plain.nbytes
        header[name] = {
            "dtype": _NAMES[plain.dtype],
            "shape": shape,
            "data_offsets": [at, end],
        }
        if plain.nbytes:
            parts.append(plain.reshape(-1).view(torch.uint8))
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return store.write_block(
        key, [len(text).to_bytes(8, "little") + text, *parts], if_exists=if_exists
    )


def load(store: BlockStore, key: str) -> dict[str, torch.Tensor]:
    """Read a block in the safetensors format once; return tensors that share its memory.

    The memory is freed with the last of the tensors. No tensor overlaps another.

    Raises:
        BlockNotFoundError: there is no block.
        CorruptBlockError: the stored bytes are not those written, or not in the format.
        UnsupportedError: this torch does not have the dtype of a tensor.
    """
    data = store.read_block(key)
    try:
        first, entries = _read_header(data)
        entries.sort()
        if [first, *(entry.end for entry in entries)] != [
            *(entry.start for entry in entries),
            len(data),
        ]:
            raise ValueError("its tensors overlap, or leave bytes between them or at its end")
        return {entry.name: entry.tensor(data) for entry in entries}
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CorruptBlockError(
            f"block {key!r} is not in the safetensors format: {exc}", key=key
        ) from exc


class _Entry(NamedTuple):
    """A tensor's place in the block; entries sort by it."""

    start: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    def tensor(self, data: memoryview) -> torch.Tensor:
        """Return the tensor as a view of the block."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise UnsupportedError(f"tensor {self.name!r} is {self.dtype}: torch has no such dtype")
        nbytes = self.end - self.start
        if math.prod(self.shape) * dtype.itemsize != nbytes:
            raise ValueError(f"tensor {self.name!r} of shape {self.shape} has {nbytes} bytes")
        if not nbytes:
            return torch.empty(self.shape, dtype=dtype)
        raw = torch.frombuffer(data, dtype=torch.uint8, offset=self.start, count=nbytes)
        if self.start % dtype.itemsize:
            raw = raw.clone()  # other writers need not align tensors
        return raw.view(dtype).reshape(self.shape)


def _read_header(data: memoryview) -> tuple[int, list[_Entry]]:
    """Return where the tensors begin, and each of them; raise what Python does of other data."""
    nbytes = int.from_bytes(data[:8], "little")
    first = 8 + nbytes
    if first > len(data) or nbytes > _MAX_HEADER_BYTES:
        raise ValueError(f"its header cannot have {nbytes} bytes")
    header = json.loads(bytes(data[8:first]))
    if not isinstance(header, dict):
        raise TypeError("its header is not an object")
    entries = []
    for name, found in header.items():
        if name == "__metadata__":
            continue
        start, end = found["data_offsets"]
        shape = tuple(found["shape"])
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(f"tensor {name!r} has a place or a shape that are not numbers")
        entries.append(_Entry(first + start, first + end, name, str(found["dtype"]), shape))
    return first, entries
