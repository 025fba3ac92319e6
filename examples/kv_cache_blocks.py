"""Offload KV-cache blocks of real model shapes, look up a prefix, load it back and compare.

A block is 256 tokens of one sequence: K and V of every layer. An engine keeps these in tensors of
their own, so a block is written as a list of pieces that is never joined, and read into as many:

    python examples/kv_cache_blocks.py --model Qwen3-8B --blocks 6

Layers with a sliding window (18 of gpt-oss-120b's 36) are stored like all others: any block may
end a prefix that is reused later, and then the window lies in it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kvio

Layers: TypeAlias = "list[np.ndarray[Any, np.dtype[np.uint16]]]"
TOKENS_PER_BLOCK = 256
HEADINGS = (
    "model",
    "pieces",
    "block MiB",
    "blocks",
    "offload MB/s",
    "load MB/s",
    "found",
    "loaded",
)


@dataclass(frozen=True)
class ModelShape:
    """What a model keeps of every token, from its config.json; numbers are of two bytes."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    def pieces(self) -> int:
        """Count the pieces of one block: K and V of every layer."""
        return 2 * self.layers

    def piece_nbytes(self) -> int:
        """Count the bytes of one piece: K or V of one layer."""
        return TOKENS_PER_BLOCK * self.kv_heads * self.head_dim * 2

    def block_nbytes(self) -> int:
        """Count the bytes of one block."""
        return self.pieces() * self.piece_nbytes()


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128),
        ModelShape("Llama-3.1-70B", layers=80, kv_heads=8, head_dim=128),
        ModelShape("Qwen3-8B", layers=36, kv_heads=8, head_dim=128),
        ModelShape("Qwen3-32B", layers=64, kv_heads=8, head_dim=128),
        ModelShape("gpt-oss-120b", layers=36, kv_heads=8, head_dim=64),
    )
}


def make_cache(shape: ModelShape, blocks: int) -> Layers:
    """Make K and V of each layer: arrays of (block, token, head, number), bf16-sized."""
    size = blocks * shape.piece_nbytes()
    form = (blocks, TOKENS_PER_BLOCK, shape.kv_heads, shape.head_dim)
    # Page-aligned, as pinned memory is: direct I/O needs no copy.
    return [
        np.frombuffer(kvio.aligned_buffer(size), np.uint16).reshape(form)
        for _ in range(shape.pieces())
    ]


def pieces_of(cache: Layers, block: int) -> list[Any]:
    """List the pieces of one block: a contiguous view into every layer's K and V."""
    return [layer[block] for layer in cache]


def block_keys(shape: ModelShape, tokens: Sequence[int]) -> list[str]:
    """Name blocks by their content: each key hashes all tokens up to the end of its block."""
    digest = hashlib.sha256()
    keys = []
    for start in range(0, len(tokens), TOKENS_PER_BLOCK):
        digest.update(np.asarray(tokens[start : start + TOKENS_PER_BLOCK], np.uint32).tobytes())
        keys.append(f"{shape.name}/{digest.copy().hexdigest()[:32]}")
    return keys


def offload_and_load(store: kvio.Store, shape: ModelShape, blocks: int) -> tuple[str, ...]:
    """Store a sequence, find its prefix again, load it into another cache: a row of the table."""
    rng = np.random.default_rng(0)
    cache = make_cache(shape, blocks)
    for layer in cache:
        layer[:] = rng.integers(0, 1 << 16, layer.shape, np.uint16)
    tokens = rng.integers(0, 100_000, blocks * TOKENS_PER_BLOCK).tolist()
    keys = block_keys(shape, tokens)

    start = time.perf_counter()
    written = store.write_blocks([(key, pieces_of(cache, i)) for i, key in enumerate(keys)])
    write_s = time.perf_counter() - start

    # A longer prompt with the same beginning: what is stored of it counts from the front.
    longer = block_keys(shape, [*tokens, *range(TOKENS_PER_BLOCK)])
    found = store.count_leading(longer)

    loaded = make_cache(shape, blocks)
    for layer in loaded:
        layer.fill(0)  # the first touch of fresh memory is not what is timed
    start = time.perf_counter()
    read = store.read_blocks_into([(k, pieces_of(loaded, i)) for i, k in enumerate(longer[:found])])
    read_s = time.perf_counter() - start

    whole = found == blocks and all(result.ok for result in (*written, *read))
    same = whole and all(map(np.array_equal, cache, loaded))
    nbytes = blocks * shape.block_nbytes()
    return (
        shape.name,
        str(shape.pieces()),
        f"{shape.block_nbytes() / kvio.MiB:.0f}",
        str(blocks),
        f"{nbytes / write_s / 1e6:.0f}",
        f"{nbytes / read_s / 1e6:.0f}",
        f"{found} of {len(longer)}",
        "identical" if same else "DIFFERENT",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Run every model asked for and print the table; False if any byte differs."""
    rows = []
    for name in arguments.model or SHAPES:
        with (
            tempfile.TemporaryDirectory(prefix=".kv-cache-", dir=arguments.root) as directory,
            kvio.open_store(arguments.backend, root=directory) as store,
        ):
            rows.append(offload_and_load(store, SHAPES[name], arguments.blocks))
    title = f"{arguments.backend}, {TOKENS_PER_BLOCK} tokens a block, bfloat16, one batch, hot"
    print_table(title, HEADINGS, rows)
    return all(row[-1] == "identical" for row in rows)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns under a title."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"{title}\n")
    for first, *others in (headings, *rows):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}}", *numbers, sep="  ")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a byte differed, 2 if the store cannot be opened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="directory to store in (here)")
    parser.add_argument("--backend", default="hybrid", help="a POSIX backend (hybrid)")
    parser.add_argument("--model", choices=sorted(SHAPES), action="append", help="default: all")
    parser.add_argument("--blocks", type=int, default=3, help="blocks a model (3)")
    arguments = parser.parse_args(argv)
    if arguments.blocks < 1:
        parser.error("--blocks must be at least 1")
    try:
        return 0 if run(arguments) else 1
    except (kvio.KvioError, OSError) as exc:
        print(f"kv_cache_blocks: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
