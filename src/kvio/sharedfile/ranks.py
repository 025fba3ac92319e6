"""The ranks of an MPI communicator as the writers of a shared file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvio.errors import KvioError, UnsupportedError

T = TypeVar("T")


def on_first(comm: Any, make: Callable[[], T], then: Callable[[], T]) -> T:
    """Run *make* on rank 0, then *then* on the others; a failure on rank 0 is everybody's.

    Raises:
        UnsupportedError: the ranks are not all on one machine.
        KvioError: what *make* raised, on every rank.
    """
    _check_one_machine(comm)
    made: T | None = None
    error: KvioError | None = None
    if comm.rank == 0:
        try:
            made = make()
        except KvioError as exc:
            error = exc
    error = comm.bcast(error, root=0)
    if error is not None:
        raise error
    return then() if made is None else made


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
