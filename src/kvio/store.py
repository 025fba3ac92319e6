"""What users hold: a store checks keys, flattens buffers, schedules, batches and counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from kvio import batches, buffers, exits, forks, reads, streams
from kvio.abc import Backend, Source
from kvio.buffers import Data
from kvio.calls import CLOSED, Calls, Pending, Settings
from kvio.counters import Counters
from kvio.damage import DamagedKeys
from kvio.errors import (
    AccessDeniedError,
    BlockNotFoundError,
    CorruptBlockError,
    KvioError,
    OutOfMemoryError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
    out_of_memory,
)
from kvio.registry import load_backend
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Cancellation,
    Capabilities,
    Finding,
    IfExists,
    Receipt,
    Removal,
    StoreStats,
    check_if_exists,
    check_key,
    check_keys,
)
from kvio.url import StoreURL


class Store:
    """Blocks under keys, on whatever medium the backend is.

    Thread-safe. Pickles as its URL and options and opens anew; makes itself ready again in a
    forked child. A context manager. Made by `open_store`.

    Single calls raise; batches return a `BlockResult` a block. ``timeout`` in seconds bounds any
    call; one that gives up raises `StorageTimeoutError` and never touches the caller's memory
    afterwards. A write that timed out is not published later, unless it already was.
    """

    def __init__(self, url: StoreURL, settings: Settings) -> None:
        self._url = url
        self._settings = settings
        self._made_in = os.getpid()
        self._backend: Backend = load_backend(url.scheme).from_url(url)
        self._damaged = DamagedKeys()
        self._start()
        forks.watch(self)

    def _start(self) -> None:
        self._counters = Counters()
        self._calls = Calls(self._settings, self._url.place)
        self._backend.use_threads(self._calls.executor.run_all)

    def __repr__(self) -> str:
        state = "closed" if self._calls.closed else "open"
        return f"<kvio.Store {self._url.place} {state}>"

    def __del__(self) -> None:
        """Warn that it was not closed, and close it when what was submitted has ended."""
        calls: Calls | None = getattr(self, "_calls", None)
        if calls is not None and not calls.closed:
            exits.dropped(
                self,
                f"store {self._url.place}",
                self.close,
                at_once=not calls.executor.has_threads,
                warns=self._made_in == os.getpid(),
            )

    def write_block(
        self, key: str, data: Data, *, if_exists: IfExists = "keep", timeout: float | None = None
    ) -> Receipt:
        """Store *data* under a key, whole or not at all.

        *data* is a buffer, a CPU tensor, or a sequence of them; it may be reused when the call
        returns. ``keep`` keeps an intact block of the same length and replaces a broken one,
        ``replace`` always writes, ``error`` refuses a taken key. Below ``durable``, ``keep`` checks
        the length and the trailer of an existing block, and all of it where this store has found
        the block of this key corrupt before.

        Raises:
            InvalidKeyError: the key breaks the rules.
            TypeError: *data* is no buffer, or one of objects, pointers or the other byte order.
            BlockSizeError: *data* is not contiguous.
            BlockExistsError: the key is taken and *if_exists* is ``"error"``.
            StorageError: the medium failed or the deadline passed.
            OutOfMemoryError: there is no memory to write it with.
        """
        check_key(key)
        check_if_exists(if_exists)
        parts = buffers.as_parts(data)
        write: Callable[..., Receipt] = self._backend.write_block
        calls, call = self._calls, object()
        limit = calls.limit(timeout)
        if self._damaged.keys:
            write = partial(self._damaged.write_block, self._backend)
        try:
            if limit is None:  # as `Calls.here`, which costs a small block one part in twenty
                calls.inside.add(call)
                if calls.closed:
                    raise StoreClosedError(CLOSED)
                receipt = write(key, parts, if_exists=if_exists)
            else:
                receipt = calls.run(
                    lambda cancel: write(key, parts, if_exists=if_exists, cancel=cancel),
                    nbytes=buffers.total_bytes(parts),
                    read=False,
                    timeout=limit,
                    describe="the write",
                )
        except MemoryError as exc:
            raise self._out_of_memory(exc, "writes", key, buffers.total_bytes(parts)) from exc
        except KvioError as exc:
            self._counters.failed(exc, "writes")
            raise
        finally:
            calls.inside.discard(call)
            if calls.closed:
                calls.left()
        self._counters.wrote(receipt)
        return receipt

    def read_block_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Read a block into the caller's buffers and return how many bytes were read.

        Without *offset* and *nbytes* the whole block is read and its checksum verified; *out*
        must have room for it. With either, a range is: as many bytes from *offset* as *nbytes*
        (or else *out*) asks for and the block has; of a range only the trailer is checked.
        Bytes of *out* beyond the count are unspecified.

        Raises:
            BlockNotFoundError: there is no block.
            CorruptBlockError: there is one, but not as it was written.
            TypeError: *out* is no buffer, or one of objects, pointers or the other byte order.
            BlockSizeError: *out* is too small, read-only or not contiguous, or *offset* lies
                beyond the end.
            StorageError: the medium failed or the deadline passed.
            OutOfMemoryError: there is no memory to read it with.
        """
        parts = reads.target(key, out, offset, nbytes)
        calls, call = self._calls, object()
        limit = calls.limit(timeout)
        try:
            if limit is None:  # as in `write_block`
                calls.inside.add(call)
                if calls.closed:
                    raise StoreClosedError(CLOSED)
                got = self._backend.read_block_into(key, parts, offset=offset, nbytes=nbytes)
            else:
                room = buffers.total_bytes(parts)
                work, deliver = reads.into(self._backend, key, parts, offset, nbytes, private=True)
                got = calls.run(
                    work, nbytes=room, timeout=limit, describe="the read", deliver=deliver
                )
        except MemoryError as exc:
            raise self._out_of_memory(exc, "reads", key, buffers.total_bytes(parts)) from exc
        except KvioError as exc:
            self._read_failed(key, exc)
            raise
        finally:
            calls.inside.discard(call)
            if calls.closed:
                calls.left()
        self._counters.read(got)
        return got

    def read_block(
        self, key: str, *, offset: int = 0, nbytes: int | None = None, timeout: float | None = None
    ) -> memoryview:
        """Read a block, or a range of it, into fresh page-aligned memory.

        Raises:
            BlockNotFoundError, CorruptBlockError, BlockSizeError, StorageError: as
                `read_block_into`.
            OutOfMemoryError: there is no memory for it; ranges of it may fit.
        """
        check_key(key)
        reads.check_range(offset, nbytes)
        try:
            view = self._calls.run(
                lambda cancel: reads.read_fresh(self._backend, key, offset, nbytes, cancel),
                nbytes=nbytes or 0,
                timeout=timeout,
                describe="the read",
            )
        except MemoryError as exc:
            raise self._out_of_memory(exc, "reads", key, nbytes) from exc
        except KvioError as exc:
            self._read_failed(key, exc)
            raise
        self._counters.read(len(view))
        return view

    def _choose_keep(
        self, key: str, nbytes: int, if_exists: IfExists, timeout: float | None
    ) -> IfExists:
        """Return what a write of this key by another process must ask for, as `DamagedKeys.choose`.

        Once it has been accepted, the key is to be forgotten.
        """
        if if_exists != "keep" or key not in self._damaged.keys:
            return if_exists
        choose = partial(self._damaged.choose, self._backend, key, nbytes, if_exists)
        return self._calls.run(choose, nbytes=nbytes, timeout=timeout, describe="the check")

    def _read_failed(self, key: str, error: KvioError) -> None:
        if isinstance(error, CorruptBlockError):
            self._damaged.note(key)
        self._counters.failed(error, "reads")

    def _write_stream(
        self, key: str, source: Source, *, nbytes: int | None, if_exists: IfExists
    ) -> Receipt:
        """Store what *source* gives, however much, with little memory (for ``kvio put``)."""
        check_key(key)
        damaged = if_exists == "keep" and key in self._damaged.keys
        try:
            if damaged and not self._calls.here(self._backend.verify_block, key).ok:
                if_exists = "replace"
            receipt = self._calls.here(streams.write, self._backend, key, source, nbytes, if_exists)
        except MemoryError as exc:
            raise self._out_of_memory(exc, "writes", key, nbytes) from exc
        except KvioError as exc:
            self._counters.failed(exc, "writes")
            raise
        self._damaged.forget(key)
        self._counters.wrote(receipt)
        return receipt

    def _read_stream(
        self, key: str, offset: int, nbytes: int | None, *, checked_first: bool
    ) -> Iterator[memoryview]:
        """Yield a block, or a range of it, with little memory (for ``kvio get``)."""
        check_key(key)
        reads.check_range(offset, nbytes)
        got = 0
        pieces = streams.read(self._backend, key, offset, nbytes, checked_first=checked_first)
        while True:
            try:
                # Not while the caller has a piece: it may never ask for the next.
                piece = self._calls.here(next, pieces, None)
            except MemoryError as exc:
                raise self._out_of_memory(exc, "reads", key, None) from exc
            except KvioError as exc:
                self._read_failed(key, exc)
                raise
            if piece is None:
                break
            got += len(piece)
            yield piece
        self._counters.read(got)

    def _out_of_memory(
        self, error: MemoryError, counted: str, key: str, nbytes: int | None
    ) -> OutOfMemoryError:
        """Make the error of a block, and count it."""
        named = out_of_memory(error, key, nbytes)
        self._counters.failed(named, counted)
        return named

    def write_blocks(
        self,
        items: Iterable[tuple[str, Data]],
        *,
        if_exists: IfExists = "keep",
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Write (key, data) pairs over all I/O threads; a result each, in order.

        A durable batch shares directory syncs. Nothing that happens to one block stops another.

        Where the handler of a signal raises an exception (Ctrl-C), the batch ends early: a note
        of the exception says how many blocks were stored, and its attribute ``kvio_results`` has
        the result of each, ``cancelled`` for those that were not reached.

        Raises:
            InvalidKeyError, BlockSizeError, TypeError: before any I/O.
        """
        return self._write_batch(items, if_exists, timeout, Cancellation())

    def _write_batch(
        self,
        items: Iterable[tuple[str, Data]],
        if_exists: IfExists,
        timeout: float | None,
        cancel: Cancellation,
    ) -> list[BlockResult]:
        check_if_exists(if_exists)
        results = batches.write(
            self._calls, self._backend, self._damaged, items, if_exists, timeout, cancel
        )
        self._counters.wrote_batch(results)
        return results

    def read_blocks_into(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Read whole blocks into (key, out) pairs over all I/O threads; a result each, in order.

        A block with fewer bytes than its buffer is ``short``; the bytes it has are there.
        A signal ends it early as `write_blocks`.

        Raises:
            InvalidKeyError, BlockSizeError, TypeError: before any I/O.
        """
        return self._read_batch(items, timeout, Cancellation())

    def _read_batch(
        self, items: Iterable[tuple[str, Data]], timeout: float | None, cancel: Cancellation
    ) -> list[BlockResult]:
        results = batches.read(self._calls, self._backend, items, timeout, cancel)
        if self._counters.read_batch(results):
            self._damaged.note_results(results)
        return results

    def submit_write(
        self, key: str, data: Data, *, if_exists: IfExists = "keep", timeout: float | None = None
    ) -> Future[Receipt]:
        """Queue a write; *data* must stay as it is until the future is done.

        Blocks while the queue holds more than ``max_queued_bytes``.
        """
        return self._calls.submit(self._pending_write(key, data, if_exists), timeout)

    def _pending_write(self, key: str, data: Data, if_exists: IfExists) -> Pending:
        check_key(key)
        check_if_exists(if_exists)
        parts = buffers.as_parts(data)
        write = partial(self._damaged.write_block, self._backend, key, parts, if_exists=if_exists)
        return Pending(
            lambda cancel: write(cancel=cancel),
            nbytes=buffers.total_bytes(parts),
            read=False,
            describe="the write",
            key=key,
            ended=self._counters.write_ended,
        )

    def submit_read_into(
        self,
        key: str,
        out: Data,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Queue a `read_block_into`; queued reads go before queued writes.

        Without a timeout it cannot be cancelled once it has begun: it fills *out*.
        """
        return self._calls.submit(self._pending_read(key, out, offset, nbytes, timeout), timeout)

    def _pending_read(
        self, key: str, out: Data, offset: int, nbytes: int | None, timeout: float | None
    ) -> Pending:
        parts = reads.target(key, out, offset, nbytes)
        private = self._calls.limit(timeout) is not None
        work, deliver = reads.into(self._backend, key, parts, offset, nbytes, private=private)
        return Pending(
            work,
            nbytes=buffers.total_bytes(parts),
            describe="the read",
            key=key,
            deliver=deliver,
            ended=partial(self._read_ended, key),
            holding=not private,
        )

    def _read_ended(self, key: str, nbytes: int, error: BaseException | None) -> None:
        if isinstance(error, CorruptBlockError):
            self._damaged.note(key)
        self._counters.read_ended(nbytes, error)

    def stat_block(self, key: str, *, timeout: float | None = None) -> BlockStat:
        """Describe a block by its trailer.

        Raises:
            BlockNotFoundError: there is no block.
            CorruptBlockError: its trailer is not one.
        """
        check_key(key)
        look = partial(self._backend.stat_block, key)
        try:
            return self._calls.run(lambda c: look(cancel=c), timeout=timeout, describe="the stat")
        except CorruptBlockError:
            self._damaged.note(key)
            raise

    def contains(self, key: str, *, timeout: float | None = None) -> bool:
        """Tell whether a block stands under a key and its trailer is intact."""
        try:
            self.stat_block(key, timeout=timeout)
        except (BlockNotFoundError, CorruptBlockError):
            return False
        return True

    def count_leading(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Count how many keys from the front are present: the prefix lookup of KV caches.

        It may go by names alone. A block that was damaged, after a power cut for instance, may be
        counted; reading it finds that out, and writing it then with ``keep`` replaces it.
        A key that cannot be asked for ends the count as one that is absent does.
        """
        wanted = list(keys)
        check_keys(wanted)
        count = partial(self._backend.count_leading, wanted)
        return self._calls.run(lambda c: count(cancel=c), timeout=timeout, describe="the lookup")

    def list_keys(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[str]:
        """Yield the keys that start with *prefix*, in no promised order.

        Keys written or deleted meanwhile may or may not be seen. The timeout is for all of them;
        what the consumer does in between does not count.
        """
        keys = self._backend.list_keys(prefix)
        yield from self._calls.each(keys, timeout=timeout, describe="the listing")

    def verify_block(self, key: str, *, timeout: float | None = None) -> BlockResult:
        """Check a stored block to its last byte without returning any of it."""
        check_key(key)
        check = partial(self._backend.verify_block, key)
        result = self._calls.run(lambda c: check(cancel=c), timeout=timeout, describe="the check")
        self._damaged.note_results((result,))
        return result

    def remove_corrupt(
        self,
        key: str,
        *,
        quarantine: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> Removal:
        """Remove a block if it is corrupt, checked to its last byte right before.

        One that was written anew since it was found corrupt stays. What may be other data stays
        too: blocks of another key or namespace, and objects in a bucket that do not end as blocks
        do. *quarantine* names a directory, made if need be (0700), where the bytes of the block
        are put first as they are stored, in a new file named by the key (0600); a file system's
        file goes there itself where it can, and what cannot be read is zeros in a copy.

        Raises:
            InvalidKeyError: the key breaks the rules.
            AccessDeniedError: the store is open read-only.
            UnsupportedError: the backend does not hand out what is stored (``raw_blocks``).
        """
        from kvio.quarantine import remove_corrupt  # late: few ask for it

        check_key(key)
        can = self.capabilities
        if not can.writable:
            raise AccessDeniedError(
                f"cannot remove block {key!r}: store {self._url.place} is open read-only",
                errno=errno.EROFS,
                key=key,
            )
        if not can.raw_blocks:
            text = f"a {self._url.scheme} store does not hand out blocks as they are stored"
            raise UnsupportedError(text)
        remove = partial(
            remove_corrupt,
            self._backend,
            key,
            namespace=str(self._url.options.get("namespace", "")),
            directory=None if quarantine is None else os.fspath(quarantine),
        )
        removal = self._calls.run(
            lambda c: remove(cancel=c), read=False, timeout=timeout, describe="the removal"
        )
        self._counters.deleted(int(removal.status is BlockStatus.CORRUPT))
        return removal

    def delete_block(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove a block; False if there was none."""
        check_key(key)
        remove = partial(self._backend.delete_block, key)
        gone = self._calls.run(
            lambda c: remove(cancel=c), read=False, timeout=timeout, describe="the deletion"
        )
        self._counters.deleted(1)
        return gone

    def delete_blocks(
        self, keys: Iterable[str], *, timeout: float | None = None
    ) -> list[BlockResult]:
        """Remove blocks over all I/O threads; a result each, ``missing`` where there was none."""
        results = batches.delete(self._calls, self._backend, keys, timeout)
        self._counters.deleted(len(results))
        return results

    def sweep(self, *, older_than_s: float = 86400.0, dry_run: bool = False) -> list[str]:
        """Remove temporaries of dead writers and name them; *dry_run* only names them.

        A writer on this machine is dead when its process is; of another machine's only the time
        since it last wrote tells, and *older_than_s* must exceed the longest pause.
        """
        sweep = self._backend.sweep
        return self._calls.run(
            lambda _: sweep(older_than_s=older_than_s, dry_run=dry_run), read=False
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises, after every fallback; S3 servers are asked, once."""
        return self._backend.capabilities

    def probe(self) -> list[Finding]:
        """Try what the medium can do beyond its capabilities; leaves nothing behind."""
        return self._calls.here(self._backend.probe)

    @property
    def url(self) -> StoreURL:
        """What was opened: backend, path and options."""
        return self._url

    @property
    def io_threads(self) -> int:
        """How many threads batches, submitted work and calls with a timeout share."""
        return self._calls.threads

    def stats(self) -> StoreStats:
        """Count what happened since the store was opened."""
        executor = self._calls.executor
        return self._counters.snapshot(
            self._backend.modes_taken,
            retries=self._backend.retries_made,
            queued_bytes=executor.queued_bytes,
            quarantined_threads=executor.quarantined,
        )

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything submitted has ended; adds no durability.

        Raises:
            StorageTimeoutError: it had not in time.
        """
        limit = self._calls.limit(timeout)
        if not self._calls.here(self._calls.executor.drain, timeout=limit):
            raise StorageTimeoutError("submitted work did not end in time")

    def close(self, *, timeout: float | None = None) -> None:
        """Finish what was submitted, then close, once; later calls raise `StoreClosedError`.

        Raises:
            StorageTimeoutError: after *timeout* seconds calls were still running; what was only
                queued is cancelled, and what is stuck keeps its descriptors.
        """
        if not self._calls.refuse():
            return
        if not self._calls.close(timeout):
            raise StorageTimeoutError("calls were still under way when close() gave up")
        self._backend.close()
        forks.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.capabilities.shared:
            raise UnsupportedError(f"a {self._url.scheme} store cannot go to another process")
        return Store, (self._url.without_secrets(), self._settings)

    def _after_fork(self) -> None:
        if self._calls.closed:
            return
        self._start()
        self._damaged = DamagedKeys(self._damaged.keys)  # the lock may have been held
        try:
            self._backend.after_fork()
        except KvioError:
            self._calls.refuse()  # the medium is gone; descriptors must not be used again
