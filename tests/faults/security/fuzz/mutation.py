"""Text and bytes that were valid once: a mutator with a seed, in the way of AFL, few lines."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Final

_NUMBERS: Final = (0, 1, 7, 63, 127, 128, 255, 256, 4095, 4096, 0x7FFF, 0xFFFF, 0x7FFFFFFF)
_HUGE: Final = (0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_TEXTS: Final = (
    *("", "\0", "\n", " ", "..", "../", "//", "%00", "%2e%2e", "~", "\u202e", "é", "\ud800"),
    *("0" * 40, "9" * 30, "-1", "1e999", "nan", "inf", "0x10", "١٢", "1_000", "A" * 300, "://"),
)


def mutate(data: bytes, dice: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Change some bytes: flipped, replaced, cut, doubled, or spliced with those of another."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(8):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << dice.randrange(8)
            case 2 if at < len(changed):
                changed[at] = dice.randrange(256)
            case 3:
                width = dice.choice(("<H", "<I", "<Q"))
                limit = (1 << 8 * struct.calcsize(width)) - 1
                number = dice.choice((*_NUMBERS, *_HUGE)) & limit
                packed = struct.pack(width, number)
                changed[at : at + len(packed)] = packed
            case 4:
                del changed[at : at + dice.choice((1, 2, 8, 64, 1 << 20))]
            case 5:
                changed[at:at] = changed[at : at + dice.randrange(1, 64)] * dice.choice((1, 2, 9))
            case 6 if others:
                other = dice.choice(others)
                changed[at:] = other[dice.randrange(len(other) + 1) :]
            case _:
                changed[at:at] = dice.randbytes(dice.randrange(1, 9))
    return bytes(changed)


def mutate_text(text: str, dice: random.Random) -> str:
    """Change some characters of a text, or put in what parsers stumble over."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(len(text) + 1)
        match dice.randrange(5):
            case 0:
                text = text[:at] + text[at + dice.randrange(1, 9) :]
            case 1:
                text = text[:at] + text[at : at + 20] * 2 + text[at + 20 :]
            case 2:
                text = text[:at] + chr(dice.choice((32, 44, 45, 58, 47, 92, 61, 38))) + text[at:]
            case 3:
                text = text[:at] + chr(dice.randrange(1, 0xD7FF)) + text[at + 1 :]
            case _:
                text = text[:at] + dice.choice(_TEXTS) + text[at:]
    return text


def fuzz(
    samples: Sequence[bytes],
    parse: Callable[[bytes], object],
    allowed: tuple[type[Exception], ...],
    *,
    dice: random.Random,
    rounds: int,
    seal: Callable[[bytes], bytes] | None = None,
) -> int:
    """Parse mutants of samples; how many were taken. What is not *allowed* comes out.

    Half of them are sealed again, where there is a way: their checksums are right.
    """
    taken = 0
    for number in range(rounds):
        data = mutate(dice.choice(samples), dice, samples)
        if seal is not None and dice.randrange(2):
            data = seal(data)
        try:
            parse(data)
            taken += 1
        except allowed:
            continue
        except BaseException as exc:
            exc.add_note(f"round {number}: {data[:500]!r}")
            raise
    return taken
