"""The interfaces: `BlockStore` for users of blocks, and `Backend`, which a store stands on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

from kvio.errors import KvioError, UnsupportedError
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    Finding,
    IfExists,
    Level,
    Parts,
    Receipt,
)

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from kvio.url import StoreURL

#: Runs blocking tasks concurrently on a store's I/O threads and the caller's own, returns their
#: results in order, and raises the first error after all have ended.
RunAll: TypeAlias = Callable[[Sequence[Callable[[], Any]]], list[Any]]


#: Fills the beginning of a buffer with the next bytes of a stream and returns how many; 0 at the
#: end of the stream.
Source: TypeAlias = Callable[[memoryview], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A regular file that is open to become a block.

    Attributes:
        path: for messages.
        fd: open for reading, and where *movable* for writing too.
        dirfd: its directory, where its name is *name*.
        nbytes: its length.
        move: it loses its name when the block is stored.
        movable: it may itself become the block.
    """

    path: str
    fd: int
    dirfd: int
    name: str
    nbytes: int
    move: bool
    movable: bool


class WriteReceipt(Protocol):
    """The answer to a write: a `kvio.Receipt`, or a `kvio.StagedReceipt` that can be waited for."""

    @property
    def key(self) -> str:
        """The block's name."""

    @property
    def nbytes(self) -> int:
        """Payload length in bytes."""

    @property
    def checksum(self) -> int | None:
        """CRC32C of the payload, or None where none was computed."""

    @property
    def level(self) -> Level:
        """The level that the write has reached by now."""


class WriteResult(Protocol):
    """The result of one block of `BlockStore.write_blocks`."""

    @property
    def key(self) -> str:
        """The block's name."""

    @property
    def status(self) -> BlockStatus:
        """What became of the block."""

    @property
    def error(self) -> KvioError | None:
        """The error that a write of this block alone would have raised."""

    @property
    def receipt(self) -> WriteReceipt | None:
        """The receipt, if the block was written or accepted."""

    @property
    def ok(self) -> bool:
        """Whether it was."""


