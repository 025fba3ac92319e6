"""Run ``python -m benchmarks`` as a user does, from any directory."""

from __future__ import annotations

import os
import queue
import subprocess
from typing import Any, Final

from benchmarks.harness.workers import module_command

COMMAND: Final = module_command("benchmarks")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=280,
        check=False,
    )


class Communicator:
    """What mpi4py's is to the ranks, between threads of this process."""

    def __init__(self, number: int, boxes: list[list[queue.Queue[Any]]]) -> None:
        self._number = number
        self._boxes = boxes

    def Get_size(self) -> int:  # noqa: N802  # mpi4py's name
        return len(self._boxes)

    def Get_rank(self) -> int:  # noqa: N802  # mpi4py's name
        return self._number

    def send(self, message: Any, dest: int) -> None:
        self._boxes[self._number][dest].put(message)

    def iprobe(self, source: int) -> bool:
        return not self._boxes[source][self._number].empty()

    def recv(self, source: int) -> Any:
        return self._boxes[source][self._number].get()


def communicators(size: int) -> list[Communicator]:
    """Return the communicators of the ranks of one job."""
    boxes: list[list[queue.Queue[Any]]] = [
        [queue.Queue() for _ in range(size)] for _ in range(size)
    ]
    return [Communicator(number, boxes) for number in range(size)]
