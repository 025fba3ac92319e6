"""What a process is told and what it tells, and the contenders that it knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self

from kvio import MiB
from kvio.experiments.plot import size_text

#: What is timed, as tables and plots name it, in their order.
WRITE: Final = "write"
DURABLE: Final = "durable"
OPERATIONS: Final = (WRITE, DURABLE)

#: How writers run at the same time.
PROCESSES: Final = "processes"
THREADS: Final = "threads"
KINDS: Final = (PROCESSES, THREADS)

Way = Literal["kvio", "store", "python", "C", "ior"]


class Contender(NamedTuple):
    """One way to write.

    Attributes:
        way: who makes the calls.
        mode: of a shared file, the policy of a store, or by hand ``buffered`` or ``direct``.
        separate: each writer has a file of its own.
    """

    way: Way
    mode: str
    separate: bool = False
    checksum: bool = True
    preallocate: bool = True

    @property
    def direct(self) -> bool:
        """It is past the page cache for certain."""
        return self.mode in ("direct", "posix-direct")


#: The contenders that bars are about.
SHARED_DIRECT: Final = "shared direct"
SHARED_BARE: Final = "shared direct, no checksum"
SHARED_HOLE: Final = "shared direct, not preallocated"
FILES_DIRECT: Final = "files direct"
C_DIRECT: Final = "C direct"
C_FILES: Final = "C direct, files"
IOR: Final = ("ior buffered", "ior direct")
#: Every contender, in the order of tables.
CONTENDERS: Final = {
    "shared buffered": Contender("kvio", "buffered"),
    SHARED_DIRECT: Contender("kvio", "direct"),
    SHARED_BARE: Contender("kvio", "direct", checksum=False),
    SHARED_HOLE: Contender("kvio", "direct", preallocate=False),
    "shared hybrid": Contender("kvio", "hybrid"),
    FILES_DIRECT: Contender("kvio", "direct", separate=True),
    "files posix-tmpfile": Contender("store", "posix-tmpfile", separate=True),
    "files posix-direct": Contender("store", "posix-direct", separate=True),
    "python buffered": Contender("python", "buffered"),
    "python buffered, not preallocated": Contender("python", "buffered", preallocate=False),
    "python direct": Contender("python", "direct"),
    "python direct, not preallocated": Contender("python", "direct", preallocate=False),
    "C buffered": Contender("C", "buffered"),
    C_DIRECT: Contender("C", "direct"),
    C_FILES: Contender("C", "direct", separate=True),
    IOR[0]: Contender("ior", "buffered", preallocate=False),
    IOR[1]: Contender("ior", "direct", preallocate=False),
}


class Shape(NamedTuple):
    """What each writer writes, as IOR says it: in every segment a block, transfer by transfer."""

    name: str
    block_bytes: int
    transfer_bytes: int
    segments: int


#: IOR's parameters and the others of the paper, which has half a gigabyte a process.
SHAPES: Final = {
    "ior": Shape("ior", 32 * MiB, MiB, 8),
    "custom": Shape("custom", 512 * MiB, 4 * MiB, 1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """So many writers write *segments* blocks each.

    Attributes:
        kind: ``processes`` or ``threads``.
        placement: ``map_by/order``; empty: writers run where the kernel puts them.
    """

    shape: str
    kind: str
    writers: int
    block_bytes: int
    transfer_bytes: int
    segments: int
    placement: str = ""

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.transfer_bytes)}"

    @property
    def subject(self) -> str:
        """Name the writers and what they write."""
        noun = {PROCESSES: "process", THREADS: "thread"}[self.kind]
        ending = ("es" if self.kind == PROCESSES else "s") if self.writers > 1 else ""
        placement = f", {self.placement}" if self.placement else ""
        return f"{self.writers} {noun}{ending}, {self.shape}{placement}"

    @property
    def writer_bytes(self) -> int:
        """Count what one writer writes."""
        return self.segments * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Count what all write."""
        return self.writers * self.writer_bytes

    @classmethod
    def within(
        cls, max_bytes: int, shape: Shape, *, kind: str, writers: int, placement: str = ""
    ) -> Self:
        """Scale a shape down to what a turn may write: shorter blocks, then fewer segments."""
        share, transfer = max_bytes // writers, shape.transfer_bytes
        segments = max(1, min(shape.segments, share // transfer))
        block = max(1, min(shape.block_bytes, share // segments) // transfer) * transfer
        return cls(shape.name, kind, writers, block, transfer, segments, placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process prepares for a turn.

    Attributes:
        root: an empty directory for the turn's files.
        case: its fields.
        writers: the numbers of the writers that run in this process.
        cpus: where each of these may run; None: anywhere.
        program: the compiled C program; empty: there is none.
    """

    contender: str
    root: str
    case: dict[str, Any]
    writers: list[int]
    cpus: list[list[int] | None]
    program: str

    @property
    def wanted(self) -> Contender:
        """Look the contender up."""
        return CONTENDERS[self.contender]

    @property
    def first(self) -> bool:
        """This process makes the file and seals it."""
        return 0 in self.writers


class Transfer(NamedTuple):
    """One call: where its bytes go in the file, and where they are among the writer's own."""

    offset: int
    source: int
    nbytes: int


def transfers(case: Case, writer: int, *, separate: bool) -> Iterator[Transfer]:
    """List a writer's calls in order.

    Writers' blocks alternate in the shared file, segment by segment; in a file of one's own they
    lie one after the other.
    """
    for start, source in blocks(case, writer, separate=separate):
        for at in range(0, case.block_bytes, case.transfer_bytes):
            yield Transfer(start + at, source + at, case.transfer_bytes)


def blocks(case: Case, writer: int, *, separate: bool) -> Iterator[tuple[int, int]]:
    """Tell where each of a writer's blocks begins: in the file, and among its own bytes."""
    for segment in range(case.segments):
        number = segment if separate else segment * case.writers + writer
        yield number * case.block_bytes, segment * case.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a turn took in one process; times by the machine's monotonic clock.

    Attributes:
        started_s, ended_s: of each of its writers, the end being that of the last call.
        synced_s: when all of them had synced.
        latencies_s: every call of all its writers.
        user_s, system_s: CPU time of the process from start to synced.
    """

    started_s: list[float]
    ended_s: list[float]
    synced_s: float
    latencies_s: list[float]
    user_s: float
    system_s: float
