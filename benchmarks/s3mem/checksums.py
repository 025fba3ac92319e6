"""The digests that S3 knows of a body: made, compared with what the client sent."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias

from benchmarks.s3mem.errors import S3Error

Views: TypeAlias = Sequence[memoryview]

_CRC32C: Final = 0x82F63B78
_CRC64NVME: Final = 0x9A6C9329AC4BC9B5


def hashed(name: str, views: Views) -> bytes:
    """Return the digest of a body by an algorithm of hashlib."""
    digest = hashlib.new(name, usedforsecurity=False)
    for view in views:
        digest.update(view)
    return digest.digest()


def verify(headers: Mapping[str, str], views: Views) -> dict[str, str]:
    """Compare a body with the Content-MD5 and the checksums among *headers*.

    Returns:
        The ``x-amz-checksum-*`` headers that held.

    Raises:
        S3Error: ``BadDigest``, or ``InvalidDigest`` for a value that can be no digest.
    """
    if (md5 := headers.get("content-md5")) is not None:
        _compare("content-md5", md5, hashed("md5", views))
    held = {}
    for name, value in headers.items():
        if name.startswith("x-amz-checksum-") and name not in _NOT_VALUES:
            algorithm = _ALGORITHMS.get(name.removeprefix("x-amz-checksum-"))
            if algorithm is None:
                raise S3Error("InvalidRequest", f"{name} is no checksum known here.")
            _compare(name, value, algorithm(views))
            held[name] = value
    return held


def _compare(name: str, given: str, actual: bytes) -> None:
    try:
        wanted = base64.b64decode(given, validate=True)
    except binascii.Error:
        raise S3Error("InvalidDigest", f"{name} is not base64.") from None
    if len(wanted) != len(actual):
        raise S3Error("InvalidDigest" if name == "content-md5" else "InvalidRequest")
    if wanted != actual:
        raise S3Error("BadDigest", f"{name} did not match what we received.")


def _crc32(views: Views) -> bytes:
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value.to_bytes(4, "big")


@cache
def _table(polynomial: int) -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return table


def _by_table(polynomial: int, nbytes: int) -> Callable[[Views], bytes]:
    """A checksum the standard library lacks: about 20 MB/s, enough for tests."""

    def checksum(views: Views) -> bytes:
        table = _table(polynomial)
        mask = value = (1 << 8 * nbytes) - 1
        for view in views:
            for byte in view:
                value = value >> 8 ^ table[(value ^ byte) & 0xFF]
        return (value ^ mask).to_bytes(nbytes, "big")

    return checksum


_ALGORITHMS: Final[Mapping[str, Callable[[Views], bytes]]] = {
    "crc32": _crc32,
    "crc32c": _by_table(_CRC32C, 4),
    "crc64nvme": _by_table(_CRC64NVME, 8),
    "sha1": lambda views: hashed("sha1", views),
    "sha256": lambda views: hashed("sha256", views),
}
_NOT_VALUES: Final = frozenset(
    ("x-amz-checksum-mode", "x-amz-checksum-algorithm", "x-amz-checksum-type")
)
