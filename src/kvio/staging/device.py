"""Staging memory on a torch device, and what copies from it must wait for."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NamedTuple

from kvio import _native
from kvio.core.buffers import PAGE_BYTES, aligned, total_bytes
from kvio.core.threads import Condition
from kvio.errors import (
    ConfigError,
    MissingDependencyError,
    OutOfMemoryError,
    StorageError,
    StorageTimeoutError,
    StoreClosedError,
    UnsupportedError,
)
from kvio.staging.allocator import Extents, Segments, Span, whole_pages
from kvio.staging.host import (
    Fence,
    Filled,
    HostMemory,
    Part,
    check_lengths,
    crc32c_of,
    cut_spans,
    pairs,
)
from kvio.staging.pending import deadline_of, left
from kvio.types import MiB, Parts


class _Range(NamedTuple):
    start: int
    end: int
    fence: Fence


class Fences:
    """Fences by ranges of a memory; bytes that are filled again have only the new fence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ranges: list[_Range] = []  # none overlaps another; in order

    def __len__(self) -> int:
        return len(self._ranges)

    def put(self, spans: Sequence[Span], fence: Fence | None) -> None:
        """Replace the fences of the bytes in spans by one, or by none."""
        with self._lock:
            for offset, nbytes in spans:
                new = [_Range(offset, offset + nbytes, fence)] if fence is not None else []
                self._replace(offset, offset + nbytes, new)

    def over(self, spans: Sequence[Span]) -> list[Fence]:
        """Return the fences of the bytes in spans, each once."""
        with self._lock:
            found = [r.fence for span in spans for r in self._touching(*_ends(span))]
        return list(dict.fromkeys(found))

    def drop(self, spans: Sequence[Span], fence: Fence) -> None:
        """Remove a fence of bytes in spans, unless they have another one by now."""
        with self._lock:
            for span in spans:
                for one in self._touching(*_ends(span)):
                    if one.fence is fence:
                        self._replace(one.start, one.end, [])

    def _touching(self, start: int, end: int) -> list[_Range]:
        first, last = self._slice(start, end)
        return self._ranges[first:last] if start < end else []

    def _slice(self, start: int, end: int) -> tuple[int, int]:
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._ranges) and self._ranges[first].end <= start:
            first += 1
        return first, max(first, bisect_left(self._starts, end))

    def _replace(self, start: int, end: int, new: list[_Range]) -> None:
        """Replace the ranges between two ends, and cut those that reach beyond them."""
        if start == end:
            return
        first, last = self._slice(start, end)
        old = self._ranges[first:last]
        before = [one._replace(end=start) for one in old[:1] if one.start < start]
        after = [one._replace(start=end) for one in old[-1:] if one.end > end]
        self._ranges[first:last] = [*before, *new, *after]
        self._starts[first:last] = [one.start for one in (*before, *new, *after)]


def _ends(span: Span) -> tuple[int, int]:
    return span.offset, span.offset + span.nbytes


# --------------------------------------------------------------------------------------------------
# A bounded buffer in host memory whose pages are lent.


#: How often to check whether abandoned calls still hang.
_ASK_S: Final = 0.05
#: How long a caller without a limit waits where nothing but the end of such calls can make room.
_PATIENCE_S: Final = 10.0


@dataclass(eq=False, slots=True)
class _Loan:
    """Pages of the ring, or as many bytes of other memory.

    Attributes:
        spare_bytes: how many, if it is other memory in the place of pages that are quarantined.
        hanging: given once it is quarantined.
    """

    spans: Sequence[Span] = ()
    spare_bytes: int = 0
    parts: Parts = field(default=())
    hanging: Callable[[], bool] | None = None

    @property
    def is_quarantined(self) -> bool:
        return self.hanging is not None and self.hanging()


