"""Staging memory on a torch device, and host memory that a GPU reads and writes at full speed.

Torch is looked for when such memory is opened, and CUDA is called only where it is available.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kvio import _native
from kvio.buffers import PAGE_BYTES, total_bytes
from kvio.errors import (
    ConfigError,
    MissingDependencyError,
    OutOfMemoryError,
    StorageError,
    StoreClosedError,
    UnsupportedError,
)
from kvio.types import MiB, Parts
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.fences import Fences
from kvio.wrappers.staging.host import Fence, Filled, HostMemory, crc32c_of
from kvio.wrappers.staging.pieces import Part, check_lengths, cut_spans, pairs
from kvio.wrappers.staging.ring import Ring
from kvio.wrappers.staging.segments import Segments

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
        populate: bool = False,
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
            populate=populate,
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
        """Unpin what nobody closed: CUDA would take what comes to lie there for this."""
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

    def doubt(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Keep a part of the ring beyond its context, as long as *hanging*."""
        self._ring.doubt(parts, hanging)

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
        """Wait for the copies in, of which only their fences tell that they failed; then copy."""
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
        """Let a slab go when no copy into it is under way that nobody has waited for."""
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
