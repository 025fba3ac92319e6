"""Bar 1: one block through the page cache, against a plain C loop.

Every block of a round has memory of its own, for all contenders alike: a store whose user reads
into one small buffer for ever would be measured in the processor's cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

import kvio
from benchmarks.blockloop import LOOK, BlockLoop
from benchmarks.ground import same_bytes, seeded_buffer
from benchmarks.measure import Bench, Contender, KiB, MiB, Row, above_bar, size_text, time_bar

SIZES: Final = (4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB)
_BAR = "1 buffered"
_OFF, _ON, _LOOP = "kvio, checksum off", "kvio, checksum on", "C loop"
_SAME = "C loop, also looks for a standing block"


def each(calls: Sequence[Callable[[], Any]]) -> float:
    """Time every call by itself and give the median."""
    seconds = []
    for call in calls:
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


def run(bench: Bench) -> Iterator[Row]:
    """Write and read (hot) blocks one by one, checksum off and on."""
    ground = bench.ground
    off = ground.store("posix-tmpfile", checksum="none", verify="length")
    on = ground.store("posix-tmpfile")
    loop = BlockLoop(ground.root, link_by_proc="proc" in on.capabilities.publish)
    for size in SIZES:
        count = bench.count(max(2, min(64, 32 * MiB // size)))
        yield from _rows(
            "write", size, bench.interleave(_writers(bench, size, count, off, on, loop))
        )
        yield from _rows(
            "read, hot", size, bench.interleave(_readers(bench, size, count, off, on, loop))
        )
    loop.close()


def _rows(verb: str, size: int, samples: dict[str, list[float]]) -> Iterator[Row]:
    what = f"{verb}, {size_text(size)}"
    if size < MiB:
        yield above_bar(_BAR, what, samples, (_OFF, _LOOP), at_most_us=15)
        yield time_bar(_BAR, what, samples, (_ON, _OFF), at_most=None)
    else:
        yield time_bar(_BAR, what, samples, (_OFF, _LOOP), at_most=1.10)
        yield time_bar(_BAR, what, samples, (_ON, _OFF), at_most=1.10)
    if _SAME in samples:
        yield time_bar(_BAR, what, samples, (_OFF, _SAME), at_most=None)


def _writers(
    bench: Bench, size: int, count: int, off: kvio.Store, on: kvio.Store, loop: BlockLoop
) -> dict[str, Contender]:
    ground = bench.ground
    data = [seeded_buffer(size) for _ in range(count)]

    def by(store: kvio.Store) -> Contender:
        def once() -> float:
            keys = ground.keys(count)
            pairs = zip(keys, data, strict=True)
            seconds = each([partial(store.write_block, *pair) for pair in pairs])
            ground.retire(keys)
            return seconds

        return once

    def by_loop(flags: int) -> Contender:
        def once() -> float:
            keys = ground.keys(count)
            blocks = loop.prepare(keys, data)
            loop.write(blocks, flags=flags)
            ground.retire(keys)
            return statistics.median(blocks.seconds_each())

        return once

    return {_OFF: by(off), _ON: by(on), _LOOP: by_loop(0), _SAME: by_loop(LOOK)}


def _readers(
    bench: Bench, size: int, count: int, off: kvio.Store, on: kvio.Store, loop: BlockLoop
) -> dict[str, Contender]:
    data = [seeded_buffer(size) for _ in range(count)]
    out = [seeded_buffer(size) for _ in range(count)]
    keys = bench.ground.keys(count)
    for key, block in zip(keys, data, strict=True):
        on.write_block(key, block)
    blocks = loop.prepare(keys, out)

    def by(store: kvio.Store) -> Contender:
        def once() -> float:
            pairs = zip(keys, out, strict=True)
            seconds = each([partial(store.read_block_into, *pair) for pair in pairs])
            same_bytes(out, data)
            return seconds

        return once

    def by_loop() -> float:
        loop.read(blocks)
        same_bytes(out, data)
        return statistics.median(blocks.seconds_each())

    return {_OFF: by(off), _ON: by(on), _LOOP: by_loop}
