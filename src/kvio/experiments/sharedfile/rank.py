"""One process: ``python -m kvio.experiments.sharedfile.rank``, a command a line on stdin.

Each is a JSON object that is answered by one: ``prepare`` gets the bytes ready and makes the file
in the first process, ``open``, ``go`` (the clock runs), ``seal`` in the first, ``check`` (bytes
are read back and compared), and ``close``.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from dataclasses import asdict
from typing import Any, Final

import numpy as np

import kvio
from kvio import KvioError, MiB, UnsupportedError
from kvio.experiments.sharedfile import clock, lanes
from kvio.experiments.sharedfile.order import Case, Order, blocks

_SEED: Final = 20261121
_STEP: Final = 8 * MiB


def main() -> int:
    """Obey what comes on stdin until it ends, and answer on what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    rank = Rank()
    for line in sys.stdin:
        answers.write(json.dumps(rank.obey(json.loads(line))) + "\n")
    return 0


class Rank:
    """What a process keeps between turns: the bytes that its writers write."""

    def __init__(self) -> None:
        self._source = memoryview(b"")
        self._placed: list[Any] = []
        self._lane: lanes.Lane | None = None
        self._order: Order | None = None
        self._cpus = os.sched_getaffinity(0)
        self._warm = False

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what one command says; what goes wrong is an answer, too."""
        calls = {
            "prepare": lambda: self._prepare(Order(**command["order"])),
            "open": self._open,
            "go": lambda: asdict(self._turn()[1].go(command["at_s"])),
            "seal": self._seal,
            "check": self._check,
            "close": self.close,
        }
        try:
            return calls[command["do"]]()
        except UnsupportedError as exc:
            return {"refused": str(exc)}
        except (KvioError, OSError, MemoryError) as exc:
            return {"error": f"{type(exc).__name__}: {exc}"}

    def _prepare(self, order: Order) -> dict[str, Any]:
        self.close()
        case = Case(**order.case)
        self._fill(order, case.writer_bytes)
        self._warm_up(order.root)
        self._order, self._lane = order, lanes.open_lane(order, self._source)
        start = time.monotonic()
        if order.first:
            self._lane.create()
        return {"created_s": time.monotonic() - start}

    def _fill(self, order: Order, writer_bytes: int) -> None:
        """Have random bytes, of each writer on memory that its CPUs touched first."""
        need = len(order.writers) * writer_bytes
        placed = [writer_bytes, order.cpus] if any(order.cpus) else []
        if len(self._source) >= need and self._placed == placed:
            return
        self._source = memoryview(b"")  # before there is other memory
        mapping = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        words = np.frombuffer(mapping, np.uint64)
        random = np.random.default_rng((_SEED, order.writers[0]))
        for number, cpus in enumerate(order.cpus):
            clock.pin(cpus)
            for own in np.array_split(
                words[number * writer_bytes // 8 :][: writer_bytes // 8],
                -(-writer_bytes // _STEP),
            ):
                own[:] = random.integers(0, 1 << 64, len(own), np.uint64)
        clock.pin(tuple(self._cpus))
        self._source, self._placed = memoryview(mapping), placed

    def _warm_up(self, root: str) -> None:
        """Do once what only the first call in a process does: load modules, and their tables."""
        if self._warm:
            return
        path = os.path.join(root, f"warm-{os.getpid()}")
        with contextlib.suppress(KvioError):  # what cannot be done is told by the turn
            with kvio.SharedFile.create(path, MiB) as file:
                file.pwrite(self._source[:MiB], 0)
                file.seal()
            os.unlink(path)
        self._warm = True

    def _open(self) -> dict[str, Any]:
        self._turn()[1].open()
        return {}

    def _seal(self) -> dict[str, Any]:
        start, before = time.monotonic(), os.times()
        receipt = self._turn()[1].seal()
        took_s, after = time.monotonic() - start, os.times()
        return {
            "seal_s": None if receipt is None else took_s,
            "user_s": after.user - before.user,
            "system_s": after.system - before.system,
            "mode": "" if receipt is None else str(receipt.mode),
            "reason": "" if receipt is None else receipt.reason,
        }

    def _check(self) -> dict[str, Any]:
        """Read back what this process's writers wrote, and compare every byte."""
        order, lane = self._turn()
        case, separate = Case(**order.case), order.wanted.separate
        room = kvio.aligned_buffer(min(lanes.READ_BYTES, case.block_bytes))
        intact = True
        for number, writer in enumerate(order.writers):
            own = self._source[number * case.writer_bytes : (number + 1) * case.writer_bytes]
            for start, source in blocks(case, writer, separate=separate):
                for at in range(0, case.block_bytes, len(room)):
                    out = room[: min(len(room), case.block_bytes - at)]
                    words = np.frombuffer(out, np.uint64)
                    lane.read(writer, start + at, out)
                    wanted = np.frombuffer(own, np.uint64, len(words), source + at)
                    intact &= np.array_equal(words, wanted)
        return {"intact": bool(intact)}

    def _turn(self) -> tuple[Order, lanes.Lane]:
        assert self._order is not None
        assert self._lane is not None
        return self._order, self._lane

    def close(self) -> dict[str, Any]:
        """End the turn; the process may run everywhere again."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        os.sched_setaffinity(0, self._cpus)
        return {}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        sys.exit(main())
