"""Staging memory: host memory, pinned host memory, or memory of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvio.errors import ConfigError
from kvio.staging import device
from kvio.staging.allocator import Span
from kvio.staging.host import Fence, Filled, HostMemory, Part, flat_parts
from kvio.types import Parts

__all__ = ["Fence", "Filled", "StagingMemory", "flat_parts", "open_memory"]


class StagingMemory(Protocol):
    """Memory that keeps bytes until they are stored; its owner tracks which of it is in use.

    Thread-safe. A span must stay in use from `fill` until the last `lend`, `fetch` or view of it
    has ended.

    Attributes:
        kind: ``"host"``, ``"pinned"``, or a torch device.
        capacity_bytes: whole pages.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def capacity_bytes(self) -> int: ...  # noqa: D102

    def fill(self, spans: Sequence[Span], data: Sequence[Part], *, checksum: bool) -> Filled:
        """Copy parts, as `flat_parts` returns them, into the spans.

        Raises:
            BlockSizeError: the parts and the spans differ in length.
            StoreClosedError: the memory was closed.
            StorageError: a device failed; the content of the spans is undefined.
        """

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return page-aligned views of the spans, without a copy; they keep the memory alive.

        Raises:
            UnsupportedError: it is memory of a device.
            StoreClosedError: the memory was closed.
        """

    def lend(
        self, spans: Sequence[Span], *, timeout: float | None = None
    ) -> AbstractContextManager[Parts]:
        """Lend the spans' bytes in page-aligned host memory, while the context lasts.

        These are views of the spans, or copies of a device's bytes in a bounded buffer, for which
        callers wait in order, at most *timeout* seconds.

        Raises:
            StorageTimeoutError: the buffer was full until then.
            StorageError: the device failed.
            StoreClosedError: the memory was closed.
        """

    def quarantine(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Record, within the context of `lend`, that a call with *parts* was abandoned.

        Its thread may use them as long as *hanging* returns True, so they are not lent again
        before; the owner keeps the spans in use for so long too.
        """

    def fetch(self, spans: Sequence[Span], out: Parts, start: int = 0) -> int:
        """Copy bytes from *start* on to *out*, as many as fit, and return their number.

        Raises:
            StorageError: the device failed; the content of *out* is undefined.
            StoreClosedError: the memory was closed.
        """

    def release(self, spans: Sequence[Span]) -> None:
        """Return unused pages to the system, or to the device.

        They may be filled again later, which fails if there is no memory left then.

        Raises:
            StorageError: the system refuses.
        """

    def close(self) -> None:
        """Release the memory; it is freed with the last view of it."""


def open_memory(
    where: str,
    nbytes: int,
    *,
    huge_pages: bool = True,
    numa_node: int | None = None,
    fd: int | None = None,
    shared: bool = False,
    populate: bool | None = False,
) -> StagingMemory:
    """Allocate staging memory: ``"host"``, ``"pinned"``, or a torch device such as ``"cuda:0"``.

    The options are those of `HostMemory`; a device has none of them.

    Raises:
        ConfigError: less than a page, an option that *where* does not have, an unknown device
            name, or a NUMA node that the kernel refuses.
        UnsupportedError: this machine has no such device, or no CUDA for pinned memory.
        MissingDependencyError: torch is not installed.
        StorageError: there is not enough memory.
    """
    if where in ("host", "pinned"):
        kind = HostMemory if where == "host" else device.PinnedMemory
        return kind(
            nbytes,
            huge_pages=huge_pages,
            numa_node=numa_node,
            fd=fd,
            shared=shared,
            populate=populate,
        )
    if fd is not None or shared or numa_node is not None:
        raise ConfigError(f"fd, shared and numa_node are for host memory, not for {where!r}")
    return device.DeviceMemory(where, nbytes)
