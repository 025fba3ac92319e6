"""What blocks of the workload hold: every byte follows from the place, the key and the version."""

from __future__ import annotations

import hashlib
import struct
from typing import Final

_HEADER: Final = struct.Struct("<I")
_LARGEST: Final = 96 << 10


def content(place: str, key: str, version: int) -> bytes:
    """Return the bytes of a block, of a length of its own; the first four say the version."""
    source = hashlib.shake_128(f"{place} {key} {version}".encode())
    nbytes = _HEADER.size + int.from_bytes(source.digest(4)) % _LARGEST
    return _HEADER.pack(version) + source.digest(nbytes - _HEADER.size)


def version_of(data: bytes, place: str, key: str) -> int | None:
    """Return which version of a key some bytes are; None: they are none, or not whole."""
    if len(data) < _HEADER.size:
        return None
    (version,) = _HEADER.unpack_from(data)
    return int(version) if data == content(place, key, version) else None
