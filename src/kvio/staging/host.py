"""Host staging memory: one page-aligned mapping, on huge pages if the system has them."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from kvio import _native
from kvio.core.buffers import (
    PAGE_BYTES,
    Data,
    as_parts,
    check_memory,
    free_bytes,
    ram_bytes,
    total_bytes,
)
from kvio.errors import (
    BlockSizeError,
    ConfigError,
    OutOfMemoryError,
    StorageError,
    StoreClosedError,
    storage_error,
)
from kvio.staging.allocator import Span, pages_of
from kvio.types import MiB, Parts

#: A flat view of bytes in host memory, or a flat uint8 tensor of device memory.
Part: TypeAlias = Any
#: Bytes populated at once: meanwhile (6 ms with pages of 4 KiB) no other thread can map memory.
STEP_BYTES: Final = 32 * MiB
#: This part of the RAM stays free while memory is populated ahead of its use.
_SPARE: Final = 16


def flat_parts(data: Data) -> list[Part]:
    """Flatten *data* into byte views of host memory and flat uint8 tensors of device memory.

    Raises:
        TypeError: an item is neither a buffer nor a tensor.
        BlockSizeError: an item is not contiguous.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return list(as_parts(data))
    items = data if isinstance(data, (list, tuple)) else (data,)
    if not any(map(on_device, items)):
        return list(as_parts(data))
    return [_flat_tensor(item) if on_device(item) else as_parts(item)[0] for item in items]


