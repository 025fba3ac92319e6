"""The ranks: processes of this machine, or of an MPI job, obeying one command after the other."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, Protocol, TypeAlias

from kvio import StorageError, UnsupportedError
from kvio.experiments import mpi
from kvio.experiments.staging.rank import Rank
from kvio.experiments.waiting import wait_readable

_COMMAND: Final = (sys.executable, "-m", "kvio.experiments.staging.rank")
#: What takes so much longer than its turn hangs.
_PATIENCE_S: Final = 120.0

Command: TypeAlias = Mapping[str, Any]


class Member(Protocol):
    """A rank, here or elsewhere."""

    def tell(self, command: Command) -> None:
        """Hand a command over; do not wait."""

    def hear(self) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            StorageError: there will be none.
        """

    def kill(self) -> None:
        """See that it is gone, if it is ours."""


class Fleet:
    """So many ranks, which do everything at the same time."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def ask(self, commands: Sequence[Command]) -> list[dict[str, Any]]:
        """Give the first ranks a command each, and wait for all answers.

        Raises:
            UnsupportedError: the medium cannot do it.
            StorageError: one failed or is gone; the others are of no use without it.
        """
        asked = self._members[: len(commands)]
        for member, command in zip(asked, commands, strict=True):
            member.tell(command)
        answers = [member.hear() for member in asked]
        for number, answer in enumerate(answers):
            if "refused" in answer:
                raise UnsupportedError(answer["refused"])
            if "error" in answer:
                raise StorageError(f"rank {number}: {answer['error']}")
        return answers

    def close(self) -> None:
        """End the processes that were begun here."""
        for member in self._members:
            member.kill()


class Local:
    """A process of this machine."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            process_group=0,  # Ctrl-C is for the process that keeps the results
        )

    def tell(self, command: Command) -> None:
        """Hand a command over; that it is gone is told by what is heard."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for the answer."""
        out = self._process.stdout
        assert out is not None
        if not wait_readable(out, _PATIENCE_S):
            raise StorageError(f"rank {self._number} did not answer for {_PATIENCE_S:.0f} s")
        line = out.readline()
        if not line.endswith(b"\n"):
            raise StorageError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        status = self._process.wait(_PATIENCE_S)
        how = (
            f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        )
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"rank {self._number} died: {': '.join([how, *lines[-1:]])}"

    def kill(self) -> None:
        """End it and forget it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Remote:
    """Another rank of an MPI job."""

    def __init__(self, communicator: Any, number: int) -> None:
        self._communicator = communicator
        self._number = number

    def tell(self, command: Command) -> None:
        self._communicator.send(dict(command), dest=self._number)

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = mpi.receive(self._communicator, self._number)
        return answer

    def kill(self) -> None:
        """Leave it: MPI ends a job that lost a rank."""


class World:
    """This process alone, or the ranks of an MPI job, of which the first leads."""

    def __init__(self, communicator: Any = None) -> None:
        self._communicator = communicator

    @property
    def size(self) -> int | None:
        """Count the ranks of the job; None: there is none."""
        return None if self._communicator is None else int(self._communicator.Get_size())

    @property
    def follows(self) -> bool:
        """Tell whether another rank leads."""
        return self._communicator is not None and self._communicator.Get_rank() > 0

    def fleet(self, ranks: int) -> Fleet:
        """Begin processes here, or address the ranks there are and one process for the leader."""
        if self._communicator is None:
            return Fleet([Local(number) for number in range(ranks)])
        others = [_Remote(self._communicator, number) for number in range(1, ranks)]
        return Fleet([Local(0), *others])

    def serve(self) -> None:
        """Obey the leader until it says that this is all."""
        rank = Rank()
        while (command := mpi.receive(self._communicator, 0)) is not None:
            self._communicator.send(rank.obey(command), dest=0)
        rank.close()

    def dismiss(self) -> None:
        """Let the other ranks end."""
        for number in range(1, self.size or 1):
            self._communicator.send(None, dest=number)


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
