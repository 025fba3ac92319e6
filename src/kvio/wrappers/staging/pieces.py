"""Lists of pieces of bytes: views of host memory, tensors of device memory, spans of either."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from kvio.buffers import Data, as_parts, total_bytes
from kvio.errors import BlockSizeError
from kvio.wrappers.staging.extents import Span

#: A flat view of bytes in host memory, or a flat uint8 tensor of device memory.
Part: TypeAlias = Any


def flat_parts(data: Data) -> list[Part]:
    """Flatten *data* into byte views of host memory and flat uint8 tensors of device memory.

    Raises:
        TypeError: an item is neither a buffer nor a tensor.
        BlockSizeError: an item is not contiguous.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return list(as_parts(data))
    items = data if isinstance(data, (list, tuple)) else (data,)
    if not any(map(on_device, items)):
        return list(as_parts(data))
    return [_flat_tensor(item) if on_device(item) else as_parts(item)[0] for item in items]


def on_device(item: object) -> bool:
    """Return whether *item* is a torch tensor outside host memory."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    return torch is not None and isinstance(item, torch.Tensor) and item.device.type != "cpu"


def _flat_tensor(tensor: Any) -> Any:
    if not tensor.is_contiguous():
        raise BlockSizeError("a tensor is not contiguous: pass a contiguous one, or its pieces")
    uint8 = sys.modules["torch"].uint8
    flat = tensor.detach()
    flat = flat if flat.dim() == 1 else flat.view(-1)
    return flat if flat.dtype == uint8 else flat.view(uint8)


def check_lengths(spans: Sequence[Span], parts: Sequence[Part]) -> None:
    """Refuse data that is longer or shorter than the spans it is for.

    Raises:
        BlockSizeError: the lengths differ.
    """
    nbytes = total_bytes(parts)
    room = sum(span.nbytes for span in spans)
    if nbytes != room:
        raise BlockSizeError(f"{nbytes} bytes of data for {room} bytes of staging memory")


def cut_spans(spans: Sequence[Span], start: int, nbytes: int) -> list[Span]:
    """Return the parts of spans that hold up to *nbytes* from *start* on."""
    cut = []
    for offset, length in spans:
        n = min(length - start, nbytes)
        if n > 0:
            cut.append(Span(offset + start, n))
            nbytes -= n
        start = max(0, start - length)
    return cut


def pairs(to: Sequence[Part], parts: Sequence[Part]) -> Iterator[tuple[Part, Part]]:
    """Split two lists into pieces of equal length, (to, from), until the shorter list ends."""
    targets = iter(to)
    target, room = None, 0
    for part in parts:
        at, left = 0, len(part)
        while left:
            while not room:
                target = next(targets, None)
                if target is None:
                    return
                room = len(target)
            n = min(room, left)
            filled = len(target) - room  # type: ignore[arg-type]  # room: there is one
            yield target[filled : filled + n], part[at : at + n]  # type: ignore[index]
            at, left, room = at + n, left - n, room - n
