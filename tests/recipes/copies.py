"""Measure what saving and loading safetensors takes: ``python -m tests.recipes.copies``.

"Copies" in docs/recipes/safetensors.md has its numbers.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import kvio
from kvio.connectors.safetensors import load, save
from kvio.types import MiB

TENSORS = 8
NBYTES = 256 * MiB


def resident_bytes(field: str) -> int:
    """Return a count of this process's resident memory: ``VmRSS``, or its peak, ``VmHWM``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} in /proc/self/status")


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Call a function; return how many bytes its peak lies above what was resident, and its result.

    What a map of a file shows is subtracted, since it is the page cache's.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    result = work()
    return resident_bytes("VmHWM") - before, result


def tensors() -> dict[str, torch.Tensor]:
    """Make tensors whose memory is touched."""
    count = NBYTES // TENSORS // 4
    return {f"layer.{n}": torch.full((count,), float(n + 1)) for n in range(TENSORS)}


def measure(way: str, store: kvio.Store, root: Path) -> tuple[int, int]:
    """Return the bytes beyond the tensors that a save and a load take."""
    given = tensors()
    if way == "kvio":
        saved, _ = peak_of(lambda: save(store, "model", given))
        loaded, found = peak_of(lambda: load(store, "model"))
    elif way == "bytes":
        saved, _ = peak_of(
            lambda: store.write_block("model", safetensors.torch.save(given), if_exists="replace")
        )
        loaded, found = peak_of(lambda: safetensors.torch.load(bytes(store.read_block("model"))))
    else:
        path = root / "model.safetensors"
        saved, _ = peak_of(lambda: safetensors.torch.save_file(given, path))
        loaded, found = peak_of(lambda: safetensors.torch.load_file(path))
        for tensor in found.values():
            tensor.sum()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    return saved, max(0, loaded - (NBYTES if way != "file" else 0))


def main(way: str) -> None:
    """Print the two numbers in bytes."""
    root = Path(tempfile.mkdtemp(prefix="kvio-copies-", dir=os.environ.get("KVIO_TEST_DIR")))
    try:
        with kvio.open_store(root) as store:
            # What torch, kvio and safetensors load and keep at first use is not a copy.
            save(store, "first", {"a": torch.ones(1000)})
            load(store, "first")
            safetensors.torch.load(safetensors.torch.save({"a": torch.ones(1000)}))
            print(*measure(way, store, root))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        import subprocess

        for name in ("kvio", "bytes", "file"):
            ended = subprocess.run(
                [sys.executable, "-m", "tests.recipes.copies", name],
                capture_output=True,
                text=True,
                check=True,
            )
            save_bytes, load_bytes = map(int, ended.stdout.split())
            print(f"{name:6} save {save_bytes / MiB:6.1f} MiB   load {load_bytes / MiB:6.1f} MiB")
