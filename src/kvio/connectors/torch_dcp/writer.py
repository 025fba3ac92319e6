"""Save checkpoints: write all data, then publish one manifest that makes it a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
import threading
import uuid
from concurrent import futures
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kvio import BlockStore
from kvio.connectors.torch_dcp.manifest import (
    ItemLocation,
    Manifest,
    RankLocation,
    bytes_view,
    dtype_name,
    encode,
    manifest_key,
)
from kvio.connectors.torch_dcp.versions import (
    check_name,
    find_head,
    is_name,
    new_version,
    remove_versions,
    settle,
)
from kvio.errors import (
    BlockExistsError,
    ConfigError,
    KvioError,
    StorageTimeoutError,
    UnsupportedError,
)
from kvio.types import Level, MiB

_log = logging.getLogger(__name__)


class _Item(NamedTuple):  # made for every tensor, in a third of the time of a frozen dataclass
    of: MetadataIndex
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
        part = bytes_view(plain)
        self._add(index, part, len(part), dtype_name(tensor.dtype), tuple(tensor.shape))

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
                done = receipt.result() if isinstance(receipt, futures.Future) else receipt
                checksum = settle(done, self._level, key).checksum
            for item in items:
                where = key if item.nbytes else ""
                at = item.offset if item.nbytes else 0
                size, crc = (nbytes, checksum) if item.nbytes else (0, None)
                stored = ItemLocation(where, at, item.nbytes, size, crc, item.dtype, item.sizes)
                found.append(WriteResult(item.of, item.nbytes, stored))
        return found

    def abandon(self) -> None:
        """Wait until no thread reads the items' memory, and remove the written blocks.

        Otherwise a staging tier would keep the failed blocks. Blocks that cannot be removed are in
        no manifest.
        """
        futures.wait(
            [receipt for *_, receipt in self._pending if isinstance(receipt, futures.Future)]
        )
        for key, _, nbytes, _ in self._pending:
            try:
                if nbytes:
                    self._store.delete_block(key)
            except StorageTimeoutError:
                return  # the next delete would time out too
            except KvioError as exc:
                _log.warning("block %r of a failed save is not removed: %s", key, exc)


_DCP_VERSION: Final = "1.0.0"


@dataclasses.dataclass(slots=True)
class _Save:
    """The state of a save; torch runs a whole save in one thread."""

    name: str
    save_id: str
    location: RankLocation | None = None
    sequence: int = 0
    from_cache: bool = False


def _check_complete(metadata: Metadata) -> None:
    """Refuse a save whose items are not those of its metadata: the plan was another's."""
    expected = sum(
        len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
        for entry in metadata.state_dict_metadata.values()
    )
    names = {index.fqn for index in metadata.storage_data}
    if len(metadata.storage_data) != expected or names != set(metadata.state_dict_metadata):
        raise UnsupportedError(
            "the save planner (enable_plan_caching=True) says that its plan has not changed, but "
            "another writer saved with it meanwhile: use one KvioWriter for all its saves"
        )


