"""Open files of a client: written in its own memory, read from the daemon's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from kvio.buffers import PAGE_BYTES
from kvio.errors import storage_error
from kvio.store import Store
from kvio.types import Parts
from kvio.wrappers.staging.daemon.lines import Lines
from kvio.wrappers.staging.daemon.remote import DaemonReads, DaemonWrites
from kvio.wrappers.staging.extents import Extents, Span
from kvio.wrappers.staging.file_room import FileRoom
from kvio.wrappers.staging.host import HostMemory
from kvio.wrappers.staging.ledger import Ledger
from kvio.wrappers.staging.options import TierOptions
from kvio.wrappers.staging.pending import Entry
from kvio.wrappers.staging.receipts import Gate
from kvio.wrappers.staging.spool import Spool


class _MemorySpool(Spool):
    """A file without a name in memory of this process alone."""

    def __init__(self, key: str, gate: Gate) -> None:
        self._key = key
        self._gate = gate
        try:
            fd = os.memfd_create("kvio-file", os.MFD_CLOEXEC)
        except OSError as exc:
            raise storage_error(exc.errno or 0, "make a file in memory", key=key) from exc
        self._file = open(fd, "w+b", buffering=0)  # noqa: SIM115

    def write(self, parts: Parts, at: int) -> None:
        """Write parts one after the other; refused in a forked child, which shares the file."""
        self._gate.check_fork()
        super().write(parts, at)


class DaemonFiles(FileRoom):
    """Files that take memory of the daemon only when they are closed.

    Until then their bytes are in ``spool=`` or, without one, in memory of this process: otherwise
    a client could hold memory that others wait for.
    """

    def __init__(
        self,
        lines: Lines,
        gate: Gate,
        memory: HostMemory,
        store: Store,
        reads: DaemonReads,
        writes: DaemonWrites,
        options: TierOptions,
    ) -> None:
        nothing = Ledger(gate, Extents(PAGE_BYTES), retries=0, release=_never)
        super().__init__(nothing, memory, store, writes, options)
        self._lines = lines
        self._staged = reads
        self._gate = gate
        self._pins: dict[Entry, ExitStack] = {}

    def open_spool(self, key: str) -> Spool:
        """Make a file for the bytes."""
        if self._directory is None:
            return _MemorySpool(key, self._gate)
        return super().open_spool(key)

    def pin(self, key: str) -> Entry | None:
        """Pin a staged block until `unpin`; a connection is in use for so long."""
        stack = ExitStack()
        entry = stack.enter_context(self._staged.pinned(key, lasting=True))
        if entry is None:
            stack.close()
        else:
            self._pins[entry] = stack
        return entry

    def unpin(self, entry: Entry) -> None:
        """Unpin a block."""
        stack = self._pins.pop(entry)
        if not self._gate.forked:  # else the pin is the parent's
            stack.close()


def _never(_spans: Sequence[Span]) -> None:
    """Do nothing: there is no memory to free."""
