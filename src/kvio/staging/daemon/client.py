"""A staging tier in the memory of a daemon: accepted writes survive the process that wrote."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

from kvio import _native
from kvio.core import buffers, threads
from kvio.core.buffers import PAGE_BYTES, Data
from kvio.core.store import Store
from kvio.errors import (
    ConfigError,
    CorruptBlockError,
    KvioError,
    StorageError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
    storage_error,
)
from kvio.staging import receipts
from kvio.staging.allocator import Extents, Span
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.connection_pool import ConnectionPool, Line
from kvio.staging.daemon.pending_writes import PendingWrites
from kvio.staging.daemon.protocol import ProtocolError
from kvio.staging.daemon.sockets import name_of, receive
from kvio.staging.draining import Drains, cut
from kvio.staging.files import FileRoom, Spool
from kvio.staging.host import STEP_BYTES, HostMemory, Populating, flat_parts
from kvio.staging.ledger import Ledger
from kvio.staging.options import TierOptions, TierStats
from kvio.staging.pending import Entry, deadline_of, left
from kvio.staging.reading import StagedReads
from kvio.staging.receipts import OpenReceipt, StagedReceipt, TierState
from kvio.staging.writing import StagedWrites, WhenFull, check_wanted
from kvio.types import (
    BlockResult,
    BlockStatus,
    Cancellation,
    IfExists,
    Level,
    Parts,
    check_keys,
    status_of,
)


def map_ahead(memory: HostMemory, fd: int) -> Populating:
    """Map the allocated pages of a shared memory on another thread; allocate none.

    Without it the first copy into each page waits for the system: 600 us per MiB with pages of
    4 KiB. A client waits for some pages when it connects, not for all, which would take twelve
    seconds for 64 GiB: memory is allocated from the lowest page on, so the pages that are mapped
    first are used first. Pages that could not be mapped are mapped when they are used.
    """
    own = os.dup(fd)
    steps = allocated_spans(own, memory.capacity_bytes)
    return Populating(memory, steps, name="kvio-page-mapping", done=partial(os.close, own))


def allocated_spans(fd: int, nbytes: int) -> Iterator[Span]:
    """Yield the allocated ranges of the file, in steps; holes were returned to the system.

    Mapping a hole would allocate it, so holes are found again if pages were freed meanwhile.
    """
    at, end, blocks = 0, 0, -1
    while at < nbytes:
        now = os.fstat(fd).st_blocks
        if at >= end or now < blocks:
            at, end = _next_run(fd, at, nbytes)
        blocks = now
        step = min(STEP_BYTES, end - at)
        if step:
            yield Span(at, step)
        at += step


def _next_run(fd: int, at: int, nbytes: int) -> tuple[int, int]:
    """Return the next allocated range."""
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
    except OSError:  # ENXIO: there are no more
        return nbytes, nbytes
    return start, os.lseek(fd, start, os.SEEK_HOLE)


# --------------------------------------------------------------------------------------------------
# The reads and writes of a client, with memory and staged bytes of the daemon.


class DaemonReads(StagedReads):
    """Reads of staged bytes, which the daemon pins while they are copied."""

    def __init__(
        self,
        connections: ConnectionPool,
        pending_writes: PendingWrites,
        memory: HostMemory,
        store: Store,
    ) -> None:
        self._connections = connections
        self._pending_writes = pending_writes
        self._memory = memory
        self._store = store

    @contextmanager
    def _pinned(self, key: str, consistency: str) -> Iterator[Entry | None]:
        if consistency not in ("tier", "backend"):
            raise ConfigError(f"consistency must be 'tier' or 'backend', not {consistency!r}")
        if consistency == "backend":
            yield None
            return
        with self.pinned(key) as entry:
            yield entry

    @contextmanager
    def pinned(self, key: str, *, lasting: bool = False) -> Iterator[Entry | None]:
        """Keep a staged block where it is while the context lasts; None: it is not staged.

        *lasting*: for as long as a file is open. Nobody waits for room that such a one keeps.
        """
        with self._connections.line() as line:
            answer = line.ask(say.Pin(key, lasting))
            if isinstance(answer, say.Pinned):
                entry = self._entry(line, key, answer)
                try:
                    yield entry
                finally:
                    line.release(answer.ticket)
                return
        yield None

    def _entry(self, line: Line, key: str, pinned: say.Pinned) -> Entry:
        one = OpenReceipt(
            self._pending_writes.tier_state,
            key,
            nbytes=pinned.nbytes,
            checksum=pinned.checksum,
            sequence=pinned.sequence,
        )
        memory = cast("HostMemory", self._memory)
        entry = Entry(one, line.spans_of(pinned, memory), "replace")
        entry.written_ns = pinned.written_ns
        return entry

    def _fetch(self, entry: Entry, parts: Parts, offset: int, nbytes: int | None) -> int:
        """Copy as the tier does; a whole block is verified: other clients can write here."""
        size, room = entry.nbytes, buffers.total_bytes(parts)
        if offset or room < size or (nbytes is not None and nbytes < size):
            return super()._fetch(entry, parts, offset, nbytes)
        whole = next(cut(parts, [size]))
        crc = _native.copy_parts(whole, self._memory.views(entry.spans), checksum=True)
        if crc != entry.receipt.checksum:
            text = f"block {entry.key!r} is corrupt in staging memory"
            raise CorruptBlockError(text, key=entry.key)
        return size

    def read_batch(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None, cancel: Cancellation
    ) -> list[BlockResult]:
        """Read as `Store.read_blocks_into` does, and end early if *cancel* is requested."""
        wanted = [(key, buffers.as_parts(out, writable=True)) for key, out in items]
        check_keys([key for key, _ in wanted])
        staged = [self._read_staged(key, parts) for key, parts in wanted]
        rest = [item for item, done in zip(wanted, staged, strict=True) if done is None]
        asked = iter(self._store._read_batch(rest, timeout, cancel) if rest else ())  # noqa: SLF001
        return [next(asked) if done is None else done for done in staged]

    def _read_staged(self, key: str, parts: Parts) -> BlockResult | None:
        try:
            with self._pinned(key, "tier") as entry:
                return None if entry is None else self._read_one(entry, parts)
        except CorruptBlockError as exc:
            return BlockResult(key, status_of(exc), 0, exc)

    def count_leading(self, keys: Iterable[str], *, timeout: float | None) -> int:
        """Count as `Store.count_leading` does, in one call of the store."""
        wanted = list(keys)
        check_keys(wanted)
        staged: set[str] = set()
        for at in range(0, len(wanted), say.MAX_KEYS):
            answer = self._connections.ask(say.Present(tuple(wanted[at : at + say.MAX_KEYS])))
            staged.update(cast("say.Keys", answer).keys)
        unstaged = [at for at, key in enumerate(wanted) if key not in staged]
        if not unstaged:
            return len(wanted)
        there = self._store.count_leading([wanted[at] for at in unstaged], timeout=timeout)
        return unstaged[there] if there < len(unstaged) else len(wanted)

    def list(self, prefix: str, *, timeout: float | None, consistency: str) -> Iterator[str]:
        """List as `Store.list_keys` does, staged keys first."""
        staged = set() if consistency == "backend" else set(self._staged_keys(prefix))
        yield from staged
        for key in self._store.list_keys(prefix, timeout=timeout):
            if key not in staged:
                yield key

    def _staged_keys(self, prefix: str) -> Iterator[str]:
        after = ""
        while True:
            page = cast("say.Keys", self._connections.ask(say.List(prefix, after)))
            yield from page.keys
            if not page.more:
                return
            after = page.keys[-1]


class DaemonWrites(StagedWrites):
    """Writes whose bytes this process copies into memory of the daemon."""

    def __init__(
        self,
        connections: ConnectionPool,
        pending_writes: PendingWrites,
        memory: HostMemory,
        store: Store,
        *,
        when_full: WhenFull,
    ) -> None:
        self._connections = connections
        self._pending_writes = pending_writes
        self._memory: HostMemory = memory
        self._store = store
        self._when_full = when_full
        self._checksum = True
        self._plain = False  # room is the daemon's

    def write(
        self,
        key: str,
        data: Data,
        *,
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation | None = None,
    ) -> StagedReceipt:
        """Stage a block, keep a staged one, or write to the store."""
        deadline, parts = deadline_of(timeout), flat_parts(data)
        nbytes = buffers.total_bytes(parts)
        if if_exists == "error":
            self.look(key, deadline)
        damaged = self._store._damaged  # noqa: SLF001  # the daemon's store has not read them
        if damaged.keys:
            if_exists = self._store._choose_keep(key, nbytes, if_exists, left(deadline))  # noqa: SLF001
        with self._pending_writes.writing():
            with self._connections.line() as line:
                limit = say.microseconds(left(deadline))
                question = say.Reserve(key, nbytes, if_exists, self._when_full, limit)
                answer = line.ask(question, timeout=left(deadline))
                if isinstance(answer, say.Through):
                    return self._pass_through(line, key, parts, nbytes, if_exists, deadline, cancel)
                if isinstance(answer, say.Grant):
                    spans = line.spans_of(answer, self._memory)
                    crc = self._memory.fill(spans, parts, checksum=True).crc32c
                    assert crc is not None, "host memory sums what arrives"
                    check_wanted(key, cancel)  # the room goes back with the connection
                    answer = line.ask(say.Commit(answer.ticket, crc), timeout=left(deadline))
            if damaged.keys:
                damaged.forget(key)
            return self._taken(key, nbytes, answer)

    def _is_staged(self, key: str) -> bool:
        return bool(cast("say.Keys", self._connections.ask(say.Present((key,)))).keys)

    def take_for_file(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:  # noqa: ARG002
        """Return None: files collect their bytes elsewhere."""
        return None

    def _taken(self, key: str, nbytes: int, answer: say.Message) -> StagedReceipt:
        taken = cast("say.Accepted", answer)
        return self._pending_writes.accept(
            key, nbytes, checksum=taken.checksum, sequence=taken.sequence
        )

    def _pass_through(
        self,
        line: Line,
        key: str,
        parts: Sequence[Any],
        nbytes: int,
        if_exists: IfExists,
        deadline: float | None,
        cancel: Cancellation | None,
    ) -> StagedReceipt:
        """Write to the store while the daemon blocks its drains of the key."""
        question = say.Fence(key, nbytes, if_exists, say.microseconds(left(deadline)))
        answer = line.ask(question, timeout=left(deadline))
        if not isinstance(answer, say.Fenced):
            return self._taken(key, nbytes, answer)
        try:
            receipt = self._write_to_store(
                key, parts, "replace" if answer.staged else if_exists, deadline, cancel
            )
        except KvioError:
            line.release(answer.ticket)
            raise
        wrote = say.Wrote(answer.ticket, receipt.checksum, receipt.level, receipt.existed)
        taken = cast("say.Accepted", line.ask(wrote, timeout=left(deadline)))
        return self._pending_writes.wrote_through(receipt, taken.sequence)

    def delete(self, key: str, *, timeout: float | None) -> bool:
        """Remove a block from the tier and the store, after a running drain."""
        before = self._pending_writes.open_numbers(key)
        question = say.Delete(key, say.microseconds(timeout))
        answer = self._connections.ask(question, timeout=timeout)
        self._pending_writes.wait_ended(before)
        return bool(cast("say.Done", answer).value)

    def delete_all(self, keys: Sequence[str], *, timeout: float | None) -> list[BlockResult]:
        """Remove blocks as `Store.delete_blocks` does, one after the other."""
        deadline = deadline_of(timeout)
        return [self._delete_one(key, deadline) for key in keys]

    def _delete_one(self, key: str, deadline: float | None) -> BlockResult:
        try:
            there = self.delete(key, timeout=left(deadline))
        except KvioError as exc:
            return BlockResult(key, status_of(exc), 0, exc)
        return BlockResult(key, BlockStatus.OK if there else BlockStatus.MISSING)


# --------------------------------------------------------------------------------------------------
# Open files of a client: written in its own memory, read from the daemon's memory.


class _MemorySpool(Spool):
    """A file without a name in memory of this process alone."""

    def __init__(self, key: str, tier_state: TierState) -> None:
        self._key = key
        self._tier_state = tier_state
        try:
            fd = os.memfd_create("kvio-file", os.MFD_CLOEXEC)
        except OSError as exc:
            raise storage_error(exc.errno or 0, "make a file in memory", key=key) from exc
        self._file = open(fd, "w+b", buffering=0)  # noqa: SIM115

    def write(self, parts: Parts, at: int) -> None:
        """Write parts one after the other; refused in a forked child, which shares the file."""
        self._tier_state.check_fork()
        super().write(parts, at)


class DaemonFiles(FileRoom):
    """Files that take memory of the daemon only when they are closed.

    Until then their bytes are in ``spool=`` or, without one, in memory of this process: otherwise
    a client could hold memory that others wait for.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        tier_state: TierState,
        memory: HostMemory,
        store: Store,
        reads: DaemonReads,
        writes: DaemonWrites,
        options: TierOptions,
    ) -> None:
        nothing = Ledger(tier_state, Extents(PAGE_BYTES), retries=0, release=_never)
        super().__init__(nothing, memory, store, writes, options)
        self._connections = connections
        self._staged = reads
        self._tier_state = tier_state
        self._pins: dict[Entry, ExitStack] = {}

    def open_spool(self, key: str) -> Spool:
        """Make a file for the bytes."""
        if self._directory is None:
            return _MemorySpool(key, self._tier_state)
        return super().open_spool(key)

    def pin(self, key: str) -> Entry | None:
        """Pin a staged block until `unpin`; a connection is in use for so long."""
        stack = ExitStack()
        entry = stack.enter_context(self._staged.pinned(key, lasting=True))
        if entry is None:
            stack.close()
        else:
            self._pins[entry] = stack
        return entry

    def unpin(self, entry: Entry) -> None:
        """Unpin a block."""
        stack = self._pins.pop(entry)
        if not self._tier_state.forked:  # else the pin is the parent's
            stack.close()


