"""A staging tier in the memory of a daemon: accepted writes survive the process that wrote."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Final, cast

from kvio import exits, forks, threads
from kvio.errors import (
    KvioError,
    StorageError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
)
from kvio.store import Store
from kvio.types import Level
from kvio.wrappers.staging import failures
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.book import Book
from kvio.wrappers.staging.daemon.fields import ProtocolError
from kvio.wrappers.staging.daemon.files import DaemonFiles
from kvio.wrappers.staging.daemon.lines import Lines
from kvio.wrappers.staging.daemon.naming import name_of
from kvio.wrappers.staging.daemon.pages import PageMapping
from kvio.wrappers.staging.daemon.remote import DaemonReads, DaemonWrites
from kvio.wrappers.staging.daemon.sockets import receive
from kvio.wrappers.staging.draining import Drains
from kvio.wrappers.staging.host import HostMemory
from kvio.wrappers.staging.options import TierOptions
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.receipts import Gate, OpenReceipt, StagedReceipt
from kvio.wrappers.staging.stats import TierStats
from kvio.wrappers.staging.tier import StagingTier

#: How long to wait for page tables when connecting: for those of 2 GiB in pages of 4 KiB.
_MAPPING_S: Final = 0.5


class DaemonDrains(Drains):
    """The drains of the daemon, as a client sees them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def start(self) -> None:
        """Do nothing: they run in the daemon."""

    def pause(self) -> None:
        """Begin no more drains for any client, until `resume` or the end of this one."""
        self._lines.ask(say.Hold(on=True))

    def resume(self) -> None:
        """Begin drains again, unless another client has paused them too."""
        self._lines.ask(say.Hold(on=False))

    def ask(self, sequence: int) -> None:
        """Report that a caller waits; ignored if the daemon is gone."""
        if not self._lines.welcome.eager:
            with suppress(StorageError, StoreClosedError):
                self._lines.tell(say.Ask(sequence))


