"""The one interface between a store and what keeps its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from kvio.errors import UnsupportedError
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStat,
    Cancellation,
    Capabilities,
    Finding,
    IfExists,
    Parts,
    Receipt,
)

if TYPE_CHECKING:
    from kvio.url import StoreURL

#: Runs blocking tasks side by side on a store's I/O threads and the caller's own, returns their
#: results in order, and raises the first error after all have ended.
RunAll: TypeAlias = Callable[[Sequence[Callable[[], Any]]], list[Any]]


#: Fills the beginning of a buffer with the bytes that come next; how many, 0 at their end.
Source: TypeAlias = Callable[[memoryview], int]


class RawBlock(ABC):
    """What was stored under a key when it was opened, as it is: padding and trailer included.

    A context manager, for one thread. Made by `Backend.open_raw`.

    Attributes:
        nbytes: its length.
        placed: where it lies shows that it is this key's; else only its trailer can.
    """

    nbytes: int
    placed: ClassVar[bool]

    @abstractmethod
    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill *out* from a byte on, which it must not end before.

        Raises:
            StorageError: the medium failed, or the block was replaced and is gone.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Check whether it is still what stands under the key."""

    def link_to(self, dirfd: int, name: str) -> bool:
        """Give a file a second name, mode 0600, in a directory; False: it must be copied.

        Raises:
            FileExistsError: the name is taken.
            OSError: the directory failed.
        """
        return False

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backend(ABC):
    """Keeps blocks of bytes under keys.

    Every method blocks, may be called from any thread, and gets keys and buffers that the store
    has checked: keys are valid, parts are flat, contiguous and, for reads, writable.

    Atomicity: no reader in any process ever sees part of a block under its key, whatever dies
    when. A write that fails or is killed leaves no key, and nothing that a later `sweep` would
    not find. *cancel*, where given, may be requested at any time: a write that has not been
    published by then is not.
    """

    #: The registered name, for messages.
    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_url(cls, url: StoreURL) -> Self:
        """Open the medium that a URL names.

        Raises:
            ConfigError: an option is unknown or wrong, or the medium is unfit, with a reason.
            UnsupportedError: the medium cannot give the durability or mode asked for.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What is promised here, after every fallback."""

    @abstractmethod
    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        """Store the parts, joined, under a key.

        ``keep`` keeps an intact block of the same length and replaces anything else. At least its
        length and trailer are checked; the store asks for ``replace`` where that is not enough.

        Raises:
            BlockExistsError: the key is taken and *if_exists* is ``"error"``.
            StorageError: the medium failed; nothing is visible.
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

        For media where that question costs as much as the answer.
        """
        return None

    @abstractmethod
    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        """Describe a block without reading its payload; raises as `read_block_into` does."""

    @abstractmethod
    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        """Remove a block; False if there was none."""

    def open_raw(self, key: str) -> RawBlock:
        """Open what is stored under a key without checking it, where ``raw_blocks`` is promised.

        Raises:
            BlockNotFoundError: there is none.
            UnsupportedError: it cannot be handed out.
        """
        raise UnsupportedError(f"{self.name} does not hand out blocks as they are stored")

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with *prefix*, in no promised order."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds; called once, with no call under way."""

    def write_stream(
        self,
        key: str,
        source: Source,
        *,
        nbytes: int | None,
        at_least: int,
        if_exists: IfExists,
    ) -> Receipt | None:
        """Store what a source gives, held in memory a piece at a time; raises as `write_block`.

        *nbytes*: how much it is, where that is known; else it is *at_least* so much. None, before
        anything was taken from the source: the store must bring the bytes to `write_block`.
        """
        return None

    def write_blocks(
        self, blocks: Blocks, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Write a batch and return a result each, in order; None: the store fans it out."""
        return None

    def read_blocks_into(
        self, blocks: Blocks, *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Read a batch and return a result each, in order; None: the store fans it out."""
        return None

    def delete_blocks(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        """Remove a batch and return a result each, in order; None: the store fans it out."""
        return None

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        """Count how many keys from the front are there.

        A name is enough where that is cheaper: what is damaged is found when it is read.
        """
        for count, key in enumerate(keys):
            if not self.verify_block(key, payload=False, cancel=cancel).ok:
                return count
        return len(keys)

    @abstractmethod
    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        """Check a stored block, its payload too if asked, without returning any of it."""

    def use_threads(self, run_all: RunAll) -> None:
        """Learn how to run tasks side by side; a backend that never does ignores it."""

    def after_fork(self) -> None:
        """Make ready for use in a child process: renew locks and descriptors."""

    def sweep(self, *, older_than_s: float, dry_run: bool = False) -> list[str]:
        """Remove temporaries that dead writers left and name them; none on most media."""
        return []

    def probe(self) -> list[Finding]:
        """Try what the medium can do beyond its capabilities; leaves nothing behind."""
        return []

    @property
    def modes_taken(self) -> dict[str, int]:
        """Count blocks written and read by I/O mode, where there is more than one."""
        return {}

    @property
    def retries_made(self) -> int:
        """Count the requests that were made again, where a medium's may fail in passing."""
        return 0