class BlockStore(Protocol):
    """What a `kvio.Store` and a `kvio.StagingTier` have in common: blocks under keys.

    Take a `BlockStore` where either will do. Each method does what that of `kvio.Store` with the
    same name does; a tier looks at what it has staged first, and then into its store.

    The default of *if_exists* is the class's own. A store has ``keep``: a block that is there need
    not be written again, which its trailer shows. A tier has ``replace``: it takes the block
    without asking the store, and overwriting is what a cache in front of checkpoints sees most.
    """

    def write_block(
        self, key: str, data: Any, *, if_exists: IfExists = ..., timeout: float | None = None
    ) -> WriteReceipt:
        """Store or stage *data* under a key, whole or not at all."""

    def write_blocks(
        self,
        items: Iterable[tuple[str, Any]],
        *,
        if_exists: IfExists = ...,
        timeout: float | None = None,
    ) -> Sequence[WriteResult]:
        """Write (key, data) pairs; return one result per block, in order."""

    def submit_write(
        self, key: str, data: Any, *, if_exists: IfExists = ..., timeout: float | None = None
    ) -> Future[Any]:
        """Queue a `write_block`; the future has its receipt. *data* must not change before."""

    def submit_read_into(
        self,
        key: str,
        out: Any,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Queue a `read_block_into`."""

    def read_block(
        self, key: str, *, offset: int = 0, nbytes: int | None = None, timeout: float | None = None
    ) -> memoryview:
        """Read a block, or a range of it, into fresh memory."""

    def read_block_into(
        self,
        key: str,
        out: Any,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Read a block, or a range of it, into the caller's buffers; return the count."""

    def read_blocks_into(
        self, items: Iterable[tuple[str, Any]], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Read whole blocks into (key, out) pairs; return one result per block, in order."""

    def stat_block(self, key: str, *, timeout: float | None = None) -> BlockStat:
        """Return the facts about a block."""

    def contains(self, key: str, *, timeout: float | None = None) -> bool:
        """Return whether there is a block under a key."""

    def count_leading(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Return how many keys from the front have a block."""

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with *prefix*, in any order."""

    def verify_block(self, key: str, *, timeout: float | None = None) -> BlockResult:
        """Check a whole block without returning its bytes."""

    def delete_block(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove a block; False if there was none."""

    def drop_cache(self, keys: Iterable[str], *, timeout: float | None = None) -> list[BlockResult]:
        """Drop stored blocks from the page cache; return one result per block, in order."""

    def path_of(self, key: str, *, timeout: float | None = None) -> Path:
        """Return the path of the file that has a stored block."""

    def delete_blocks(
        self, keys: Iterable[str], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Remove blocks; return one result per block, in order."""

    @property
    def capabilities(self) -> Capabilities:
        """The promises, with the fallbacks in use."""

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until the work that was accepted so far has ended."""

    def close(self, *, timeout: float | None = None) -> None:
        """Finish the work that was accepted, then close."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


class RawBlock(ABC):
    """The stored bytes of a key, unchecked, with padding and trailer, as of when it was opened.

    A context manager, for one thread. Made by `Backend.open_raw`.

    Attributes:
        nbytes: the length.
        placed: its place in storage shows that it belongs to this key; else only its trailer can.
    """

    nbytes: int
    placed: ClassVar[bool]

    @abstractmethod
    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill *out* with the bytes from *offset* on; there must be enough.

        Raises:
            StorageError: the storage failed, or the block was replaced and is gone.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the key still has these bytes."""

    def link_to(self, dirfd: int, name: str) -> bool:
        """Link the file into a directory, with mode 0600; False: it must be copied instead.

        Raises:
            FileExistsError: the name is taken.
            OSError: the link could not be made for another reason.
        """
        return False

    def close(self) -> None:
        """Release the descriptors it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FastReads(Protocol):
    """Reads of whole blocks, each in one step that checks its arguments itself."""

    @property
    def read(self) -> Callable[[str, object], int | None]:
        """A function that reads the block of a key into a buffer; raises as `read_block_into`.

        It returns the number of bytes, or None without having tried: the arguments are not as
        simple as that, or reads are refused.
        """

    @property
    def busy(self) -> bool:
        """Whether reads are in progress."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many blocks were read, and their bytes."""

    def refuse(self) -> None:
        """Refuse new reads."""


class Backend(ABC):
    """Storage of blocks under keys.

    Every method blocks, may be called from any thread, and gets keys and buffers that the store
    has checked: keys are valid, parts are flat, contiguous and, for reads, writable.

    Atomicity: no reader in any process ever sees part of a block under its key, whenever a
    process is killed. A write that fails or is killed leaves no key, and no file that a later
    `sweep` would not find. *cancel* may be requested at any time: a write that has not been
    published by then is not.
    """

    #: The registered name, for messages.
    name: ClassVar[str]

    @classmethod
    def usable_here(cls) -> bool:
        """Return whether a store can be opened in this process; by default it can.

        A library may not survive a fork. Where several backends have a name, such as ``s3``, the
        first that is usable is taken.
        """
        return True

    @classmethod
    def default_io_threads(cls) -> int:
        """Return how many threads a store has that names no number; they start when needed.

        By default twice the processors, 4 to 32: more do not make a disk faster.
        """
        return min(32, max(4, 2 * len(os.sched_getaffinity(0))))

    @classmethod
    @abstractmethod
    def from_url(cls, url: StoreURL) -> Self:
        """Open the storage that a URL names.

        Raises:
            ConfigError: an option is unknown or wrong.
            UnsupportedError: the storage lacks the durability or the I/O mode that was asked for.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The promises of this backend here, with the fallbacks that are in use."""

    @abstractmethod
    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        """Store the parts, joined, under a key.

        ``keep`` keeps an intact block of the same length and replaces anything else. At least its
        length and trailer are checked; the store asks for ``replace`` where that is not enough.

        Raises:
            BlockExistsError: the key is taken and *if_exists* is ``"error"``.
            StorageError: the storage failed; the block is not visible.
        """

    @abstractmethod
    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        """Fill the parts from a block and return the count.

        With *nbytes* None the block from *offset* to its end must fit. Else at most *nbytes*
        bytes from *offset* are read, fewer where the block ends before.

        Raises:
            BlockNotFoundError: there is no block.
            BlockSizeError: it does not fit, or *offset* lies beyond its end.
            CorruptBlockError: the stored bytes are not those written.
        """

    def read_block(self, key: str, *, cancel: Cancellation | None = None) -> memoryview | None:
        """Read a whole block into fresh page-aligned memory; None: the store asks for its size.

        For storage where asking for the size costs as much as reading the block.
        """
        return None

    @abstractmethod
    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        """Describe a block without reading its payload; raises as `read_block_into` does."""

    @abstractmethod
    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        """Remove a block; False if there was none."""

    def open_raw(self, key: str) -> RawBlock:
        """Open the stored bytes of a key unchecked, where ``raw_blocks`` is promised.

        Raises:
            BlockNotFoundError: there is no such block.
            UnsupportedError: this backend cannot return stored bytes unchecked.
        """
        raise UnsupportedError(f"{self.name} does not hand out blocks as they are stored")

    def drop_cache(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Drop blocks from the page cache, dirty pages once they are written back.

        Return one result per block, in order; None: blocks do not go through the page cache.
        """
        return None

    def path_of(self, key: str) -> str:
        """Return the path of the file that has a block.

        Raises:
            BlockNotFoundError: there is no such block.
            UnsupportedError: a block is not a file here.
        """
        raise UnsupportedError(f"{self.name}: a block has no file of its own")

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with *prefix*, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Release everything the backend holds; called once, with no call in progress."""

    def write_stream(
        self,
        key: str,
        source: Source,
        *,
        nbytes: int | None,
        at_least: int,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt | None:
        """Store a stream, with one piece at a time in memory; raises as `write_block` does.

        *nbytes*: the length, where it is known; else the stream has *at_least* so many bytes.
        Return None, before anything is read from the source, where streams are not supported: the
        store then collects the bytes and calls `write_block`.
        """
        return None

    def write_file(
        self,
        key: str,
        source: SourceFile,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt | None:
        """Store a file without a second copy of its bytes; raises as `write_block` does.

        Return None, with the file as it was, where that is not possible: the store then reads the
        file and calls `write_stream` or `write_block`. With a receipt, a file that is to move has
        no name any more; after an error it is as it was, or the block is visible.
        """
        return None

    def scratch_dir(self) -> AbstractContextManager[Path] | None:
        """Make a directory for files that `write_file` can move; removed at the end.

        None: there is none from which a move is cheaper than from anywhere else.
        """
        return None

    def write_blocks(
        self, blocks: Blocks, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Write a batch and return one result per block, in order; None: the store splits it."""
        return None

    def read_blocks_into(
        self, blocks: Blocks, *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Read a batch and return one result per block, in order; None: the store splits it."""
        return None

    def delete_blocks(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Remove a batch and return one result per block, in order; None: the store splits it."""
        return None

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        """Return how many keys from the front have a block.

        A backend may check for names alone where that is cheaper: reads find corrupt blocks.
        """
        for count, key in enumerate(keys):
            if not self.verify_block(key, payload=False, cancel=cancel).ok:
                return count
        return len(keys)

    @abstractmethod
    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        """Check a stored block, its payload too if asked, without returning its bytes."""

    def fast_reads(self) -> FastReads | None:
        """Return reads that need no thread and no deadline, where the backend has some.

        A store asks when it is opened, and again in a forked child after `after_fork`.
        """
        return None

    def use_threads(self, run_all: RunAll) -> None:
        """Take the function that runs tasks concurrently; a backend may ignore it."""

    def after_fork(self) -> None:
        """Renew locks and descriptors in a forked child process."""

    def sweep(self, *, older_than_s: float, dry_run: bool = False) -> list[str]:
        """Remove the temporaries of dead writers and return their names."""
        return []

    def probe(self) -> list[Finding]:
        """Find facts about the storage beyond the capabilities; leaves no files behind."""
        return []

    @property
    def modes_taken(self) -> dict[str, int]:
        """Count blocks written and read by I/O mode, where there is more than one."""
        return {}

    @property
    def retries_made(self) -> int:
        """Count the requests that were sent again after a transient error."""
        return 0
