"""The values that cross the public interface: receipts, results, capabilities, keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    ConfigError,
    CorruptBlockError,
    InvalidKeyError,
    KvioError,
    StorageTimeoutError,
)

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

IfExists: TypeAlias = Literal["keep", "replace", "error"]
Durability: TypeAlias = Literal["visible", "durable"]
Layout: TypeAlias = Literal["block", "plain"]
Verify: TypeAlias = Literal["full", "length", "off"]

#: Flat views of bytes, in order: what a backend gathers from or scatters to.
Parts: TypeAlias = Sequence[memoryview]

_IF_EXISTS: Final = ("keep", "replace", "error")
MAX_KEY_CHARACTERS: Final = 200
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._=@+-]*"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*").fullmatch
_KEYS = re.compile(rf"{_SEGMENT}(?:[/\n]{_SEGMENT})*").fullmatch


def check_key(key: str) -> None:
    """Check that a key is valid, on every backend alike.

    A key has 1 to 200 characters: segments joined by ``/``, each starting with a letter, a digit
    or ``_`` and going on with these or ``.=@+-``.

    Raises:
        InvalidKeyError: it is not; kvio never changes a key to make it valid.
    """
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARACTERS or not _KEY(key):
        raise InvalidKeyError(
            f"invalid key {key!r:.80}: 1 to {MAX_KEY_CHARACTERS} characters, segments of "
            "[A-Za-z0-9_][A-Za-z0-9._=@+-]* joined by '/'",
            key=key if isinstance(key, str) else None,
        )


def check_keys(keys: Sequence[str]) -> None:
    """Check many keys, at a third of the cost of `check_key` for each."""
    try:
        text = "\n".join(keys)
    except TypeError:
        text = ""
    if (
        _KEYS(text)
        and text.count("\n") == len(keys) - 1  # none inside a key
        and len(max(keys, key=len)) <= MAX_KEY_CHARACTERS
    ):
        return
    for key in keys:
        check_key(key)


def check_namespace(namespace: str) -> None:
    """Check the option ``namespace``.

    Raises:
        ConfigError: it cannot be hashed together with keys.
    """
    try:
        namespace.encode()
    except UnicodeEncodeError:
        raise ConfigError("option 'namespace' must be text that UTF-8 can write") from None
    if "\0" in namespace:
        raise ConfigError("option 'namespace' must not contain a zero byte")


def check_if_exists(if_exists: str) -> None:
    """Check the argument ``if_exists``.

    Raises:
        ConfigError: it is not one of `IfExists`.
    """
    if if_exists not in _IF_EXISTS:
        raise ConfigError(f"if_exists must be 'keep', 'replace' or 'error', not {if_exists!r}")


def is_key(text: str) -> bool:
    """Return whether a name found in storage is a valid key."""
    return len(text) <= MAX_KEY_CHARACTERS and _KEY(text) is not None


class Level(StrEnum):
    """How safe a written block is; levels compare by safety.

    ``accepted``: the bytes are copied, the source may be reused. ``visible``: readers in any
    process see the block. ``durable``: it survives a loss of power.
    """

    ACCEPTED = "accepted"
    VISIBLE = "visible"
    DURABLE = "durable"

    @property
    def _rank(self) -> int:
        return ("accepted", "visible", "durable").index(self.value)

    def __lt__(self, other: str) -> bool:
        return self._rank < Level(other)._rank

    def __le__(self, other: str) -> bool:
        return self._rank <= Level(other)._rank

    def __gt__(self, other: str) -> bool:
        return self._rank > Level(other)._rank

    def __ge__(self, other: str) -> bool:
        return self._rank >= Level(other)._rank


class IOMode(StrEnum):
    """How the bytes were transferred between memory and storage."""

    BUFFERED = "buffered"
    DONTCACHE = "dontcache"
    DIRECT = "direct"
    MEMORY = "memory"
    PUT = "put"
    MULTIPART = "multipart"


class BlockStatus(StrEnum):
    """The outcome for one block of a batch."""

    OK = "ok"
    KEPT = "kept"
    MISSING = "missing"
    EXISTS = "exists"
    CORRUPT = "corrupt"
    SHORT = "short"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


_STATUSES: Final = (
    (BlockNotFoundError, BlockStatus.MISSING),
    (BlockExistsError, BlockStatus.EXISTS),
    (CorruptBlockError, BlockStatus.CORRUPT),
    (StorageTimeoutError, BlockStatus.TIMEOUT),
)


def status_of(error: KvioError) -> BlockStatus:
    """Return the status that an error means for a block."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return BlockStatus.FAILED


class Receipt(NamedTuple):
    """The answer to a write: what was reached for the block, and how.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload, or None where none was computed.
        level: the level that was reached, never more than was done.
        mode: the I/O mode that was used.
        reason: why this mode, or why nothing was written.
        existed: an intact block of this length was under the key already, and was kept.
    """

    key: str
    nbytes: int
    checksum: int | None
    level: Level
    mode: IOMode
    reason: str
    existed: bool


