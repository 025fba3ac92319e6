"""Open a store, and run calls and batches on its backend: checked, counted, with deadlines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from kvio.abc import Backend, Source
from kvio.core import batches, buffers, lifetime, reads, streams
from kvio.core.block_files import BlockReader, BlockWriter
from kvio.core.buffers import Data
from kvio.core.calls import CLOSED, Calls, Pending, Settings
from kvio.core.counters import Counters
from kvio.core.damage import DamagedKeys
from kvio.errors import (
    AccessDeniedError,
    BlockNotFoundError,
    BlockSizeError,
    ConfigError,
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
    Durability,
    Finding,
    GiB,
    IfExists,
    Layout,
    Receipt,
    Removal,
    StoreStats,
    Verify,
    check_if_exists,
    check_key,
    check_keys,
)
from kvio.url import OptionValue, StoreURL, absolute, hide, locate, parse_size

if TYPE_CHECKING:
    from kvio.placement import Placement


class Store:
    """Blocks under keys in the storage of one backend; made by `open_store`.

    Thread-safe, and a context manager. It pickles as its URL and options and is opened again from
    them; in a forked child it renews its threads and descriptors.

    Calls for one block raise; batches return one `BlockResult` per block. ``timeout`` limits any
    call, in seconds; one that times out raises `StorageTimeoutError` and does not touch the
    caller's memory afterwards. A write that timed out is not published later, unless it was
    already, or its request was under way to a server (S3), which may still carry it out, whole.
    """

    _if_exists: Final[IfExists] = "keep"

    def __init__(self, url: StoreURL, settings: Settings) -> None:
        self._url = url
        self._settings = settings
        self._made_in = os.getpid()
        self._backend: Backend = load_backend(url.scheme).from_url(url)
        self._damaged = DamagedKeys()
        self._usual_nbytes = 0  # of the block that was last read into fresh memory
        self._start()
        self._attach()
        lifetime.watch_forks(self)

    def _start(self) -> None:
        self._counters = Counters()
        threads = self._settings.io_threads or self._backend.default_io_threads()
        self._calls = Calls(self._settings, self._url.place, threads=threads)

    def _attach(self) -> None:
        """Connect threads and calls with the backend."""
        self._backend.use_threads(self._calls.executor.run_all)
        if self._settings.timeout is None:
            self._calls.fast_reads = self._backend.fast_reads()

    def __repr__(self) -> str:
        state = "closed" if self._calls.closed else "open"
        return f"<kvio.Store {self._url.place} {state}>"

    def __del__(self) -> None:
        """Warn that it was not closed, and close it when submitted work has ended."""
        calls: Calls | None = getattr(self, "_calls", None)
        if calls is not None and not calls.closed and lifetime.dropped is not None:
            lifetime.dropped(
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
        returns. ``keep`` keeps an intact existing block of the same length and replaces any other,
        ``replace`` always writes, ``error`` refuses a key that has a block. Below ``durable``,
        ``keep`` checks the length and the trailer of an existing block, and its whole payload
        only if this store has found the block corrupt before.

        Raises:
            InvalidKeyError: the key is not valid.
            TypeError: *data* is not a buffer, or holds objects, pointers or numbers in the other
                byte order.
            BlockSizeError: *data* is not contiguous.
            BlockExistsError: there is a block already and *if_exists* is ``"error"``.
            StorageError: the storage failed or the deadline passed.
            OutOfMemoryError: there is no memory for buffers.
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
            if limit is None:  # as `Calls.here`, inlined: the call costs a small block 5 %
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

    def write_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        move: bool = False,
        if_exists: IfExists = "keep",
        timeout: float | None = None,
    ) -> Receipt:
        """Store the bytes of a file under a key, whole or not at all.

        The file must not change meanwhile. A clone is made where the file system can (XFS, btrfs),
        else a copy, with bounded memory.

        With *move* the store takes the file: when this returns a receipt it is gone from *path*,
        also where an existing block was kept. Where it can, the file itself becomes the block,
        with the permissions of one: in a store of files, on the same file system (see
        `scratch_dir`), if this user owns it and it has one name. Else it is copied, then removed.
        After an error the file is there as it was, or the block is. The caller vouches that no
        other process has the file open or opens it; one that has it open for writing is found
        where the file system has leases (not on NFS and FUSE), and is an error.

        Raises:
            InvalidKeyError: the key is not valid.
            BlockExistsError: there is a block already and *if_exists* is ``"error"``.
            BlockSizeError: the file became shorter.
            StorageError: the file cannot be read, or is not a regular file (to move: or a symbolic
                link); the storage failed or the deadline passed, after which the file may be in
                use until the abandoned call has ended.
            TransientStorageError: the file is to move, and is open for writing elsewhere.
        """
        write = self._file_writer(key, path, move=move, if_exists=if_exists)
        try:
            receipt = self._calls.run(write, read=False, timeout=timeout, describe="the write")
        except MemoryError as exc:
            raise self._out_of_memory(exc, "writes", key, None) from exc
        except KvioError as exc:
            self._counters.failed(exc, "writes")
            raise
        self._counters.wrote(receipt)
        return receipt

    def _file_writer(
        self, key: str, path: str | os.PathLike[str], *, move: bool, if_exists: IfExists
    ) -> Callable[[Cancellation | None], Receipt]:
        """Return the work of `write_file`, after checking its arguments."""
        check_key(key)
        check_if_exists(if_exists)
        text = os.path.abspath(os.fsdecode(path))  # of the caller's working directory, now

        def write(cancel: Cancellation | None) -> Receipt:
            with streams.opened(text, key, move=move) as source:
                chosen = self._damaged.choose(self._backend, key, source.nbytes, if_exists, cancel)
                receipt = streams.write_file(self._backend, key, source, chosen, cancel)
            self._damaged.forget(key)
            return receipt

        return write

    def _pending_file(
        self, key: str, path: str | os.PathLike[str], *, move: bool, if_exists: IfExists
    ) -> Pending:
        return Pending(
            self._file_writer(key, path, move=move, if_exists=if_exists),
            read=False,
            describe="the write",
            key=key,
            ended=self._counters.write_ended,
        )

    @contextmanager
    def scratch_dir(self) -> Iterator[Path]:
        """Make a directory for files that `write_file` with *move* takes, and yield its path.

        It is made below the root of a store of files, where a move is a rename, and else in TMPDIR
        or ``/var/tmp``. It and what is left in it are removed at the end; if this process is
        killed, a sweep of the root does so.
        """
        made = self._backend.scratch_dir()
        if made is None:
            made = streams.temporary_directory()
        with made as path:
            yield path

    def open_writer(
        self, key: str, *, if_exists: IfExists = "keep", nbytes: int | None = None
    ) -> BlockWriter:
        """Open a file object that writes a block of any length piece by piece.

        Use it in a ``with``: at its end the block is stored, whole or not at all, and
        `BlockWriter.receipt` is set; if the ``with`` raises, nothing is stored::

            with store.open_writer("samples/1") as file:
                torch.save(state, file)

        Up to 64 MiB stay in memory. Above that, file systems get the bytes as they are written; for
        a bucket they are collected in a file without a name in ``$TMPDIR`` (default /var/tmp).
        *nbytes*: the length, if it is known; more or fewer bytes are an error then.

        Raises:
            InvalidKeyError: the key is not valid.
            BlockSizeError: *nbytes* is negative.
            StoreClosedError: the store is closed.
        """
        check_key(key)
        check_if_exists(if_exists)
        if nbytes is not None and nbytes < 0:
            raise BlockSizeError(f"a block cannot have {nbytes} bytes", key=key)

        def store(held: memoryview, more: Source | None, cancel: Cancellation | None) -> Receipt:
            def write(if_exists: IfExists) -> Receipt:
                return streams.write_held(self._backend, key, held, more, nbytes, if_exists, cancel)

            return self._write_long(key, write, nbytes, if_exists)

        calls = self._calls
        if calls.closed:
            raise StoreClosedError(CLOSED)
        return BlockWriter(key, store, store_is_closed=lambda: calls.closed, nbytes=nbytes)

    def open_reader(self, key: str, *, offset: int = 0, nbytes: int | None = None) -> BlockReader:
        """Open a file object that reads a block, or a range of it, from beginning to end.

        It holds up to 16 MiB. A whole block is verified as it is read, and its last piece is
        returned only if the checksum is right; a range is not verified. For many small reads or
        lines wrap it in `io.BufferedReader`.

        Raises:
            InvalidKeyError, BlockNotFoundError, BlockSizeError: as `read_block`.
            KvioError: any other error is raised by the read that meets it.
        """
        check_key(key)
        reads.check_range(offset, nbytes)
        stat = self.stat_block(key)
        if offset > stat.nbytes:
            raise BlockSizeError(f"offset {offset} lies beyond block {key!r}", key=key)
        pieces = self._read_stream(key, offset, nbytes, checked_first=False, stat=stat)
        return BlockReader(key, pieces)

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
        must have room for it. With either, a range is read: from *offset* at most *nbytes* bytes
        (else as many as *out* has room for), fewer where the block ends. Of a range only the
        trailer is checked. Bytes of *out* beyond the count are unspecified.

        Raises:
            BlockNotFoundError: there is no block.
            CorruptBlockError: the stored bytes are not those written.
            TypeError: *out* is not a buffer, or holds objects, pointers or numbers in the other
                byte order.
            BlockSizeError: *out* is too small, read-only or not contiguous, or *offset* lies
                beyond the end.
            StorageError: the storage failed or the deadline passed.
            OutOfMemoryError: there is no memory for buffers.
        """
        calls = self._calls
        fast = calls.fast_reads
        if fast is not None and timeout is None and nbytes is None and not offset:
            try:
                got = fast.read(key, out)
            except KvioError as exc:
                self._read_failed(key, exc)
                raise
            finally:
                if calls.closed:
                    calls.left()
            if got is not None:
                return got
        parts, call = reads.target(key, out, offset, nbytes), object()
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
        if timeout is None and nbytes is None and not offset:
            usual = self._read_usual(key)
            if usual is not None:
                return usual
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
        if len(view) <= reads.SMALL_RANGE_NBYTES:
            self._usual_nbytes = len(view)
        self._counters.read(len(view))
        return view

    def _read_usual(self, key: str) -> memoryview | None:
        """Read a whole block if it fits the length of the last one; None: ask for its length."""
        calls, usual = self._calls, self._usual_nbytes
        fast = calls.fast_reads
        if fast is None or not usual:
            return None
        try:
            view = buffers.aligned(usual)
            got = fast.read(key, view)
            return None if got is None else buffers.trimmed(view, got)
        except (BlockSizeError, OutOfMemoryError):
            return None  # it is longer, or memory for it alone may still be found
        except KvioError as exc:
            self._read_failed(key, exc)
            raise
        finally:
            if calls.closed:
                calls.left()

    def _choose_keep(
        self, key: str, nbytes: int, if_exists: IfExists, timeout: float | None
    ) -> IfExists:
        """Return the ``if_exists`` for a write of this key by another process.

        See `DamagedKeys.choose`. When the write has been accepted, `DamagedKeys.forget` the key.
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
        """Store a stream of any length with little memory (for ``kvio put``)."""

        def write(if_exists: IfExists) -> Receipt:
            return streams.write(self._backend, key, source, nbytes, if_exists)

        return self._write_long(key, write, nbytes, if_exists)

    def _write_long(
        self,
        key: str,
        write: Callable[[IfExists], Receipt],
        nbytes: int | None,
        if_exists: IfExists,
    ) -> Receipt:
        check_key(key)
        damaged = if_exists == "keep" and key in self._damaged.keys
        try:
            if damaged and not self._calls.here(self._backend.verify_block, key).ok:
                if_exists = "replace"
            receipt = self._calls.here(write, if_exists)
        except MemoryError as exc:
            raise self._out_of_memory(exc, "writes", key, nbytes) from exc
        except KvioError as exc:
            self._counters.failed(exc, "writes")
            raise
        self._damaged.forget(key)
        self._counters.wrote(receipt)
        return receipt

    def _read_stream(
        self,
        key: str,
        offset: int,
        nbytes: int | None,
        *,
        checked_first: bool,
        stat: BlockStat | None = None,
    ) -> Iterator[memoryview]:
        """Yield a block, or a range of it, with little memory (for ``kvio get``)."""
        check_key(key)
        reads.check_range(offset, nbytes)
        got = 0
        pieces = streams.read(
            self._backend, key, offset, nbytes, checked_first=checked_first, stat=stat
        )
        while True:
            try:
                # Not a call in progress while the caller has a piece: it may not ask for more.
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
        """Return the error of a block, and count it."""
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
        """Write (key, data) pairs on all I/O threads; return one result per block, in order.

        A durable batch shares directory syncs. A block that fails does not stop the others.

        If the handler of a signal raises an exception (Ctrl-C), the batch ends early: a note
        on the exception says how many blocks were stored, and its attribute ``kvio_results`` has
        one result per block, ``cancelled`` for those that were not begun.

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
        """Read whole blocks into (key, out) pairs on all I/O threads; return one result per block.

        Results are in order. A block with fewer bytes than its buffer is ``short``; its bytes are
        in the buffer. A signal ends the batch early, as in `write_blocks`.

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
        """Queue a write; *data* must not change until the future is done.

        Waits while the queue holds more than ``max_queued_bytes``.
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
        """Return the facts about a block that its trailer has.

        Raises:
            BlockNotFoundError: there is no block.
            CorruptBlockError: the trailer is missing or damaged.
        """
        check_key(key)
        stat = partial(self._backend.stat_block, key)
        try:
            return self._calls.run(lambda c: stat(cancel=c), timeout=timeout, describe="the stat")
        except CorruptBlockError:
            self._damaged.note(key)
            raise

    def contains(self, key: str, *, timeout: float | None = None) -> bool:
        """Return whether there is a block under a key with an intact trailer."""
        try:
            self.stat_block(key, timeout=timeout)
        except (BlockNotFoundError, CorruptBlockError):
            return False
        return True

    def count_leading(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Return how many keys from the front have a block: the prefix lookup of KV caches.

        Only names may be checked, so a corrupt block, after a power cut for instance, may be
        counted; reading it raises, and writing it after that with ``keep`` replaces it. A key
        whose check fails ends the count as a missing one does.
        """
        wanted = list(keys)
        check_keys(wanted)
        count = partial(self._backend.count_leading, wanted)
        return self._calls.run(lambda c: count(cancel=c), timeout=timeout, describe="the lookup")

    def list_keys(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[str]:
        """Yield the keys that start with *prefix*, in any order.

        Keys written or deleted meanwhile may or may not be seen. The timeout is for the whole
        listing, without the time that the consumer takes between keys.
        """
        keys = self._backend.list_keys(prefix)
        yield from self._calls.each(keys, timeout=timeout, describe="the listing")

    def verify_block(self, key: str, *, timeout: float | None = None) -> BlockResult:
        """Check a whole stored block without returning its bytes."""
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
        """Check a whole block, and remove it if it is corrupt.

        A block that was written again since it was found corrupt stays. Data that may not be
        kvio's stays too: blocks of another key or namespace, and objects in a bucket without a
        trailer. *quarantine* names a directory, made if it is missing (0700), that first gets the
        stored bytes in a new file named by the key (0600): a link to the file where possible,
        else a copy, with zeros for bytes that cannot be read.

        Raises:
            InvalidKeyError: the key is not valid.
            AccessDeniedError: the store is open read-only.
            UnsupportedError: the backend cannot return stored bytes unchecked (``raw_blocks``).
        """
        from kvio.core.damage import remove_corrupt  # imported late: few programs use it

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
        """Remove blocks on all I/O threads; return one result per block, in order."""
        results = batches.delete(self._calls, self._backend, keys, timeout)
        self._counters.deleted(len(results))
        return results

    def drop_cache(self, keys: Iterable[str], *, timeout: float | None = None) -> list[BlockResult]:
        """Drop blocks from the page cache, so that their next reads come from the storage.

        Return one result per block, in order: ``ok``, ``missing``, or the error. Dirty pages are
        written back first, as `os.fdatasync` does, which makes no block durable that was stored as
        ``visible``: its name may still be lost. The kernel may keep pages that another process
        has mapped, and caches below the file system (a disk's, a server's) are not touched.

        Blocks of a backend without a page cache (memory, buckets) are ``ok`` unseen: there is
        nothing to drop.

        Raises:
            InvalidKeyError: before anything is dropped.
        """
        wanted = list(keys)
        check_keys(wanted)
        drop = partial(self._backend.drop_cache, wanted)
        results = self._calls.run(
            lambda c: drop(cancel=c), timeout=timeout, describe="dropping the page cache"
        )
        if results is None:
            return [BlockResult(key, BlockStatus.OK) for key in wanted]
        return results

    def path_of(self, key: str, *, timeout: float | None = None) -> Path:
        """Return the path of the file that has a block, for programs that look at files.

        It is below the root as this process names it. With ``layout=plain`` the file has the
        block's bytes alone, else padding and a trailer behind them. Whoever writes to it breaks
        the block, and a later write of the key puts another file there.

        Raises:
            BlockNotFoundError: there is no block.
            UnsupportedError: blocks are not files here (memory, buckets).
            RootMovedError: the root is no longer where it was opened.
        """
        check_key(key)
        find = partial(self._backend.path_of, key)
        return Path(self._calls.run(lambda _: find(), timeout=timeout, describe="the lookup"))

    def sweep(self, *, older_than_s: float = 86400.0, dry_run: bool = False) -> list[str]:
        """Remove temporaries of dead writers and return their names; *dry_run* removes none.

        A writer on this machine is dead when its process has ended. One on another machine is
        taken for dead when its temporary has not changed for *older_than_s* seconds, which must
        exceed the longest pause of a live writer.
        """
        sweep = self._backend.sweep
        return self._calls.run(
            lambda _: sweep(older_than_s=older_than_s, dry_run=dry_run), read=False
        )

    @property
    def capabilities(self) -> Capabilities:
        """The promises of this store, with the fallbacks in use; asks an S3 server once."""
        return self._backend.capabilities

    def probe(self) -> list[Finding]:
        """Find facts about the storage beyond the capabilities; leaves no files behind."""
        return self._calls.here(self._backend.probe)

    @property
    def url(self) -> StoreURL:
        """The backend, path and options that were opened."""
        return self._url

    @property
    def io_threads(self) -> int:
        """The number of threads that batches, submitted work and calls with a timeout share."""
        return self._calls.threads

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened."""
        executor, fast = self._calls.executor, self._calls.fast_reads
        return self._counters.snapshot(
            self._backend.modes_taken,
            fast_reads=(0, 0) if fast is None else fast.counts,
            retries=self._backend.retries_made,
            queued_bytes=executor.queued_bytes,
            quarantined_threads=executor.quarantined,
        )

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until all submitted work has ended; adds no durability.

        Raises:
            StorageTimeoutError: it did not end before the deadline.
        """
        limit = self._calls.limit(timeout)
        if not self._calls.here(self._calls.executor.drain, timeout=limit):
            raise StorageTimeoutError("submitted work did not end before the deadline")

    def close(self, *, timeout: float | None = None) -> None:
        """Finish submitted work, then close; later calls raise `StoreClosedError`.

        Writers of `open_writer` that are not closed store nothing.

        Raises:
            StorageTimeoutError: after *timeout* seconds calls were still running; queued ones are
                cancelled, and stuck ones keep their descriptors.
        """
        if not self._calls.refuse():
            return
        if not self._calls.close(timeout):
            raise StorageTimeoutError("calls were still running when close() timed out")
        self._backend.close()
        lifetime.forget_forks(self)

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
            self._attach()
        except KvioError:
            self._calls.refuse()  # the root is gone; its descriptors must not be used again


# --------------------------------------------------------------------------------------------------
# Open a store: from a URL and keywords to a backend and its settings.


def open_store(
    url: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    io_threads: int | None = None,
    durability: Durability | None = None,
    layout: Layout | None = None,
    verify: Verify | None = None,
    max_queued_bytes: int | str = GiB,
    timeout: float | None = None,
    placement: Placement | None = None,
    create: bool = False,
    options: Mapping[str, OptionValue] | None = None,
) -> Store:
    """Open a store by path, by URL (``hybrid:///mnt/kv?durability=durable``), or by name and root.

    Args:
        url: the path of a directory, which the backend ``hybrid`` opens: an `os.PathLike`, or text
            with a slash, taken as it is written (``%`` and ``?`` mean nothing in it); or
            ``backend://path?option=value``, or a backend's name alone.
        root: the directory of a file-system store, where the URL has no path.
        io_threads: threads for batches, submitted work and calls with a timeout, started when
            they are needed; default: twice the processors, 4 to 32, and 64 for S3 (boto3: 16),
            whose requests wait for the network.
        durability: the level every write reaches, ``visible`` (default) or ``durable``.
        layout: ``block`` (default: trailer, checksum) or ``plain`` (path = key, bytes exact).
        verify: what reads check: ``full`` (default), ``length`` or ``off``.
        max_queued_bytes: submitting waits while queued and running work holds more bytes; a
            number, or text such as ``"1GiB"``.
        timeout: seconds for calls without a timeout of their own; None: no limit.
        placement: a `kvio.placement.Placement`: processors for the I/O threads, near the device
            or a GPU; None: the system decides. Calls on the caller's thread stay there.
        create: make the directory of a file-system store, and those above it, if it is missing.
        options: more options of the backend, as in the URL.

    Raises:
        UnknownBackendError, MissingDependencyError: there is no such backend, or an extra must be
            installed for it.
        ConfigError: an option or the root is wrong.
        TypeError: a path is not text.
        UnsupportedError: the storage lacks the durability or the I/O mode that was asked for.
    """
    parsed = locate(url)
    given: dict[str, OptionValue] = {
        "durability": durability,
        "layout": layout,
        "verify": verify,
        "root": None if root is None else absolute(root),
        "create": "true" if create else None,
    }
    merged: dict[str, OptionValue] = dict(parsed.options)
    for extra in (options or {}, {k: v for k, v in given.items() if v is not None}):
        for name, value in extra.items():
            if name in parsed.options and parsed.options[name] != value:
                raise ConfigError(f"option {name!r} is given twice: in the URL and beside it")
            merged[name] = hide(name, value)
    full = StoreURL(parsed.scheme, parsed.host, parsed.path, merged)
    settings = Settings(
        io_threads=io_threads,
        max_queued_bytes=parse_size(max_queued_bytes),
        timeout=timeout,
        placement=placement,
    )
    try:
        return Store(full, settings)
    except OutOfMemoryError:
        raise
    except MemoryError as exc:
        raise OutOfMemoryError(f"no memory to open {url!r}") from exc
