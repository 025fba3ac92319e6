"""A drain daemon for the ranks of one turn."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvio import UnsupportedError
from kvio.experiments.waiting import wait_readable

_COMMAND: Final = (sys.executable, "-c", "from kvio.cli import main; main()", "stage-daemon")
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """One that listens at *socket*."""

    socket: str
    pid: int

    def cpu_s(self) -> float:
        """Read what it has used so far, in steps of a clock tick: proc_pid_stat(5)."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(url: str, *, capacity_bytes: int, drain_threads: int) -> Iterator[Daemon]:
    """Run a daemon for a store, with memory that is there.

    Raises:
        UnsupportedError: it does not begin; says why.
    """
    with tempfile.TemporaryDirectory(prefix="kvio-") as folder, tempfile.TemporaryFile() as said:
        socket = os.path.join(folder, "s")
        options = ("--capacity", str(capacity_bytes), "--drain-threads", str(drain_threads))
        process = subprocess.Popen(
            (*_COMMAND, url, "--socket", socket, *options, "--populate"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            process_group=0,  # Ctrl-C is for the process that keeps the results
        )
        assert process.stdout is not None
        try:
            ready = wait_readable(process.stdout, _PATIENCE_S)
            if not (ready and process.stdout.readline()):
                process.kill()
                said.seek(0)
                words = said.read().decode(errors="replace").strip().splitlines()
                raise UnsupportedError(f"no daemon: {(words or ['it said nothing'])[-1]}")
            yield Daemon(socket, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
