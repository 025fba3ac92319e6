"""Decode blocks to arrays like DLIO's readers, without pickle and without TensorFlow."""

from __future__ import annotations

import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, SupportsInt

import numpy as np

from kvio import _native
from kvio.connectors.dlio.plan import INDEXED
from kvio.errors import CorruptBlockError, UnsupportedError

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


def example(features: Mapping[str, bytes | SupportsInt]) -> bytes:
    """Return a message ``tf.train.Example`` with one value per feature."""
    content = b"".join(
        _field(_FEATURE, _field(_NAME, name.encode()) + _field(_CONTENT, _feature(value)))
        for name, value in features.items()
    )
    return _field(_FEATURES, content)


def _masked(data: bytes | memoryview) -> int:
    crc = _native.crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_ADDS) & 0xFFFFFFFF


def _feature(value: bytes | SupportsInt) -> bytes:
    if isinstance(value, bytes):
        return _field(_BYTES_LIST, _field(_VALUE, value))
    return _field(_INT64_LIST, _field(_VALUE, _varint(value)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: SupportsInt) -> bytes:
    value = int(value) & (1 << _VARINT_BITS) - 1  # a number of NumPy would overflow
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


# --------------------------------------------------------------------------------------------------
# Decode blocks to arrays like DLIO's readers, but without pickle.


#: The local file header: PKWARE's APPNOTE.TXT, 4.3.7.
_ZIP_HEADER_NBYTES: Final = 30
_ZIP_NAME_LENGTH_AT: Final = 26


def npz(block: memoryview) -> Any:
    """Return the array ``x`` of an .npz file; verify its checksum in the file."""
    with zipfile.ZipFile(_BlockFile(block)) as archive:
        member = archive.getinfo("x.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            return npy(memoryview(archive.read(member)))
        with archive.open(member):  # verifies the local header against the directory
            pass
    content = block[_content_at(block, member.header_offset) :][: member.file_size]
    if zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile("Bad CRC-32 for 'x.npy'")
    return npy(content)


def npy(block: memoryview) -> Any:
    """Return the array of an .npy file as a view of the block."""
    file = _BlockFile(block)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, by_columns, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        raise ValueError("objects are pickled, and allow_pickle=False")
    count = math.prod(shape)
    array = np.frombuffer(block, dtype=dtype, count=count, offset=file.tell())
    return array.reshape(shape, order="F" if by_columns else "C")


def _content_at(block: memoryview, header: int) -> int:
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", block, header + _ZIP_NAME_LENGTH_AT)
    return header + _ZIP_HEADER_NBYTES + int(name_nbytes + extra_nbytes)


class _BlockFile(io.RawIOBase):
    """A block as a file object that copies only the bytes that are read."""

    def __init__(self, block: memoryview) -> None:
        self._block = block
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._block)}[whence]
        at: int = start + offset
        if at < 0:
            raise OSError("a seek before the start")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        found = self._block[self._at : self._at + len(out)]
        out[: len(found)] = found
        self._at += len(found)
        return len(found)


def image(block: memoryview) -> Any:
    """Return the pixels of a JPEG or PNG file."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(block)))


def hdf5(block: memoryview) -> Any:
    """Return the records of an HDF5 file: those of ``records``, or of ``records_0``, ….

    Several datasets of records are one array: after the axis of samples comes one of datasets.
    """
    import h5py

    with h5py.File(_BlockFile(block), "r") as file:
        names = sorted(name for name in file if name.startswith("records"))
        arrays = [file[name][()] for name in names]
    if not arrays:
        raise ValueError("it has no dataset 'records' or 'records_0'")
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)


def csv(block: memoryview) -> Any:
    """Return the rows of a CSV file; some releases write a header, whose first cell is empty."""
    import pandas as pd

    header = 0 if bytes(block[:1]) == b"," else None
    return pd.read_csv(_BlockFile(block), header=header).to_numpy()


def tfrecord(block: memoryview) -> Any:
    """Return the images of a TFRecord file's examples, or the bytes of other records."""
    return [np.frombuffer(image_of(record), dtype=np.uint8) for record in records(block)]


_DECODERS: Final[Mapping[str, Callable[[memoryview], Any]]] = MappingProxyType(
    {
        "npz": npz,
        "npy": npy,
        "jpeg": image,
        "png": image,
        "hdf5": hdf5,
        "csv": csv,
        "tfrecord": tfrecord,
    }
)
#: Formats whose last axis is the sample; in the other formats it is the first axis.
_SAMPLES_LAST: Final = frozenset({"npz", "npy"})
_WHOLE: Final = frozenset({"jpeg", "png"})
#: Exceptions that the libraries raise for corrupt bytes: pillow a SyntaxError, zipfile a
#: RuntimeError for the flag "encrypted".
_DAMAGE: Final = (
    *(ValueError, OSError, EOFError, LookupError, SyntaxError, RuntimeError, TypeError),
    *(MemoryError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error),
    tokenize.TokenError,  # for an .npy header
    Warning,  # for an .npy header of Python 2, if warnings are errors
)


def check_format(name: str) -> None:
    """Refuse a format that is not supported.

    Raises:
        UnsupportedError: the error lists the supported formats.
    """
    if name not in _DECODERS and name not in INDEXED:
        raise UnsupportedError(
            f"DLIO on kvio reads {', '.join((*_DECODERS, *sorted(INDEXED)))}, not {name}; "
            "kvio.decode=false reads any format without decoding it"
        )


def decode(name: str, block: memoryview, *, key: str) -> Any:
    """Decode a block in one of DLIO's formats to an array.

    Raises:
        CorruptBlockError: the bytes are not in that format; the error names the block.
    """
    check_format(name)
    try:
        return _DECODERS[name](block)
    except _DAMAGE as exc:
        raise CorruptBlockError(f"block {key!r} is no {name} sample: {exc}", key=key) from exc


def sample(name: str, array: Any, number: int, *, key: str) -> Any:
    """Return one sample of a decoded block.

    Raises:
        CorruptBlockError: the block has fewer samples; the error names the block.
    """
    if name in _WHOLE:
        return array
    try:
        return array[..., number] if name in _SAMPLES_LAST else array[number]
    except IndexError as exc:
        raise CorruptBlockError(f"block {key!r} has no sample {number}: {exc}", key=key) from exc
