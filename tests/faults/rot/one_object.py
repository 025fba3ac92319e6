"""The campaign on an object of S3, by one library: ``python -m tests.faults.rot.one_object NAME``.

The server is the project's own in memory, so that what it holds can be changed at will. A library
that knows one server in a process has a process of its own.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.faults.rot.campaign import Campaign
from tests.faults.sizes import FULL, seed
from tests.posix import faultlab
from tests.s3.failing import BUCKET, PREFIX, open_faulty, stored
from tests.s3.faulty import FaultyServer

KEY = "models/a"
THOROUGH = "s3+minio"


class Object:
    """An object whose bytes are changed and put back."""

    def __init__(self, server: FaultyServer, key: str, payload: bytes) -> None:
        self._server, self._name = server, f"{PREFIX}/{key}"
        self.whole = stored(key, payload)
        self._put(self.whole)

    @contextmanager
    def byte(self, at: int, value: int) -> Iterator[None]:
        """Have another value at a place for a while."""
        with self.content(self.whole[:at] + bytes([value]) + self.whole[at + 1 :]):
            yield

    @contextmanager
    def content(self, content: bytes) -> Iterator[None]:
        """Have other content for a while."""
        self._put(content)
        yield
        self._put(self.whole)

    def _put(self, content: bytes) -> None:
        self._server.put(BUCKET, self._name, content)


def run(library: str, *, much: bool = FULL) -> dict[str, Any]:
    """Damage an object in many ways; what was counted, and what went unnoticed.

    Every byte of a trailer is changed where there is `much` to do, for one library and one length:
    which bytes are looked at is no library's business.
    """
    reported: dict[str, Any] = {"flips": 0, "detected": 0, "missed": []}
    dice = random.Random(f"{seed()} {library}")
    with FaultyServer() as server, open_faulty(library, server) as store:
        for nbytes in (0, 5, 9001) if much else (9001,):
            payload = faultlab.pattern(2, nbytes)
            done = Campaign(store, KEY, payload, Object(server, KEY, payload), dice)
            every = much and (library, nbytes) == (THOROUGH, 5)
            done.trailer(count=None if every else 100 if much else 12)
            done.checksummed(80 if much else 8)
            done.contents(others(done, dice, 40 if much else 6))
            done.healed()
            reported["flips"] += done.flips
            reported["detected"] += done.detected
            reported["missed"] += done.missed
    return reported


def others(done: Campaign, dice: random.Random, cuts: int) -> Iterator[tuple[str, bytes]]:
    """Yield content that is no block of the key, and blocks that are whole but another's."""
    whole, payload = done.place.whole, done.payload
    for _ in range(cuts):
        length = dice.choice([dice.randrange(len(whole)), len(whole) - 1 - dice.randrange(64)])
        yield f"cut to {length}", whole[:length]
    for extra in (1, 64, 4096, 70_000):
        yield f"{extra} bytes more", whole + bytes(extra)
    for key in ("models/b", "models", "a"):
        yield f"the block of {key}", stored(key, payload)
    yield "all zeros", bytes(len(whole))
    yield "nothing", b""


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
