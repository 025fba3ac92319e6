"""Callers' memory as flat views, and aligned memory of our own.

Anything with the buffer protocol is taken as it is: ``bytes``, ``bytearray``, ``memoryview``,
``mmap``, numpy arrays. What lacks it but speaks DLPack on the CPU (torch tensors of any dtype,
bfloat16 included) is taken by address. Nothing is ever copied to make it fit.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from kvio import _dlpack, _native
from kvio.errors import BlockSizeError, storage_error
from kvio.types import MiB

#: A buffer, a CPU tensor, or a sequence of them: the pieces of one block, in order.
Data: TypeAlias = Any

PAGE_BYTES: Final = 4096

_PIECES: Final = (list, tuple)
#: What is always one flat piece of bytes.
_FLAT_WRITABLE: Final = frozenset((bytearray,))
_FLAT: Final = frozenset((bytes, bytearray))


def as_parts(data: Data, *, writable: bool = False) -> list[memoryview]:
    """Flatten *data* into one-dimensional byte views over the same memory.

    Raises:
        TypeError: an item is neither a buffer nor a CPU tensor.
        BlockSizeError: an item is not C-contiguous, or read-only where bytes would be written.
    """
    if isinstance(data, _PIECES):
        return [_flat(item, writable) for item in data]
    return [_flat(data, writable)]


def flatten(
    blocks: Sequence[Data], *, writable: bool = False
) -> tuple[Sequence[Sequence[memoryview]], list[int]]:
    """Flatten the data of many blocks: the parts of each, and how many bytes each has.

    Raises:
        TypeError, BlockSizeError: as `as_parts`.
    """
    kinds = set(map(type, blocks))
    views: Sequence[memoryview] = ()
    if kinds <= (_FLAT_WRITABLE if writable else _FLAT):
        views = [memoryview(data) for data in blocks]
    elif kinds == {memoryview} and not _unfit(blocks, writable):
        views = blocks
    if views:
        return list(zip(views, strict=True)), list(map(len, views))
    parts = [as_parts(data, writable=writable) for data in blocks]
    return parts, [total_bytes(own) for own in parts]


def _unfit(views: Sequence[memoryview], writable: bool) -> list[memoryview]:  # noqa: FBT001
    """Pick the views that cannot be used as they are: not flat, not bytes, or read-only."""
    unfit = [view for view in views if view.strides != (1,) or view.format != "B"]
    return unfit + [view for view in views if view.readonly] if writable else unfit


def total_bytes(parts: Iterable[memoryview]) -> int:
    """Sum the lengths of flat views."""
    return sum(map(len, parts))


def _flat(item: Any, writable: bool) -> memoryview:  # noqa: FBT001  # private, always by position
    try:
        view = memoryview(item)
    except (TypeError, ValueError, BufferError):
        view = _tensor_view(item)
    if not view.c_contiguous:
        raise BlockSizeError("a buffer is not C-contiguous: pass a contiguous one, or its pieces")
    if writable and view.readonly:
        raise BlockSizeError("a buffer to read into is read-only")
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _tensor_view(item: Any) -> memoryview:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.ndarray):
        # A dtype the buffer protocol has no letter for, such as ml_dtypes.bfloat16.
        if not item.flags.c_contiguous:
            raise BlockSizeError("an array is not C-contiguous: pass a contiguous one")
        return memoryview(item.reshape(-1).view(numpy.uint8))
    if hasattr(item, "__dlpack__"):
        return _dlpack.view(item)
    raise TypeError(f"{type(item).__name__} is neither a buffer nor a DLPack tensor")


def scatter(data: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy *data* into the views one after the other, as far as it goes."""
    at = 0
    for part in parts:
        n = min(len(part), len(data) - at)
        part[:n] = data[at : at + n]
        at += n


def aligned(nbytes: int, alignment: int = PAGE_BYTES) -> memoryview:
    """Allocate writable page-aligned memory, not zeroed, freed with its last view.

    Memory from here is read and written by direct I/O without a copy.
    """
    return _native.allocate(nbytes, alignment)[:nbytes]


def trimmed(view: memoryview, nbytes: int) -> memoryview:
    """Give the first bytes of a view from `aligned`, copied where it would keep much more."""
    if nbytes > len(view) // 2:
        return view[:nbytes]
    smaller = aligned(nbytes)
    smaller[:] = view[:nbytes]
    return smaller


class BouncePool:
    """Aligned buffers on huge pages for direct I/O; about *limit* are kept."""

    def __init__(self, nbytes: int, *, limit: int) -> None:
        self.nbytes = nbytes
        self._limit = limit
        self._free: list[_native.Memory] = []

    def take(self) -> _native.Memory:
        """Give a buffer, a used one if there is one."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        try:
            return _native.Memory(self.nbytes, 2 * MiB)
        except MemoryError as exc:
            raise storage_error(errno.ENOMEM, "allocate a bounce buffer") from exc

    def give(self, buffer: _native.Memory) -> None:
        """Take a buffer back, or free it when enough are kept."""
        if len(self._free) < self._limit:
            self._free.append(buffer)
