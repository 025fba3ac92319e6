"""The counters of a store; one lock, taken once per call or batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from kvio.errors import KvioError
from kvio.types import BlockResult, BlockStatus, Receipt, StoreStats, status_of

_NAMES = {
    BlockStatus.KEPT: "kept",
    BlockStatus.MISSING: "missing",
    BlockStatus.CORRUPT: "corrupt",
    BlockStatus.TIMEOUT: "timeouts",
    BlockStatus.FAILED: "failed",
}
#: The fields of `StoreStats` that are counted here.
_COUNTED = (
    *("writes", "reads", "deletes", "bytes_written", "bytes_read"),
    *_NAMES.values(),
)

_STATUS = attrgetter("status")
_NBYTES = attrgetter("nbytes")


class Counters:
    """Thread-safe counts behind `Store.stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)

    def wrote(self, receipt: Receipt) -> None:
        """Count one write that succeeded."""
        with self._lock:
            self._wrote(receipt)

    def read(self, nbytes: int) -> None:
        """Count one read that succeeded."""
        counts = self._counts
        with self._lock:
            counts["reads"] += 1
            counts["bytes_read"] += nbytes

    def failed(self, error: KvioError, verb: str) -> None:
        """Count one call that failed; *verb* is ``writes`` or ``reads``."""
        with self._lock:
            self._counts[verb] += 1
            self._counts[_NAMES.get(status_of(error), "failed")] += 1

    def write_ended(self, receipt: Receipt, error: BaseException | None) -> None:
        """Count a submitted write."""
        if error is None:
            self.wrote(receipt)
        elif isinstance(error, KvioError):
            self.failed(error, "writes")

    def read_ended(self, nbytes: int, error: BaseException | None) -> None:
        """Count a submitted read."""
        if error is None:
            self.read(nbytes)
        elif isinstance(error, KvioError):
            self.failed(error, "reads")

    def wrote_batch(self, results: Sequence[BlockResult]) -> None:
        """Count a batch of writes."""
        self._batch("writes", "bytes_written", results)

    def read_batch(self, results: Sequence[BlockResult]) -> int:
        """Count a batch of reads, and return how many blocks of it were corrupt."""
        return self._batch("reads", "bytes_read", results)

    def _batch(self, verb: str, moved: str, results: Sequence[BlockResult]) -> int:
        statuses = list(map(_STATUS, results))
        others: Counter[BlockStatus] = Counter()
        nbytes = sum(map(_NBYTES, results))
        if statuses.count(BlockStatus.OK) != len(results):  # avoids hashing every status
            others.update(statuses)
            nbytes -= sum(one.nbytes for one in results if one.status is BlockStatus.KEPT)
        with self._lock:
            self._counts[verb] += len(results)
            self._counts[moved] += nbytes
            for status, count in others.items():
                if status is not BlockStatus.OK and status is not BlockStatus.SHORT:
                    self._counts[_NAMES.get(status, "failed")] += count
        return others[BlockStatus.CORRUPT]

    def deleted(self, blocks: int) -> None:
        """Count deletions."""
        with self._lock:
            self._counts["deletes"] += blocks

    def snapshot(
        self,
        modes: dict[str, int],
        *,
        fast_reads: tuple[int, int],
        retries: int,
        queued_bytes: int,
        quarantined_threads: int,
    ) -> StoreStats:
        """Return the current counts; *fast_reads*: blocks and bytes that the backend counted."""
        with self._lock:
            counts = dict(self._counts)
            counts["reads"] += fast_reads[0]
            counts["bytes_read"] += fast_reads[1]
            return StoreStats(
                **counts,
                modes=modes,
                retries=retries,
                queued_bytes=queued_bytes,
                quarantined_threads=quarantined_threads,
            )

    def _wrote(self, receipt: Receipt) -> None:
        self._counts["writes"] += 1
        if receipt.existed:
            self._counts["kept"] += 1
        else:
            self._counts["bytes_written"] += receipt.nbytes
