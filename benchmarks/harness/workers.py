"""Worker processes that act at the same time: of this machine, or the ranks of an MPI job.

A worker is an object with one method per command; it runs in a process of its own, which reads a
JSON object per line from stdin and answers each with one on what was stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

from kvio import ConfigError, KvioError, StorageError, UnsupportedError

#: A JSON object; ``do`` names the worker's method, and the rest are its arguments.
Command: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

#: The folder that ``import benchmarks`` needs, whatever the current directory is.
_REPOSITORY: Final = str(Path(__file__).resolve().parents[2])
#: A command that takes so long hangs.
_TIMEOUT_S: Final = 120.0
_JOB_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
#: MPI waits by spinning, on a processor that a rank needs.
_PAUSE_S: Final = 0.0005


class Worker(Protocol):
    """What a process does: a method per command, each with keyword arguments and an answer."""

    def close(self) -> Answer:
        """End the trial."""


def module_command(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this repository as a program, from anywhere."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {_REPOSITORY!r}); "
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    )
    return sys.executable, "-c", code, *arguments


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def wait_readable(source: int | _HasDescriptor, timeout_s: float) -> bool:
    """Wait until there is something to read, or the end; False: it took too long.

    select(2) knows no descriptor above 1023, of which a large program may have some.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def obey(worker: Worker, command: Command) -> Answer:
    """Run one command; what goes wrong is an answer, too."""
    arguments = dict(command)
    try:
        answer: Answer = getattr(worker, arguments.pop("do"))(**arguments)
    except UnsupportedError as exc:
        return {"refused": str(exc)}
    except (KvioError, OSError, MemoryError) as exc:
        return {"error": f"{type(exc).__name__}: {exc}"}
    return answer


class _Member(Protocol):
    def send(self, command: Command) -> None:
        """Hand a command over; do not wait."""

    def receive(self) -> Answer:
        """Wait for the answer.

        Raises:
            StorageError: there will be none.
        """

    def kill(self) -> None:
        """End the process, if it is ours."""


class Workers:
    """Several workers that obey at the same time."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = members

    def ask(self, commands: Sequence[Command]) -> list[Answer]:
        """Send the first workers a command each, and wait for all answers.

        Raises:
            UnsupportedError: the storage cannot do it.
            StorageError: one failed or is gone; the others are of no use without it.
        """
        asked = self._members[: len(commands)]
        for member, command in zip(asked, commands, strict=True):
            member.send(command)
        answers = [member.receive() for member in asked]
        for number, answer in enumerate(answers):
            if "refused" in answer:
                raise UnsupportedError(answer["refused"])
            if "error" in answer:
                raise StorageError(f"rank {number}: {answer['error']}")
        return answers

    def close(self) -> None:
        """End the processes that were started here."""
        for member in self._members:
            member.kill()


class Local:
    """A worker of a class, in a process of this machine."""

    def __init__(self, kind: type[Worker], number: int) -> None:
        self._number = number
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            module_command(__name__, f"{kind.__module__}:{kind.__qualname__}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            process_group=0,  # Ctrl-C is for the process that keeps the results
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Hand a command over; `receive` reports that the process is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Answer:
        """Wait for the answer.

        Raises:
            StorageError: the process died or did not answer.
        """
        out = self._process.stdout
        assert out is not None
        if not wait_readable(out, _TIMEOUT_S):
            raise StorageError(f"rank {self._number} did not answer for {_TIMEOUT_S:.0f} s")
        line = out.readline()
        if not line.endswith(b"\n"):
            raise StorageError(self._last_words())
        answer: Answer = json.loads(line)
        return answer

    def _last_words(self) -> str:
        status = self._process.wait(_TIMEOUT_S)
        how = (
            f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        )
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"rank {self._number} died: {': '.join([how, *lines[-1:]])}"

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Remote:
    """A worker in another rank of an MPI job."""

    def __init__(self, communicator: Any, number: int) -> None:
        self._communicator = communicator
        self._number = number

    def send(self, command: Command) -> None:
        self._communicator.send(dict(command), dest=self._number)

    def receive(self) -> Answer:
        answer: Answer = mpi_receive(self._communicator, self._number)
        return answer

    def kill(self) -> None:
        """Leave it: MPI ends a job that lost a rank."""


class Job:
    """This process alone, or the ranks of an MPI job, of which the first leads."""

    def __init__(self, kind: type[Worker], communicator: Any = None) -> None:
        self._kind = kind
        self._communicator = communicator

    @property
    def size(self) -> int | None:
        """The ranks of the job; None: there is no job."""
        return None if self._communicator is None else int(self._communicator.Get_size())

    @property
    def follows(self) -> bool:
        """Another rank leads."""
        return self._communicator is not None and self._communicator.Get_rank() > 0

    def workers(self, count: int) -> Workers:
        """Start processes here, or use the other ranks and one process for the leader."""
        if self._communicator is None:
            return Workers([Local(self._kind, number) for number in range(count)])
        others = [_Remote(self._communicator, number) for number in range(1, count)]
        return Workers([Local(self._kind, 0), *others])

    def counts(self, wanted: Sequence[int] | None, default: Sequence[int]) -> list[int]:
        """Choose numbers of workers: what is wanted, else the default; of a job what it has.

        Raises:
            ConfigError: the job has fewer ranks than are wanted.
        """
        if self.size is None:
            return list(default if wanted is None else wanted)
        if wanted is None:
            fit = [count for count in default if count <= self.size]
            return fit if self.size in fit else [*fit, self.size]
        beyond = [count for count in wanted if count > self.size]
        if beyond:
            raise ConfigError(f"{beyond[0]} processes: this job has {self.size} ranks")
        return list(wanted)

    def serve(self) -> None:
        """Obey the leader until it ends the job."""
        worker = self._kind()
        while (command := mpi_receive(self._communicator, 0)) is not None:
            self._communicator.send(obey(worker, command), dest=0)
        worker.close()

    def dismiss(self) -> None:
        """Let the other ranks end."""
        for number in range(1, self.size or 1):
            self._communicator.send(None, dest=number)


@contextmanager
def job_of(kind: type[Worker]) -> Iterator[Job]:
    """Lend the ranks of this job, each a worker of a class; they end with it.

    Raises:
        ConfigError: mpirun started it, and mpi4py is missing: each rank would be a run of its own.
    """
    found = Job(kind, communicator())
    try:
        yield found
    finally:
        if not found.follows:
            found.dismiss()


def communicator() -> Any:
    """Return the communicator of all ranks; None: mpirun did not start this process, or it alone.

    Raises:
        ConfigError: mpi4py is missing.
    """
    if not any(int(os.environ.get(name) or 0) > 1 for name in _JOB_SIZES):
        return None
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError("started by mpirun, but mpi4py is not installed") from None
    return MPI.COMM_WORLD


def mpi_receive(communicator: Any, source: int) -> Any:
    """Wait for what a rank sends, and leave the processor to others meanwhile."""
    while not communicator.iprobe(source=source):
        time.sleep(_PAUSE_S)
    return communicator.recv(source=source)


def main() -> int:
    """Run the worker that the first argument names until stdin ends."""
    module, _, name = sys.argv[1].partition(":")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    worker: Worker = getattr(importlib.import_module(module), name)()
    for line in sys.stdin:
        answers.write(json.dumps(obey(worker, json.loads(line))) + "\n")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        sys.exit(main())
