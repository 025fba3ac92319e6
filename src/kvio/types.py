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
    """Accept a key that means one block on every backend.

    A key has 1 to 200 characters: segments joined by ``/``, each starting with a letter, a digit
    or ``_`` and going on with these or ``.=@+-``.

    Raises:
        InvalidKeyError: it is anything else; nothing is ever cleaned up.
    """
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARACTERS or not _KEY(key):
        raise InvalidKeyError(
            f"invalid key {key!r:.80}: 1 to {MAX_KEY_CHARACTERS} characters, segments of "
            "[A-Za-z0-9_][A-Za-z0-9._=@+-]* joined by '/'",
            key=key if isinstance(key, str) else None,
        )


def check_keys(keys: Sequence[str]) -> None:
    """Accept many keys at a third of the price of `check_key` each, which tells what is wrong."""
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
    """Refuse what cannot be hashed with keys: `ConfigError`."""
    try:
        namespace.encode()
    except UnicodeEncodeError:
        raise ConfigError("option 'namespace' must be text that UTF-8 can write") from None
    if "\0" in namespace:
        raise ConfigError("option 'namespace' must not contain a zero byte")


def check_if_exists(if_exists: str) -> None:
    """Refuse what is no `IfExists` with `ConfigError`."""
    if if_exists not in _IF_EXISTS:
        raise ConfigError(f"if_exists must be 'keep', 'replace' or 'error', not {if_exists!r}")


def is_key(text: str) -> bool:
    """Tell whether a name found on a medium could be a key."""
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
    """How the bytes went between memory and medium."""

    BUFFERED = "buffered"
    DONTCACHE = "dontcache"
    DIRECT = "direct"
    MEMORY = "memory"
    PUT = "put"
    MULTIPART = "multipart"


class BlockStatus(StrEnum):
    """What became of one block of a batch."""

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
    """Say in one word what an error means for one block."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return BlockStatus.FAILED


class Receipt(NamedTuple):
    """What a finished write promises about one block.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload, or None where none was computed.
        level: the level that was reached, never more than was done.
        mode: the I/O mode that was taken.
        reason: why this mode, or why nothing was written.
        existed: an intact block of this length stood under the key and was kept.
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
    """What is stored under a key, by its trailer.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload as stored, or None where there is none.
        stored_nbytes: bytes the medium holds, padding and trailer included.
        mtime_ns: time of the write, nanoseconds since 1970, or None where unknown.
    """

    key: str
    nbytes: int
    checksum: int | None
    stored_nbytes: int
    mtime_ns: int | None


class BlockResult(NamedTuple):
    """What became of one block of a batch; a miss is ordinary and stops nothing.

    Attributes:
        key: the block's name.
        status: see `BlockStatus`. ``short``: the block has fewer bytes than the buffer.
        nbytes: bytes transferred, or the length of the block that was kept.
        error: the error a single call would have raised, or None.
        receipt: of a write that succeeded, else None.
    """

    key: str
    status: BlockStatus
    nbytes: int = 0
    error: KvioError | None = None
    receipt: Receipt | None = None

    @property
    def ok(self) -> bool:
        """The block is where it was asked to be: ``ok`` or ``kept``."""
        return self.status is BlockStatus.OK or self.status is BlockStatus.KEPT


class Removal(NamedTuple):
    """What became of a block that was to be removed if it is corrupt.

    Attributes:
        key: the block's name.
        status: ``corrupt``: it was, and is removed; ``ok``: it is intact and stays; ``missing``:
            there is none; else it stays, and *error* says why.
        error: why it was not removed, or None.
        path: the file that has its bytes, or None.
    """

    key: str
    status: BlockStatus
    error: KvioError | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend promises, always in the positive; False means not promised.

    Attributes:
        atomic_write: readers see a whole block or none, whatever dies when.
        exclusive_create: of several writers with ``if_exists="error"`` one succeeds.
        durable_write: ``durability="durable"`` is open to this store.
        checksum: blocks carry a checksum that reads verify.
        native_batch: a batch is one call per I/O thread.
        shared: other processes see what is stored.
        raw_blocks: what is stored can be taken out as it is, damaged or not.
        writable: blocks can be written and deleted; False: the store is open read-only.
        usable_after_fork: a forked child may go on using the store; else its calls raise.
        direct_io: direct I/O really bypasses the page cache here.
        memory_alignment: caller memory aligned to this many bytes is read and written without
            a copy under direct I/O; 1 where alignment does not matter.
        publish: how a name appears.
        medium: what is underneath, in words.
        notes: what a user should know: fallbacks taken, and promises refused and why.
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
    """One answer about a medium.

    Attributes:
        name: what was asked.
        answer: what was found, in a few words.
        good: it is as one would wish; None where there is nothing to wish for.
        meaning: one sentence: what it means for a user.
    """

    name: str
    answer: str
    good: bool | None
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since a store was opened, and what is under way now.

    Attributes:
        writes, reads, deletes: blocks asked for.
        kept, missing, corrupt, failed, timeouts: how they ended, where not well.
        bytes_written, bytes_read: payload bytes transferred.
        modes: blocks by the I/O mode that was taken.
        retries: requests that failed in passing and were made again.
        queued_bytes: bytes of the work that waits or runs on the I/O threads.
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
    """Blocks to write, or to read into memory, column by column.

    Attributes:
        keys: checked keys.
        parts: flat views of each block's bytes.
        sizes: the lengths of each block's parts, in all.
    """

    keys: Sequence[str]
    parts: Sequence[Parts]
    sizes: Sequence[int]


class Cancellation:
    """Tells a running call that nobody waits for it any more.

    A write that sees it publishes nothing; a read stops before its next system call.

    Attributes:
        requested: the call is to end.
        results: set by a batch when it begins: computes the result of each of its blocks, for a
            caller that was interrupted; to be called when the batch has ended.
    """

    __slots__ = ("_callbacks", "requested", "results")

    def __init__(self) -> None:
        self.requested = False
        self.results: Callable[[], list[BlockResult]] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def request(self) -> None:
        """Cancel, now or as soon as the call looks."""
        self.requested = True
        for callback in tuple(self._callbacks):
            callback()

    def on_request(self, callback: Callable[[], None]) -> None:
        """Run *callback* when cancelled, at once if that was before."""
        self._callbacks.append(callback)
        if self.requested:
            callback()
