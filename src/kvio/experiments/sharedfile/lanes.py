"""The contenders as one process runs them: kvio's shared files, its stores, and os.pwrite."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol
from urllib.parse import quote

import kvio
from kvio import ConfigError, MiB, UnsupportedError
from kvio.experiments.sharedfile import clock
from kvio.experiments.sharedfile.order import Case, Order, Transfer, Window, blocks, transfers
from kvio.experiments.sharedfile.program import Program

_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
#: Whole cells of a shared file, so that none is read twice.
READ_BYTES: Final = 16 * MiB


class Lane(Protocol):
    """Writes the bytes of this process's writers one way."""

    def create(self) -> None:
        """Make the file that all writers share, before the clock; in the first process alone."""

    def open(self) -> None:
        """Have all that writing needs."""

    def go(self, at_s: float) -> Window:
        """Write and sync from *at_s* on."""

    def seal(self) -> kvio.Receipt | None:
        """Publish what all processes wrote; in the first one alone; None: there is no such step."""

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        """Read back from a file that a writer wrote."""

    def close(self) -> None:
        """Give back what is held."""


def open_lane(order: Order, source: memoryview) -> Lane:
    """Open a contender for writers whose bytes lie one after the other in *source*.

    Raises:
        UnsupportedError: the medium cannot do it.
    """
    if order.wanted.way == "kvio":
        return _Files(order, source) if order.wanted.separate else _Shared(order, source)
    if order.wanted.way == "store":
        return _Blocks(order, source)
    return _Program(order, source) if order.wanted.way == "C" else _Plain(order, source)


class _Writers:
    """What lanes have in common: whose bytes are where."""

    def __init__(self, order: Order, source: memoryview) -> None:
        self.order, self.wanted = order, order.wanted
        self.case = Case(**order.case)
        self._source = source

    def bytes_of(self, writer: int) -> memoryview:
        """View what a writer writes."""
        size = self.case.writer_bytes
        at = self.order.writers.index(writer) * size
        return self._source[at : at + size]

    def transfers(self, writer: int) -> list[tuple[Transfer, memoryview]]:
        """List a writer's calls, each with its bytes."""
        own = self.bytes_of(writer)
        calls = transfers(self.case, writer, separate=self.wanted.separate)
        return [(one, own[one.source : one.source + one.nbytes]) for one in calls]

    def path(self, writer: int) -> str:
        """Name the file that a writer writes."""
        name = f"own-{writer:04d}" if self.wanted.separate else "shared"
        return os.path.join(self.order.root, name)


class _Calls(_Writers):
    """Writers that make one call after the other."""

    def create(self) -> None:
        pass

    def go(self, at_s: float) -> Window:
        calls = [partial(self._write, writer) for writer in self.order.writers]
        return clock.run(calls, self.order.cpus, self._sync, at_s)

    def _write(self, writer: int) -> list[float]:
        raise NotImplementedError

    def _sync(self) -> None:
        raise NotImplementedError

    def seal(self) -> kvio.Receipt | None:
        return None


def _create(path: str, order: Order, *, nbytes: int, writers: int) -> kvio.SharedFile:
    wanted, case = order.wanted, Case(**order.case)
    mode = {"buffered": "buffered", "direct": "direct", "hybrid": "hybrid"}[wanted.mode]
    try:
        return kvio.SharedFile.create(
            path,
            nbytes,
            writers=writers,
            mode=mode,
            checksum=wanted.checksum,
            preallocate=wanted.preallocate,
            stripe_bytes=case.block_bytes if writers > 1 and case.segments > 1 else 0,
        )
    except ConfigError as exc:  # no direct I/O, or nothing durable
        raise UnsupportedError(str(exc)) from exc


class _Shared(_Calls):
    """One `kvio.SharedFile`: threads write by the handle that seals, processes by their own."""

    def __init__(self, order: Order, source: memoryview) -> None:
        super().__init__(order, source)
        self._sealing: kvio.SharedFile | None = None
        self._own: kvio.SharedFile | None = None
        self._reading: kvio.SharedFile | None = None

    def create(self) -> None:
        case = self.case
        self._sealing = _create(
            self.path(0), self.order, nbytes=case.total_bytes, writers=case.writers
        )

    def open(self) -> None:
        if len(self.order.writers) == 1:
            [rank] = self.order.writers
            self._own = kvio.SharedFile.open(self.path(rank), rank)

    def _write(self, writer: int) -> list[float]:
        file = self._own or self._sealing
        assert file is not None
        return _pwrites(file, self.transfers(writer))

    def _sync(self) -> None:
        if self._own is not None:
            self._own.close()

    def seal(self) -> kvio.Receipt | None:
        assert self._sealing is not None
        return self._sealing.seal()

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        if self._reading is None:
            self._reading = kvio.SharedFile.open(self.path(writer))
        self._reading.pread_into(out, offset)

    def close(self) -> None:
        for file in (self._own, self._reading, self._sealing):
            if file is not None:
                file.close()


