"""The memory of a CPU tensor through the DLPack protocol, version 0 or 1, without its library.

Source of the layout: the DLPack C header, ``dlpack/dlpack.h`` 1.0.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvio import _native
from kvio.errors import BlockSizeError

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