def _never(_spans: Sequence[Span]) -> None:
    """Do nothing: there is no memory to free."""


#: How long to wait for page tables when connecting: for those of 2 GiB in pages of 4 KiB.
_MAPPING_S: Final = 0.5


class DaemonDrains(Drains):
    """The drains of the daemon, as a client sees them."""

    def __init__(self, connections: ConnectionPool) -> None:
        self._connections = connections

    def start(self) -> None:
        """Do nothing: they run in the daemon."""

    def pause(self) -> None:
        """Begin no more drains for any client, until `resume` or the end of this one."""
        self._connections.ask(say.Hold(on=True))

    def resume(self) -> None:
        """Begin drains again, unless another client has paused them too."""
        self._connections.ask(say.Hold(on=False))

    def ask(self, sequence: int) -> None:
        """Report that a caller waits; ignored if the daemon is gone."""
        if not self._connections.welcome.eager:
            with suppress(StorageError, StoreClosedError):
                self._connections.send(say.Ask(sequence))


class RemoteEngine:
    """The engine of a tier in the memory of a drain daemon, shared with its other clients.

    The promises are those of `StagingTier`, and a write that was accepted is stored even if this
    process is killed. Sequence numbers, `durable_sequence`, `stats`, `pause`, `shrink` and `grow`
    are the daemon's, for all its clients; `barrier`, `failed` and `close` are about the writes of
    this one. If the daemon is killed, receipts that are open fail with `TierNotDrainedError`,
    whose ``.keys`` names them all.
    """

    def __init__(self, store: Store, path: str, options: TierOptions) -> None:
        self.connections = ConnectionPool(path, name_of(store.url))
        welcome = self.connections.welcome
        self.mapping: Populating | None = None
        try:
            memory = HostMemory(welcome.capacity_bytes, fd=self.connections.fd)
            if welcome.populated:
                self.mapping = map_ahead(memory, self.connections.fd)
                self.mapping.wait(_MAPPING_S)
        except BaseException:
            self.connections.close()
            self.connections.events.close()
            raise
        finally:
            os.close(self.connections.fd)
        self.memory = memory
        self.tier_state = TierState(welcome.level)
        self.pending_writes = self.accepting = PendingWrites(self.tier_state, self.connections.path)
        self.drains = DaemonDrains(self.connections)
        self.reads = DaemonReads(self.connections, self.pending_writes, memory, store)
        self.writes = DaemonWrites(
            self.connections, self.pending_writes, memory, store, when_full=options.when_full
        )
        self.files = DaemonFiles(
            self.connections, self.tier_state, memory, store, self.reads, self.writes, options
        )
        self._closed = False
        self._durable_sequence = 0
        self.listening = threading.Thread(
            target=_listen,
            args=(self.connections, self.pending_writes),
            name="kvio-events",
            daemon=True,
        )
        self.pending_writes.hearing = self.listening
        try:
            threads.start(self.listening)
        except BaseException:
            self.connections.close()
            self.connections.events.close()
            raise

    def barrier(self, level: Level | str | None, *, timeout: float | None) -> None:
        """Wait until every write of this client has reached a level."""
        self.tier_state.check_fork()
        if self.tier_state.check_level(level) is Level.ACCEPTED:
            return
        goal, deadline = self.pending_writes.last, deadline_of(timeout)
        self.drains.ask(goal)
        reached = self.pending_writes.wait(goal, timeout)
        if self.pending_writes.failures(goal):  # by now another client may have replaced them
            with suppress(StorageError, StoreClosedError):
                self._forget_what_is_over()
            reached = self.pending_writes.wait(goal, left(deadline))
        failed = self.pending_writes.failures(goal)
        if failed:
            raise receipts.combine(failed)
        if not reached:
            raise StorageTimeoutError("staged block(s) were not stored before the deadline")

    @property
    def durable_sequence(self) -> int:
        """The number up to which every write of any client is stored; it never falls."""
        with suppress(StorageError):  # a daemon that is gone stores no more
            self._durable_sequence = max(self._durable_sequence, self.stats().durable_sequence)
        return self._durable_sequence

    @property
    def failed(self) -> list[StagedReceipt]:
        """The writes of this client that failed for good and whose bytes are still staged."""
        if self._closed:
            return []
        self._forget_what_is_over()
        staged = [one for one in self.pending_writes.failed() if not one.absorbed]
        return [*staged, *self.lost]

    def _forget_what_is_over(self) -> None:
        for page in _pages(self.pending_writes.failed()):
            over = cast("say.Sequences", self.connections.ask(say.Over(page)))
            self.pending_writes.forget(over.sequences, over.events)

    def retry_failed(self) -> list[StagedReceipt]:
        """Retry every failed write of this client; return their receipts, which are open again."""
        failed, driven = self.pending_writes.failed(), set[int]()
        for page in _pages(failed):
            answer = cast("say.Sequences", self.connections.ask(say.Retry(page)))
            driven.update(answer.sequences)
            again = {one: n for one, n in failed.items() if one.sequence in driven}
            self.pending_writes.reopen(again, answer.events)
        return [one for one in failed if one.sequence in driven and not one.absorbed]

    def discard(self, receipt: StagedReceipt) -> bool:
        """Drop a failed write of this client and its bytes."""
        if self.pending_writes.forget_lost(receipt):
            return True
        if receipt not in self.pending_writes.failed():
            return False
        answer = cast("say.Done", self.connections.ask(say.Discard(receipt.sequence)))
        if answer.value:
            self.pending_writes.forget([receipt.sequence])
        return bool(answer.value)

    def shrink(self, nbytes: int) -> int:
        """Return memory of the daemon to the system; return the number of bytes freed at once."""
        return cast("say.Done", self.connections.ask(say.Resize(-nbytes))).value

    def grow(self, nbytes: int) -> int:
        """Use memory again that `shrink` returned; return the number of bytes."""
        return cast("say.Done", self.connections.ask(say.Resize(nbytes))).value if nbytes else 0

    def stats(self) -> TierStats:
        """Count what the daemon did, and what it holds now."""
        return cast("say.StatsAre", self.connections.ask(say.Stats())).stats

    def check_open(self) -> None:
        """Raise StoreClosedError after `end`."""
        if self._closed:
            raise StoreClosedError("the staging tier is closed")

    def drain(self, deadline: float | None) -> None:
        """Accept no more, and wait until every write of this client is stored.

        Raises:
            TierNotDrainedError: blocks failed, or were still on their way at the deadline.
        """
        with suppress(KvioError):  # a daemon that is gone: its receipts have failed
            self.drains.resume()
        written = self.pending_writes.refuse(left(deadline))
        goal = self.pending_writes.last
        with suppress(KvioError):
            self.drains.ask(goal)
        reached = self.pending_writes.wait(goal, left(deadline))
        if self.pending_writes.lost is None:
            with suppress(StorageError):
                self._forget_what_is_over()
        keys = self.pending_writes.unstored_keys()
        if (keys or not written) and self.pending_writes.lost is None:
            self.pending_writes.take_again()
            why = "failed" if reached and written else "timed out"
            raise receipts.not_drained(keys, why)

    def end(self, deadline: float | None) -> None:
        """End the connections and release the memory."""
        self.files.end()
        # What follows may ask the daemon for something.
        self.pending_writes.wait_reported(left(deadline))
        self.connections.close()
        if self.listening is not threading.current_thread():
            threads.join(self.listening, left(deadline))
        if self.mapping is not None:
            self.mapping.end()
        self.memory.close()
        self._closed = True

    @property
    def lost(self) -> list[StagedReceipt]:
        """The failed writes of this client whose bytes are not staged any more."""
        return self.pending_writes.lost_writes()

    def after_fork(self) -> None:
        """Mark this as the engine of a forked child, which cannot use it."""
        self.tier_state.forked = True
        self.connections.abandon()


