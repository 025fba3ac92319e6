"""One rank: ``python -m kvio.experiments.staging.rank``, a command a line on stdin.

Each is a JSON object that is answered by one. ``open`` prepares a turn; then for each operation
``ready``, ``go`` (the clock runs), ``check`` (bytes are compared); and ``close``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np

from kvio import KvioError, MiB, UnsupportedError
from kvio.experiments.staging import lanes
from kvio.experiments.staging.order import (
    ACCEPT,
    DRAIN,
    PAGE_CACHE,
    READ,
    STORES,
    WRITE,
    Order,
    Window,
)

_SEED: Final = 20260105


def main() -> int:
    """Obey what comes on stdin until it ends, and answer on what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    rank = Rank()
    for line in sys.stdin:
        answers.write(json.dumps(rank.obey(json.loads(line))) + "\n")
    return 0


class Rank:
    """What a process keeps between turns: its bytes, and memory to read them to."""

    def __init__(self) -> None:
        self._source = self._target = memoryview(b"")
        self._lane: lanes.Lane | None = None
        self._order: Order | None = None

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what one command says; what goes wrong is an answer, too."""
        calls = {
            "open": lambda: self._open(Order(**command["order"])),
            "ready": lambda: self._make_ready(command["operation"]),
            "go": lambda: self._go(command["operation"], command["at_s"]),
            "check": lambda: self._check(command["operation"]),
            "close": self.close,
        }
        try:
            return calls[command["do"]]()
        except UnsupportedError as exc:
            return {"refused": str(exc)}
        except (KvioError, OSError, MemoryError) as exc:
            return {"error": f"{type(exc).__name__}: {exc}"}

    def _open(self, order: Order) -> dict[str, Any]:
        self.close()
        self._order = order
        nbytes = order.count * order.nbytes
        if len(self._source) != nbytes:
            self._source = self._target = memoryview(b"")  # before there is other memory
            self._source, self._target = lanes.memory(nbytes), lanes.memory(nbytes)
            words = np.frombuffer(self._source, np.uint64)
            random = np.random.default_rng((_SEED, order.rank))
            words[:] = random.integers(0, 1 << 64, len(words), np.uint64)
        self._lane = lanes.open_lane(order)
        self._lane.warm_up(order.key("warm", 0), self._source[: min(order.nbytes, MiB)])
        return {}

    def _make_ready(self, operation: str) -> dict[str, Any]:
        order, lane = self._open_turn()
        if operation == ACCEPT:
            lane.hold()
        elif operation == READ:
            self._wipe()
        elif operation == DRAIN:
            lane.prepare_drain(self._keys(order, operation), self._pieces(self._source))
        return {}

    def _go(self, operation: str, at_s: float) -> dict[str, Any]:
        order, lane = self._open_turn()
        keys = self._keys(order, operation)
        read = operation == READ
        pieces = self._pieces(self._target if read else self._source)
        call = lane.read if read else lane.write
        calls = [partial(call, key, piece) for key, piece in zip(keys, pieces, strict=True)]
        if (pause_s := at_s - time.monotonic()) > 0:
            time.sleep(pause_s)
        cpu, start = time.process_time(), time.monotonic()
        if operation == DRAIN:
            lane.drain()
            end = settled = time.monotonic()
            latencies = [end - start] * len(calls)
        else:
            latencies = _timed(calls)
            end = settled = time.monotonic()
            if operation not in (ACCEPT, READ):
                lane.settle()
                settled = time.monotonic()
        return asdict(
            Window(
                start_s=start,
                end_s=end,
                settled_s=settled,
                latencies_s=latencies,
                cpu_s=time.process_time() - cpu,
            )
        )

    def _check(self, operation: str) -> dict[str, Any]:
        """Compare what was read, or read what was stored; staged bytes are read by READ."""
        order, lane = self._open_turn()
        if operation == ACCEPT:
            return {"intact": None}
        if operation != READ:
            self._wipe()
            pieces = self._pieces(self._target)
            for key, out in zip(self._keys(order, operation), pieces, strict=True):
                lane.read_stored(key, out)
        same = np.array_equal(
            np.frombuffer(self._source, np.uint64), np.frombuffer(self._target, np.uint64)
        )
        return {"intact": bool(same)}

    def close(self) -> dict[str, Any]:
        """End the turn."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        return {}

    def _open_turn(self) -> tuple[Order, lanes.Lane]:
        assert self._order is not None
        assert self._lane is not None
        return self._order, self._lane

    def _keys(self, order: Order, operation: str) -> list[str]:
        """Name the blocks of an operation: what was accepted is what is read and drained."""
        written = operation
        if order.contender not in STORES and operation in (READ, DRAIN):
            written = WRITE if order.contender == PAGE_CACHE else ACCEPT
        return [order.key(written, index) for index in range(order.count)]

    def _pieces(self, memory: memoryview) -> list[memoryview]:
        order, _ = self._open_turn()
        return [memory[at : at + order.nbytes] for at in range(0, len(memory), order.nbytes)]

    def _wipe(self) -> None:
        np.frombuffer(self._target, np.uint64)[:] = 0


def _timed(calls: list[Any]) -> list[float]:
    clock, latencies = time.perf_counter, []
    for call in calls:
        start = clock()
        call()
        latencies.append(clock() - start)
    return latencies


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        sys.exit(main())
