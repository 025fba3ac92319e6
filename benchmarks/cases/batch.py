"""Bar 2: a batch of small blocks, against the C loop with as many threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

import kvio
from benchmarks.blockloop import LOOK, BlockLoop
from benchmarks.ground import same_bytes, seeded_buffer
from benchmarks.measure import Bench, Contender, KiB, Row, time_bar

SIZES: Final = (4 * KiB, 8 * KiB, 16 * KiB, 32 * KiB, 64 * KiB)
_BAR = "2 batch"
_OFF, _ON, _LOOP = "kvio, checksum off", "kvio, checksum on", "C loop"
_SAME = "C loop, also looks for a standing block"


def run(bench: Bench) -> Iterator[Row]:
    """Write and read (hot) 1,000 blocks of 4 to 64 KiB in one call."""
    for threads in (1, 2, 4):
        yield from _with_threads(bench, threads)


def _with_threads(bench: Bench, threads: int) -> Iterator[Row]:
    ground = bench.ground
    off = ground.store("posix-tmpfile", checksum="none", verify="length", io_threads=threads)
    on = ground.store("posix-tmpfile", io_threads=threads)
    loop = BlockLoop(ground.root, link_by_proc="proc" in on.capabilities.publish)
    sizes = [SIZES[number % len(SIZES)] for number in range(bench.count(1000))]
    data = [seeded_buffer(size) for size in sizes]
    for verb, contenders in (
        ("write", _writers(bench, off, on, loop, data, threads)),
        ("read, hot", _readers(bench, off, on, loop, data, threads)),
    ):
        samples = bench.interleave(contenders)
        what = f"{verb}, {len(data)} x 4 to 64 KiB, {threads} threads"
        yield time_bar(_BAR, what, samples, (_OFF, _LOOP), at_most=1.15, unit="ms")
        yield time_bar(_BAR, what, samples, (_ON, _LOOP), at_most=None, unit="ms")
        if _SAME in samples:
            yield time_bar(_BAR, what, samples, (_OFF, _SAME), at_most=None, unit="ms")
    loop.close()


def _writers(
    bench: Bench,
    off: kvio.Store,
    on: kvio.Store,
    loop: BlockLoop,
    data: Sequence[memoryview],
    threads: int,
) -> dict[str, Contender]:
    ground = bench.ground

    def by(store: kvio.Store) -> Contender:
        def once() -> float:
            keys = ground.keys(len(data))
            items = list(zip(keys, data, strict=True))
            start = perf_counter()
            results = store.write_blocks(items)
            seconds = perf_counter() - start
            _check(results)
            ground.retire(keys)
            return seconds

        return once

    def by_loop(flags: int) -> Contender:
        def once() -> float:
            keys = ground.keys(len(data))
            seconds = loop.write(loop.prepare(keys, data), threads=threads, flags=flags)
            ground.retire(keys)
            return seconds

        return once

    return {_OFF: by(off), _ON: by(on), _LOOP: by_loop(0), _SAME: by_loop(LOOK)}


def _readers(
    bench: Bench,
    off: kvio.Store,
    on: kvio.Store,
    loop: BlockLoop,
    data: Sequence[memoryview],
    threads: int,
) -> dict[str, Contender]:
    keys = bench.ground.keys(len(data))
    _check(on.write_blocks(zip(keys, data, strict=True)))
    out = [seeded_buffer(len(piece)) for piece in data]
    items = list(zip(keys, out, strict=True))
    blocks = loop.prepare(keys, out)

    def by(store: kvio.Store) -> Contender:
        def once() -> float:
            start = perf_counter()
            results = store.read_blocks_into(items)
            seconds = perf_counter() - start
            _check(results)
            same_bytes(out, data)
            return seconds

        return once

    return {_OFF: by(off), _ON: by(on), _LOOP: lambda: loop.read(blocks, threads=threads)}


def _check(results: Sequence[kvio.BlockResult]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error
