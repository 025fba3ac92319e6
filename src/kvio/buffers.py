"""Callers' memory as flat views, and aligned memory of our own.

Anything with the buffer protocol is taken as it is: ``bytes``, ``bytearray``, ``memoryview``,
``mmap``, numpy arrays. What lacks it but speaks DLPack on the CPU (torch tensors of any dtype,
bfloat16 included) is taken by address. Nothing is ever copied to make it fit.

A block keeps bytes and no dtype. So memory is refused whose bytes do not stand for themselves:
references and pointers, which lead nowhere once they are read back, and numbers in the other byte
order, which a reader would take for this machine's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from kvio import _dlpack, _native, system_memory
from kvio.errors import BlockSizeError, OutOfMemoryError
from kvio.types import MiB

#: A buffer, a CPU tensor, or a sequence of them: the pieces of one block, in order.
Data: TypeAlias = Any

PAGE_BYTES: Final = 4096
#: What this process can surely have; more is asked for, which takes up to 0.6 ms, and remembered.
_known_bytes = 64 * MiB

_PIECES: Final = (list, tuple)
#: What is always one flat piece of bytes.
_FLAT_WRITABLE: Final = frozenset((bytearray,))
_FLAT: Final = frozenset((bytes, bytearray))

#: Formats of one native number an item; what else there is takes a closer check.
_NUMBERS: Final = frozenset("cb?hHiIlLqQnNefdg")
#: In a format (PEP 3118), the names of a structure's fields.
_FIELD_NAMES: Final = re.compile(":[^:]*:")
#: Objects, pointers to bytes, to text, to anything and to functions; ``Z`` alone, for ``Zd`` is a
#: complex number. Source: PEP 3118, and ``_type_`` of ctypes' simple types.
_ADDRESSES: Final = re.compile("[OPXz&]|Z(?![efdg])")
_OTHER_ORDER: Final = re.compile("[>!]" if sys.byteorder == "little" else "<")


def as_parts(data: Data, *, writable: bool = False) -> list[memoryview]:
    """Flatten *data* into one-dimensional byte views over the same memory.

    Raises:
        TypeError: an item is neither a buffer nor a CPU tensor, or one of objects, of pointers or
            of the other byte order.
        BlockSizeError: an item is not C-contiguous, or read-only where bytes would be written.
    """
    if isinstance(data, _PIECES):
        return [_flat(item, writable) for item in data]
    return [_flat(data, writable)]


def view_bytes(item: Any) -> memoryview:
    """Flatten one buffer or CPU tensor, not a sequence of them, as `as_parts` does."""
    return _flat(item, writable=False)


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
    kind = view.format
    if kind == "B" and view.strides == (1,):  # bytes in a row
        if writable and view.readonly:
            raise BlockSizeError("a buffer to read into is read-only")
        return view
    if kind not in _NUMBERS:
        _check_format(view)
    if not view.c_contiguous:
        raise BlockSizeError("a buffer is not C-contiguous: pass a contiguous one, or its pieces")
    if writable and view.readonly:
        raise BlockSizeError("a buffer to read into is read-only")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _check_format(view: memoryview) -> None:
    """Refuse memory of objects, of pointers, of the other byte order, or of unknown content."""
    numpy = sys.modules.get("numpy")
    if view.format == "B" and view.itemsize == 1:
        return
    if numpy is not None and isinstance(view.obj, numpy.ndarray | numpy.generic):
        _check_dtype(view.obj.dtype)  # a format ends at a zero byte in the name of a field
        return
    codes = _FIELD_NAMES.sub("", view.format)
    if view.format == "B" or codes.count("{") != codes.count("}"):
        raise TypeError(  # ctypes describes unions and packed structures as bytes
            f"a buffer has items of {view.itemsize} bytes and does not say what they are: pass "
            "memoryview(it).cast('B') if they hold no addresses"
        )
    _refuse(
        f"format {view.format!r}",
        addresses=_ADDRESSES.search(codes) is not None,
        swapped=_OTHER_ORDER.search(codes) is not None,
    )


def _check_dtype(dtype: Any) -> None:
    """Refuse what `_check_format` does, of numpy's arrays."""
    if dtype.hasobject or _is_swapped(dtype):
        _refuse(f"dtype {dtype}", addresses=dtype.hasobject, swapped=True)


