"""A creator and writer processes, to be run under strace: PATH MODE WRITERS SIZE."""

from __future__ import annotations

import os
import random
import sys

from kvio.sharedfile import SharedFile

PIECE = 60_001


def odd_sizes(size: int, writers: int) -> tuple[int, ...]:
    """Divide a file into domains of which none begins or ends on a block."""
    mean = size // writers
    sizes = [mean + 1111 * (rank % 3 - 1) + 7 for rank in range(writers - 1)]
    return (*sizes, size - sum(sizes))


def write(path: str, rank: int) -> None:
    """Write a domain in pieces that keep to no block, not in order."""
    with SharedFile.open(path, rank) as file:
        todo = [
            (at, min(PIECE, start + nbytes - at))
            for start, nbytes in file.domain()
            for at in range(start, start + nbytes, PIECE)
        ]
        random.Random(rank).shuffle(todo)
        for offset, nbytes in todo:
            file.pwrite(bytes([65 + rank]) * nbytes, offset)


def main() -> None:
    """Create, let processes write, seal."""
    path, mode = sys.argv[1:3]
    writers, size = map(int, sys.argv[3:5])
    sizes = odd_sizes(size, writers)
    with SharedFile.create(path, size, writers=writers, mode=mode, sizes=sizes) as file:
        pids = []
        for rank in range(writers):
            pid = os.fork()
            if pid == 0:
                write(path, rank)
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
        file.seal()


if __name__ == "__main__":
    main()
