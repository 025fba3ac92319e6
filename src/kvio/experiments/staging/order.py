"""What a rank is told and what it tells, and the contenders that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote

from kvio import MiB
from kvio.experiments.plot import size_text

#: What is timed, as tables and plots name it, in their order.
ACCEPT: Final = "accept"
WRITE: Final = "write"
DRAIN: Final = "drain"
READ: Final = "read"
OPERATIONS: Final = (WRITE, ACCEPT, DRAIN, READ)

#: The floor of accept and of reads.
MEMCPY: Final = "memcpy"
#: Tiers by name: the backend behind and its durability.
TIERS: Final = {
    "tier tmpfile": ("posix-tmpfile", "visible"),
    "tier tmpfile durable": ("posix-tmpfile", "durable"),
    "tier direct": ("posix-direct", "visible"),
    "tier direct durable": ("posix-direct", "durable"),
    "daemon direct durable": ("posix-direct", "durable"),
}
#: The tier that all ranks share: the memory and the drains of a `kvio stage-daemon`.
DAEMON: Final = "daemon direct durable"
#: The same backends, written directly.
STORES: Final = {
    "posix-tmpfile": ("posix-tmpfile", "visible"),
    "posix-tmpfile durable": ("posix-tmpfile", "durable"),
    "posix-direct": ("posix-direct", "visible"),
    "posix-direct durable": ("posix-direct", "durable"),
}
PAGE_CACHE: Final = "write(2)"
#: System calls by hand.
FILES: Final = (PAGE_CACHE, "write(2) fsync", "O_DIRECT fdatasync")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (MEMCPY, *TIERS, *STORES, *FILES)
#: Those whose bytes survive a power cut as soon as they say that they are done.
SAFE: Final = frozenset(
    {
        *(name for name, (_, level) in {**TIERS, **STORES}.items() if level == "durable"),
        *FILES[1:],
    }
)

#: Blocks of a rank in one turn, at most.
_MOST_BLOCKS: Final = 256


def store_of(tier: str) -> str:
    """Name the contender that writes a tier's backend directly."""
    return next(name for name, same in STORES.items() if same == TIERS[tier])


def url_of(kind: tuple[str, str], root: str, *, checksum: bool) -> str:
    """Give the URL of a store of a backend and durability."""
    backend, durability = kind
    options = "" if checksum else "&checksum=none&verify=length"
    return f"{backend}://{quote(root)}?durability={durability}{options}"


def steps_of(contender: str) -> tuple[str, ...]:
    """Give the operations of a contender's turn, in their order."""
    if contender == MEMCPY:
        return ACCEPT, READ, WRITE
    if contender in TIERS:
        return ACCEPT, READ, DRAIN, WRITE
    if contender in STORES:
        return DRAIN, WRITE
    return (WRITE, READ) if contender == PAGE_CACHE else (WRITE,)


@dataclass(frozen=True, slots=True)
class Case:
    """So many ranks write *count* blocks of *nbytes* each, one after the other."""

    ranks: int
    nbytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.nbytes)}"

    @property
    def subject(self) -> str:
        """Name the number of ranks."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def total_bytes(self) -> int:
        """Count what all ranks write in one operation."""
        return self.ranks * self.count * self.nbytes

    @classmethod
    def within(cls, max_bytes: int, *, ranks: int, nbytes: int) -> Self:
        """Give as many blocks as a turn may write, and one at least."""
        return cls(ranks, nbytes, max(1, min(_MOST_BLOCKS, max_bytes // (ranks * nbytes))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a rank prepares for a turn.

    Attributes:
        root: of the store, or of files.
        tag: begins every key; no other turn has it.
        drain_threads: of a tier, and of the writes that its drain is compared with.
        checksum: of kvio's blocks, staged and stored.
        socket: where a daemon listens, for the contender that has one.
    """

    contender: str
    root: str
    tag: str
    rank: int
    nbytes: int
    count: int
    drain_threads: int
    checksum: bool
    socket: str | None = None

    def key(self, operation: str, index: int) -> str:
        """Name a block; no two ranks, turns and operations have the same."""
        return f"{self.tag}/{operation}/{self.rank:04d}/{index:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one operation took in one rank.

    Attributes:
        start_s, end_s: by the machine's monotonic clock; the end is that of the last call.
        settled_s: when all was as safe as the contender makes it.
        latencies_s: each call; of a drain, the time until its barrier for every block.
        cpu_s: of this process, all its threads, from start to settled.
    """

    start_s: float
    end_s: float
    settled_s: float
    latencies_s: list[float]
    cpu_s: float


#: Below this the bar of accept does not hold.
BAR_BYTES: Final = MiB