def _is_swapped(dtype: Any) -> bool:
    """Report whether any number has the other byte order; ``isnative`` passes over subarrays."""
    if dtype.subdtype is not None:
        return _is_swapped(dtype.subdtype[0])
    if dtype.fields is not None:
        return any(_is_swapped(field[0]) for field in dtype.fields.values())
    return not dtype.isnative


def _refuse(what: str, *, addresses: bool, swapped: bool) -> None:
    if addresses:
        raise TypeError(
            f"a buffer of {what} holds addresses, not data: convert it to bytes or numbers first"
        )
    if swapped:
        raise TypeError(
            f"a buffer of {what} is not in this machine's byte order, and a block keeps no dtype: "
            "convert it first, an array by array.astype(array.dtype.newbyteorder('='))"
        )


def _tensor_view(item: Any) -> memoryview:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.ndarray):
        # A dtype the buffer protocol has no letter for, such as ml_dtypes.bfloat16.
        _check_dtype(item.dtype)
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

    Raises:
        OutOfMemoryError: there is not so much, or the machine or control group never has.
    """
    check_memory(nbytes)
    try:
        return _native.allocate(nbytes, alignment)[:nbytes]
    except MemoryError as exc:
        raise OutOfMemoryError(f"no memory for {nbytes} bytes", nbytes=nbytes) from exc


def check_memory(nbytes: int) -> None:
    """Refuse more bytes than this process can ever have, which Linux may promise all the same.

    Raises:
        OutOfMemoryError: it has less.
    """
    global _known_bytes
    if nbytes <= _known_bytes:
        return
    try:
        _known_bytes = system_memory.most_bytes()
    except MemoryError as exc:  # there is none for a line of text
        raise OutOfMemoryError(f"no memory for {nbytes} bytes", nbytes=nbytes) from exc
    if nbytes > _known_bytes:
        raise OutOfMemoryError(
            f"no memory for {nbytes} bytes: this process can have {_known_bytes} at most "
            "(RAM and swap, or the limit of its control group)",
            nbytes=nbytes,
        )


def trimmed(view: memoryview, nbytes: int) -> memoryview:
    """Give the first bytes of a view from `aligned`, copied where it would keep much more."""
    if nbytes > len(view) // 2:
        return view[:nbytes]
    smaller = aligned(nbytes)
    smaller[:] = view[:nbytes]
    return smaller


def bounce_buffer(nbytes: int) -> _native.Memory:
    """Allocate a buffer on huge pages for direct I/O.

    Raises:
        OutOfMemoryError: there is no memory for it.
    """
    try:
        return _native.Memory(nbytes, 2 * MiB)
    except MemoryError as exc:
        text = f"no memory for a bounce buffer of {nbytes} bytes"
        raise OutOfMemoryError(text, nbytes=nbytes) from exc


class BouncePool:
    """Aligned buffers on huge pages for direct I/O; about *limit* are kept."""

    def __init__(self, nbytes: int, *, limit: int) -> None:
        self.nbytes = nbytes
        self._limit = limit
        self._free: list[_native.Memory] = []

    def take(self) -> _native.Memory:
        """Return a buffer, a used one if there is one.

        Raises:
            OutOfMemoryError: there is no memory for another.
        """
        try:
            return self._free.pop()
        except IndexError:
            pass
        return bounce_buffer(self.nbytes)

    def give(self, buffer: _native.Memory) -> None:
        """Take a buffer back, or free it when enough are kept."""
        if len(self._free) < self._limit:
            self._free.append(buffer)
