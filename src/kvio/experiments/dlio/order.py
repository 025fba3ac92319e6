"""What is compared: workloads by ranks, and the contenders that take turns at them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

from kvio import KiB, MiB
from kvio.experiments.s3.order import LIBRARIES

#: What is timed, as tables and plots name it, in their order.
GENERATION: Final = "generation"
EPOCH: Final = "epoch"
CHECKPOINT: Final = "checkpoint"
OPERATIONS: Final = (GENERATION, EPOCH, CHECKPOINT)

_STOCK: Final = "local_fs"
_POSIX: Final = ("posix-tmpfile", "posix-direct", "hybrid")
_S3: Final = ("s3+boto3", "s3+minio", "s3+obstore", "s3+s3dlio", "s3+torch")
_TORCH: Final = " torch"
#: DLIO's own storage and readers, in kvio's loader: what the others' speed is divided by.
REFERENCE: Final = _STOCK
#: DLIO as it comes: its own storage, readers and loader.
STOCK: Final = f"{_STOCK}{_TORCH}"
#: The contender that bars are about.
TMPFILE: Final = _POSIX[0]
#: Every contender, in the order of tables.
CONTENDERS: Final = (
    *(f"{storage}{loader}" for storage in (_STOCK, *_POSIX) for loader in ("", _TORCH)),
    *_S3,
)


def default() -> list[str]:
    """Give what takes part unless others are asked for: one S3 library, the first that is here."""
    here = [name for name in _S3 if importlib.util.find_spec(library_of(name)) is not None]
    chosen = (here or _S3)[0]
    return [name for name in CONTENDERS if name not in _S3 or name == chosen]


def library_of(contender: str) -> str:
    """Give the module of an S3 contender's library."""
    return LIBRARIES[contender.partition("+")[2]]


def backend_of(contender: str) -> str | None:
    """Give the name of kvio's backend; None: DLIO's own storage."""
    storage = contender.removesuffix(_TORCH)
    return None if storage == _STOCK else storage


def has_own_loader(contender: str) -> bool:
    """Tell whether DLIO's own loader reads, in worker processes of torch."""
    return contender.endswith(_TORCH)


def uses_server(contender: str) -> bool:
    """Tell whether blocks are objects on a server."""
    return contender in _S3


def has_torch() -> bool:
    """Tell whether torch is installed, without which DLIO has neither loader nor checkpoints."""
    return importlib.util.find_spec("torch") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What DLIO generates and reads, after a benchmark of MLPerf Storage.

    Attributes:
        record_nbytes: of a sample before it is encoded.
        batch: samples of a step of a rank.
        saves: it is about checkpoints, and its samples are few and small.
    """

    name: str
    format: str
    record_nbytes: int
    batch: int
    saves: bool = False


WORKLOADS: Final = {
    one.name: one
    for one in (
        Workload(name="unet3d", format="npz", record_nbytes=2 * MiB, batch=4),
        Workload(name="retinanet", format="jpeg", record_nbytes=322_957, batch=4),
        Workload(name="checkpoint", format="npz", record_nbytes=64 * KiB, batch=1, saves=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of a workload, the same for every contender.

    Attributes:
        max_bytes: of samples before encoding, or of the checkpoints of all epochs and ranks.
        read_threads: readers of a rank, in threads or processes.
        epochs: of which the median is taken; of checkpoints too.
        compute_s: what a step of training sleeps.
    """

    max_bytes: int
    read_threads: int
    epochs: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on so many ranks."""

    workload: Workload
    ranks: int

    def __str__(self) -> str:
        return f"{self.workload.name}, np {self.ranks}"

    def files(self, load: Load) -> int:
        """Count the samples, each a file: whole steps of all ranks, and one a thread at least."""
        step = self.workload.batch * self.ranks
        least = max(2 * step, -(-load.read_threads // self.workload.batch) * step)
        if self.workload.saves:
            return least
        return max(least, load.max_bytes // self.workload.record_nbytes // step * step)
