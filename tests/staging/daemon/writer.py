"""A client that writes until it is killed, and says what was accepted: run by ``python -m``."""

from __future__ import annotations

import os
import random
import sys
import threading

import kvio
from tests.staging.daemon.blocks import KEYS, block_of

THREADS = 2


def write_for_ever(tier: kvio.StagingTier, thread: int, seed: int, said: int) -> None:
    """Write blocks of our own keys; a line of (key, number) once each is accepted."""
    choose = random.Random(f"{seed}/{thread}")
    number = 0
    while True:
        number += 1
        key = f"c{seed}t{thread}/k{choose.randrange(KEYS)}"
        data = block_of(key, number, choose.choice([1, 900, 5_000, 70_000, 900_000]))
        tier.write_block(key, data)
        os.write(said, f"{key} {number}\n".encode())  # one short write to a pipe is whole


def main() -> None:
    """Write from several threads at once."""
    url, path, seed = sys.argv[1:4]
    tier = kvio.stage(kvio.open_store(url), daemon=path)
    for thread in range(1, THREADS):
        threading.Thread(
            target=write_for_ever, args=(tier, thread, int(seed), 1), daemon=True
        ).start()
    write_for_ever(tier, 0, int(seed), 1)


if __name__ == "__main__":
    main()
