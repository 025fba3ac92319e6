"""The functions that accept a small block: its length, and a copy with its checksum."""

from __future__ import annotations

import array
import ctypes

import google_crc32c
import numpy as np
import pytest

from kvio._native import copy_small, flat_nbytes


def test_a_flat_buffer_has_its_length_in_bytes() -> None:
    """Of numbers of any width; anything else is left to the slow path."""
    assert flat_nbytes("a/b", b"bytes") == 5
    assert flat_nbytes("a", memoryview(b"bytes")[1:]) == 4
    assert flat_nbytes("a", array.array("d", [1.0, 2.0])) == 16
    assert flat_nbytes("a", np.zeros((3, 5), np.int16)) == 30
    for other in (
        *("text", None, [b"a", b"b"], memoryview(bytes(8))[::2], np.zeros(4, object)),
        *((ctypes.c_void_p * 2)(), np.zeros(4, ">i4"), np.zeros((4, 4))[:, ::2]),
    ):
        assert flat_nbytes("a", other) is None


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a b", "a" * 201, "\ud800", 5])
def test_an_invalid_key_is_left_to_the_slow_path(key: object) -> None:
    """Which names it."""
    assert flat_nbytes(key, b"bytes") is None


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 4097, 65_536])
def test_what_is_copied_is_summed(nbytes: int) -> None:
    """And nothing around it changes."""
    source, memory = np.random.default_rng(nbytes).bytes(nbytes), bytearray(nbytes + 20)

    assert copy_small(memory, 10, source, True) == google_crc32c.value(source)
    assert memory == bytes(10) + source + bytes(10)
    assert copy_small(memory, 0, source, False) is None


@pytest.mark.parametrize("offset", [4, 2**63])
def test_nothing_is_copied_beyond_the_memory(offset: int) -> None:
    """It is refused, and the memory is as it was."""
    memory = bytearray(8)

    with pytest.raises(ValueError, match="does not fit"):
        copy_small(memory, offset, b"bytes", True)
    with pytest.raises((TypeError, BufferError)):
        copy_small(bytes(8), 0, b"bytes", True)
    assert memory == bytes(8)