class DaemonTier(StagingTier):
    """A tier in the memory of a drain daemon, shared with its other clients.

    Verbs and promises are those of `StagingTier`, and a write that was accepted is stored even if
    this process is killed. Sequence numbers, `durable_sequence`, `stats`, `pause`, `shrink` and
    `grow` are the daemon's, for all its clients; `barrier`, `failed` and `close` are about the
    writes of this one. If the daemon is killed, receipts that are open fail with
    `TierNotDrainedError`, whose ``.keys`` names them all.
    """

    def __init__(self, store: Store, path: str, options: TierOptions) -> None:
        self._store = store
        self._options = options
        self._lines = Lines(path, name_of(store.url))
        welcome = self._lines.welcome
        self._mapping: PageMapping | None = None
        try:
            memory = HostMemory(welcome.capacity_bytes, fd=self._lines.fd)
            if welcome.populated:
                self._mapping = PageMapping(memory, self._lines.fd)
                self._mapping.wait(_MAPPING_S)
        except BaseException:
            self._lines.close()
            self._lines.events.close()
            raise
        finally:
            os.close(self._lines.fd)
        self._memory = memory
        self._gate = Gate(welcome.level)
        self._book = Book(self._gate, self._lines.path)
        exits.watch(self._book)
        self._drains = DaemonDrains(self._lines)
        self._gate.ask = self._drains.ask
        reads = DaemonReads(self._lines, self._book, memory, store)
        writes = DaemonWrites(self._lines, self._book, memory, store, when_full=options.when_full)
        self._files = DaemonFiles(self._lines, self._gate, memory, store, reads, writes, options)
        self._reads, self._writes = reads, writes
        self._close_lock = threading.Lock()
        self._closed = False
        self._durable_sequence = 0
        self._listening = threading.Thread(
            target=_listen, args=(self._lines, self._book), name="kvio-events", daemon=True
        )
        self._book.hearing = self._listening
        try:
            threads.start(self._listening)
        except BaseException:
            self._lines.close()
            self._lines.events.close()
            raise
        forks.watch(self)

    # Promises

    def barrier(self, level: Level | str | None = None, *, timeout: float | None = None) -> None:
        """Wait as `StagingTier.barrier` does, for the writes of this client."""
        self._gate.check_fork()
        if self._gate.check_level(level) is Level.ACCEPTED:
            return
        goal = self._book.last
        self._drains.ask(goal)
        reached = self._book.wait(goal, timeout)
        failed = self._book.take_unreported()
        if failed:
            raise failures.combine(failed)
        if not reached:
            raise StorageTimeoutError("staged block(s) were not stored before the deadline")

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write of any client is stored; it never falls."""
        self._gate.check_fork()
        with suppress(StorageError):  # a daemon that is gone stores no more
            self._durable_sequence = max(self._durable_sequence, self.stats().durable_sequence)
        return self._durable_sequence

    @property
    def failed(self) -> list[StagedReceipt]:
        """The writes of this client that failed for good and whose bytes are still staged."""
        self._gate.check_fork()
        if self._closed:
            return []
        self._forget_what_is_over()
        return [one for one in self._book.failed() if not one.absorbed]

    def _forget_what_is_over(self) -> None:
        for page in _pages(self._book.failed()):
            over = cast("say.Sequences", self._lines.ask(say.Over(page)))
            self._book.forget(over.sequences)

    def retry_failed(self) -> list[StagedReceipt]:
        """Drive every failed write of this client again; they are open again, and returned."""
        self._check_open()
        failed, driven = self._book.failed(), set[int]()
        for page in _pages(failed):
            answer = cast("say.Sequences", self._lines.ask(say.Retry(page)))
            driven.update(answer.sequences)
            again = {one: n for one, n in failed.items() if one.sequence in driven}
            self._book.reopen(again, answer.events)
        return [one for one in failed if one.sequence in driven and not one.absorbed]

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed write of this client and its bytes."""
        self._gate.check_fork()
        if receipt not in self._book.failed():
            return False
        answer = cast("say.Done", self._lines.ask(say.Discard(receipt.sequence)))
        if answer.value:
            self._book.discarded(receipt.sequence)
        return bool(answer.value)

    # The tier itself

    def shrink(self, nbytes: int) -> int:
        """Return memory of the daemon to the system; return the number of bytes freed at once."""
        self._check_open()
        return cast("say.Done", self._lines.ask(say.Resize(-nbytes))).value

    def grow(self, nbytes: int) -> int:
        """Take back into use what `shrink` gave away; how many bytes."""
        self._check_open()
        return cast("say.Done", self._lines.ask(say.Resize(nbytes))).value if nbytes else 0

    def stats(self) -> TierStats:
        """Count what the daemon did, and what it holds now."""
        self._gate.check_fork()
        return cast("say.StatsAre", self._lines.ask(say.Stats())).stats

    def close(self, *, timeout: float | None = None) -> None:
        """Wait until every write of this client is stored, then close; one that cannot stays open.

        Raises:
            TierNotDrainedError: blocks failed, or were still on their way after *timeout* seconds,
                or the daemon is gone (the tier is closed then); ``.keys`` names them.
            KvioError: writes that no barrier has told of were lost to another writer; the tier is
                closed.
        """
        if self._gate.forked:
            return
        deadline = deadline_of(timeout)
        with self._close_lock:
            if not self._closed:
                self._finish(deadline)
                self._end(deadline)

    def _finish(self, deadline: float | None) -> None:
        with suppress(KvioError):  # a daemon that is gone: its receipts have failed
            self._drains.resume()
        written = self._book.refuse(left(deadline))
        goal = self._book.last
        with suppress(KvioError):
            self._drains.ask(goal)
        reached = self._book.wait(goal, left(deadline))
        if self._book.lost is None:
            with suppress(StorageError):
                self._forget_what_is_over()
        keys = self._book.unstored_keys()
        if (keys or not written) and self._book.lost is None:
            self._book.take_unreported()
            self._book.take_again()
            why = "failed" if reached and written else "timed out"
            raise failures.not_drained(keys, why)

    def _end(self, deadline: float | None) -> None:
        self._files.end()
        self._book.wait_told(left(deadline))  # what follows may ask the daemon for something
        self._lines.close()
        if self._listening is not threading.current_thread():
            threads.join(self._listening, left(deadline))
        if self._mapping is not None:
            self._mapping.end()
        self._memory.close()
        self._closed = True
        forks.forget(self)
        if self._options.close_store:
            self._store.close(timeout=left(deadline))
        lost = self._book.take_unreported()
        if lost:
            raise failures.combine(lost)

    def _check_open(self) -> None:
        self._gate.check_fork()
        if self._closed:
            raise StoreClosedError("the staging tier is closed")

    def _after_fork(self) -> None:
        self._gate.forked = True
        self._lines.abandon()


def _listen(lines: Lines, book: Book) -> None:
    """Hear how writes end, until the daemon or the tier does, which may be dropped meanwhile."""
    with lines.events as events:
        try:
            while (event := receive(events)) is not None:
                if not isinstance(event, say.Stored | say.Failed | say.Driven):
                    raise ProtocolError(f"{type(event).__name__} is no event")
                book.hear(event)
        except OSError:
            pass  # said below
        book.lose()


def _pages(receipts: Collection[OpenReceipt]) -> list[tuple[int, ...]]:
    """Yield the numbers of writes, as many at a time as fit one request.

    One page at least: who asks notices that the daemon is gone.
    """
    numbers = sorted(receipt.sequence for receipt in receipts)
    most = say.MAX_SEQUENCES
    return [tuple(numbers[at : at + most]) for at in range(0, len(numbers), most)] or [()]


def connect(store: Store, path: str, options: TierOptions) -> DaemonTier:
    """Stage in the memory of the daemon that listens at *path*, for the same store.

    Raises:
        ConfigError: the daemon stores elsewhere, or with other options.
        AccessDeniedError: it is another user's.
        UnsupportedError: other processes do not see the store.
        StorageError: nobody listens there.
    """
    if not store.capabilities.shared:
        raise UnsupportedError(f"a drain daemon does not see a {store.url.scheme} store")
    return DaemonTier(store, path, options)
