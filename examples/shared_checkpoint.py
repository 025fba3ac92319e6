"""Write one checkpoint file from several processes, seal it, and read it back side by side.

Each process has a part of the state, writes it into its own domain of the file, and reads that
domain back when the file is sealed:

    python examples/shared_checkpoint.py --processes 4 --mib 256

The first process is this one: it creates the file and seals it. Under MPI the same is
``SharedFile.from_comm``; see docs/sharedfile.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np

import kvio
from kvio import MiB, SharedFile

PIECE = 4 * MiB
TIMEOUT_S = 120.0
HEADINGS = ("processes", "MiB", "mode", "written MB/s", "read MB/s", "read back")


def make_state(rank: int, nbytes: int) -> Any:
    """Make the part of the state that a rank has: bytes that no other rank has."""
    memory = np.frombuffer(kvio.aligned_buffer(max(1, nbytes)), np.uint8)[:nbytes]
    memory[:] = np.frombuffer(np.random.default_rng(rank).bytes(nbytes), np.uint8)
    return memory


def pieces(file: SharedFile, rank: int) -> list[tuple[int, int, int]]:
    """Cut a domain into calls: offset in the file, offset in the rank's state, length."""
    found: list[tuple[int, int, int]] = []
    before = 0
    for offset, nbytes in file.domain(rank):
        found += (
            (offset + at, before + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)
        )
        before += nbytes
    return found


def work(path: str, rank: int, barrier: Any) -> None:
    """Write a rank's part, wait until the file is sealed, read the part back and compare."""
    try:
        with SharedFile.open(path, rank) as file:
            todo = pieces(file, rank)
            state = make_state(rank, sum(nbytes for _, _, nbytes in todo))
            barrier.wait(TIMEOUT_S)
            for offset, at, nbytes in todo:
                file.pwrite(state[at : at + nbytes], offset)
        barrier.wait(TIMEOUT_S)  # it is sealed
        copy = np.frombuffer(kvio.aligned_buffer(max(1, state.nbytes)), np.uint8)[: state.nbytes]
        with SharedFile.open(path) as file:
            for offset, at, nbytes in todo:
                file.pread_into(copy[at : at + nbytes], offset)
        barrier.wait(TIMEOUT_S)  # and read
    except BrokenBarrierError:
        sys.exit(2)  # somebody else failed, and says why
    except kvio.KvioError as exc:
        barrier.abort()
        print(f"shared_checkpoint: rank {rank}: {exc}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if np.array_equal(copy, state) else 1)


def race(file: SharedFile, barrier: Any) -> tuple[kvio.Receipt, float, float]:
    """Let all begin, seal, let all read: the receipt, and how long writing and reading took."""
    barrier.wait(TIMEOUT_S)
    begun = time.perf_counter()
    receipt = file.seal(timeout=TIMEOUT_S)
    sealed = time.perf_counter()
    barrier.wait(TIMEOUT_S)
    reading = time.perf_counter()
    barrier.wait(TIMEOUT_S)
    return receipt, sealed - begun, time.perf_counter() - reading


def run(path: Path, arguments: argparse.Namespace) -> bool:
    """Write, seal, read, and print; False if a byte differs."""
    start, writers = multiprocessing.get_context(arguments.start), arguments.processes
    barrier = start.Barrier(writers + 1)
    chosen = {name: getattr(arguments, name) for name in ("mode", "durability", "stripe_bytes")}
    with SharedFile.create(path, arguments.mib * MiB, writers=writers, **chosen) as file:
        ranks = [
            start.Process(target=work, args=(str(path), rank, barrier)) for rank in range(writers)
        ]
        for process in ranks:
            process.start()
        try:
            receipt, *seconds = race(file, barrier)
        except BaseException:
            barrier.abort()  # whoever waits for it ends
            raise
        finally:
            for process in ranks:
                process.join()
    same = all(process.exitcode == 0 for process in ranks)
    show(receipt, writers, seconds, same=same)
    return same


def show(receipt: kvio.Receipt, writers: int, seconds: Sequence[float], *, same: bool) -> None:
    """Print a row of rates and the receipt."""
    rates = (f"{receipt.nbytes / each / 1e6:.0f}" for each in seconds)
    mib, verdict = f"{receipt.nbytes / MiB:.0f}", "identical" if same else "DIFFERENT"
    row = (str(writers), mib, str(receipt.mode), *rates, verdict)
    title = "one file; writes until it is sealed, reads with what the page cache has of it"
    print_table(title, HEADINGS, [row])
    print(
        f"receipt: {receipt.nbytes} bytes, {receipt.level}, {receipt.mode} ({receipt.reason}), "
        f"crc32c {receipt.checksum:08x}"
    )


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns under a title."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"{title}\n")
    for first, *others in (headings, *rows):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}}", *numbers, sep="  ")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a byte differed, 2 if it cannot be done as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="directory to write in (here)")
    parser.add_argument("--processes", type=int, default=4, help="that write (4)")
    parser.add_argument("--mib", type=int, default=64, help="of the file, in MiB (64)")
    parser.add_argument("--mode", choices=("hybrid", "buffered", "direct"), default="hybrid")
    parser.add_argument("--durability", choices=("visible", "durable"), default="durable")
    parser.add_argument("--stripe-bytes", type=int, default=0, help="dealt out in turn")
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn")
    arguments = parser.parse_args(argv)
    if min(arguments.processes, arguments.mib) < 1:
        parser.error("--processes and --mib must be at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix=".shared-", dir=arguments.root) as directory:
            return 0 if run(Path(directory) / "checkpoint.bin", arguments) else 1
    except (kvio.KvioError, BrokenBarrierError, OSError) as exc:
        print(f"shared_checkpoint: {exc or 'a process failed'}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
