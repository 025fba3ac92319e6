"""How fast a staging tier drains, beside the same blocks written directly by as many threads.

Run by hand: ``python benchmarks/drain.py ROOT``. Rounds alternate in one process, over one store
and over pages that earlier rounds touched, so that little but the tier differs.
"""

from __future__ import annotations

import sys
import threading
import time
from statistics import median
from tempfile import TemporaryDirectory

import kvio

BLOCKS, NBYTES, THREADS, ROUNDS = 128, kvio.MiB, 2, 12


def direct(store: kvio.Store, source: memoryview) -> float:
    """Write all blocks by threads of our own; seconds."""

    def work(first: int) -> None:
        for number in range(first, BLOCKS, THREADS):
            store.write_block(f"d{number}", source[number * NBYTES : (number + 1) * NBYTES])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def drained(tier: kvio.StagingTier, source: memoryview) -> float:
    """Stage all blocks, then drain them; seconds of the drain."""
    tier.pause()
    for number in range(BLOCKS):
        tier.write_block(f"t{number}", source[number * NBYTES : (number + 1) * NBYTES])
    start = time.perf_counter()
    tier.resume()
    tier.barrier("visible")
    return time.perf_counter() - start


def clear(store: kvio.Store) -> None:
    """Delete what a round wrote, whose pages the next one uses."""
    for key in list(store.list_keys("")):
        store.delete_block(key)


def main(root: str) -> None:
    """Print medians and the ratio of medians, for drains of lower and of equal priority."""
    source = kvio.aligned_buffer(BLOCKS * NBYTES)
    source[:] = b"7" * len(source)
    for nice in (10, 0):
        with (
            TemporaryDirectory(dir=root) as folder,
            kvio.open_store("posix-tmpfile", root=folder, io_threads=THREADS) as store,
            kvio.stage(
                store, 160 * kvio.MiB, drain_threads=THREADS, drain_nice=nice, populate=True
            ) as tier,
        ):
            alone: list[float] = []
            behind: list[float] = []
            for _ in range(ROUNDS):
                alone.append(direct(store, source))
                clear(store)
                behind.append(drained(tier, source))
                clear(store)
        ratio = median(a / b for a, b in zip(alone, behind, strict=True))
        print(
            f"drain_nice={nice}: direct {median(alone) * 1e3:.1f} ms, "
            f"drain {median(behind) * 1e3:.1f} ms, rate {ratio:.2f} of direct"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
