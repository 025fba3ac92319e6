"""CRC32C by every implementation in the C core, against a published library."""

from __future__ import annotations

import random

import google_crc32c
import pytest

from kvio._native import drop_cache, ffi, lib

#: Around the steps of every implementation: 8, 16, 64, 256 and 2,048 bytes, and several of them.
_LENGTHS = [*range(80), *(n + d for n in (128, 256, 512, 2048, 4096, 65536) for d in (-1, 0, 1, 9))]
_IMPLEMENTATIONS = sorted(name for name in dir(lib) if name.startswith("KVIO_CRC_"))


@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_every_implementation_computes_the_same(name: str) -> None:
    """At every length and alignment, from nothing and going on from another checksum."""
    implementation = getattr(lib, name)
    if not lib.kvio_crc32c_available(implementation):
        pytest.skip(f"this processor lacks the instructions of {name}")
    data = random.Random(1).randbytes(70_000)
    for length in _LENGTHS:
        for start in (0, 1, 7):
            piece = data[start : start + length]
            memory = ffi.from_buffer(piece)
            got = lib.kvio_crc32c_with(implementation, 0, memory, length)
            more = lib.kvio_crc32c_with(implementation, got, memory, length)
            assert got == google_crc32c.value(piece), (length, start)
            assert more == google_crc32c.value(piece + piece), (length, start)


def test_bytes_are_copied_and_summed_at_once() -> None:
    """The copy is the source, its checksum that of the library, and nothing beside is touched."""
    data = random.Random(2).randbytes(70_000)
    for length in _LENGTHS:
        copy = bytearray(length + 2)
        target, source = ffi.from_buffer(copy), ffi.from_buffer(data)
        crc = lib.kvio_crc32c_copy(0, target + 1, source, length)

        assert crc == google_crc32c.value(data[:length])
        assert copy == b"\0" + data[:length] + b"\0"


def test_checksums_of_pieces_are_combined() -> None:
    """As if both pieces had been summed in one go."""
    data = random.Random(3).randbytes(5000)
    for cut in (0, 1, 64, 2500, 4999, 5000):
        first, second = (google_crc32c.value(piece) for piece in (data[:cut], data[cut:]))
        combined = lib.kvio_crc32c_combine(first, second, 5000 - cut)
        assert combined == google_crc32c.value(data)


def test_a_cache_that_cannot_be_dropped_is_an_error() -> None:
    """Of a descriptor that is none."""
    with pytest.raises(OSError, match="descriptor"):
        drop_cache(-1)
