"""Flat byte views of the caller's memory, and allocation of aligned memory.

Objects with the buffer protocol are used in place: ``bytes``, ``bytearray``, ``memoryview``,
``mmap``, numpy arrays. So are CPU tensors that support DLPack instead (torch tensors of any dtype,
bfloat16 included). Nothing is copied.

A block keeps bytes and no dtype. So two kinds of memory are refused: references and pointers,
which are invalid once they are read back, and numbers in the other byte order, which a reader
would take for this machine's.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from kvio import _native
from kvio.errors import BlockSizeError, ConfigError, OutOfMemoryError
from kvio.filesystem.sysfs import Tree
from kvio.types import MiB
from kvio.url import parse_size

_SYSTEM: Final = Tree("/")
_UNLIMITED: Final = 1 << 63


def ram_bytes(tree: Tree = _SYSTEM) -> int:
    """Return the bytes of RAM that this process can use: all, or the limit of its control group."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = _meminfo(tree, "MemTotal", installed)
    return min(total, *_limits(tree, "memory.max", "memory.limit_in_bytes"))


def most_bytes(tree: Tree = _SYSTEM) -> int:
    """Return the bytes of RAM and swap that this process can use."""
    swap = min(_meminfo(tree, "SwapTotal", 0), *_limits(tree, "memory.swap.max"))
    return ram_bytes(tree) + swap


def free_bytes(tree: Tree = _SYSTEM) -> int:
    """Return the bytes of RAM that this process can have without taking any from another.

    What the page cache holds of a limited control group counts as taken.
    """
    free = _meminfo(tree, "MemAvailable", 0)
    for folder, unified in _groups(tree):
        names = ("max", "current") if unified else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_number(tree, f"{folder}/memory.{name}") for name in names)
        if limit is not None and used is not None:
            free = min(free, limit - used)
    return max(free, 0)


def _meminfo(tree: Tree, name: str, otherwise: int) -> int:
    """Read a line of /proc/meminfo, which is in KiB."""
    for line in (tree.text("/proc/meminfo") or "").splitlines():
        field, _, value = line.partition(":")
        if field == name:
            return int(value.split()[0]) << 10
    return otherwise


def _limits(tree: Tree, unified: str, legacy: str | None = None) -> Iterator[int]:
    """Yield the limits of this process's control groups, of versions 2 and 1."""
    yield _UNLIMITED
    for folder, is_unified in _groups(tree):
        name = unified if is_unified else legacy
        limit = None if name is None else _number(tree, f"{folder}/{name}")
        if limit is not None:
            yield limit


def _groups(tree: Tree) -> Iterator[tuple[str, bool]]:
    """Yield the folders of this process's control groups for memory; whether of version 2.

    A container may see its own group as the root, or a path of the host that does not exist here.
    """
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root = "/sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
        else:
            continue
        groups = [group for group in path.split("/") if group]
        for depth in range(len(groups) + 1):
            yield "/".join((root, *groups[:depth])), number == "0"


def _number(tree: Tree, path: str) -> int | None:
    value = (tree.text(path) or "").strip()
    return int(value) if value.isdecimal() else None


# --------------------------------------------------------------------------------------------------
# The memory of a CPU tensor through the DLPack protocol, version 0 or 1, without its library.
#
# Source of the layout: the DLPack C header, ``dlpack/dlpack.h`` 1.0.


_CPU_DEVICES: Final = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: all readable by the CPU
_OPAQUE_HANDLE: Final = 3  # kDLOpaqueHandle: addresses that only their library can use


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def view(tensor: Any) -> memoryview:
    """View a contiguous CPU tensor's bytes, writable, for as long as the view lives.

    Raises:
        BlockSizeError: it is not contiguous, or lies on a device.
        TypeError: it will not be exported, for example because it requires a gradient, or its
            elements are opaque handles or have no bits.
    """
    device_type, _ = tensor.__dlpack_device__()
    if device_type not in _CPU_DEVICES:
        raise BlockSizeError("the tensor is not in host memory: copy it to the CPU first")
    try:
        capsule = tensor.__dlpack__()
    except (BufferError, RuntimeError) as exc:
        raise TypeError(f"the tensor cannot be exported: {exc}") from exc
    address = _get_pointer(capsule, b"dltensor")
    return _view_tensor(_Tensor.from_address(address), capsule)


