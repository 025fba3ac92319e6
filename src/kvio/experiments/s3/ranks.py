"""Under mpirun every rank runs client processes, and rank 0 leads; else there is this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvio import StorageError
from kvio.experiments import mpi
from kvio.experiments.s3.fleet import Client, Ended, Running, begin_here
from kvio.experiments.s3.order import Order


class World:
    """This process alone, or the ranks of an MPI job."""

    def __init__(self, communicator: Any = None) -> None:
        self._communicator = communicator

    @property
    def size(self) -> int:
        """Count the ranks."""
        return 1 if self._communicator is None else int(self._communicator.Get_size())

    @property
    def follows(self) -> bool:
        """Tell whether another rank leads."""
        return self._communicator is not None and self._communicator.Get_rank() > 0

    def begin(self, number: int, order: Order, environ: Mapping[str, str]) -> Running:
        """Begin a client process: of rank *number*, where there are ranks."""
        if self._communicator is None or number == 0:
            return begin_here(number, order, environ)
        return _Remote(self._communicator, number, order, environ)

    def serve(self) -> None:
        """Do what rank 0 says until it ends."""
        client: Client | None = None
        while True:
            call, *arguments = mpi.receive(self._communicator, 0)
            if call == "leave":
                return
            answer: tuple[str, Any]
            try:
                if call == "begin":
                    client = Client(*arguments)
                    answer = ("", None)
                else:
                    answer = ("", getattr(client, call)())
            except StorageError as exc:
                answer = (str(exc), None)
            self._communicator.send(answer, dest=0)

    def dismiss(self) -> None:
        """Let the other ranks end."""
        for rank in range(1, self.size):
            self._communicator.send(("leave",), dest=rank)


class _Remote:
    """A client process that another rank runs."""

    def __init__(
        self, communicator: Any, rank: int, order: Order, environ: Mapping[str, str]
    ) -> None:
        self._communicator = communicator
        self._rank = rank
        self._ask("begin", order, dict(environ))

    def wait_ready(self) -> None:
        self._ask("wait_ready")

    def go(self) -> None:
        self._ask("go")

    def wait_done(self) -> None:
        self._ask("wait_done")

    def end(self) -> Ended:
        ended: Ended = self._ask("end")
        return ended

    def kill(self) -> None:
        self._ask("kill")

    def _ask(self, *call: Any) -> Any:
        self._communicator.send(call, dest=self._rank)
        failure, value = mpi.receive(self._communicator, self._rank)
        if failure:
            raise StorageError(failure)
        return value


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
