"""A process that stops its file system while it writes, mounts it again, and reports what it found.

    python -m tests.faults.blocks.stopping DIRECTORY KIND CYCLES SEED [WAY...]

The stop is that of the file systems' own ioctl: from then on no I/O reaches the disk, and the
journal in memory is dropped. Writes one line of JSON: verdicts, and how often each way was taken.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import kvio
from tests.faults.blocks import kernel
from tests.faults.blocks.cycles import WAYS, Cycle, Cycles
from tests.faults.blocks.workload import ROOT, content, names, run_threads

_THREADS: Final = 2
#: The stop comes at one of the first so many operations.
_OPERATIONS: Final = 24
#: So many operations of each thread begin after it.
_AFTERWARDS: Final = 3
_SPIN: Final = 4000
_LIMIT_S: Final = 60


@dataclass(slots=True)
class Moment:
    """When the stop comes: at one of the first operations, or a little later."""

    random: random.Random
    stop_at: int = 0
    begun: int = 0
    due: threading.Event = field(default_factory=threading.Event)
    down: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.stop_at = self.random.randint(1, _OPERATIONS)

    def count(self) -> None:
        """Note that an operation begins."""
        self.begun += 1
        if self.begun == self.stop_at:
            self.due.set()

    def stop(self, mountpoint: str) -> None:
        """Wait for the moment, and stop the file system."""
        assert self.due.wait(_LIMIT_S), "the writers came to nothing"
        for _ in range(self.random.randrange(_SPIN)):
            pass
        kernel.shut_down(mountpoint)
        self.down.set()


def _write_blocks(cycle: Cycle, store: kvio.Store, keys: Sequence[str], seed: float) -> None:
    """Write, replace, keep and delete until enough of it came after the stop."""
    source, standing = random.Random(seed), dict[str, int]()
    version, late = 0, 0
    while late < _AFTERWARDS:
        key, chance = source.choice(keys), source.random()
        version += 1
        if key in standing and chance < 0.2:
            late += cycle.attempt(key, None, partial(store.delete_block, key))
            del standing[key]
            continue
        keeps = key in standing and chance < 0.4
        chosen = standing[key] if keeps else version
        how: Literal["keep", "replace"] = "keep" if keeps else "replace"
        write = partial(store.write_block, key, content(key, chosen), if_exists=how)
        late += cycle.attempt(key, chosen, write)
        standing[key] = chosen


def _run_blocks(moment: Moment, cycle: Cycle) -> None:
    keys, seeds = names(12), [moment.random.random() for _ in range(_THREADS)]
    with cycle.scenario.open(cycle.mountpoint, "durable") as store:
        writers = [
            partial(_write_blocks, cycle, store, keys[n::_THREADS], seed)
            for n, seed in enumerate(seeds)
        ]
        _beside_stop(cycle, moment, writers)


def _write_staged(cycle: Cycle, tier: kvio.StagingTier, keys: Sequence[str]) -> None:
    version, late = 0, 0
    while late < _AFTERWARDS:
        version += 1
        receipts = []
        for key in keys:
            late += cycle.begin(key, version)
            receipts.append(tier.write_block(key, content(key, version)))
        for key, receipt in zip(keys, receipts, strict=True):
            try:
                receipt.wait("durable", timeout=_LIMIT_S)
            except kvio.StorageError:
                continue
            cycle.done(key, version)


def _run_staged(moment: Moment, cycle: Cycle) -> None:
    keys = names(12)
    with cycle.scenario.open(cycle.mountpoint, "durable") as store:
        tier = kvio.stage(store, "32MiB", retries=0)
        parts = [keys[n::_THREADS] for n in range(_THREADS)]
        _beside_stop(cycle, moment, [partial(_write_staged, cycle, tier, part) for part in parts])
        if not tier.failed:
            cycle.lies.append("a drain after the stop did not fail")
        for receipt in tier.failed:
            tier.discard(receipt)
        with suppress(kvio.KvioError):  # it reports once more what was lost
            tier.close()


def seal(path: str, data: bytes) -> None:
    """Write a shared file of two ranks, and publish it."""
    with kvio.SharedFile.create(path, len(data), writers=2, if_exists="replace") as file:
        for rank in range(2):
            for offset, nbytes in file.domain(rank):
                file.pwrite(memoryview(data)[offset : offset + nbytes], offset)
        file.seal()


def _write_shared(cycle: Cycle, key: str) -> None:
    version, late = 0, 0
    path = f"{cycle.mountpoint}/{ROOT}/{key}"
    while late < _AFTERWARDS:
        version += 1
        late += cycle.attempt(key, version, partial(seal, path, content(key, version)))


def _run_shared(moment: Moment, cycle: Cycle) -> None:
    _beside_stop(
        cycle, moment, [partial(_write_shared, cycle, key) for key in ("shared0", "shared2")]
    )


def _beside_stop(cycle: Cycle, moment: Moment, writers: Sequence[Callable[[], None]]) -> None:
    """Run writers while the file system is stopped."""
    run_threads([*writers, partial(moment.stop, cycle.mountpoint)])


_BODIES: Final = {"staged": _run_staged, "shared": _run_shared}


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    work, kind, count, seed, *among = arguments
    kernel.own_namespace()
    kernel.mount("none", work, "tmpfs", "size=1g,mode=700")
    source, ways = random.Random(f"{seed} {kind}"), Counter(dict.fromkeys(among or WAYS, 0))
    with Cycles(kind, work) as cycles:
        for number in range(int(count)):
            way, moment = source.choice(list(ways)), Moment(source)
            cycle = Cycle(cycles.root, WAYS[way], moment.down.is_set, moment.count)
            body = partial(_BODIES.get(way, _run_blocks), moment)
            cycles.run(cycle, body, f"{kind} {way} seed {seed} cycle {number}")
            ways[way] += 1
    print(json.dumps({**cycles.verdicts.as_json(), "ways": ways}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
