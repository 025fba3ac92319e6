"""Make and validate the trailer that ends every object of ``layout=block``."""

from __future__ import annotations

from typing import Final

from kvio import _native
from kvio.errors import CorruptBlockError
from kvio.format import (
    TRAILER_BYTES,
    Trailer,
    TrailerError,
    key_hash,
    pack_trailer,
    unpack_trailer,
)
from kvio.s3 import body
from kvio.types import Parts

NBYTES: Final = TRAILER_BYTES


def make(namespace: str, key: str, nbytes: int, checksum: int | None) -> bytes:
    """Return the trailer of a block."""
    trailer = Trailer(nbytes, checksum, key_hash(namespace, key))
    return pack_trailer(trailer, _native.crc32c)


def parse(end: bytes, *, total: int, namespace: str, key: str) -> Trailer:
    """Parse the last bytes of an object of *total* bytes.

    Raises:
        CorruptBlockError: they are no valid trailer of a block of this key.
    """
    try:
        return unpack_trailer(
            end,
            stored_nbytes=total,
            expected_key_hash=key_hash(namespace, key),
            crc32c=_native.crc32c,
        )
    except TrailerError as exc:
        raise CorruptBlockError(f"block {key!r} is corrupt: {exc}", key=key) from None


def check_payload(trailer: Trailer, payload: Parts, key: str) -> None:
    """Compare a whole payload with the checksum in its trailer.

    Raises:
        CorruptBlockError: the checksums differ.
    """
    if trailer.checksum is not None and body.crc32c(payload) != trailer.checksum:
        raise CorruptBlockError(
            f"block {key!r} is corrupt: the payload's checksum is wrong", key=key
        )
