"""The processes that write, of this machine or of an MPI job, as the staging experiment has."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvio.experiments import mpi
from kvio.experiments.sharedfile.rank import Rank
from kvio.experiments.staging import fleet

_COMMAND: Final = (sys.executable, "-m", "kvio.experiments.sharedfile.rank")


class Local(fleet.Local):
    """A process of this machine that knows the commands of `Rank`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            process_group=0,  # Ctrl-C is for the process that keeps the results
        )


class World(fleet.World):
    """This process alone, or the ranks of an MPI job, of which the first leads."""

    def fleet(self, ranks: int) -> fleet.Fleet:
        """Begin processes here, or address the ranks there are and one process for the leader."""
        if self._communicator is None:
            return fleet.Fleet([Local(number) for number in range(ranks)])
        remote = fleet._Remote  # noqa: SLF001  # the same, but for what serves at its end
        others = [remote(self._communicator, number) for number in range(1, ranks)]
        return fleet.Fleet([Local(0), *others])

    def serve(self) -> None:
        """Obey the leader until it says that this is all."""
        rank = Rank()
        while (command := mpi.receive(self._communicator, 0)) is not None:
            self._communicator.send(rank.obey(command), dest=0)
        rank.close()


@contextmanager
def world() -> Iterator[World]:
    """Give the ranks of this job; they end with it.

    Raises:
        ConfigError: mpirun started it, and mpi4py is missing: each rank would be a run of its own.
    """
    found = World(mpi.communicator())
    try:
        yield found
    finally:
        if not found.follows:
            found.dismiss()
