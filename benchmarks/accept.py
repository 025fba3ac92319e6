"""What accepting a block into a staging tier costs beside a copy, held drains and running ones.

Run as ``python -m benchmarks.accept --root /dev/shm/accept``: each round has every contender in
turn, each on blocks of new keys; source, copy and staging memory have been touched before. Reported
are medians over the rounds of each round's mean, median and 99th percentile.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import kvio
from kvio import KiB, MiB
from kvio.url import parse_size

_CAPACITY_BYTES = 512 * MiB
_ROUND_BYTES = 256 * MiB
_ROUND_BLOCKS = 1500


def _timed(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for number in range(count):
        begun = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - begun)
    return times


class _Tier:
    """A tier over files whose drains are held, or run on so many threads (0: the default)."""

    def __init__(self, root: Path, *, threads: int | None) -> None:
        root.mkdir(parents=True)
        self._store = kvio.open_store("posix-tmpfile", root=root)
        self._tier = kvio.stage(
            self._store, _CAPACITY_BYTES, populate=True, drain_threads=threads or None
        )
        self._held = threads is None

    def round(self, source: np.ndarray, count: int) -> list[float]:
        if self._held:
            self._tier.pause()
        write, keys = self._tier.write_block, [f"k{number}" for number in range(count)]
        times = _timed(lambda number: write(keys[number], source), count)
        self._tier.resume()
        self._tier.flush()
        self._store.delete_blocks(keys)
        return times

    def close(self) -> None:
        self._tier.close()
        self._store.close()


def _measure(root: Path, nbytes: int, rounds: int, threads: list[int]) -> None:
    count = min(_ROUND_BLOCKS, _ROUND_BYTES // nbytes)
    source = np.random.default_rng(1).integers(0, 255, nbytes, dtype=np.uint8)
    copies = np.ones((_ROUND_BYTES // nbytes, nbytes), np.uint8)
    names = {"held": None, **{f"{n or 'default'} thread(s)": n for n in threads}}
    tiers = {name: _Tier(root / name.replace(" ", "-"), threads=own) for name, own in names.items()}
    contenders: dict[str, Callable[[], list[float]]] = {
        "copy": lambda: _timed(lambda n: np.copyto(copies[n % len(copies)], source), count)
    }
    for name, tier in tiers.items():
        contenders[name] = partial(tier.round, source, count)
    found: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, one in contenders.items():
            times = one()
            if number:  # the first touches the memory
                found[name].append(times)
    for tier in tiers.values():
        tier.close()
    base = statistics.median(map(statistics.fmean, found["copy"]))
    for name, of_rounds in found.items():
        mean = statistics.median(map(statistics.fmean, of_rounds))
        median = statistics.median(map(statistics.median, of_rounds))
        late = statistics.median(float(np.quantile(times, 0.99)) for times in of_rounds)
        print(
            f"{nbytes // KiB:6d} KiB  {name:18s} mean {mean * 1e6:8.1f} us  "
            f"median {median * 1e6:8.1f}  p99 {late * 1e6:8.1f}  rate / copy's {base / mean:.2f}"
        )


def main() -> None:
    """Measure, and remove what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="a directory that is made anew")
    parser.add_argument("--sizes", default="64KiB,1MiB,8MiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", default="1,0", help="drain threads; 0: the default")
    given = parser.parse_args()
    given.root.mkdir()
    try:
        for size in map(parse_size, given.sizes.split(",")):
            threads = [int(n) for n in given.threads.split(",")]
            _measure(given.root / str(size), size, given.rounds, threads)
    finally:
        shutil.rmtree(given.root)


if __name__ == "__main__":
    main()
