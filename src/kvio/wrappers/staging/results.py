"""The outcome for one block of a staged batch."""

from __future__ import annotations

from typing import NamedTuple

from kvio.errors import KvioError
from kvio.types import BlockStatus
from kvio.wrappers.staging.receipts import StagedReceipt


class StagedResult(NamedTuple):
    """The outcome for one block of a staged batch.

    Attributes:
        key: the block's name.
        status: ``ok`` if it was accepted.
        nbytes: its length if it was accepted.
        error: the error that a call for this block alone would have raised, or None.
        receipt: the receipt if it was accepted, else None.
    """

    key: str
    status: BlockStatus
    nbytes: int = 0
    error: KvioError | None = None
    receipt: StagedReceipt | None = None

    @property
    def ok(self) -> bool:
        """The block was accepted."""
        return self.status is BlockStatus.OK