class KvioWriter(StorageWriter):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """Saves checkpoints of ``torch.distributed.checkpoint`` under a name in a store.

    Every save has new keys, so an older checkpoint stays complete until the manifest of the new one
    has reached *level*. Only then are saves older than the newest *keep* removed. A save that fails
    or is killed changes no existing checkpoint; see `remove_unfinished` for its blocks.

    Only one job may save under a name at a time. Several threads may use one writer. `KvioStager`
    orders asynchronous saves; without it, a save fails if a later save was published before it.

    Args:
        store: a `kvio.Store`, or a staging tier over one.
        name: the start of the keys; ``checkpoint_id`` of a save replaces it.
        keep: number of saves to keep.
        block_bytes: tensors are gathered into blocks of about this size; a larger one is a block.
        level: the level that data and manifest must reach; the store must provide it.

    Raises:
        ConfigError: *keep* or *block_bytes* is not positive, or *level* is invalid.
        InvalidKeyError: *name* cannot start a key.
    """

    def __init__(
        self,
        store: BlockStore,
        name: str,
        *,
        keep: int = 1,
        block_bytes: int = 64 * MiB,
        level: str = Level.DURABLE,
    ) -> None:
        super().__init__()
        check_name(name)
        if keep < 1 or block_bytes < 1:
            raise ConfigError(f"keep={keep} and block_bytes={block_bytes} must be at least 1")
        if level not in (Level.VISIBLE, Level.DURABLE):
            raise ConfigError(f"level must be 'visible' or 'durable', not {level!r}")
        self._store = store
        self._name = name
        self._keep = keep
        self._block_bytes = block_bytes
        self._level = Level(level)
        self._lock = threading.Lock()
        self._sequence = 0
        self._saves: dict[int, _Save] = {}
        self._plans: list[SavePlan] = []

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(
            type(self), keep=self._keep, block_bytes=self._block_bytes, level=self._level
        )
        return make, (self._store, self._name)

    @property
    def checkpoint_id(self) -> str:
        """Return the name that this thread saves under."""
        return self._current().name

    def storage_meta(self) -> StorageMeta:
        """Return torch's description of the checkpoint and the save."""
        save = self._current()
        return StorageMeta(checkpoint_id=save.name, save_id=save.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can have this name."""
        return is_name(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a save in this thread."""
        name = self._name if checkpoint_id is None else os.fspath(checkpoint_id)
        check_name(name)
        self._saves[threading.get_ident()] = _Save(name, uuid.uuid4().hex)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Refuse saves without a coordinator, which must know when all ranks have finished."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False saves each rank separately, but kvio publishes one manifest "
                "after all ranks: use use_collectives=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the version of the save and the location of every rank's data."""
        save = self._current()
        published = find_head(self._store, save.name)
        with self._lock:
            self._sequence = max(self._sequence, published.sequence if published else 0) + 1
            save.sequence = self._sequence
            save.from_cache = not all(plan.usable for plan in plans)
            plans = self._whole_plans(plans)
            self._plans = plans
        save.location = RankLocation(save.name, new_version(save.sequence), 0)
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(save.location, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def _whole_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, with this writer's last ones for ranks that sent "as before".

        A planner that caches plans would use those with the locations of the save before, and mix
        two checkpoints; with a whole plan it takes the new location.
        """
        if all(plan.usable for plan in plans):
            return plans
        before = self._plans
        if len(before) != len(plans):
            raise UnsupportedError(
                "the save planner (enable_plan_caching=True) sent no plan because it has not "
                "changed, but this writer has not seen it: use one KvioWriter for all saves, or "
                "enable_plan_caching=False"
            )
        return [new if new.usable else old for new, old in zip(plans, before, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and wait until they have reached the level."""
        location = plan.storage_data
        if not isinstance(location, RankLocation):
            raise UnsupportedError("the save planner removed the storage_data of the plan")
        packer = Packer(
            self._store, location.prefix, block_bytes=self._block_bytes, level=self._level
        )
        try:
            for item in plan.items:
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    packer.add_tensor(item.index, data)
                else:
                    packer.add_bytes(item.index, data)
            results = packer.finish()
        except BaseException:
            packer.abandon()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest, then remove saves older than the newest *keep*.

        Raises:
            BlockExistsError: a save that started later was already published.
        """
        save = self._saves.pop(threading.get_ident(), None)
        if save is None or save.location is None:
            raise UnsupportedError("finish() was not called by the thread that planned the save")
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        if save.from_cache:
            _check_complete(metadata)
        metadata.storage_meta = StorageMeta(checkpoint_id=save.name, save_id=save.save_id)
        metadata.version = _DCP_VERSION
        with self._lock:
            replaced = self._publish(save, save.location, metadata)
            remove_versions(self._store, save.name, replaced)

    def _publish(self, save: _Save, location: RankLocation, metadata: Metadata) -> list[str]:
        """Publish the manifest and return the saves that it no longer lists."""
        published = find_head(self._store, save.name)
        if published is not None and published.sequence > save.sequence:
            raise BlockExistsError(
                f"checkpoint {save.name!r}: version {published.version} was published before "
                f"{location.version}, which started earlier and is not published; use async_save "
                "with async_stager=KvioStager() to keep saves in order",
                key=manifest_key(save.name),
            )
        older: list[str] = []
        stuck: list[str] = []
        if published is not None:
            older = list(published.versions)
            stuck = remove_versions(self._store, save.name, published.removing)
        replaced = older[self._keep - 1 :]
        manifest = Manifest(
            version=location.version,
            sequence=save.sequence,
            versions=(location.version, *older[: self._keep - 1]),
            removing=(*replaced, *stuck),
            metadata=metadata,
        )
        data = encode(manifest, save.name)
        for key in (manifest_key(save.name, location.version), manifest_key(save.name)):
            settle(self._store.write_block(key, data, if_exists="replace"), self._level, key)
        return replaced

    def _current(self) -> _Save:
        return self._saves.setdefault(threading.get_ident(), _Save(self._name, uuid.uuid4().hex))