def _listen(connections: ConnectionPool, pending_writes: PendingWrites) -> None:
    """Hear how writes end, until the daemon or the tier does, which may be dropped meanwhile."""
    with connections.events as events:
        try:
            while (event := receive(events)) is not None:
                if not isinstance(event, say.Stored | say.Failed | say.Driven):
                    raise ProtocolError(f"{type(event).__name__} is no event")
                pending_writes.hear(event)
        except OSError:
            pass  # said below
        pending_writes.lose()


def _pages(receipts: Collection[OpenReceipt]) -> list[tuple[int, ...]]:
    """Yield the numbers of writes, as many at a time as fit one request.

    One page at least: who asks notices that the daemon is gone.
    """
    numbers = sorted(receipt.sequence for receipt in receipts)
    most = say.MAX_SEQUENCES
    return [tuple(numbers[at : at + most]) for at in range(0, len(numbers), most)] or [()]


def connect(store: Store, path: str, options: TierOptions) -> RemoteEngine:
    """Stage in the memory of the daemon that listens at *path*, for the same store.

    Raises:
        ConfigError: the daemon stores elsewhere, or with other options.
        AccessDeniedError: it is another user's.
        UnsupportedError: other processes do not see the store.
        StorageError: no process listens there.
    """
    if not store.capabilities.shared:
        raise UnsupportedError(f"a drain daemon does not see a {store.url.scheme} store")
    return RemoteEngine(store, path, options)
