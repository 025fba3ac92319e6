"""Client processes of one load: begun, started at the same moment, and accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, Protocol, TypeAlias

from kvio import StorageError
from kvio.experiments.s3.order import Order, Window

_COMMAND: Final = (sys.executable, "-m", "kvio.experiments.s3.client")
#: A load's windows end by themselves; what takes so much longer hangs.
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One client process: its windows, and all of it from its start to its end."""

    windows: list[Window]
    wall_s: float
    user_s: float
    system_s: float


class Running(Protocol):
    """A client process, here or elsewhere; `Client` tells what each call does."""

    def wait_ready(self) -> None: ...  # noqa: D102
    def go(self) -> None: ...  # noqa: D102
    def wait_done(self) -> None: ...  # noqa: D102
    def end(self) -> Ended: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


#: Begins the client of a number.
Begin: TypeAlias = Callable[[int, Order, Mapping[str, str]], Running]


def run_load(
    orders: Sequence[Order],
    environ: Mapping[str, str],
    begin: Begin,
    *,
    around: Callable[[], None],
) -> list[Ended]:
    """Run an order a process, all at the same time.

    *around* is called when all are ready and when all are done, for each operation.

    Raises:
        StorageError: one failed; says what it said.
    """
    clients: list[Running] = []
    try:
        clients += (begin(at, order, environ) for at, order in enumerate(orders))
        for _ in orders[0].operations:
            for client in clients:
                client.wait_ready()
            around()
            for client in clients:
                client.go()
            for client in clients:
                client.wait_done()
            around()
        return [client.end() for client in clients]
    finally:
        for client in clients:
            client.kill()


def begin_here(_number: int, order: Order, environ: Mapping[str, str]) -> Running:
    """Begin a process of this machine."""
    return Client(order, environ)


class Client:
    """One client process."""

    def __init__(self, order: Order, environ: Mapping[str, str]) -> None:
        self._windows: list[Window] = []
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            _COMMAND,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            process_group=0,  # Ctrl-C is for the process that keeps the results
            text=True,
        )
        self._ended: Ended | None = None
        try:
            # Popen would reap it before a signal, and with it what it used.
            self._pidfd = os.pidfd_open(self._process.pid)
            limit = _PATIENCE_S + order.limit_s * len(order.operations)
            self._timer = threading.Timer(limit, self._shoot)
            self._timer.daemon = True
            self._timer.start()
            self._send(order.line())
        except BaseException:  # Ctrl-C among them: no caller has this client yet, to kill it
            self._process.kill()
            self._process.wait()
            raise

    def wait_ready(self) -> None:
        """Wait until it could begin its next operation."""
        self._next()

    def go(self) -> None:
        """Start its clock."""
        self._send("go\n")

    def wait_done(self) -> None:
        """Wait for what its operation took."""
        self._windows.append(Window.of(self._next()))

    def end(self) -> Ended:
        """Wait for its end."""
        if self._ended is None:
            _, status, usage = os.wait4(self._process.pid, 0)
            wall = time.monotonic() - self._started
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended = Ended(self._windows, wall, usage.ru_utime, usage.ru_stime)
        return self._ended

    def kill(self) -> None:
        """See that it is gone."""
        self._timer.cancel()
        if self._pidfd < 0:
            return
        if self._ended is None:
            self._shoot()
            self.end()
        os.close(self._pidfd)
        self._pidfd = -1
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _shoot(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StorageError(self._complaint()) from None

    def _next(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StorageError(self._complaint())
        if line.startswith('{"error"'):
            raise StorageError(str(json.loads(line)["error"]))
        return line

    def _complaint(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the client died: {lines[-1] if lines else 'it said nothing'}"
