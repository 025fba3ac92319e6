"""Saving: data first, durable; then one manifest that makes all of it a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import uuid
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kvio.connectors.torch_dcp.manifest import Manifest, Place, encode, manifest_key
from kvio.connectors.torch_dcp.packing import Packer
from kvio.connectors.torch_dcp.versions import (
    BlockStore,
    check_name,
    find_manifest,
    new_version,
    remove_versions,
    settle,
)
from kvio.errors import BlockExistsError, ConfigError, InvalidKeyError, UnsupportedError
from kvio.types import Level, MiB

_DCP_VERSION: Final = "1.0.0"


@dataclasses.dataclass(slots=True)
class _Save:
    """What one thread is saving; torch drives a save from one thread from beginning to end."""

    name: str
    save_id: str
    place: Place | None = None
    sequence: int = 0


class KvioWriter(StorageWriter):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """Saves checkpoints of ``torch.distributed.checkpoint`` under a name in a store.

    Every save has keys of its own, so an older checkpoint of the name stays whole until the new
    one's manifest is as safe as *level* says; only then are saves beyond the newest *keep* removed.
    A save that dies or fails changes nothing that can be loaded; see `remove_unfinished`.

    One job at a time saves under a name. Several threads may use one writer; asynchronous saves
    are ordered by `KvioStager`, and without it one that an overtaking save made old fails.

    Args:
        store: a `kvio.Store`, or a staging tier over one.
        name: what the keys start with; ``checkpoint_id`` of a save replaces it.
        keep: how many saves can be loaded.
        block_bytes: tensors are gathered into blocks of about this size; a larger one is a block.
        level: how safe data and manifest must be. The store must be open for it.

    Raises:
        ConfigError: *keep* or *block_bytes* is not positive, or *level* is no level to wait for.
        InvalidKeyError: *name* cannot begin a key.
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

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(
            type(self), keep=self._keep, block_bytes=self._block_bytes, level=self._level
        )
        return make, (self._store, self._name)

    @property
    def checkpoint_id(self) -> str:
        """The name that this thread saves under."""
        return self._current().name

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint and the save."""
        save = self._current()
        return StorageMeta(checkpoint_id=save.name, save_id=save.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a checkpoint can have this name."""
        try:
            check_name(os.fspath(checkpoint_id))
        except InvalidKeyError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save on this thread."""
        name = self._name if checkpoint_id is None else os.fspath(checkpoint_id)
        check_name(name)
        self._saves[threading.get_ident()] = _Save(name, uuid.uuid4().hex)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Refuse saves without a coordinator: nobody would know when all ranks are done."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False saves each rank for itself; kvio publishes one manifest "
                "after all ranks: leave it True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the save its version, and every rank its place."""
        if not all(plan.usable for plan in plans):
            raise UnsupportedError(
                "a save planner with enable_plan_caching=True reuses plans that say where an older "
                "save put its data: turn it off, or overwriting would mix two checkpoints"
            )
        save = self._current()
        published = find_manifest(self._store, save.name)
        with self._lock:
            self._sequence = max(self._sequence, published.sequence if published else 0) + 1
            save.sequence = self._sequence
        save.place = Place(save.name, new_version(save.sequence), 0)
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(save.place, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; when it returns they are as safe as asked."""
        place = plan.storage_data
        if not isinstance(place, Place):
            raise UnsupportedError("the save planner dropped the storage_data of the plan")
        packer = Packer(self._store, place.prefix, block_bytes=self._block_bytes, level=self._level)
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
        """Publish the manifest, then remove what is older than the newest *keep* saves.

        Raises:
            BlockExistsError: a save that began later was published meanwhile.
        """
        save = self._saves.pop(threading.get_ident(), None)
        if save is None or save.place is None:
            raise UnsupportedError("finish() was not called by the thread that planned the save")
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        metadata.storage_meta = StorageMeta(checkpoint_id=save.name, save_id=save.save_id)
        metadata.version = _DCP_VERSION
        with self._lock:
            replaced = self._publish(save, save.place, metadata)
            remove_versions(self._store, save.name, replaced)

    def _publish(self, save: _Save, place: Place, metadata: Metadata) -> list[str]:
        """Publish the manifest and name the saves it no longer offers."""
        published = find_manifest(self._store, save.name)
        if published is not None and published.sequence > save.sequence:
            raise BlockExistsError(
                f"checkpoint {save.name!r}: version {published.version} was published before "
                f"{place.version}, which began earlier and stays unpublished; async_save with "
                "async_stager=KvioStager() keeps saves in order",
                key=manifest_key(save.name),
            )
        older: list[str] = []
        stuck: list[str] = []
        if published is not None:
            older = list(published.versions)
            stuck = remove_versions(self._store, save.name, published.removing)
        replaced = older[self._keep - 1 :]
        manifest = Manifest(
            version=place.version,
            sequence=save.sequence,
            versions=(place.version, *older[: self._keep - 1]),
            removing=(*replaced, *stuck),
            metadata=metadata,
        )
        data = encode(manifest, save.name)
        for key in (manifest_key(save.name, place.version), manifest_key(save.name)):
            settle(self._store.write_block(key, data, if_exists="replace"), self._level, key)
        return replaced

    def _current(self) -> _Save:
        return self._saves.setdefault(threading.get_ident(), _Save(self._name, uuid.uuid4().hex))
