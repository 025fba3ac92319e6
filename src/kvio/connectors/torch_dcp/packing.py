"""Pack one rank's items into blocks without copying them into one buffer."""

from __future__ import annotations

import io
import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from kvio.connectors.torch_dcp.manifest import ItemLocation, dtype_name
from kvio.connectors.torch_dcp.versions import BlockStore, settle
from kvio.errors import KvioError, StorageTimeoutError, UnsupportedError
from kvio.types import Level

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Item:
    index: MetadataIndex
    offset: int
    nbytes: int
    dtype: str | None
    sizes: tuple[int, ...] | None


class Packer:
    """Gathers items into blocks of about *block_bytes*; a larger item is one block.

    Blocks are written in the background by the store's I/O threads if it has ``submit_write``.
    """

    def __init__(self, store: BlockStore, prefix: str, *, block_bytes: int, level: Level) -> None:
        self._store = store
        self._prefix = prefix
        self._block_bytes = block_bytes
        self._level = level
        self._items: list[_Item] = []
        self._parts: list[Any] = []
        self._nbytes = 0
        self._pending: list[tuple[str, list[_Item], int, Any]] = []

    def add_bytes(self, index: MetadataIndex, data: io.BytesIO) -> None:
        """Add an item that the planner serialized to bytes."""
        self._add(index, data.getbuffer(), data.getbuffer().nbytes, None, None)

    def add_tensor(self, index: MetadataIndex, tensor: torch.Tensor) -> None:
        """Add the elements of a tensor or view on any device.

        Raises:
            UnsupportedError: the tensor is sparse, quantized or a meta tensor.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UnsupportedError(
                f"tensor {index.fqn!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}: only "
                "dense tensors with data can be saved"
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = plain.reshape(-1).view(torch.uint8)
        self._add(index, flat, flat.numel(), dtype_name(tensor.dtype), tuple(tensor.shape))

    def _add(
        self,
        index: MetadataIndex,
        part: Any,
        nbytes: int,
        dtype: str | None,
        sizes: tuple[int, ...] | None,
    ) -> None:
        if self._items and self._nbytes + nbytes > self._block_bytes:
            self._write()
        self._items.append(_Item(index, self._nbytes, nbytes, dtype, sizes))
        if nbytes:
            self._parts.append(part)
        self._nbytes += nbytes

    def _write(self) -> None:
        key = f"{self._prefix}/{len(self._pending):06d}"
        items, parts, nbytes = self._items, self._parts, self._nbytes
        self._items, self._parts, self._nbytes = [], [], 0
        receipt = None
        if nbytes:  # items without bytes need no block
            submit = getattr(self._store, "submit_write", self._store.write_block)
            receipt = submit(key, parts, if_exists="replace")
        self._pending.append((key, items, nbytes, receipt))

    def finish(self) -> list[WriteResult]:
        """Wait until every block has the requested level; return the location of each item.

        Raises:
            KvioError: a block could not be written, or did not reach the level.
        """
        if self._items:
            self._write()
        found = []
        for key, items, nbytes, receipt in self._pending:
            checksum = None
            if receipt is not None:
                done = receipt.result() if isinstance(receipt, Future) else receipt
                checksum = settle(done, self._level, key).checksum
            for item in items:
                where = key if item.nbytes else ""
                at = item.offset if item.nbytes else 0
                size, crc = (nbytes, checksum) if item.nbytes else (0, None)
                stored = ItemLocation(where, at, item.nbytes, size, crc, item.dtype, item.sizes)
                found.append(WriteResult(item.index, item.nbytes, stored))
        return found

    def abandon(self) -> None:
        """Wait until no thread reads the items' memory, and remove the written blocks.

        Otherwise a staging tier would keep the failed blocks. Blocks that cannot be removed are in
        no manifest.
        """
        wait([receipt for *_, receipt in self._pending if isinstance(receipt, Future)])
        for key, _, nbytes, _ in self._pending:
            try:
                if nbytes:
                    self._store.delete_block(key)
            except StorageTimeoutError:
                return  # the next delete would time out too
            except KvioError as exc:
                _log.warning("block %r of a failed save is not removed: %s", key, exc)
