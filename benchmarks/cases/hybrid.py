"""Bar 4: hybrid against the better of always buffered and always direct.

A write is judged by the time of the call, which for a buffered one ends in the page cache; how
long it takes until the medium has the bytes too (syncfs inside the timed part) is shown beside.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final

import kvio
from benchmarks.ground import same_bytes, seeded_buffer
from benchmarks.measure import Bench, Contender, KiB, MiB, Row, rate_bar, size_text
from kvio import tuning

SIZES: Final = tuple(4 * KiB << (2 * step) for step in range(8))
_TUNE_S: Final = 30.0
_BAR = "4 hybrid"
_HYBRID, _TUNED = "hybrid, defaults", "hybrid, tuned"
_BUFFERED, _DIRECT = "buffered", "direct"
_Stores = dict[str, kvio.Store]


def run(bench: Bench) -> Iterator[Row]:
    """Write, read cold and read hot at every size, with default thresholds and calibrated."""
    ground = bench.ground
    tuned = tuning.tune(str(ground.scratch()), budget_s=_TUNE_S * bench.scale)
    tuning.save(str(ground.root), tuned)
    stores = {
        _HYBRID: ground.store("hybrid", calibration="none"),
        _TUNED: ground.store("hybrid"),
        _BUFFERED: ground.store("posix-tmpfile"),
        _DIRECT: ground.store("posix-direct"),
    }
    for size in SIZES:
        count = bench.count(max(2, min(48, 32 * MiB // size)))
        yield from _writes(bench, stores, size, count)
        yield from _reads(bench, stores, size, count, hot=False)
        yield from _reads(bench, stores, size, count, hot=True)


def _writes(bench: Bench, stores: _Stores, size: int, count: int) -> Iterator[Row]:
    data = [seeded_buffer(size) for _ in range(count)]

    def by(store: kvio.Store, *, synced: bool) -> Contender:
        def once() -> float:
            keys = bench.ground.keys(count)
            start = perf_counter()
            for key, block in zip(keys, data, strict=True):
                store.write_block(key, block)
            if synced:
                bench.ground.sync()
            seconds = perf_counter() - start
            bench.ground.retire(keys)
            return seconds

        return once

    for verb, synced in (("write", False), ("write + syncfs", True)):
        before = _modes(stores)
        samples = bench.interleave({name: by(s, synced=synced) for name, s in stores.items()})
        taken = _modes_since(stores, before)
        yield from _rows(f"{verb}, {size_text(size)}", samples, size * count, taken, bar=not synced)


def _reads(bench: Bench, stores: _Stores, size: int, count: int, *, hot: bool) -> Iterator[Row]:
    ground = bench.ground
    data = [seeded_buffer(size) for _ in range(count)]
    out = [seeded_buffer(size) for _ in range(count)]
    keys = ground.keys(count)
    for key, block in zip(keys, data, strict=True):
        stores[_BUFFERED].write_block(key, block)
    ground.drop_cache(keys)
    prepare: Callable[[list[str]], float] = ground.warm_cache if hot else ground.drop_cache
    cached: list[float] = []

    def by(store: kvio.Store) -> Contender:
        def once() -> float:
            cached.append(prepare(keys))
            start = perf_counter()
            for key, block in zip(keys, out, strict=True):
                store.read_block_into(key, block)
            seconds = perf_counter() - start
            same_bytes(out[:1], data[:1])
            return seconds

        return once

    before = _modes(stores)
    samples = bench.interleave({name: by(store) for name, store in stores.items()})
    state = f"; cachestat before: {min(cached):.0%} to {max(cached):.0%} in the page cache"
    taken = {name: text + state for name, text in _modes_since(stores, before).items()}
    what = f"read {'hot' if hot else 'cold'}, {size_text(size)}"
    yield from _rows(what, samples, size * count, taken, bar=True)
    ground.retire(keys)


def _rows(
    what: str, samples: dict[str, list[float]], nbytes: int, taken: dict[str, str], *, bar: bool
) -> Iterator[Row]:
    better = min((_BUFFERED, _DIRECT), key=lambda name: statistics.median(samples[name]))
    for name in (_HYBRID, _TUNED):
        yield rate_bar(
            _BAR, what, samples, (name, better), nbytes=nbytes,
            at_least=0.95 if bar else None, note=taken[name],
        )  # fmt: skip


def _modes(stores: _Stores) -> dict[str, dict[str, int]]:
    return {name: dict(store.stats().modes) for name, store in stores.items()}


def _modes_since(stores: _Stores, before: dict[str, dict[str, int]]) -> dict[str, str]:
    """Say which I/O modes each store has taken since."""
    texts = {}
    for name, now in _modes(stores).items():
        taken = {mode: n - before[name].get(mode, 0) for mode, n in now.items()}
        texts[name] = "took " + ", ".join(f"{mode} {n}" for mode, n in taken.items() if n)
    return texts
