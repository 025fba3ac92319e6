"""One seeded trace of entries through the program's own cache, every byte compared.

Run as ``python -m benchmarks.scenarios.mlperf_kv.trace`` in a process of its own, since it loads
the program. Prints one line of JSON: what was read back, as a digest, and what was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import random
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvio
from kvio.connectors.mlperf_kv import KvioBackend
from kvio.connectors.mlperf_kv.program import Program, load

_STEPS: Final = 120
_MOST_TOKENS: Final = 512
_MODEL: Final = "tiny-1b"
#: Of the tiers, in GiB: little, so that entries move from memory to storage and are evicted there.
_MEMORY_GB: Final = 0.02
_STORAGE_GB: Final = 0.15


class Compared:
    """A storage tier that remembers a digest of what was written, and compares what is read."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self._written: dict[str, tuple[str, object]] = {}
        self._everything = hashlib.sha256()
        self.reads = self.writes = self.deletes = self.wrong = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def digest(self) -> str:
        """The digest of all entries that were read, in order, with their keys."""
        return self._everything.hexdigest()

    def write(self, key: str, data: Any) -> Any:
        """Write, and remember."""
        self._written[key] = _digest(data)
        self.writes += 1
        return self._tier.write(key, data)

    def read(self, key: str) -> Any:
        """Read, and compare bytes, shape and type."""
        data, timing = self._tier.read(key)
        found = _digest(data)
        self.reads += 1
        self.wrong += found != self._written[key]
        self._everything.update(repr((key, found)).encode())
        return data, timing

    def delete(self, key: str) -> Any:
        """Delete, and forget."""
        self._written.pop(key, None)
        self.deletes += 1
        return self._tier.delete(key)


def _digest(data: Any) -> tuple[str, object]:
    form = (data.shape, str(data.dtype)) if isinstance(data, np.ndarray) else None
    return hashlib.sha256(memoryview(data).cast("B")).hexdigest(), form


def replay(program: Program, tier: str, root: Path, *, seed: int, trust_fsync: bool) -> Compared:
    """Send one trace through the program's cache, with its own storage tier or kvio's."""
    settings = {
        "model_config": program.module.MODEL_CONFIGS[_MODEL],
        "gpu_memory_gb": 0,
        "cpu_memory_gb": _MEMORY_GB,
        "cache_dir": str(root),
        "seed": seed,
        "storage_capacity_gb": _STORAGE_GB,
    }
    store: kvio.Store | None = None
    if tier != "stock":
        options = {"trust_fsync": "true"} if trust_fsync else {}
        store = kvio.open_store(tier, root=root, durability="durable", create=True, options=options)
        made = KvioBackend(store, timing=program.timing)
        program.use(lambda **_: made)
    takes = inspect.signature(program.cache).parameters
    cache = program.cache(**{name: value for name, value in settings.items() if name in takes})
    compared = cache.backends["nvme"] = Compared(cache.backends["nvme"])
    chance = random.Random(seed)
    keys: list[str] = []
    for step in range(_STEPS):
        if not keys or chance.random() < 0.4:
            keys.append(f"user_{step:04d}_turn_{chance.randrange(9)}")
            cache.allocate_cache(keys[-1], chance.randint(1, _MOST_TOKENS))
        else:
            cache.access_cache(chance.choice(keys))
    compared.clear()
    if store is not None:
        store.close()
    return compared


def main() -> None:
    """Replay the trace and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tier", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trust-fsync", action="store_true")
    given = parser.parse_args()
    found = replay(
        load(given.program), given.tier, given.root, seed=given.seed, trust_fsync=given.trust_fsync
    )
    counts = {name: getattr(found, name) for name in ("writes", "reads", "deletes", "wrong")}
    sys.stdout.write(json.dumps({**counts, "digest": found.digest}) + "\n")


if __name__ == "__main__":
    main()
