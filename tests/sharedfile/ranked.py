"""What each rank of test_ranks_real runs: ``ranked.py mpi|gloo DIRECTORY ACTION …``.

For gloo, rank and size come from the environment, as torchrun sets them. Each rank writes how its
turns ended to DIRECTORY/rank-N.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvio
from kvio import SharedFile
from kvio.sharedfile import ranks

SIZE = 100_000
#: What a rank raises, by the name that a test uses.
ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (MemoryError, OSError, TypeError, KeyboardInterrupt, SystemExit)
}
#: How often the ranks meet in `SharedFile.from_comm`.
_EXCHANGES = 3


def payload(offset: int, nbytes: int) -> bytes:
    """Make the bytes that belong at an offset."""
    return bytes((offset + at) % 251 for at in range(nbytes))


def open_file(comm: Any, path: Path) -> SharedFile:
    """Open the file for this rank."""
    return SharedFile.from_comm(comm, path, SIZE, durability="visible")


def write(comm: Any, path: Path) -> str:
    """Write this rank's part; rank 0 seals."""
    with open_file(comm, path) as file:
        for offset, nbytes in file.domain():
            file.pwrite(payload(offset, nbytes), offset)
        return str(file.seal(timeout=60).nbytes) if file.rank == 0 else "written"


def fail(comm: Any, path: Path, failing: int, kind: str) -> str:
    """Let one rank raise as it makes or opens the file; return how this rank ended."""
    step = "open" if failing else "create"
    before = getattr(SharedFile, step)

    def broken(*_: Any, **__: Any) -> SharedFile:
        raise ERRORS[kind]

    if ranks.ranks_of(comm).rank == failing:
        setattr(SharedFile, step, broken)
    try:
        open_file(comm, path).close()
    except BaseException as exc:  # noqa: BLE001  # it is what is asked for
        return f"{type(exc).__name__}: {exc}"
    finally:
        setattr(SharedFile, step, before)
    return "opened"


class Interrupted:
    """A communicator whose rank gets a SIGINT some moments after it has come."""

    def __init__(self, comm: Any, spins: int) -> None:
        self._ranks = ranks.ranks_of(comm)
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self._times = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
        self._sender = threading.Thread(target=self._send, args=(spins,))

    def _send(self, spins: int) -> None:
        for _ in range(spins):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    def allgather(self, said: Any, /) -> list[Any]:
        """Return what every rank says; the signal has come when the last exchange is over."""
        self._times += 1
        if self._times == 1:
            self._sender.start()
        found = self._ranks.allgather(said)
        if self._times == _EXCHANGES:
            self._sender.join()
        return found


def interrupt(comm: Any, path: Path, failing: int, spins: int) -> str:
    """Interrupt one rank; return how this rank ended."""
    if ranks.ranks_of(comm).rank == failing:
        comm = Interrupted(comm, spins)
    try:
        file = open_file(comm, path)
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001  # it is what is asked for
        return type(exc).__name__
    (file.close if file.rank else file.abort)()
    return "opened"


def die(comm: Any, path: Path) -> str:
    """Be killed on rank 1 when rank 0 has made the file; return how this rank ended."""

    def killed(*_: Any, **__: Any) -> SharedFile:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if ranks.ranks_of(comm).rank == 1:
        SharedFile.open = killed  # type: ignore[method-assign]  # a process of its own
    try:
        open_file(comm, path).close()
    except Exception as exc:  # noqa: BLE001  # it is what is asked for
        return type(exc).__name__
    return "opened"


def be_refused(comm: Any, path: Path) -> str:
    """Return why this communicator is not taken."""
    try:
        open_file(comm, path).close()
    except kvio.UnsupportedError as exc:
        return str(exc)
    return "opened"


def turns(
    comm: Any, files: Path, meet: Callable[[], object], arguments: list[str]
) -> Iterator[Any]:
    """Take the turns of an action; yield how each ended on this rank, and what was left."""
    path = files / "f"
    match arguments:
        case ["write"]:
            yield write(comm, path)
        case ["be refused"]:
            yield be_refused(comm, path)
        case ["die"]:
            yield die(comm, path)
        case ["raise"]:
            for kind in ERRORS:
                for failing in (0, 1, 2):
                    yield fail(comm, path, failing, kind)
                    meet()
                    yield os.listdir(files)
                    meet()
        case ["interrupt", seed, times, most_spins]:
            dice = random.Random(int(seed))
            for _ in range(int(times)):
                failing = dice.randrange(ranks.ranks_of(comm).size)
                yield failing, interrupt(comm, path, failing, dice.randrange(int(most_spins)))
                meet()
                yield os.listdir(files)
                meet()
        case _:
            raise AssertionError(arguments)


def main(kind: str, root: Path, arguments: list[str]) -> None:
    """Take the turns of one rank; *kind* is "mpi", or a backend of torch.distributed."""
    files = root / "files"
    if kind == "mpi":
        from mpi4py import MPI

        comm: Any = MPI.COMM_WORLD
        rank, meet = int(comm.rank), comm.Barrier
    else:
        from torch import distributed

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = f"file://{root}/store"
        distributed.init_process_group(kind, init_method=store, rank=rank, world_size=size)
        comm, meet = distributed.group.WORLD, distributed.barrier
    said = list(turns(comm, files, meet, arguments))
    (root / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