@dataclass(frozen=True, slots=True)
class BlockStat:
    """The facts about a stored block, as its trailer has them.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload as stored, or None where there is none.
        stored_nbytes: bytes in storage, padding and trailer included.
        mtime_ns: time of the write, nanoseconds since 1970, or None where unknown.
    """

    key: str
    nbytes: int
    checksum: int | None
    stored_nbytes: int
    mtime_ns: int | None


class BlockResult(NamedTuple):
    """The outcome for one block of a batch; a missing block does not stop the others.

    Attributes:
        key: the block's name.
        status: see `BlockStatus`. ``short``: the block has fewer bytes than the buffer.
        nbytes: bytes transferred, or the length of the block that was kept.
        error: the error that a call for this block alone would have raised, or None.
        receipt: of a write that succeeded, else None.
    """

    key: str
    status: BlockStatus
    nbytes: int = 0
    error: KvioError | None = None
    receipt: Receipt | None = None

    @property
    def ok(self) -> bool:
        """True if the status is ``ok`` or ``kept``."""
        return self.status is BlockStatus.OK or self.status is BlockStatus.KEPT


class Removal(NamedTuple):
    """The outcome of `Store.remove_corrupt`.

    Attributes:
        key: the block's name.
        status: ``corrupt``: the block was corrupt and has been removed; ``ok``: it is intact and
            stays; ``missing``: there is none; else it stays, and *error* says why.
        error: why it was not removed, or None.
        path: the file in the quarantine directory that has its bytes, or None.
    """

    key: str
    status: BlockStatus
    error: KvioError | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The promises of a store; False means that it is not promised.

    Attributes:
        atomic_write: readers see a whole block or none, whenever a writer is killed.
        exclusive_create: of several writers with ``if_exists="error"`` one succeeds.
        durable_write: ``durability="durable"`` is possible here.
        checksum: blocks carry a checksum that reads verify.
        native_batch: a batch is one call per I/O thread.
        shared: other processes see the blocks.
        raw_blocks: stored bytes can be copied out as they are, corrupt or not.
        writable: blocks can be written and deleted; False: the store is open read-only.
        usable_after_fork: a forked child may use the store; else its calls raise.
        direct_io: direct I/O really bypasses the page cache here.
        memory_alignment: caller memory aligned to this many bytes is read and written without
            a copy under direct I/O; 1 where alignment does not matter.
        publish: how a block gets its name.
        medium: the file system or service below, in words.
        notes: fallbacks that are in use, and which promises are refused and why.
    """

    atomic_write: bool = False
    exclusive_create: bool = False
    durable_write: bool = False
    checksum: bool = False
    native_batch: bool = False
    shared: bool = False
    raw_blocks: bool = False
    writable: bool = True
    usable_after_fork: bool = False
    direct_io: bool = False
    memory_alignment: int = 1
    publish: str = ""
    medium: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the storage, as `kvio doctor` prints it.

    Attributes:
        name: the question.
        answer: the answer, in a few words.
        good: the answer is favourable; None where neither answer is better.
        meaning: one sentence on what it means for a user.
    """

    name: str
    answer: str
    good: bool | None
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since a store was opened, and the work in progress.

    Attributes:
        writes, reads, deletes: blocks that calls named.
        kept, missing, corrupt, failed, timeouts: blocks by outcome.
        bytes_written, bytes_read: payload bytes transferred.
        modes: blocks by the I/O mode that was used.
        retries: requests that were sent again after a transient error.
        queued_bytes: bytes of the jobs that are queued or running on the I/O threads.
        quarantined_threads: I/O threads stuck in calls that timed out.
    """

    writes: int = 0
    reads: int = 0
    deletes: int = 0
    kept: int = 0
    missing: int = 0
    corrupt: int = 0
    failed: int = 0
    timeouts: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    modes: dict[str, int]
    retries: int = 0
    queued_bytes: int = 0
    quarantined_threads: int = 0


class Blocks(NamedTuple):
    """Blocks to write, or to read into memory, as columns.

    Attributes:
        keys: checked keys.
        parts: flat views of each block's bytes.
        sizes: the total length of each block's parts.
    """

    keys: Sequence[str]
    parts: Sequence[Parts]
    sizes: Sequence[int]


class Cancellation:
    """Asks a running call to stop, because its caller no longer waits.

    A write that notices it publishes nothing; a read stops before its next system call.

    Attributes:
        requested: the call should stop.
        results: set by a batch when it begins: returns one result per block, for a caller that
            was interrupted; to be called when the batch has ended.
    """

    __slots__ = ("_callbacks", "requested", "results")

    def __init__(self) -> None:
        self.requested = False
        self.results: Callable[[], list[BlockResult]] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def request(self) -> None:
        """Ask the call to stop; it does so at its next check."""
        self.requested = True
        for callback in tuple(self._callbacks):
            callback()

    def on_request(self, callback: Callable[[], None]) -> None:
        """Run *callback* when cancellation is requested, at once if it was already."""
        self._callbacks.append(callback)
        if self.requested:
            callback()