def _view_tensor(tensor: _Tensor, capsule: object) -> memoryview:
    if tensor.code == _OPAQUE_HANDLE:
        raise TypeError("a tensor of opaque handles holds addresses, not data: convert it first")
    if not tensor.bits or not tensor.lanes:
        text = f"a tensor of {tensor.lanes} lanes of {tensor.bits} bits: its elements are no bytes"
        raise TypeError(text)
    shape = tensor.shape[: tensor.ndim]
    count = 1
    for extent in shape:
        count *= extent
    if tensor.strides and count and not _contiguous(shape, tensor.strides[: tensor.ndim]):
        raise BlockSizeError("a tensor is not contiguous: pass a contiguous one, or its pieces")
    nbytes = (count * tensor.bits * tensor.lanes + 7) // 8
    if nbytes == 0:
        return memoryview(bytearray())
    return _native.view_address(tensor.data + tensor.byte_offset, nbytes, owner=capsule)


def _contiguous(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


#
# Objects with the buffer protocol are used in place: ``bytes``, ``bytearray``, ``memoryview``,
# ``mmap``, numpy arrays. So are CPU tensors that support DLPack instead (torch tensors of any
# dtype, bfloat16 included). Nothing is copied.
#
# A block keeps bytes and no dtype. So two kinds of memory are refused: references and pointers,
# which are invalid once they are read back, and numbers in the other byte order, which a reader
# would take for this machine's.


#: A buffer, a CPU tensor, or a sequence of them: the pieces of one block, in order.
Data: TypeAlias = Any

PAGE_BYTES: Final = 4096
#: Sizes up to this are allocated without asking for the memory limit, which takes up to 0.6 ms.
_known_bytes = 64 * MiB

_PIECES: Final = (list, tuple)
#: Types whose objects are always one flat piece of bytes.
_FLAT_WRITABLE: Final = frozenset((bytearray,))
_FLAT: Final = frozenset((bytes, bytearray))

#: Formats whose items are native numbers; others go to `_check_format`.
_NUMBERS: Final = frozenset("cb?hHiIlLqQnNefdg")
#: The names of a structure's fields in a format (PEP 3118).
_FIELD_NAMES: Final = re.compile(":[^:]*:")
#: Objects, and pointers to bytes, text, anything and functions; not ``Zd``, a complex number.
#: Source: PEP 3118, and ``_type_`` of ctypes' simple types.
_ADDRESSES: Final = re.compile("[OPXz&]|Z(?![efdg])")
_OTHER_ORDER: Final = re.compile("[>!]" if sys.byteorder == "little" else "<")


def as_parts(data: Data, *, writable: bool = False) -> list[memoryview]:
    """Flatten *data* into one-dimensional byte views over the same memory.

    Raises:
        TypeError: an item is neither a buffer nor a CPU tensor, or it holds objects, pointers or
            numbers in the other byte order.
        BlockSizeError: an item is not C-contiguous, or read-only where bytes would be written.
    """
    if type(data) in (_FLAT_WRITABLE if writable else _FLAT):
        return [memoryview(data)]
    if isinstance(data, _PIECES):
        return [_flat(item, writable) for item in data]
    return [_flat(data, writable)]


def view_bytes(item: Any) -> memoryview:
    """Flatten one buffer or CPU tensor, not a sequence of them, as `as_parts` does."""
    return _flat(item, writable=False)


def flatten(
    blocks: Sequence[Data], *, writable: bool = False
) -> tuple[Sequence[Sequence[memoryview]], list[int]]:
    """Flatten the data of many blocks; return the parts and the length in bytes of each.

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
    """Return the views that cannot be used as they are: not flat, not bytes, or read-only."""
    unfit = [view for view in views if view.strides != (1,) or view.format != "B"]
    return unfit + [view for view in views if view.readonly] if writable else unfit


def total_bytes(parts: Iterable[memoryview]) -> int:
    """Return the total length of flat views."""
    return sum(map(len, parts))


def _flat(item: Any, writable: bool) -> memoryview:  # noqa: FBT001  # private, always by position
    try:
        view = memoryview(item)
    except (TypeError, ValueError, BufferError):
        view = _tensor_view(item)
    kind = view.format
    if kind == "B" and view.strides == (1,):  # contiguous bytes
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
    """Refuse memory with objects, pointers, the other byte order, or unknown content."""
    numpy = sys.modules.get("numpy")
    if view.format == "B" and view.itemsize == 1:
        return
    if numpy is not None and isinstance(view.obj, numpy.ndarray | numpy.generic):
        _check_dtype(view.obj.dtype)  # its format would end at a zero byte in a field's name
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
    """Refuse the dtypes of numpy whose formats `_check_format` refuses."""
    if dtype.hasobject or _is_swapped(dtype):
        _refuse(f"dtype {dtype}", addresses=dtype.hasobject, swapped=True)


def _is_swapped(dtype: Any) -> bool:
    """Return whether any number has the other byte order; ``isnative`` ignores subarrays."""
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
        # The buffer protocol has no format for its dtype, such as ml_dtypes.bfloat16.
        _check_dtype(item.dtype)
        if not item.flags.c_contiguous:
            raise BlockSizeError("an array is not C-contiguous: pass a contiguous one")
        return memoryview(item.reshape(-1).view(numpy.uint8))
    if hasattr(item, "__dlpack__"):
        return view(item)
    raise TypeError(f"{type(item).__name__} is neither a buffer nor a DLPack tensor")


def scatter(data: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy *data* into the views one after the other, until it ends."""
    at = 0
    for part in parts:
        n = min(len(part), len(data) - at)
        part[:n] = data[at : at + n]
        at += n


def aligned(nbytes: int, alignment: int = PAGE_BYTES) -> memoryview:
    """Allocate writable page-aligned memory, not zeroed, that is freed with its last view.

    Direct I/O reads and writes it without a copy. Up to 64 MiB of what is freed are kept for the
    next block, since the kernel zeroes new memory page by page.

    Raises:
        OutOfMemoryError: there is not enough memory, or the machine or control group has less.
    """
    check_memory(nbytes)
    try:
        return _native.allocate(nbytes, alignment)[:nbytes]
    except MemoryError as exc:
        raise OutOfMemoryError(f"no memory for {nbytes} bytes", nbytes=nbytes) from exc


def keep_freed_memory(nbytes: int | str) -> None:
    """Keep at most so many bytes of freed memory of blocks for the next blocks of this process.

    It is 64 MiB unless this says otherwise. The kernel zeroes the pages of new memory, which costs
    a third of the time of a direct read of a large block; memory that was a block's before is
    taken as it is. Of what is kept one block takes half, or 32 MiB where that is more.

    Args:
        nbytes: a number, or text such as ``"1GiB"``; 0 keeps nothing.

    Raises:
        ConfigError: it is no size.
    """
    wanted = parse_size(nbytes)
    if wanted < 0:
        raise ConfigError(f"memory to keep must be at least 0 bytes, not {wanted}")
    _native.keep_freed_memory(wanted)


def check_memory(nbytes: int) -> None:
    """Refuse to allocate more than the machine or control group has; Linux may allow it.

    Raises:
        OutOfMemoryError: there is less memory than that.
    """
    global _known_bytes
    if nbytes <= _known_bytes:
        return
    try:
        _known_bytes = most_bytes()
    except MemoryError as exc:  # not even for reading the limit
        raise OutOfMemoryError(f"no memory for {nbytes} bytes", nbytes=nbytes) from exc
    if nbytes > _known_bytes:
        raise OutOfMemoryError(
            f"no memory for {nbytes} bytes: this process can have {_known_bytes} at most "
            "(RAM and swap, or the limit of its control group)",
            nbytes=nbytes,
        )


def trimmed(view: memoryview, nbytes: int) -> memoryview:
    """Return the first bytes of a view from `aligned`, copied if most of it would be wasted."""
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
    """A pool of aligned buffers on huge pages for direct I/O; about *limit* are kept."""

    def __init__(self, nbytes: int, *, limit: int) -> None:
        self.nbytes = nbytes
        self._limit = limit
        self._free: list[_native.Memory] = []

    def take(self) -> _native.Memory:
        """Return a buffer from the pool, or a new one.

        Raises:
            OutOfMemoryError: there is no memory for a new one.
        """
        try:
            return self._free.pop()
        except IndexError:
            pass
        return bounce_buffer(self.nbytes)

    def give(self, buffer: _native.Memory) -> None:
        """Return a buffer to the pool, or free it when the pool is full."""
        if len(self._free) < self._limit:
            self._free.append(buffer)
