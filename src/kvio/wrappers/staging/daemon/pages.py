"""Map the allocated pages of shared memory in the background of a client's first writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

from kvio import _native
from kvio.types import MiB
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.host import MADV_POPULATE_WRITE, HostMemory

#: Bytes mapped at once: meanwhile (6 ms with pages of 4 KiB) no other thread can map memory.
_STEP_BYTES: Final = 32 * MiB


class PageMapping:
    """Maps the allocated pages of a shared memory on another thread; allocates none.

    Without it the first copy into each page waits for the system: 600 us per MiB with pages of
    4 KiB. A client waits for some pages when it connects, not for all, which would take twelve
    seconds for 64 GiB: memory is allocated from the lowest page on, so the pages that are mapped
    first are used first. Pages that could not be mapped are mapped when they are used.
    """

    def __init__(self, memory: HostMemory, fd: int) -> None:
        self._memory = memory
        self._fd = os.dup(fd)
        self._ending = False
        self._thread = threading.Thread(target=self._map, name="kvio-page-mapping", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # out of threads: pages are mapped as they are used
            os.close(self._fd)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all pages are mapped, at most so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def end(self) -> None:
        """Stop mapping."""
        self._ending = True
        self.wait()

    def _map(self) -> None:
        try:
            for span in self._present():
                if self._ending:
                    return
                for view in self._memory.views([span]):
                    _native.advise(view, MADV_POPULATE_WRITE)
        except OSError:
            return  # before Linux 5.14, or out of memory for page tables
        finally:
            os.close(self._fd)

    def _present(self) -> Iterator[Span]:
        """Yield the allocated ranges of the file, in steps; holes were returned to the system.

        Mapping a hole would allocate it, so holes are found again if pages were freed meanwhile.
        """
        at, end, blocks = 0, 0, -1
        while at < self._memory.capacity_bytes:
            now = os.fstat(self._fd).st_blocks
            if at >= end or now < blocks:
                at, end = self._next_run(at)
            blocks = now
            step = min(_STEP_BYTES, end - at)
            if step:
                yield Span(at, step)
            at += step

    def _next_run(self, at: int) -> tuple[int, int]:
        """Return the next allocated range."""
        try:
            start = os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: there are no more
            return self._memory.capacity_bytes, self._memory.capacity_bytes
        return start, os.lseek(self._fd, start, os.SEEK_HOLE)
