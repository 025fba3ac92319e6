"""The contenders as one rank runs them: memory, a tier, a store, files by hand."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import kvio
from kvio import UnsupportedError
from kvio.experiments.staging.order import FILES, MEMCPY, PAGE_CACHE, STORES, TIERS, Order, url_of

_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class Lane(Protocol):
    """Stores blocks one way; blocks are named by their number."""

    def warm_up(self, key: str, data: memoryview) -> None:
        """Do once what only the first call does: start threads, make directories."""

    def write(self, key: str, data: memoryview) -> None:
        """Make one call, as an application would."""

    def settle(self) -> None:
        """Wait until all is as safe as this makes it."""

    def hold(self) -> None:
        """Begin no drains."""

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        """Have what `drain` needs."""

    def drain(self) -> None:
        """Store what is staged, or write blocks directly with the same concurrency."""

    def read(self, key: str, out: memoryview) -> None:
        """Read a block from where it was put."""

    def read_stored(self, key: str, out: memoryview) -> None:
        """Read a block from where it ended up."""

    def close(self) -> None:
        """Give back what is held."""


def open_lane(order: Order) -> Lane:
    """Open a contender.

    Raises:
        UnsupportedError: the medium cannot do it.
    """
    if order.contender == MEMCPY:
        return _Memory(order)
    if order.contender in TIERS:
        return _Tier(order)
    return _Direct(order) if order.contender in STORES else _Files(order)


def memory(nbytes: int) -> memoryview:
    """Give memory that is there: on huge pages where given, every page touched."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, nbytes, mmap.PAGESIZE):
        mapping[at] = 1
    return memoryview(mapping)


class _Idle:
    """What most lanes have nothing to do for."""

    def warm_up(self, key: str, data: memoryview) -> None:
        pass

    def settle(self) -> None:
        pass

    def hold(self) -> None:
        pass

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        pass

    def drain(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class _Memory(_Idle):
    """The C library's memcpy, by way of a view's assignment."""

    def __init__(self, order: Order) -> None:
        self._nbytes = order.nbytes
        self._memory = memory(order.count * order.nbytes)

    def write(self, key: str, data: memoryview) -> None:
        at = int(key[-5:]) * self._nbytes
        self._memory[at : at + self._nbytes] = data

    def read(self, key: str, out: memoryview) -> None:
        at = int(key[-5:]) * self._nbytes
        out[:] = self._memory[at : at + self._nbytes]

    read_stored = read


class _Tier:
    """A tier that holds a turn's blocks, over a store."""

    def __init__(self, order: Order) -> None:
        self._store = _open_store(order, TIERS[order.contender])
        try:
            self._tier = kvio.stage(
                self._store,
                capacity=order.count * order.nbytes,
                drain_threads=order.drain_threads,
                checksum=order.checksum,
                close_store=True,
                populate=True,
                daemon=order.socket,
            )
        except BaseException:
            self._store.close()
            raise

    def warm_up(self, key: str, data: memoryview) -> None:
        self.write(key, data)
        self.settle()

    def write(self, key: str, data: memoryview) -> None:
        self._tier.write_block(key, data)

    def settle(self) -> None:
        self._tier.barrier()

    def hold(self) -> None:
        self._tier.pause()

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        pass

    def drain(self) -> None:
        self._tier.resume()
        self._tier.barrier()

    def read(self, key: str, out: memoryview) -> None:
        self._tier.read_block_into(key, out)

    def read_stored(self, key: str, out: memoryview) -> None:
        self._tier.read_block_into(key, out, consistency="backend")

    def close(self) -> None:
        self._tier.close()


class _Direct(_Idle):
    """A store without a tier."""

    def __init__(self, order: Order) -> None:
        self._store = _open_store(order, STORES[order.contender])
        self._count = order.drain_threads
        self._threads: Threads | None = None

    def warm_up(self, key: str, data: memoryview) -> None:
        self.write(key, data)

    def write(self, key: str, data: memoryview) -> None:
        self._store.write_block(key, data, if_exists="replace")  # as tiers do

    def prepare_drain(self, keys: Sequence[str], pieces: Sequence[memoryview]) -> None:
        calls = list(zip(keys, pieces, strict=True))
        self._threads = Threads(lambda index: self.write(*calls[index]), len(calls), self._count)

    def drain(self) -> None:
        assert self._threads is not None
        self._threads.run()

    def read(self, key: str, out: memoryview) -> None:
        self._store.read_block_into(key, out)

    read_stored = read

    def close(self) -> None:
        self._store.close()


class Threads:
    """Threads that wait for the start, and then share calls that are numbered."""

    def __init__(self, call: Callable[[int], None], count: int, threads: int) -> None:
        self._call = call
        self._numbers = iter(range(count))
        self._gate = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self) -> None:
        """Make all calls."""
        self._gate.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _work(self) -> None:
        self._gate.wait()
        try:
            for index in self._numbers:
                self._call(index)
        except Exception as exc:  # noqa: BLE001  # run() raises it
            self._failures.append(exc)


class _Files(_Idle):
    """One file a block by system calls, under its name from the start."""

    def __init__(self, order: Order) -> None:
        self._root = order.root
        self._flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._sync: Callable[[int], Any] | None = None
        if order.contender != PAGE_CACHE:
            self._sync = os.fsync if order.contender == FILES[1] else os.fdatasync
        if order.contender == FILES[2]:
            self._flags |= os.O_DIRECT
            self._probe(order.key("probe", 0))

    def _probe(self, key: str) -> None:
        """See whether the medium takes it, before the clock."""
        try:
            os.close(os.open(self._path(key), self._flags, 0o600))
        except OSError as exc:
            if exc.errno in _REFUSED:
                raise UnsupportedError(f"O_DIRECT: {exc.strerror}") from exc
            raise

    def write(self, key: str, data: memoryview) -> None:
        fd = os.open(self._path(key), self._flags, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            if self._sync is not None:
                self._sync(fd)
        finally:
            os.close(fd)

    def read(self, key: str, out: memoryview) -> None:
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while out and (got := os.readv(fd, [out])):
                out = out[got:]
        finally:
            os.close(fd)

    read_stored = read

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key.replace("/", "-"))


def _open_store(order: Order, kind: tuple[str, str]) -> kvio.Store:
    return kvio.open_store(url_of(kind, order.root, checksum=order.checksum))
