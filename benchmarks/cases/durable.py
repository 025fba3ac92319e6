"""Bar 5: a durable batch shares directory syncs."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from benchmarks.blockloop import DURABLE, BlockLoop
from benchmarks.ground import seeded_buffer
from benchmarks.measure import Bench, MiB, Row, rate_bar

_BAR = "5 durable"
_BATCH, _SINGLES, _LOOP = "kvio, one batch", "kvio, one by one", "C loop, one by one"


def run(bench: Bench) -> Iterator[Row]:
    """Write 64 blocks of 1 MiB durably, in one call and one by one."""
    ground = bench.ground
    count = bench.count(64)
    store = ground.store("posix-tmpfile", durability="durable")
    loop = BlockLoop(ground.root, link_by_proc="proc" in store.capabilities.publish)
    data = [seeded_buffer(MiB) for _ in range(count)]

    def batch() -> float:
        keys = ground.keys(count)
        start = perf_counter()
        results = store.write_blocks(zip(keys, data, strict=True))
        seconds = perf_counter() - start
        assert all(result.ok for result in results)
        ground.retire(keys)
        return seconds

    def singles() -> float:
        keys = ground.keys(count)
        start = perf_counter()
        for key, block in zip(keys, data, strict=True):
            store.write_block(key, block)
        seconds = perf_counter() - start
        ground.retire(keys)
        return seconds

    def loop_singles() -> float:
        keys = ground.keys(count)
        seconds = loop.write(loop.prepare(keys, data), flags=DURABLE)
        ground.retire(keys)
        return seconds

    samples = bench.interleave({_BATCH: batch, _SINGLES: singles, _LOOP: loop_singles})
    what = f"write, {count} x 1 MiB"
    nbytes = count * MiB
    yield rate_bar(_BAR, what, samples, (_BATCH, _SINGLES), nbytes=nbytes, at_least=1.5)
    yield rate_bar(_BAR, what, samples, (_SINGLES, _LOOP), nbytes=nbytes, at_least=None)
    loop.close()