class _Files(_Calls):
    """A `kvio.SharedFile` of its own for each writer."""

    def __init__(self, order: Order, source: memoryview) -> None:
        super().__init__(order, source)
        self._files: dict[int, kvio.SharedFile] = {}

    def open(self) -> None:
        for writer in self.order.writers:
            self._files[writer] = _create(
                self.path(writer), self.order, nbytes=self.case.writer_bytes, writers=1
            )

    def _write(self, writer: int) -> list[float]:
        return _pwrites(self._files[writer], self.transfers(writer))

    def _sync(self) -> None:
        for file in self._files.values():
            file.seal()

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        self._files[writer].pread_into(out, offset)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _pwrites(file: kvio.SharedFile, calls: Sequence[tuple[Transfer, memoryview]]) -> list[float]:
    clock_s, latencies = time.perf_counter, []
    for call, piece in calls:
        start = clock_s()
        file.pwrite(piece, call.offset)
        latencies.append(clock_s() - start)
    return latencies


class _Blocks(_Calls):
    """A block a writer in one durable store: one call, whose time is shared out to transfers."""

    def __init__(self, order: Order, source: memoryview) -> None:
        super().__init__(order, source)
        self._store: kvio.Store | None = None
        self._read: tuple[int, memoryview] | None = None

    def open(self) -> None:
        url = f"{self.wanted.mode}://{quote(self.order.root)}?durability=durable"
        self._store = kvio.open_store(url)

    def _write(self, writer: int) -> list[float]:
        pieces = [piece for _, piece in self.transfers(writer)]
        assert self._store is not None
        start = time.perf_counter()
        self._store.write_block(f"own-{writer:04d}", pieces)
        return [(time.perf_counter() - start) / len(pieces)] * len(pieces)

    def _sync(self) -> None:
        pass  # each block was durable when its call returned

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        assert self._store is not None
        if self._read is None or self._read[0] != writer:
            self._read = None  # before there is other memory
            self._read = writer, self._store.read_block(f"own-{writer:04d}")
        out[:] = self._read[1][offset : offset + len(out)]

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _Plain(_Calls):
    """os.pwrite, by a descriptor a process, and one fdatasync each."""

    def __init__(self, order: Order, source: memoryview) -> None:
        super().__init__(order, source)
        self._fd = -1

    def create(self) -> None:
        make_file(self.path(0), self.case.total_bytes if self.wanted.preallocate else 0)

    def open(self) -> None:
        flags = os.O_DIRECT if self.wanted.direct else 0
        self._fd = open_file(self.path(0), os.O_WRONLY | flags)

    def _write(self, writer: int) -> list[float]:
        clock_s, fd, latencies = time.perf_counter, self._fd, []
        for call, piece in self.transfers(writer):
            start = clock_s()
            done = os.pwrite(fd, piece, call.offset)
            while done < len(piece):
                done += os.pwrite(fd, piece[done:], call.offset + done)
            latencies.append(clock_s() - start)
        return latencies

    def _sync(self) -> None:
        os.fdatasync(self._fd)

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        read_file(self.path(writer), offset, out)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _Program(_Writers):
    """The same calls by a compiled program, which gets the bytes before the clock."""

    def __init__(self, order: Order, source: memoryview) -> None:
        super().__init__(order, source)
        self._program: Program | None = None

    def create(self) -> None:
        if not self.wanted.separate:
            make_file(self.path(0), self.case.total_bytes)

    def open(self) -> None:
        order, case = self.order, self.case
        if self.wanted.separate:
            for writer in order.writers:
                make_file(self.path(writer), case.writer_bytes)
        writers = [
            (
                self.path(writer),
                [at for at, _ in blocks(case, writer, separate=self.wanted.separate)],
                cpus,
            )
            for writer, cpus in zip(order.writers, order.cpus, strict=True)
        ]
        self._program = Program(
            order.program,
            writers,
            direct=self.wanted.direct,
            transfer_bytes=case.transfer_bytes,
            block_bytes=case.block_bytes,
        )
        self._program.load(self._source[: len(writers) * case.writer_bytes])

    def go(self, at_s: float) -> Window:
        assert self._program is not None
        return self._program.go(at_s)

    def seal(self) -> kvio.Receipt | None:
        return None

    def read(self, writer: int, offset: int, out: memoryview) -> None:
        read_file(self.path(writer), offset, out)

    def close(self) -> None:
        if self._program is not None:
            self._program.close()


def make_file(path: str, nbytes: int) -> None:
    """Make a file with all its blocks allocated; 0 bytes: none is."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def open_file(path: str, flags: int) -> int:
    """Open a file; what O_DIRECT is refused with is an `UnsupportedError`."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as exc:
        if flags & os.O_DIRECT and exc.errno in _REFUSED:
            raise UnsupportedError(f"O_DIRECT: {exc.strerror}") from exc
        raise


def read_file(path: str, offset: int, out: memoryview) -> None:
    """Fill *out* from a file, as far as it goes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while out and (got := os.preadv(fd, [out], offset)):
            out, offset = out[got:], offset + got
    finally:
        os.close(fd)
