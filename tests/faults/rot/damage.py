"""One file, damaged in place and healed again, as often as there are ways to damage it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
#: Truncations and extensions of so many bytes are all tried.
NEAR: Final = 70


class Patient:
    """A file whose bytes are changed in place and put back, without kvio's code."""

    def __init__(self, path: Path) -> None:
        path.chmod(0o600)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.whole = path.read_bytes()

    def __enter__(self) -> Patient:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @contextmanager
    def byte(self, at: int, value: int) -> Iterator[None]:
        """Have another value at a place for a while."""
        assert value != self.whole[at]
        os.pwrite(self._fd, bytes([value]), at)
        yield
        os.pwrite(self._fd, self.whole[at : at + 1], at)

    @contextmanager
    def content(self, content: bytes) -> Iterator[None]:
        """Have other content for a while."""
        assert content != self.whole
        self._become(content)
        yield
        self._become(self.whole)

    def _become(self, content: bytes) -> None:
        os.ftruncate(self._fd, len(content))
        os.pwrite(self._fd, content, 0)


def flips(whole: bytes, start: int, stop: int, dice: random.Random) -> Iterator[tuple[int, int]]:
    """Yield, for every byte of a region, each of its bits flipped and one random replacement."""
    for at in range(start, stop):
        yield from ((at, whole[at] ^ 1 << bit) for bit in range(8))
        yield at, other(whole[at], dice)


def sampled(
    whole: bytes, start: int, stop: int, dice: random.Random, count: int
) -> Iterator[tuple[int, int]]:
    """Yield random places of a region with a bit flipped or the byte replaced, its ends always."""
    if start >= stop:
        return
    places = [start, stop - 1, *(dice.randrange(start, stop) for _ in range(count))][:count]
    for at in places:
        bit = dice.randrange(9)
        yield at, whole[at] ^ 1 << bit if bit < 8 else other(whole[at], dice)


def other(value: int, dice: random.Random) -> int:
    """Return any other value of a byte."""
    return (value + dice.randrange(1, 256)) % 256


def lengths(whole: int, dice: random.Random, count: int) -> list[int]:
    """Return lengths to cut a file to: all near its ends, those of pages, and random ones."""
    near = {n for back in range(NEAR) for n in (back, whole - 1 - back)}
    pages = {n + step for n in range(0, whole, PAGE_BYTES) for step in (-1, 0, 1)}
    some = {dice.randrange(whole) for _ in range(count)}
    return sorted(n for n in near | pages | some if 0 <= n < whole)


def extensions(whole: bytes, dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield content with more at its end: zeros, noise, and its own beginning again."""
    for extra in (1, 2, 63, 64, 65, 511, 4095, 4096, 65_535, 65_536, 100_000):
        yield f"{extra} zeros more", whole + bytes(extra)
        yield f"{extra} random bytes more", whole + dice.randbytes(extra)
    yield "itself twice but for its end", whole + whole[:-1]


def overwritten(whole: bytes, stop: int, page: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield content in which one page before *stop* is another."""
    for at in range(0, stop, PAGE_BYTES):
        nbytes = min(PAGE_BYTES, stop - at)
        content = whole[:at] + page[:nbytes] + whole[at + nbytes :]
        if content != whole:
            yield f"{name} over the page at {at}", content
