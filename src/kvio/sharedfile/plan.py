"""The fixed part of a map, which all writers of a shared file share; see docs/format.md."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvio import _native
from kvio.errors import ConfigError
from kvio.sharedfile.layout import MAX_WRITERS, Layout

#: 32 or 64 bits a number.
Width: TypeAlias = Literal["I", "Q"]


def pack_words(width: Width, numbers: Sequence[int]) -> bytes:
    """Encode unsigned integers."""
    words = array(width, numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack_words(width: Width, data: bytes) -> tuple[int, ...]:
    """Decode unsigned integers; *data* holds a whole number of them."""
    words = array(width, data)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


MAGIC: Final = b"KVIOMAP\n"
VERSION: Final = 2
FLAG_DIRECT: Final = 1
FLAG_CHECKSUM: Final = 2
FLAG_DURABLE: Final = 4
FLAG_INDEX: Final = 8
FLAG_REPLACE: Final = 16
FLAG_SIDECAR: Final = 32
_KNOWN_FLAGS: Final = 63

_FIXED = struct.Struct("<8sHHI16s16sQQQQIII32x")
_CRC = struct.Struct("<I")
HEAD_BYTES: Final = _FIXED.size + _CRC.size  # 128
#: After the head: state, progress and the number of processes that wait for it, whether a seal
#: must read all bytes again, and the device and inode of the data.
STATE_AT: Final = 128
PROGRESS_AT: Final = 132
WAITERS_AT: Final = 136
REREAD_AT: Final = 140
INODE_AT: Final = 144
WRITERS_AT: Final = 192
#: Of each writer: its state, the errno of its failure, its process.
WRITER_BYTES: Final = 16


class PlanError(ValueError):
    """These bytes are not the beginning of a map; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The fixed properties of a shared file.

    Attributes:
        file_id: 16 random bytes that distinguish this file from others of its name.
        boot_id: the boot of the machine that made it; the mapped counts are lost with it.
        layout: the bytes of each writer.
        memory_align: the alignment of memory that direct I/O needs.
        direct, checksum, durable: how bytes are written; *index*: whether checksums are kept in
            the sealed file; *replace*: whether an existing file is replaced.
        sidecar: whether checksums are kept in a file beside the sealed one.
        file_mode: the permissions of the sealed file and its sidecar.
    """

    file_id: bytes
    boot_id: bytes
    layout: Layout
    memory_align: int
    direct: bool
    checksum: bool
    durable: bool
    index: bool
    replace: bool
    sidecar: bool = False
    file_mode: int = 0o400

    @property
    def flags(self) -> int:
        """The options as bits."""
        return (
            FLAG_DIRECT * self.direct
            | FLAG_CHECKSUM * self.checksum
            | FLAG_DURABLE * self.durable
            | FLAG_INDEX * self.index
            | FLAG_REPLACE * self.replace
            | FLAG_SIDECAR * self.sidecar
        )

    @property
    def sizes_at(self) -> int:
        """The offset of the sizes of domains in the map."""
        return WRITERS_AT + WRITER_BYTES * self.layout.writers

    @property
    def cells_at(self) -> int:
        """The offset of the cells, 8 bytes each."""
        return self.sizes_at + 8 * len(self.layout.sizes)

    @property
    def blocks_at(self) -> int:
        """The offset of file blocks with several writers, aligned as in the file."""
        end = self.cells_at + 8 * self.layout.cells
        align = max(self.layout.align, 4096)
        return -(-end // align) * align

    @property
    def map_nbytes(self) -> int:
        """The length of the map."""
        return self.blocks_at + len(self.layout.shared_blocks) * self.layout.align


def pack(plan: Plan) -> tuple[bytes, bytes]:
    """Encode a plan: the head of the map, and the sizes at `Plan.sizes_at`."""
    layout = plan.layout
    sizes = pack_words("Q", layout.sizes)
    head = _FIXED.pack(
        MAGIC, VERSION, plan.flags, layout.writers, plan.file_id, plan.boot_id, layout.size,
        layout.cell_bytes, layout.stripe_bytes, len(layout.sizes), layout.align, plan.memory_align,
        plan.file_mode,
    )  # fmt: skip
    return head + _CRC.pack(_native.crc32c(sizes, _native.crc32c(head))), sizes


def room_of(head: bytes) -> int:
    """Return how many more bytes after a map's first ones `unpack` needs."""
    fields = _FIXED.unpack_from(head)
    writers, nsizes = (min(int(fields[place]), MAX_WRITERS) for place in (3, 9))
    return WRITER_BYTES * writers + 8 * nsizes


def unpack(data: bytes, nbytes: int) -> Plan:
    """Decode and check the beginning of a map of *nbytes* bytes.

    Raises:
        PlanError: it is not a map, of another version, damaged, or truncated.
    """
    if len(data) < WRITERS_AT:
        raise PlanError("shorter than a map's head")
    (magic, version, flags, writers, file_id, boot_id, size, cell_bytes, stripe_bytes, nsizes,
     align, memory_align, file_mode) = _FIXED.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise PlanError("it does not begin as a map of a shared file does")
    if version != VERSION or flags & ~_KNOWN_FLAGS:
        raise PlanError(f"version {version} with flags {flags} is not known to this kvio")
    if writers > MAX_WRITERS or nsizes > MAX_WRITERS:
        raise PlanError(f"{writers} writers, {nsizes} sizes")
    at = WRITERS_AT + WRITER_BYTES * writers
    sizes = data[at : at + 8 * nsizes]
    crc = _CRC.unpack_from(data, _FIXED.size)[0]
    if len(sizes) < 8 * nsizes or crc != _native.crc32c(sizes, _native.crc32c(data[: _FIXED.size])):
        raise PlanError("the checksum of its head is wrong")
    try:
        layout = Layout(size, writers, align, cell_bytes, stripe_bytes, unpack_words("Q", sizes))
    except ConfigError as exc:
        raise PlanError(str(exc)) from exc
    plan = Plan(
        file_id, boot_id, layout, memory_align, bool(flags & FLAG_DIRECT),
        bool(flags & FLAG_CHECKSUM), bool(flags & FLAG_DURABLE), bool(flags & FLAG_INDEX),
        bool(flags & FLAG_REPLACE), bool(flags & FLAG_SIDECAR), file_mode,
    )  # fmt: skip
    if file_mode & ~0o777:
        raise PlanError(f"permissions {file_mode:o}")
    if not 1 <= memory_align <= _native.lib.KVIO_MAX_ALIGN or plan.map_nbytes != nbytes:
        raise PlanError(f"it has {nbytes} bytes, not {plan.map_nbytes}")
    return plan
