"""The 64-byte trailer that ends every block of ``layout=block``; see docs/format.md.

The POSIX backends read and write it in C (``_native/trailer.c``); this module does the same for
backends in Python, and is the reference in tests.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

TRAILER_BYTES: Final = 64
MAGIC: Final = b"KVIOBLK\n"
VERSION: Final = 1
FLAG_CHECKSUM: Final = 1
#: Zero padding between payload and trailer is shorter than this.
MAX_PADDING_BYTES: Final = 65536

_HEAD = struct.Struct("<8sHHIQ16s20x")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Trailer:
    """The fields of a trailer; *checksum* is None if none was computed."""

    nbytes: int
    checksum: int | None
    key_hash: bytes


class TrailerError(ValueError):
    """These bytes are not a valid trailer; the message says why."""


def key_hash(namespace: str, key: str) -> bytes:
    """Return the BLAKE2b-128 of a namespace and key in UTF-8, joined by a zero byte."""
    return hashlib.blake2b(f"{namespace}\0{key}".encode(), digest_size=16).digest()


def pack_trailer(trailer: Trailer, crc32c: Callable[[bytes], int]) -> bytes:
    """Encode a trailer; *crc32c* computes the checksum of its first 60 bytes."""
    flags = 0 if trailer.checksum is None else FLAG_CHECKSUM
    head = _HEAD.pack(
        MAGIC, VERSION, flags, trailer.checksum or 0, trailer.nbytes, trailer.key_hash
    )
    return head + _CRC.pack(crc32c(head))


def unpack_trailer(
    data: bytes, *, stored_nbytes: int, expected_key_hash: bytes, crc32c: Callable[[bytes], int]
) -> Trailer:
    """Decode and check a trailer, the last 64 of *stored_nbytes* bytes.

    Raises:
        TrailerError: magic, version, checksum, length or key is wrong.
    """
    if len(data) != TRAILER_BYTES or stored_nbytes < TRAILER_BYTES:
        raise TrailerError("shorter than a trailer")
    magic, version, flags, checksum, nbytes, stored_hash = _HEAD.unpack(data[:60])
    if magic != MAGIC:
        raise TrailerError("no kvio trailer at the end")
    if version != VERSION or flags > FLAG_CHECKSUM:
        raise TrailerError(f"trailer version {version} with flags {flags} is not known")
    if crc32c(data[:60]) != _CRC.unpack(data[60:])[0]:
        raise TrailerError("the trailer's own checksum is wrong")
    padding = stored_nbytes - TRAILER_BYTES - nbytes
    if not 0 <= padding < MAX_PADDING_BYTES:
        raise TrailerError(f"a payload of {nbytes} bytes does not fit {stored_nbytes} stored bytes")
    if stored_hash != expected_key_hash:
        raise TrailerError("the block belongs to another key or namespace")
    return Trailer(nbytes, checksum if flags & FLAG_CHECKSUM else None, stored_hash)
