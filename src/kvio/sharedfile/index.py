"""The index of a sealed file: the checksums of its cells, and a trailer; see docs/format.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvio import _native
from kvio.errors import ConfigError
from kvio.sharedfile.layout import Layout
from kvio.sharedfile.plan import pack_words, unpack_words

MAGIC: Final = b"KVIOSHF\n"
VERSION: Final = 1
FLAG_CHECKSUM: Final = 1
TRAILER_BYTES: Final = 96

_HEAD = struct.Struct("<8sHHI16sQQQIIII20x")
_CRC = struct.Struct("<I")


class SealError(ValueError):
    """These bytes are not the end of a sealed shared file; the message says why."""


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a sealed file; *checksums* of its cells, or None if none were computed."""

    file_id: bytes
    layout: Layout
    checksums: Sequence[int] | None


def starts_at(layout: Layout) -> int:
    """Return the offset of a file's index: the first file block after the payload."""
    return -(-layout.size // layout.align) * layout.align


def nbytes_of(layout: Layout, *, checksum: bool) -> int:
    """Return the length of index and trailer."""
    return 8 * len(layout.sizes) + 4 * layout.cells * checksum + TRAILER_BYTES


def pack(index: Index) -> bytes:
    """Encode an index and its trailer."""
    layout = index.layout
    table = pack_words("Q", layout.sizes) + pack_words("I", index.checksums or ())
    flags = 0 if index.checksums is None else FLAG_CHECKSUM
    head = _HEAD.pack(
        MAGIC, VERSION, flags, layout.writers, index.file_id, layout.size, layout.stripe_bytes,
        layout.cells, layout.cell_bytes, layout.align, len(layout.sizes), _native.crc32c(table),
    )  # fmt: skip
    return table + head + _CRC.pack(_native.crc32c(head))


def table_nbytes(trailer: bytes, file_nbytes: int, *, apart: bool = False) -> int:
    """Return the length of the index before a trailer, to be read for `unpack`.

    Args:
        trailer: the last bytes.
        file_nbytes: the length of the file they end.
        apart: the payload is another file, and this one begins with the index.

    Raises:
        SealError: it is no trailer of this version, damaged, or not of a file of this length.
    """
    if len(trailer) != TRAILER_BYTES:
        raise SealError("shorter than a trailer")
    head = trailer[: _HEAD.size]
    magic, version, flags, *_ = fields = _HEAD.unpack(head)
    if magic != MAGIC:
        raise SealError("it does not end as a sealed shared file does, and has no sidecar")
    if version != VERSION or flags & ~FLAG_CHECKSUM:
        raise SealError(f"version {version} with flags {flags} is not known to this kvio")
    if _CRC.unpack(trailer[_HEAD.size :])[0] != _native.crc32c(head):
        raise SealError("the checksum of its trailer is wrong")
    (_, _, _, writers, _, size, stripe_bytes, cells, cell_bytes, align, nsizes, _) = fields
    if not (align and cell_bytes):
        raise SealError("its blocks or cells have no bytes")
    stripes = -(-size // stripe_bytes) if stripe_bytes else writers
    if cells > size // cell_bytes + 2 * stripes:
        raise SealError(f"it cannot have {cells} cells")
    nbytes = int(8 * nsizes + 4 * cells * (flags & FLAG_CHECKSUM))
    whole = nbytes + TRAILER_BYTES + (0 if apart else -(-size // align) * align)
    if whole != file_nbytes:
        raise SealError(f"it has {file_nbytes} bytes, not {whole}")
    return nbytes


def unpack(table: bytes, trailer: bytes, file_nbytes: int, *, apart: bool = False) -> Index:
    """Decode the end of a file of *file_nbytes* bytes and check all it says; *apart* as above.

    Raises:
        SealError: it is not whole, or does not fit the file.
    """
    nbytes = table_nbytes(trailer, file_nbytes, apart=apart)
    (_, _, flags, writers, file_id, size, stripe_bytes, cells, cell_bytes, align, nsizes,
     table_crc) = _HEAD.unpack(trailer[: _HEAD.size])  # fmt: skip
    if len(table) != nbytes or table_crc != _native.crc32c(table):
        raise SealError("the checksum of its index is wrong")
    sizes = unpack_words("Q", table[: 8 * nsizes])
    try:
        layout = Layout(size, writers, align, cell_bytes, stripe_bytes, sizes)
    except ConfigError as exc:
        raise SealError(str(exc)) from exc
    checksums = unpack_words("I", table[8 * nsizes :]) if flags & FLAG_CHECKSUM else None
    if cells != layout.cells:
        raise SealError(f"it has {cells} cells, not {layout.cells}")
    return Index(file_id, layout, checksums)


def whole_checksum(index: Index) -> int | None:
    """Combine the checksums of all cells into that of the payload."""
    if index.checksums is None:
        return None
    checksums = index.checksums
    return _native.crc32c_combine(
        (checksums[number], end - start) for _, number, start, end in index.layout.all_cells()
    )
