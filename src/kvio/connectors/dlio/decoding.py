"""Blocks to arrays, as DLIO's own readers make them; never through a pickle."""

from __future__ import annotations

import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from kvio.connectors.dlio.plan import INDEXED
from kvio.connectors.dlio.tfrecord import image_of, records
from kvio.errors import CorruptBlockError, UnsupportedError

#: Of a local header: APPNOTE.TXT of PKWARE, 4.3.7.
_ZIP_HEADER_NBYTES: Final = 30
_ZIP_NAME_LENGTH_AT: Final = 26


def npz(block: memoryview) -> Any:
    """Give the array ``x`` of an .npz file; the file's own checksum of it is verified."""
    with zipfile.ZipFile(_BlockFile(block)) as archive:
        member = archive.getinfo("x.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            return npy(memoryview(archive.read(member)))
        with archive.open(member):  # checks that the member is where the directory says
            pass
    content = block[_content_at(block, member.header_offset) :][: member.file_size]
    if zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile("Bad CRC-32 for 'x.npy'")
    return npy(content)


def npy(block: memoryview) -> Any:
    """Give the array of an .npy file: the bytes of the block, not a copy of them."""
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
    """A block as a file, of which only what is read is copied."""

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
    """Give the pixels of a JPEG or PNG file."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(block)))


def hdf5(block: memoryview) -> Any:
    """Give the records of an HDF5 file."""
    import h5py

    with h5py.File(_BlockFile(block), "r") as file:
        return file["records"][()]


def csv(block: memoryview) -> Any:
    """Give the rows of a CSV file."""
    import pandas as pd

    return pd.read_csv(_BlockFile(block)).to_numpy()


def tfrecord(block: memoryview) -> Any:
    """Give the images of a TFRecord file's examples; of other records, the bytes."""
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
#: The last axis of these numbers the samples; the first one of the others.
_SAMPLES_LAST: Final = frozenset({"npz", "npy"})
_WHOLE: Final = frozenset({"jpeg", "png"})
#: What the libraries raise of bytes that are damaged: pillow a SyntaxError, zipfile a RuntimeError
#: for a flag that says encrypted.
_DAMAGE: Final = (
    *(ValueError, OSError, EOFError, LookupError, SyntaxError, RuntimeError, TypeError),
    *(MemoryError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error),
    tokenize.TokenError,  # of a header of .npy
    Warning,  # of one as Python 2 wrote it, where warnings are errors
)


def check_format(name: str) -> None:
    """Refuse a format that is not read here.

    Raises:
        UnsupportedError: with the formats that are.
    """
    if name not in _DECODERS and name not in INDEXED:
        raise UnsupportedError(
            f"DLIO on kvio reads {', '.join((*_DECODERS, *sorted(INDEXED)))}, not {name}; "
            "kvio.decode=false reads any format's bytes without a look at them"
        )


def decode(name: str, block: memoryview, *, key: str) -> Any:
    """Make an array of a block in a format of DLIO's.

    Raises:
        CorruptBlockError: the bytes are not of that format; it names the block.
    """
    check_format(name)
    try:
        return _DECODERS[name](block)
    except _DAMAGE as exc:
        raise CorruptBlockError(f"block {key!r} is no {name} sample: {exc}", key=key) from exc


def sample(name: str, array: Any, number: int, *, key: str) -> Any:
    """Give one sample of a decoded block, as the reader of its format does.

    Raises:
        CorruptBlockError: the block has fewer; it names the block.
    """
    if name in _WHOLE:
        return array
    try:
        return array[..., number] if name in _SAMPLES_LAST else array[number]
    except IndexError as exc:
        raise CorruptBlockError(f"block {key!r} has no sample {number}: {exc}", key=key) from exc
