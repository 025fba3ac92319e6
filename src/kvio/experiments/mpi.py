"""The MPI job that an experiment may be part of; mpi4py is imported only in one."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from kvio import ConfigError

_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
#: MPI waits by spinning, on a processor that a rank wants.
_PAUSE_S: Final = 0.0005


def communicator() -> Any:
    """Give the communicator of all ranks; None: mpirun did not start this process, or it alone.

    Raises:
        ConfigError: mpi4py is missing: each rank would be a run of its own.
    """
    if not any(int(os.environ.get(name) or 0) > 1 for name in _SIZES):
        return None
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError("started by mpirun, but mpi4py is not installed") from None
    return MPI.COMM_WORLD


def receive(communicator: Any, source: int) -> Any:
    """Wait for what a rank sends, and leave the processor to others meanwhile."""
    while not communicator.iprobe(source=source):
        time.sleep(_PAUSE_S)
    return communicator.recv(source=source)