def on_device(item: object) -> bool:
    """Return whether *item* is a torch tensor outside host memory."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    return torch is not None and isinstance(item, torch.Tensor) and item.device.type != "cpu"


def _flat_tensor(tensor: Any) -> Any:
    if not tensor.is_contiguous():
        raise BlockSizeError("a tensor is not contiguous: pass a contiguous one, or its pieces")
    uint8 = sys.modules["torch"].uint8
    flat = tensor.detach()
    flat = flat if flat.dim() == 1 else flat.view(-1)
    return flat if flat.dtype == uint8 else flat.view(uint8)


def check_lengths(spans: Sequence[Span], parts: Sequence[Part]) -> None:
    """Refuse data that is longer or shorter than the spans it is for.

    Raises:
        BlockSizeError: the lengths differ.
    """
    nbytes = total_bytes(parts)
    room = sum(span.nbytes for span in spans)
    if nbytes != room:
        raise BlockSizeError(f"{nbytes} bytes of data for {room} bytes of staging memory")


def cut_spans(spans: Sequence[Span], start: int, nbytes: int) -> list[Span]:
    """Return the parts of spans that hold up to *nbytes* from *start* on."""
    cut = []
    for offset, length in spans:
        n = min(length - start, nbytes)
        if n > 0:
            cut.append(Span(offset + start, n))
            nbytes -= n
        start = max(0, start - length)
    return cut


def pairs(to: Sequence[Part], parts: Sequence[Part]) -> Iterator[tuple[Part, Part]]:
    """Split two lists into pieces of equal length, (to, from), until the shorter list ends."""
    targets = iter(to)
    target, room = None, 0
    for part in parts:
        at, left = 0, len(part)
        while left:
            while not room:
                target = next(targets, None)
                if target is None:
                    return
                room = len(target)
            n = min(room, left)
            filled = len(target) - room  # type: ignore[arg-type]  # room: there is one
            yield target[filled : filled + n], part[at : at + n]  # type: ignore[index]
            at, left, room = at + n, left - n, room - n


_MADV_WIPEONFORK: Final = 18  # madvise(2); the mmap module has no name for it
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


class Fence(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Return whether the work before it is done.

        Raises:
            StorageError: it failed.
        """

    def wait(self) -> None:
        """Wait until the work before it is done.

        Raises:
            StorageError: it failed.
        """


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of `StagingMemory.fill`.

    The source may be reused as soon as `StagingMemory.fill` returned; on a device in stream order.
    *crc32c* is None where it was not asked for, or the bytes never met a processor. *ready* None:
    the bytes are there. Reading through the memory that was filled needs no wait for it.
    """

    crc32c: int | None
    ready: Fence | None = None


class HostMemory:
    """One page-aligned mapping of *nbytes*, whole pages of it.

    Private memory, of which a forked child sees zeros and costs the parent no copies; or, with *fd*
    (a memfd, which stays the caller's) or *shared* (one of our own), memory for every process that
    maps the file. With *populate* the pages are there from the start; None: a thread gets them
    meanwhile, the lowest first, which are used first. Else the first write to each waits for the
    system.

    Attributes:
        capacity_bytes: whole pages.
        fd: of our own memfd, which can be neither cut nor extended; else None.

    Raises:
        ConfigError: less than a page, a file that is shorter, or the kernel refuses the NUMA node.
        OutOfMemoryError: there is not so much memory.
        StorageError: the kernel gives no such memory.
    """

    kind = "host"

    @property
    def whole(self) -> memoryview:
        """A view of all of it; empty once it is closed."""
        return self._view

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        fd: int | None = None,
        shared: bool = False,
        populate: bool | None = False,
    ) -> None:
        self.capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes < PAGE_BYTES:
            raise ConfigError(f"staging memory of {nbytes} bytes: at least {PAGE_BYTES}")
        self.fd: int | None = None
        self._closed = False
        self._populating: Populating | None = None
        self._shared = shared or fd is not None
        check_memory(self.capacity_bytes)
        with _as_storage_error(f"map {nbytes} bytes of staging memory", nbytes):
            if fd is None and shared:
                fd = self.fd = _sealed_memfd(self.capacity_bytes)
            self._view = _map(self.capacity_bytes, fd)
        self._advise(huge_pages=huge_pages, numa_node=numa_node, populate=populate)

    def fill(self, spans: Sequence[Span], data: Sequence[Part], *, checksum: bool) -> Filled:
        """Copy flat parts (see `flat_parts`) into the spans, and compute their checksum.

        Raises:
            BlockSizeError: the parts and the spans differ in length.
            StoreClosedError: the memory was closed.
            StorageError: a device failed to give its bytes.
        """
        check_lengths(spans, data)
        views = self.views(spans)
        if not any(map(on_device, data)):
            return Filled(_native.copy_parts(views, data, checksum=checksum))
        _fill_from_device(views, data)
        return Filled(crc32c_of(views) if checksum else None)

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return page-aligned views of the spans, without a copy; they keep the memory alive.

        Raises:
            StoreClosedError: the memory was closed.
        """
        if self._closed:
            raise StoreClosedError("the staging memory is closed")
        whole = self._view
        return [whole[offset : offset + nbytes] for offset, nbytes in spans]

    @contextmanager
    def lend(self, spans: Sequence[Span], *, timeout: float | None = None) -> Iterator[Parts]:  # noqa: ARG002
        """Lend views of the spans, without waiting."""
        yield self.views(spans)

    def quarantine(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Do nothing: the owner keeps the lent spans in use."""

    def fetch(self, spans: Sequence[Span], out: Parts, start: int = 0) -> int:
        """Copy bytes from *start* on to *out*, as many as fit, and return their number.

        Raises:
            StoreClosedError: the memory was closed.
        """
        room = total_bytes(out)
        if len(spans) == 1:  # the most of them
            offset, nbytes = spans[0]
            cut = [Span(offset + start, max(0, min(nbytes - start, room)))]
        else:
            cut = cut_spans(spans, start, room)
        _native.copy_parts(out, self.views(cut), checksum=False)
        return sum(span.nbytes for span in cut)

    def release(self, spans: Sequence[Span]) -> None:
        """Return whole pages to the system; they are zeros when they are used again.

        Raises:
            StorageError: the kernel refuses.
        """
        self._stop_populating()  # or it could allocate again what is released here
        advice = mmap.MADV_REMOVE if self._shared else mmap.MADV_DONTNEED
        with _as_storage_error("give staging memory back"):
            for view in self.views(_whole_pages(spans)):
                _native.advise(view, advice)

    def close(self) -> None:
        """Release the memory; it is freed with the last view of it."""
        self._stop_populating()
        self._closed = True
        self._view = memoryview(b"")
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _stop_populating(self) -> None:
        if self._populating is not None:
            self._populating.end()

    def _steps(self) -> Iterator[Span]:
        """Yield the memory in steps, until little is free: the rest is allocated when used."""
        spare = ram_bytes() // _SPARE
        for start in range(0, self.capacity_bytes, STEP_BYTES):
            if free_bytes() < spare + STEP_BYTES:
                return
            yield Span(start, min(STEP_BYTES, self.capacity_bytes - start))

    def _advise(self, *, huge_pages: bool, numa_node: int | None, populate: bool | None) -> None:
        if huge_pages:
            with suppress(OSError):  # a kernel without them: more and slower page faults
                _native.advise(self._view, mmap.MADV_HUGEPAGE)
        if not self._shared:
            with suppress(OSError):  # before Linux 4.14: copies on write after a fork
                _native.advise(self._view, _MADV_WIPEONFORK)
        if numa_node is not None:
            _bind(self._view, numa_node)
        if populate:
            with _as_storage_error("populate staging memory", len(self._view)):
                _native.advise(self._view, MADV_POPULATE_WRITE)
        elif populate is None:
            self._populating = Populating(self, self._steps(), name="kvio-populating")


class Populating:
    """Populates spans of host memory on another thread, one after the other.

    Pages that it did not populate are when they are first used.

    Args:
        memory: stays open until `end`, or until the last span.
        steps: the spans, taken when the one before is populated.
        name: of the thread.
        done: called when it ends.
    """

    def __init__(
        self,
        memory: HostMemory,
        steps: Iterator[Span],
        *,
        name: str,
        done: Callable[[], object] = bool,
    ) -> None:
        self._ending = False
        self._thread = threading.Thread(
            target=self._populate, args=(memory, steps, done), name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # out of threads
            done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the last span, at most so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def end(self) -> None:
        """Stop after the span that is being populated."""
        self._ending = True
        self.wait()

    def _populate(
        self, memory: HostMemory, steps: Iterator[Span], done: Callable[[], object]
    ) -> None:
        try:
            for span in steps:
                if self._ending:
                    return
                for view in memory.views([span]):
                    _native.advise(view, MADV_POPULATE_WRITE)
        except OSError:
            return  # before Linux 5.14, or out of memory
        finally:
            done()


def _sealed_memfd(nbytes: int) -> int:
    """Make a file without a name that cannot be truncated, which would be a SIGBUS."""
    fd = os.memfd_create("kvio-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _map(nbytes: int, fd: int | None) -> memoryview:
    if fd is None:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if os.fstat(fd).st_size < nbytes:
        raise ConfigError(f"the file for {nbytes} bytes of staging memory is shorter")
    return memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED))


def _bind(view: memoryview, node: int) -> None:
    try:
        _native.bind_node(view, node)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"staging memory on NUMA node {node}: {exc}") from exc


@contextmanager
def _as_storage_error(doing: str, nbytes: int | None = None) -> Iterator[None]:
    """Turn a failed system call into a typed error; *nbytes*: the memory it was for."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        error = storage_error(exc.errno or 0, doing)
        if isinstance(error, OutOfMemoryError):
            error.nbytes = nbytes
        raise error from exc


def crc32c_of(parts: Parts) -> int:
    """Return the CRC32C of pieces of host memory, one after the other."""
    crc = 0
    for part in parts:
        crc = _native.crc32c(part, crc)
    return crc


def _whole_pages(spans: Sequence[Span]) -> list[Span]:
    """Return the system's pages that lie in the spans, which may be smaller than a page."""
    inner = []
    for offset, nbytes in spans:
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + pages_of(nbytes) * PAGE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            inner.append(Span(start, end - start))
    return inner


def _fill_from_device(views: Sequence[memoryview], data: Sequence[Part]) -> None:
    """Copy parts, tensors among them, one after the other; all is there on return."""
    torch = sys.modules["torch"]
    for view, piece in pairs(views, data):
        if isinstance(piece, memoryview):
            _native.copy_parts([view], [piece], checksum=False)
            continue
        try:
            torch.frombuffer(view, dtype=torch.uint8).copy_(piece)
        except RuntimeError as exc:
            raise StorageError(f"copy from {piece.device}: {exc}") from exc
