"""The ranks of an MPI communicator as the writers of a shared file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvio.errors import KvioError, UnsupportedError

T = TypeVar("T")


def on_first(
    comm: Any,
    make: Callable[[], T],
    join: Callable[[], T],
    leave: Callable[[T], None],
    undo: Callable[[T], None],
) -> T:
    """Run *make* on rank 0, then *join* on the others; a failure of one is everybody's.

    What the others had opened is left, and what rank 0 had made undone, where a rank failed.

    Raises:
        UnsupportedError: the ranks are not all on one machine.
        KvioError: what the first rank that failed raised, on every rank.
    """
    _check_one_machine(comm)
    mine, error = _attempt(make) if comm.rank == 0 else (None, None)
    error = comm.bcast(error, root=0)
    if error is not None:
        raise error
    if comm.rank != 0:
        mine, error = _attempt(join)
    error = next((found for found in comm.allgather(error) if found is not None), None)
    if error is None:
        assert mine is not None
        return mine
    if mine is not None:
        (undo if comm.rank == 0 else leave)(mine)
    raise error


def _attempt(step: Callable[[], T]) -> tuple[T | None, KvioError | None]:
    try:
        return step(), None
    except KvioError as exc:
        return None, exc


def _check_one_machine(comm: Any) -> None:
    from mpi4py import MPI

    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = near.size
    near.Free()
    if here != comm.size:
        raise UnsupportedError(
            f"{comm.size} ranks, {here} of them on this machine: writers of a shared file meet in "
            "memory and must be on one machine; split the communicator by machine"
        )
