"""What is done to one stored block, counted; the same for every reader and for broken ones.

Two things are no rot that a reader could find, and are not counted: a flipped byte of the zero
padding, of which nothing is ever returned (the block comes back whole), and an older block of the
same key, which is a legal block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import kvio
from tests.faults.rot import damage, reading

TRAILER_BYTES: Final = 64
#: A format's padding is shorter.
MAX_PADDING_BYTES: Final = 65_536


class Place(Protocol):
    """What holds one block and can be damaged: a file, or an object."""

    whole: bytes

    def byte(self, at: int, value: int) -> AbstractContextManager[None]:
        """Have another value at a place for a while."""

    def content(self, content: bytes) -> AbstractContextManager[None]:
        """Have other content for a while."""


@dataclass(slots=True)
class Campaign:
    """Damages a block in every way and keeps count.

    Attributes:
        tier: before the store, and read through as well.
        flips: how many times the block was damaged.
        detected: how many of these every way to read it noticed.
        missed: the first of the others, and who was taken in.
    """

    store: kvio.Store
    key: str
    payload: bytes
    place: Place
    dice: random.Random
    tier: kvio.StagingTier | None = None
    flips: int = 0
    detected: int = 0
    missed: list[str] = field(default_factory=list)

    def trailer(self, *, count: int | None = None) -> None:
        """Change every byte of the trailer, or some: nobody may look past it."""
        whole = self.place.whole
        at = len(whole) - TRAILER_BYTES
        several = (
            damage.flips(whole, at, len(whole), self.dice)
            if count is None
            else damage.sampled(whole, at, len(whole), self.dice, count)
        )
        for place, value in several:
            with self.place.byte(place, value):
                self._look(f"byte {place - at} of the trailer is {value:#x}", reading.ALL)

    def checksummed(self, count: int) -> None:
        """Change bytes of the payload: who reads it whole notices, a range elsewhere is right."""
        for at, value in damage.sampled(self.place.whole, 0, len(self.payload), self.dice, count):
            with self.place.byte(at, value):
                self._look(f"byte {at} of the payload is {value:#x}", reading.WHOLE)
                self._elsewhere(at)

    def padding(self, count: int) -> None:
        """Change bytes of the padding: the block comes back whole, or is refused."""
        start, stop = len(self.payload), len(self.place.whole) - TRAILER_BYTES
        for at, value in damage.sampled(self.place.whole, start, stop, self.dice, count):
            with self.place.byte(at, value):
                try:
                    got = bytes(self.store.read_block(self.key))
                except kvio.CorruptBlockError:
                    continue
                assert got == self.payload, f"padding at {at} is in what was read"

    def contents(self, contents: Iterator[tuple[str, bytes]]) -> None:
        """Put other content in the block's place: it is no block of this key."""
        for name, content in contents:
            with self.place.content(content):
                readers = reading.ALL
                if content[-TRAILER_BYTES:] == self.place.whole[-TRAILER_BYTES:]:
                    readers = reading.WHOLE  # the trailer is as it was; only the payload can tell
                self._look(name, readers)

    def shapes(self, count: int) -> None:
        """Cut it, lengthen it, and lose or exchange its pages."""
        whole, end = self.place.whole, len(self.payload)
        cuts = damage.lengths(len(whole), self.dice, count)
        self.contents((f"cut to {n} bytes", whole[:n]) for n in cuts)
        self.contents(iter(damage.extensions(whole, self.dice)))
        zeros = bytes(damage.PAGE_BYTES)
        self.contents(damage.overwritten(whole, end, zeros, "zeros"))
        self.contents(damage.overwritten(whole, end, whole[-damage.PAGE_BYTES :], "its end"))
        foreign = random.Random(77).randbytes(damage.PAGE_BYTES)
        self.contents(damage.overwritten(whole, end, foreign, "another block's page"))
        self.contents(iter([("all zeros", bytes(len(whole))), ("nothing", b"")]))
        self._misfits()

    def _misfits(self) -> None:
        """Put the trailer behind more or less than it says: a range must not trust it either."""
        whole, end = self.place.whole, len(self.payload)
        trailer = whole[-TRAILER_BYTES:]
        for extra in (MAX_PADDING_BYTES, MAX_PADDING_BYTES + 1, 1 << 20):
            self._behind(f"{extra} bytes of padding", self.payload + bytes(extra) + trailer)
        for less in {1, 2, 64, end // 2, end}:
            if 0 < less <= end:
                self._behind(f"{less} bytes fewer", self.payload[: end - less] + trailer)

    def _behind(self, name: str, content: bytes) -> None:
        with self.place.content(content):
            self._look(f"{name} before the trailer", reading.ALL)

    def healed(self) -> None:
        """Check that the harness damaged the block and nothing else: healed, it is whole."""
        assert bytes(self.store.read_block(self.key)) == self.payload
        assert self.store.verify_block(self.key).ok
        if self.tier is not None:
            assert bytes(self.tier.read_block(self.key)) == self.payload
            with self.tier.open(self.key, "rb") as file:
                assert file.read() == self.payload

    def _look(self, name: str, readers: reading.Readers) -> None:
        self.flips += 1
        nbytes = len(self.payload)
        taken = reading.taken_in(readers, self.store, self.key, nbytes, tier=self.tier)
        if taken:
            self.missed += [f"{name}: {', '.join(taken)}"] * (len(self.missed) < 20)
        else:
            self.detected += 1

    def _elsewhere(self, damaged: int) -> None:
        """Read a range without the damaged byte: only the trailer vouches for it, and it is right.

        A range with that byte in it is delivered as it lies there; docs/durability.md says so.
        """
        start = self.dice.randrange(len(self.payload))
        stop = self.dice.randrange(start, len(self.payload)) + 1
        if start <= damaged < stop:
            return
        got = self.store.read_block(self.key, offset=start, nbytes=stop - start)
        assert bytes(got) == self.payload[start:stop], f"range {start} to {stop}"
