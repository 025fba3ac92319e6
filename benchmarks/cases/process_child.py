"""Writes many fresh blocks by submit_write and reports how far this process's memory grew.

Keys are recycled with ``replace`` so that little of the disk is used; every block is fresh memory,
so that what waits in the queue is what the process holds. All futures are kept to the end, as a
caller may: a finished one must not hold on to its block.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter

import kvio

_KEYS = 64
_MiB = 1 << 20


def main() -> None:
    """Do what the arguments say: backend, root, total, block and queue bytes."""
    backend, root = sys.argv[1:3]
    total, block, queue = map(int, sys.argv[3:])
    pattern = bytes(range(256)) * (block // 256)
    with kvio.open_store(backend, root=root, max_queued_bytes=queue) as store:
        store.write_block("memory/warm", pattern, if_exists="replace")
        before = _memory_bytes("VmRSS")
        started = perf_counter()
        written = block * _write(store, total // block, pattern, give_up_bytes=6 * queue)
        seconds = perf_counter() - started
    figures = {
        "before_bytes": before,
        "peak_bytes": _memory_bytes("VmHWM"),  # ru_maxrss starts with the parent's, across exec
        "seconds": seconds,
        "written_bytes": written,
        # The block the caller is about to submit, and the pool of aligned bounce buffers.
        "slack_bytes": 2 * block + 64 * _MiB,
        "slack_text": "bound + 2 blocks + 64 MiB of bounce buffers and allocator",
    }
    print(json.dumps(figures))


def _write(store: kvio.Store, blocks: int, pattern: bytes, *, give_up_bytes: int) -> int:
    """Write so many blocks, or fewer if memory grows past all bounds; how many it were."""
    futures: list[Future[kvio.Receipt]] = []
    for number in range(blocks):
        if number % 32 == 0 and _memory_bytes("VmRSS") > give_up_bytes:
            break
        key = f"memory/{number % _KEYS}"
        futures.append(store.submit_write(key, bytearray(pattern), if_exists="replace"))
    for future in futures:
        future.result()
    return len(futures)


def _memory_bytes(field: str) -> int:
    fields = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


if __name__ == "__main__":
    main()
