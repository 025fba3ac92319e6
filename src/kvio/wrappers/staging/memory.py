"""Where staged bytes lie: host memory, memory that a GPU reads at full speed, or a device's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvio.errors import ConfigError
from kvio.types import Parts
from kvio.wrappers.staging import device
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.host import Fence, Filled, HostMemory
from kvio.wrappers.staging.pieces import Part, flat_parts

__all__ = ["Fence", "Filled", "StagingMemory", "flat_parts", "open_memory"]


class StagingMemory(Protocol):
    """Memory that keeps bytes until they are stored; which of it is in use, its owner knows.

    Every call may be made from any thread. A span must stay in use from `fill` until the last
    `lend`, `fetch` or view of it has ended.

    Attributes:
        kind: ``"host"``, ``"pinned"``, or a torch device.
        capacity_bytes: whole pages.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def capacity_bytes(self) -> int: ...  # noqa: D102

    def fill(self, spans: Sequence[Span], data: Sequence[Part], *, checksum: bool) -> Filled:
        """Copy parts as `flat_parts` gives them into the spans.

        Raises:
            BlockSizeError: the parts and the spans differ in length.
            StoreClosedError: the memory was closed.
            StorageError: a device failed; what the spans hold is undefined.
        """

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """View the spans' bytes, page-aligned, with no copy; the views keep the memory.

        Raises:
            UnsupportedError: the memory is a device's.
            StoreClosedError: the memory was closed.
        """

    def lend(
        self, spans: Sequence[Span], *, timeout: float | None = None
    ) -> AbstractContextManager[Parts]:
        """Lend the spans' bytes in page-aligned host memory, for as long as the context lasts.

        The views themselves, or a device's bytes in a bounded buffer, each copied once. Waits
        *timeout* seconds for room there, behind those who came before.

        Raises:
            StorageTimeoutError: others kept the room for so long.
            StorageError: the device failed.
            StoreClosedError: the memory was closed.
        """

    def doubt(self, parts: Parts, hanging: Callable[[], bool]) -> None:
        """Note, within the context of `lend`, that a call was given up that was given *parts*.

        It may look at them as long as *hanging*, so they are not lent again before. The spans
        themselves their owner keeps in use for so long.
        """

    def fetch(self, spans: Sequence[Span], out: Parts, start: int = 0) -> int:
        """Copy bytes from *start* on to the caller's memory, as many as fit; how many.

        Raises:
            StorageError: the device failed; what *out* holds is undefined.
            StoreClosedError: the memory was closed.
        """

    def release(self, spans: Sequence[Span]) -> None:
        """Give pages that are out of use back to the system, or to the device.

        They may be filled again later, which may fail where the memory is gone to others by then.

        Raises:
            StorageError: the system refuses.
        """

    def close(self) -> None:
        """Let go of the memory; it is freed with the last view of it."""


def open_memory(
    where: str,
    nbytes: int,
    *,
    huge_pages: bool = True,
    numa_node: int | None = None,
    fd: int | None = None,
    shared: bool = False,
    populate: bool = False,
) -> StagingMemory:
    """Get staging memory: ``"host"``, ``"pinned"``, or a torch device such as ``"cuda:0"``.

    The options are those of `HostMemory`; a device has none of them.

    Raises:
        ConfigError: less than a page, an option that does not go with *where*, no such device name,
            or the kernel refuses the NUMA node.
        UnsupportedError: this machine has no such device, or no CUDA to pin memory for.
        MissingDependencyError: torch is not installed.
        StorageError: there is no such memory left.
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