class Ring:
    """Lends the pages of *memory*, first come first served.

    A request longer than the ring gets new memory, when nothing else is lent.

    Pages that an abandoned call may still use are not lent again while any call hangs, because
    that call would write the bytes of another block. Meanwhile other requests get new memory, so
    that they can go on, but never more than the pages held back: two rings in total.

    Attributes:
        lent_bytes: in whole pages, with those held back.
    """

    def __init__(self, memory: HostMemory, *, patience_s: float = _PATIENCE_S) -> None:
        self._memory = memory
        self._patience_s = patience_s
        self._extents = Extents(memory.capacity_bytes)
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._queue: deque[object] = deque()
        self._loans: dict[int, _Loan] = {}  # by the identity of what is lent
        self._quarantined: list[_Loan] = []
        self._spare_bytes = 0

    @property
    def lent_bytes(self) -> int:  # noqa: D102  # above
        return self._extents.used_bytes + self._spare_bytes

    @contextmanager
    def lend(self, nbytes: int, *, timeout: float | None = None) -> Iterator[Parts]:
        """Lend *nbytes* of page-aligned memory for as long as the context lasts.

        Raises:
            StorageTimeoutError: others kept it for *timeout* seconds; or, where there is no limit,
                abandoned calls kept all of it for ten.
        """
        loan = self._take(nbytes, timeout)
        try:
            own = loan.spare_bytes or nbytes > self._memory.capacity_bytes
            loan.parts = [aligned(nbytes)] if own else self._memory.views(loan.spans)
            self._loans[id(loan.parts)] = loan
            yield loan.parts
        finally:
            self._loans.pop(id(loan.parts), None)
            loan.parts = ()
            with self._lock:
                self._quarantined.append(loan)
                self._settle()
                self._changed.notify_all()

    def quarantine(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Keep what is lent as *parts* beyond its context, as long as *hanging*."""
        self._loans[id(parts)].hanging = hanging

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _take(self, nbytes: int, timeout: float | None) -> _Loan:
        """Wait in line for pages; what is too long for them takes all, and so is alone."""
        wanted = min(nbytes, self._memory.capacity_bytes)
        deadline, patience = deadline_of(timeout), None
        place = object()
        with self._lock:
            self._queue.append(place)
            try:
                while True:
                    self._settle()
                    loan = self._find(wanted) if self._queue[0] is place else None
                    if loan is not None:
                        return loan
                    if not self._stuck(wanted):
                        patience = None
                    elif patience is None:
                        patience = monotonic() + self._patience_s
                    self._wait(nbytes, patience if deadline is None else deadline)
            finally:
                self._queue.remove(place)
                self._changed.notify_all()

    def _find(self, wanted: int) -> _Loan | None:
        spans = self._extents.take(wanted)
        if spans is not None:
            return _Loan(spans)
        spare = whole_pages(wanted)
        if self._spare_bytes + spare > self._quarantined_bytes()[0]:
            return None
        self._spare_bytes += spare
        return _Loan(spare_bytes=spare)

    def _stuck(self, wanted: int) -> bool:
        """Return whether only the end of abandoned calls can free pages."""
        pages, spare = self._quarantined_bytes()
        return wanted > self._memory.capacity_bytes - pages and wanted > pages - spare

    def _wait(self, nbytes: int, deadline: float | None) -> None:
        rest = left(deadline)
        if rest == 0:
            text = f"no room for {nbytes} bytes on their way out"
            if self._quarantined:
                kept = sum(self._quarantined_bytes())
                text += f": {kept} bytes are kept for abandoned calls that still hang"
            raise StorageTimeoutError(text)
        if self._quarantined:
            rest = _ASK_S if rest is None else min(rest, _ASK_S)
        self._changed.wait(rest)

    def _quarantined_bytes(self) -> tuple[int, int]:
        """Count what is kept for abandoned calls: in whole pages, and in other memory."""
        pages = sum(whole_pages(span.nbytes) for loan in self._quarantined for span in loan.spans)
        return pages, sum(loan.spare_bytes for loan in self._quarantined)

    def _settle(self) -> None:
        """Take back what is no longer viewed."""
        quarantined, self._quarantined = self._quarantined, []
        for loan in quarantined:
            if loan.is_quarantined:
                self._quarantined.append(loan)
            else:
                self._extents.give(loan.spans)
                self._spare_bytes -= loan.spare_bytes


# --------------------------------------------------------------------------------------------------
# Staging memory on a torch device, and host memory that a GPU reads and writes at full speed.
#
# Torch is looked for when such memory is opened, and CUDA is called only where it is available.


#: What is given back to a device at once: torch's allocator keeps such pieces apart.
SEGMENT_BYTES: Final = 64 * MiB
RING_BYTES: Final = 64 * MiB

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device


class PinnedMemory(HostMemory):
    """Host memory that is registered with CUDA, in segments, so that parts can be given back.

    Raises:
        UnsupportedError: this machine has no CUDA device.
        MissingDependencyError: torch is not installed.
        ConfigError, StorageError: as `HostMemory`, or CUDA refuses to register it.
    """

    kind = "pinned"

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
        torch = _load_torch()
        if not torch.cuda.is_available():
            raise UnsupportedError("pinned staging memory: torch sees no CUDA device here")
        self._torch = torch
        self._closing = False
        super().__init__(
            nbytes,
            huge_pages=huge_pages,
            numa_node=numa_node,
            fd=fd,
            shared=shared,
            populate=bool(populate),  # pinning gets the pages anyhow
        )
        self._segments = Segments(
            self.capacity_bytes, SEGMENT_BYTES, acquire=self._register, drop=self._unregister
        )
        self._segments.acquire_all()

    def fill(self, spans: Sequence[Span], data: Sequence[Part], *, checksum: bool) -> Filled:  # noqa: D102
        self._segments.use(spans)
        return super().fill(spans, data, checksum=checksum)

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """View the spans' bytes, cut where segments meet: CUDA copies no further at once."""
        size = self._segments.segment_bytes
        pieces = self._segments.cut(spans)
        return super().views([Span(seg * size + start, nbytes) for seg, start, nbytes in pieces])

    def release(self, spans: Sequence[Span]) -> None:
        """Free the segments without pages in use."""
        self._segments.release(spans)

    def close(self) -> None:  # noqa: D102
        if not self._closed:
            self._closing = True
            self._segments.drop_all()
        super().close()

    def __del__(self) -> None:
        """Unpin what was never closed: CUDA would take what comes to lie there for this."""
        if hasattr(self, "_segments") and not sys.is_finalizing():
            self.close()

    def _segment(self, number: int) -> Span:
        size = self._segments.segment_bytes
        return Span(number * size, self._segments.nbytes_of(number))

    def _register(self, number: int) -> None:
        (view,) = super().views([self._segment(number)])
        cudart = self._torch.cuda.cudart()
        status = cudart.cudaHostRegister(_native.address_of(view), len(view), _PORTABLE)
        _check(status, "register staging memory with CUDA")

    def _unregister(self, number: int) -> None:
        """Unpin a segment and give its pages back; pinned, the GPU would keep the old ones.

        At the end they stay with the views that are left: a call that hangs may have some.
        """
        (view,) = super().views([self._segment(number)])
        status = self._torch.cuda.cudart().cudaHostUnregister(_native.address_of(view))
        _check(status, "unregister staging memory from CUDA")
        if not self._closing:
            super().release([self._segment(number)])


class DeviceMemory:
    """Memory of a torch device, filled by its own copies and read through a bounded ring.

    A device's tensors are copied in its stream order: work that is queued behind `fill` may change
    them. Every byte crosses to the host once for each `lend` or `fetch` of it.

    Raises:
        ConfigError: less than a page, or no such device name.
        UnsupportedError: this machine has no such device, or torch no streams for it.
        MissingDependencyError: torch is not installed.
        StorageError: the device has not so much memory left.
    """

    def __init__(
        self,
        where: str,
        nbytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self.capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes < PAGE_BYTES:
            raise ConfigError(f"staging memory of {nbytes} bytes: at least {PAGE_BYTES}")
        self._device = _Device(where)
        self.kind = str(self._device.device)
        self._segments = Segments(
            self.capacity_bytes, segment_bytes, acquire=self._allocate, drop=self._free
        )
        self._slabs: list[Any] = [None] * len(self._segments)
        self._segments.acquire_all()
        pinned = self._device.device.type == "cuda"
        kind = PinnedMemory if pinned else HostMemory
        self._ring = Ring(kind(min(ring_bytes, self.capacity_bytes)))
        self._fences = Fences()  # of what was filled and not yet read
        self._closed = False

    def fill(self, spans: Sequence[Span], data: Sequence[Part], *, checksum: bool) -> Filled:
        """Copy parts into the spans: a device's in stream order, the host's before it returns.

        The checksum is of what lay in host memory: None where a part lay on a device.
        """
        check_lengths(spans, data)
        self._segments.use(spans)
        fence = self._device.copy_in(self._tensors(spans), data)
        self._fences.put(spans, fence)
        in_host = all(isinstance(part, memoryview) for part in data)
        return Filled(crc32c_of(data) if checksum and in_host else None, fence)

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """Refuse: the processor cannot see a device's bytes; `lend` copies them."""
        raise UnsupportedError(f"no views of memory on {self.kind} (of {len(spans)} spans)")

    @contextmanager
    def lend(self, spans: Sequence[Span], *, timeout: float | None = None) -> Iterator[Parts]:
        """Copy the spans' bytes to the ring, once, and lend them while the context lasts."""
        with self._ring.lend(sum(span.nbytes for span in spans), timeout=timeout) as parts:
            self._copy_out(spans, spans, parts)
            yield parts

    def quarantine(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Keep a part of the ring beyond its context, as long as *hanging*."""
        self._ring.quarantine(parts, hanging)

    def fetch(self, spans: Sequence[Span], out: Parts, start: int = 0) -> int:
        """Copy bytes from *start* on straight to the caller's memory; how many."""
        cut = cut_spans(spans, start, total_bytes(out))
        self._copy_out(spans, cut, out)
        return sum(span.nbytes for span in cut)

    def release(self, spans: Sequence[Span]) -> None:
        """Return the segments without pages in use to torch's allocator."""
        self._fences.put(spans, None)
        self._segments.release(spans)

    def close(self) -> None:  # noqa: D102
        if self._closed:
            return
        self._closed = True
        self._segments.drop_all()
        self._ring.close()

    def _copy_out(self, whole: Sequence[Span], cut: Sequence[Span], out: Parts) -> None:
        """Wait for the copies in, whose failure only their fences report; then copy."""
        for fence in self._fences.over(whole):
            fence.wait()
            self._fences.drop(whole, fence)
        self._device.copy_out(self._tensors(cut), out)

    def _tensors(self, spans: Sequence[Span]) -> list[Any]:
        if self._closed:
            raise StoreClosedError("the staging memory is closed")
        return [
            self._slabs[segment][start : start + nbytes]
            for segment, start, nbytes in self._segments.cut(spans)
        ]

    def _allocate(self, number: int) -> None:
        self._slabs[number] = self._device.allocate(self._segments.nbytes_of(number))

    def _free(self, number: int) -> None:
        """Let a slab go when no copy into it is under way that has not been waited for."""
        self._device.settle()
        self._slabs[number] = None


class _Device:
    """What is asked of torch: memory, and copies in and out on streams of our own."""

    def __init__(self, where: str) -> None:
        self._torch = _load_torch()
        try:
            device = self._torch.device(where)
        except RuntimeError as exc:
            raise ConfigError(f"staging memory {where!r}: {exc}") from exc
        self._module = self._module_of(device)
        if device.index is None and device.type != "cpu":
            device = self._torch.device(device.type, self._module.current_device())
        self.device = device
        self._filling, self._draining = self._stream(), self._stream()

    def allocate(self, nbytes: int) -> Any:
        """Get memory to fill; its last owner may have work queued on it, by torch's allocator."""
        try:
            slab = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)
        except RuntimeError as exc:
            text = f"no memory for {nbytes} bytes on {self.device}: {exc}"
            raise OutOfMemoryError(text, nbytes=nbytes) from exc
        self._filling.wait_stream(self._module.current_stream(self.device))
        return slab

    def copy_in(self, tensors: Sequence[Any], parts: Sequence[Part]) -> Fence | None:
        """Queue copies behind the work that made the parts, and later work on them behind these."""
        with _device_errors(f"copy to {self.device}"):
            current = [self._module.current_stream(device) for device in self._devices(parts)]
            for stream in current:
                self._filling.wait_stream(stream)
            try:
                with self._module.stream(self._filling):
                    for target, piece in pairs(tensors, parts):
                        self._copy(target, piece)
            finally:
                event = self._filling.record_event()
                for stream in current if event is not None else ():
                    stream.wait_event(event)
        return None if event is None else _DeviceFence(event, f"copy to {self.device}")

    def copy_out(self, tensors: Sequence[Any], out: Parts) -> None:
        """Copy to host memory, and wait for that alone."""
        with _device_errors(f"copy from {self.device}"):
            with self._module.stream(self._draining):
                for view, tensor in pairs(out, tensors):
                    self._host_tensor(view).copy_(tensor, non_blocking=True)
            _wait_for(self._draining)

    def settle(self) -> None:
        """Wait for all copies in."""
        with _device_errors(f"copy to {self.device}"):
            _wait_for(self._filling)

    def _copy(self, target: Any, piece: Part) -> None:
        if isinstance(piece, memoryview):
            target.copy_(self._host_tensor(piece))  # the host's memory may change on return
        else:
            target.copy_(piece, non_blocking=True)

    def _devices(self, parts: Sequence[Part]) -> set[Any]:
        """Name the devices of which work must be done before, and may go on after, a copy."""
        of_parts = {part.device for part in parts if not isinstance(part, memoryview)}
        return {device for device in of_parts if device.type == self.device.type}

    def _host_tensor(self, view: memoryview) -> Any:
        if view.readonly:  # torch warns of such memory, which is only read here
            view = _native.view_address(_native.address_of(view), len(view), owner=view)
        return self._torch.frombuffer(view, dtype=self._torch.uint8)

    def _module_of(self, device: Any) -> Any:
        try:
            module = self._torch.get_device_module(device)
        except RuntimeError as exc:
            raise UnsupportedError(f"staging memory on {device}: {exc}") from exc
        if device.type != "cpu" and not module.is_available():
            raise UnsupportedError(f"staging memory on {device}: torch sees no such device here")
        if (device.index or 0) >= module.device_count():
            raise UnsupportedError(f"staging memory on {device}: {module.device_count()} are there")
        if not hasattr(module, "Stream"):
            raise UnsupportedError(f"staging memory on {device}: torch has no streams for it")
        return module

    def _stream(self) -> Any:
        if self.device.type == "cpu":
            return self._module.Stream()
        return self._module.Stream(device=self.device)


class _DeviceFence:
    """An event of a device, of which failures are ours."""

    def __init__(self, event: Any, doing: str) -> None:
        self._event = event
        self._doing = doing

    def done(self) -> bool:
        with _device_errors(self._doing):
            return bool(self._event.query())

    def wait(self) -> None:
        with _device_errors(self._doing):
            self._event.synchronize()


@contextmanager
def _device_errors(doing: str) -> Iterator[None]:
    """Torch reports what a device did wrong as RuntimeError."""
    try:
        yield
    except RuntimeError as exc:
        raise StorageError(f"{doing}: {exc}") from exc


def _wait_for(stream: Any) -> None:
    event = stream.record_event()
    if event is not None:  # as on the CPU, where everything is done at once
        event.synchronize()


def _check(status: Any, doing: str) -> None:
    if int(status):
        raise StorageError(f"{doing}: error {int(status)}")


def _load_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            "pinned and device staging memory need torch: pip install 'kvio[torch]'"
        ) from exc
    return torch
