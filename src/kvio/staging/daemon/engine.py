"""The daemon's tier: the ledger, drains and memory that its clients fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from kvio import _native
from kvio.core.store import Store
from kvio.errors import CorruptBlockError, StorageTimeoutError
from kvio.staging.allocator import Span
from kvio.staging.device import Ring
from kvio.staging.draining import Drains, cut
from kvio.staging.engine import LocalEngine
from kvio.staging.files import FileRoom
from kvio.staging.host import HostMemory
from kvio.staging.options import TierOptions
from kvio.staging.pending import Entry
from kvio.staging.receipts import OpenReceipt
from kvio.staging.writing import StagedWrites, WhenFull
from kvio.types import IfExists, MiB, Receipt

_RING_BYTES: Final = 64 * MiB


class CheckedDrains(Drains):
    """Drains of memory that clients can write to; the stored bytes are those accepted.

    The bytes are copied to private memory and summed on the way; the copy is stored only if the
    checksum is that of the accepted bytes. Checking the shared bytes themselves would not be
    enough: they may change between the check and the write.
    """

    ring: Ring

    def _write(self, batch: Sequence[Entry]) -> Sequence[Receipt | BaseException]:
        limit = self._timeout
        outcomes: dict[Entry, Receipt | BaseException] = {}
        with self.ring.lend(sum(entry.nbytes for entry in batch), timeout=limit) as parts:
            good: list[tuple[Entry, list[memoryview]]] = []
            for entry, copy in zip(batch, cut(parts, [e.nbytes for e in batch]), strict=True):
                views = self._memory.views(entry.spans)
                crc = _native.copy_parts(copy, views, checksum=True)
                if crc == entry.receipt.checksum:
                    good.append((entry, copy))
                else:
                    text = f"block {entry.key!r} was changed in staging memory after it was taken"
                    outcomes[entry] = CorruptBlockError(text, key=entry.key)
            outcomes.update(self._send(good))
            if any(isinstance(outcome, StorageTimeoutError) for outcome in outcomes.values()):
                self.ring.quarantine(parts, self.hanging)
        return [outcomes[entry] for entry in batch]

    def _send(
        self, good: Sequence[tuple[Entry, list[memoryview]]]
    ) -> dict[Entry, Receipt | BaseException]:
        if not good:
            return {}
        entry, copy = good[0]
        store, if_exists, limit = self._store, entry.if_exists, self._timeout
        if len(good) == 1:
            try:
                stored = store.write_block(entry.key, copy, if_exists=if_exists, timeout=limit)
            except StorageTimeoutError as exc:
                return {entry: exc}
            return {entry: stored}
        items = [(e.key, parts) for e, parts in good]
        results = store.write_blocks(items, if_exists=if_exists, timeout=limit)
        return {
            e: result.receipt or result.error or CorruptBlockError(result.status, key=e.key)
            for (e, _), result in zip(good, results, strict=True)
        }


class Reservations(StagedWrites):
    """Allocates memory for bytes that clients will copy."""

    def reserve(
        self, key: str, nbytes: int, *, if_exists: IfExists, deadline: float | None
    ) -> OpenReceipt | Sequence[Span] | None:
        """Allocate memory, waiting for it if ``when_full`` says so, or keep a staged block.

        None: the block must go past the tier. Room is to be committed to the ledger or cancelled.

        Raises:
            BlockExistsError, StorageFullError, StorageTimeoutError, StoreClosedError: as
                `StagingTier.write_block`.
        """
        ledger = self._ledger
        with ledger.lock:
            ledger.check_open_locked()
            answer = ledger.answer_locked(key, nbytes, if_exists)
            if answer is not None:
                return answer
            spans = self._make_room_locked(nbytes, deadline)
            if spans is not None:
                ledger.filling += 1
            return spans


class DaemonTierCore(LocalEngine):
    """The engine of a tier over memory that is shared.

    Attributes:
        memory: the staging memory; its descriptor goes to clients.
        eager: drains begin without being asked.
        files: pins blocks for open files, so that no write waits for the room they keep.
    """

    memory: HostMemory
    drains: CheckedDrains

    def __init__(self, store: Store, memory: HostMemory, options: TierOptions) -> None:
        super().__init__(store, memory, options, drains=CheckedDrains)
        self.level = self.tier_state.best
        self.eager = options.drain_from == "accept"
        self.drains.ring = Ring(HostMemory(min(_RING_BYTES, memory.capacity_bytes)))
        self._by_rule = {rule: self._reservations(rule) for rule in get_args(WhenFull)}
        self.files = FileRoom(self.ledger, memory, store, self._by_rule["block"], options)

    def _reservations(self, when_full: WhenFull) -> Reservations:
        return Reservations(
            self.ledger, self.memory, self.store, when_full=when_full, checksum=True
        )

    def room(self, when_full: WhenFull) -> Reservations:
        """Return the writes with this rule for a full tier."""
        return self._by_rule[when_full]

    def close(self) -> None:
        """Release the memory, after the drains have ended."""
        self.drains.ring.close()
        self.memory.close()
