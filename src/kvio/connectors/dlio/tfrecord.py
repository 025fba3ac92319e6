"""Read and write TFRecord files without TensorFlow, and verify both checksums of each record.

A record is its length, a checksum of the length, the bytes, and a checksum of the bytes. DLIO's
records are messages ``tf.train.Example`` with the features ``image`` and ``size``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from kvio import _native

_LENGTH: Final = struct.Struct("<Q")
_SUM: Final = struct.Struct("<I")
_HEAD_NBYTES: Final = _LENGTH.size + _SUM.size
_MASK_ADDS: Final = 0xA282EAD8

#: Protocol buffers: wire types, and the field numbers in DLIO's messages.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED: Final = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_FEATURES = _FEATURE = _NAME = _BYTES_LIST = _VALUE = 1
_CONTENT = 2
_INT64_LIST = 3
_VARINT_BITS: Final = 64


def records(block: memoryview) -> Iterator[memoryview]:
    """Yield the records of a file as views of the block.

    Raises:
        ValueError: the file is truncated, or a checksum is wrong.
    """
    at = 0
    while at < len(block):
        head = block[at : at + _HEAD_NBYTES]
        if len(head) < _HEAD_NBYTES:
            raise ValueError(f"it ends within the length of the record at {at}")
        if _masked(head[: _LENGTH.size]) != _SUM.unpack_from(head, _LENGTH.size)[0]:
            raise ValueError(f"the checksum of the length of the record at {at} is wrong")
        start = at + _HEAD_NBYTES
        end = start + _LENGTH.unpack_from(head)[0]
        if end + _SUM.size > len(block):
            raise ValueError(f"it ends within the record at {at}")
        if _masked(block[start:end]) != _SUM.unpack_from(block, end)[0]:
            raise ValueError(f"the checksum of the record at {at} is wrong")
        yield block[start:end]
        at = end + _SUM.size


def framed(record: bytes) -> bytes:
    """Return a record with its length and checksums."""
    length = _LENGTH.pack(len(record))
    return length + _SUM.pack(_masked(length)) + record + _SUM.pack(_masked(record))


def image_of(record: memoryview) -> memoryview:
    """Return the first value of the feature ``image``, or the record if it has none."""
    try:
        for features in _fields(record, _FEATURES):
            for feature in _fields(features, _FEATURE):
                if bytes(next(_fields(feature, _NAME), b"")) == b"image":
                    return next(_fields(next(_fields(next(_fields(feature, _CONTENT)), 1)), 1))
    except (StopIteration, IndexError, ValueError):
        pass
    return record


def example(features: Mapping[str, bytes | int]) -> bytes:
    """Return a message ``tf.train.Example`` with one value per feature."""
    content = b"".join(
        _field(_FEATURE, _field(_NAME, name.encode()) + _field(_CONTENT, _feature(value)))
        for name, value in features.items()
    )
    return _field(_FEATURES, content)


def _masked(data: bytes | memoryview) -> int:
    crc = _native.crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_ADDS) & 0xFFFFFFFF


def _feature(value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return _field(_BYTES_LIST, _field(_VALUE, value))
    return _field(_INT64_LIST, _field(_VALUE, _varint(value)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= (1 << _VARINT_BITS) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yield the contents of length-delimited fields with the number *wanted*."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _read_varint(message, at)
            continue
        if kind == _BYTES:
            nbytes, at = _read_varint(message, at)
        elif kind in _FIXED:
            nbytes = _FIXED[kind]
        else:
            raise ValueError(f"invalid wire type {kind}")
        if at + nbytes > len(message):
            raise ValueError("a field ends beyond its message")
        if tag == wanted << 3 | _BYTES:
            yield message[at : at + nbytes]
        at += nbytes


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _VARINT_BITS + 6, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")
