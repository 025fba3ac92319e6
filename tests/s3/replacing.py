"""What a store reads of an object that another writer replaces between two requests of a call.

A process of its own, as one library knows one server in a process:
``python -m tests.s3.replacing LIBRARY LAYOUT`` prints JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import kvio
from kvio import MiB
from kvio.testing.payloads import payload
from tests.s3.faulty import FaultyServer, Seen
from tests.s3.libraries import open_s3

PART_BYTES: Final = 5 * MiB
#: A block in one part, and one in two.
SIZES: Final = {"small": 1000, "large": 6 * MiB}
#: By how much the block is longer that takes the other's place.
CHANGES: Final = (-40, 0, 40)
#: More requests than any call makes of a block that changes once.
MOST_REQUESTS: Final = 24
#: More blocks than any call meets between asking for an object and asking for it again.
VERSIONS: Final = 12
BUCKET: Final = "bucket"
OBJECT: Final = "p/k"


class Call(NamedTuple):
    """What is asked of a store, and the right answer where the block stays as it is."""

    make: Callable[[kvio.Store], object]
    right: Callable[[bytes], object]


def _into(store: kvio.Store) -> bytes:
    out = bytearray(SIZES["large"] + 1000)
    return bytes(out[: store.read_block_into("k", out)])


def _verified(store: kvio.Store) -> object:
    result = store.verify_block("k")
    return result.error or result.status


def _range(offset: int, nbytes: int) -> Call:
    return Call(
        lambda store: bytes(store.read_block("k", offset=offset, nbytes=nbytes)),
        lambda block: block[offset : offset + nbytes],
    )


CALLS: Final[Mapping[str, Call]] = {
    "read": Call(lambda store: bytes(store.read_block("k")), lambda block: block),
    "read into memory": Call(_into, lambda block: block),
    "read the end": _range(900, SIZES["large"]),
    "read the middle": _range(7, 980),
    "verify": Call(_verified, lambda _: kvio.BlockStatus.OK),
}


class Replacing:
    """Another writer of one block, who acts between a store's requests."""

    def __init__(self, server: FaultyServer, store: kvio.Store, blocks: Sequence[bytes]) -> None:
        self._server = server
        self._store = store
        self.blocks = blocks
        self._objects = [self._object_of(block) for block in blocks]

    def _object_of(self, block: bytes) -> bytes:
        self._store.write_block("k", block, if_exists="replace")
        found = self._server.get(BUCKET, OBJECT)
        assert found is not None
        return found

    def place(self, version: int) -> None:
        """Store a block."""
        self._server.put(BUCKET, OBJECT, self._objects[version])

    def answer(self, call: Call, after: Callable[[int], int | None]) -> tuple[object, int]:
        """Make a call; after each of its requests the version that *after* names is placed."""
        requests = itertools.count(1)
        made = 0

        def watch(seen: Seen) -> None:
            nonlocal made
            if seen.key == OBJECT:
                made = next(requests)
                version = after(made)
                if version is not None:
                    self.place(version)

        self.place(0)
        self._server.watch = watch
        try:
            return call.make(self._store), made
        except kvio.KvioError as exc:
            return exc, made
        finally:
            self._server.watch = lambda _: None


def replaced_once(server: FaultyServer, store: kvio.Store, nbytes: int) -> dict[str, Any]:
    """Replace a block after each request of each call in turn."""
    replaced, wrong = 0, []
    for change in CHANGES:
        other = Replacing(server, store, [payload(nbytes, 1), payload(nbytes + change, 2)])
        for name, call in CALLS.items():
            right = [call.right(block) for block in other.blocks]
            for number in range(1, MOST_REQUESTS):
                got, made = other.answer(call, {number: 1}.get)
                if got not in right:
                    wrong.append(f"{name}, {change:+} bytes after request {number}: {_said(got)}")
                if made < number:
                    break
                replaced += 1
            else:
                wrong.append(f"{name} made {MOST_REQUESTS} requests")
    return {"replaced": replaced, "wrong": wrong}


def replaced_each_time(server: FaultyServer, store: kvio.Store) -> dict[str, Any]:
    """Replace a block after every request of a call."""
    nbytes = SIZES["large"]
    blocks = [payload(nbytes + 40 * (seed % 2), seed) for seed in range(VERSIONS)]
    other = Replacing(server, store, blocks)
    outcomes: Counter[str] = Counter()
    for name, call in CALLS.items():
        got, _ = other.answer(call, lambda number: number % VERSIONS)
        if got in [call.right(block) for block in blocks]:
            outcomes["whole"] += 1
        elif isinstance(got, kvio.TransientStorageError | kvio.BlockSizeError):
            outcomes[type(got).__name__] += 1
        else:
            outcomes[f"{name}: {_said(got)}"] += 1
    return dict(outcomes)


def _said(got: object) -> str:
    return f"{len(got)} bytes" if isinstance(got, bytes) else repr(got)


def main(library: str, layout: Literal["block", "plain"]) -> None:
    """Print what was read."""
    options = {"part_bytes": PART_BYTES, "retries": 0}
    with (
        FaultyServer() as server,
        open_s3(library, server.endpoint, BUCKET, prefix="p", layout=layout, options=options) as s,
    ):
        reported = {name: replaced_once(server, s, nbytes) for name, nbytes in SIZES.items()}
        print(json.dumps({"once": reported, "each time": replaced_each_time(server, s)}))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
