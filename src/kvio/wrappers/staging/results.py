"""What became of one block of a batch that was staged."""

from __future__ import annotations

from typing import NamedTuple

from kvio.errors import KvioError
from kvio.types import BlockStatus
from kvio.wrappers.staging.receipts import StagedReceipt


class StagedResult(NamedTuple):
    """What became of one block of a batch that was staged.

    Attributes:
        key: the block's name.
        status: ``ok`` where it was accepted.
        nbytes: its length then.
        error: the error a single call would have raised, or None.
        receipt: of a block that was accepted, else None.
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
