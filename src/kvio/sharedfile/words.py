"""Arrays of little-endian integers as bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Literal, TypeAlias

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
