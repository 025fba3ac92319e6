"""Load checkpoints: read and verify each block of the manifest once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as IOFuture
from concurrent.futures import wait
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from kvio import BlockStore, aligned_buffer
from kvio.connectors.torch_dcp.manifest import ItemLocation, bytes_view
from kvio.connectors.torch_dcp.versions import check_name, is_name, read_manifest
from kvio.errors import (
    BlockError,
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    UnsupportedError,
    out_of_memory,
)

_CONCURRENT_BLOCKS: Final = 4


class KvioReader(StorageReader):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """Loads checkpoints saved by `KvioWriter`, with any number of ranks.

    Blocks are read whole and verified, directly into tensors that need a whole stored tensor.
    After an error the content of the tensors being loaded is undefined.

    Args:
        store: a `kvio.Store`, or a staging tier over one.
        name: the checkpoint's name; ``checkpoint_id`` of a load replaces it.
        version: one of `versions`; None: the newest.
        weights_only: refuse what ``torch.load(weights_only=True)`` refuses, because torch's
            load planner unpickles without this limit. False trusts all users who can write to the
            store.

    Raises:
        InvalidKeyError: *name* cannot start a key.
    """

    def __init__(
        self,
        store: BlockStore,
        name: str,
        *,
        version: str | None = None,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        check_name(name)
        self._store = store
        self._name = name
        self._wanted = version
        self._weights_only = weights_only
        self._version = ""
        self._load_id = uuid.uuid4().hex
        self._stored: dict[MetadataIndex, ItemLocation] = {}

    @property
    def checkpoint_id(self) -> str:
        """Return the name of the checkpoint."""
        return self._name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can have this name."""
        return is_name(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        if checkpoint_id is not None:
            check_name(os.fspath(checkpoint_id))
            self._name = os.fspath(checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._stored = {}

    # Not named kwargs: with a parameter of that name torch expects one manifest per rank.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002
        """Read the manifest.

        Raises:
            BlockNotFoundError: there is no such checkpoint.
            CorruptBlockError: its manifest is corrupt.
            UnsupportedError: a later kvio wrote it.
        """
        manifest = read_manifest(self._store, self._name, self._wanted)
        self._version = manifest.version
        metadata = manifest.metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002, FBT001
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Keep the locations of the items."""
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the version that this rank has read to the plan."""
        return dataclasses.replace(plan, storage_data=self._version)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have read the same version.

        Raises:
            BlockNotFoundError: the checkpoint was replaced while it was being loaded.
        """
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise BlockNotFoundError(
                f"checkpoint {self._name!r} was replaced while it was being loaded: ranks found "
                f"versions {sorted(found)}; load again, or choose one with version="
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items.

        Raises:
            CorruptBlockError, BlockNotFoundError: a block is corrupt or missing; the error names
                the items in it.
            UnsupportedError: an item is refused by *weights_only*.
        """
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._stored[item.storage_index].key, []).append(item)
        pending: deque[_BlockLoad] = deque()
        try:
            for key, items in wanted.items():
                if len(pending) == _CONCURRENT_BLOCKS:
                    self._deliver(pending.popleft(), planner)
                pending.append(self._start(key, items, planner))
            while pending:
                self._deliver(pending.popleft(), planner)
        finally:
            wait([load.count for load in pending if isinstance(load.count, IOFuture)])
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _start(self, key: str, items: list[ReadItem], planner: LoadPlanner) -> _BlockLoad:
        load = _BlockLoad(key, [(item, self._stored[item.storage_index]) for item in items])
        if key:
            with self._errors_named(load):
                self._check_block(load)  # before allocating memory for the manifest's lengths
        with load.memory():
            out = load.targets(planner)
        if key:
            load.count = getattr(self._store, "submit_read_into", self._read_now)(key, out)
        return load

    def _check_block(self, load: _BlockLoad) -> None:
        stored, found = load.items[0][1], self._store.stat_block(load.key)
        if found.nbytes != stored.block_nbytes:
            raise CorruptBlockError(f"it has {found.nbytes} bytes, not {stored.block_nbytes}")
        if None not in (found.checksum, stored.checksum) and found.checksum != stored.checksum:
            raise CorruptBlockError("its checksum differs from the manifest: it is another block")

    def _read_now(self, key: str, out: Any) -> IOFuture[int]:
        """Read in this thread, for a store without ``submit_read_into``."""
        done: IOFuture[int] = IOFuture()
        try:
            done.set_result(self._store.read_block_into(key, out))
        except BlockError as exc:
            done.set_exception(exc)
        return done

    def _deliver(self, load: _BlockLoad, planner: LoadPlanner) -> None:
        if load.key:
            with self._errors_named(load):
                got, expected = load.count.result(), load.items[0][1].block_nbytes
                if got != expected:
                    raise CorruptBlockError(f"{got} bytes were read, not {expected}")
        for item, stored in load.items:
            if item.type == LoadItemType.BYTE_IO:
                with load.memory():
                    data = self._bytes(item, load.bytes_of(stored))
                planner.load_bytes(item, data)
            else:
                with load.memory():
                    load.fill(item, stored)
                planner.commit_tensor(item, load.tensors[id(item)])

    @contextlib.contextmanager
    def _errors_named(self, load: _BlockLoad) -> Iterator[None]:
        """Add the checkpoint, the block and its items to errors."""
        try:
            yield
        except BlockNotFoundError as exc:
            raise BlockNotFoundError(
                f"{self._where(load)} is missing; a save that keeps fewer versions may have "
                f"removed it: {exc}",
                key=load.key,
            ) from exc
        except (CorruptBlockError, BlockSizeError) as exc:
            raise CorruptBlockError(f"{self._where(load)} is corrupt: {exc}", key=load.key) from exc

    def _where(self, load: _BlockLoad) -> str:
        names = sorted({stored_item.storage_index.fqn for stored_item, _ in load.items})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        holds = ", ".join(map(repr, names[:3])) + more
        return f"checkpoint {self._name!r}, block {load.key!r} with {holds}"

    def _bytes(self, item: ReadItem, data: bytes) -> io.BytesIO:
        if self._weights_only:
            try:
                torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as exc:
                raise UnsupportedError(
                    f"item {item.storage_index.fqn!r} of checkpoint {self._name!r} is not plain "
                    "data: torch.load(weights_only=True) refuses it. Allow its types with "
                    "torch.serialization.add_safe_globals, or, if you trust all users who can "
                    f"write to the store, load with KvioReader(weights_only=False): {exc}"
                ) from exc
        return io.BytesIO(data)


class _BlockLoad:
    """A block being read, and the destinations of its bytes."""

    def __init__(self, key: str, items: list[tuple[ReadItem, ItemLocation]]) -> None:
        self.key = key
        self.items = items
        self.count: Any = None
        self.tensors: dict[int, torch.Tensor] = {}
        self._direct: set[int] = set()
        self._scratch = memoryview(b"")

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Convert MemoryError to an error that names the block."""
        try:
            yield
        except MemoryError as exc:
            raise out_of_memory(exc, self.key, self.items[0][1].block_nbytes) from exc

    def targets(self, planner: LoadPlanner) -> list[Any]:
        """Return the buffers for the whole block, in order: tensors, and scratch for the rest."""
        direct: dict[int, torch.Tensor] = {}
        uses: dict[int, int] = {}
        for item, stored in self.items:
            uses[stored.offset] = uses.get(stored.offset, 0) + 1
            if item.type != LoadItemType.BYTE_IO:
                tensor = planner.resolve_tensor(item).detach()
                _check_shape(item, stored, tensor)
                self.tensors[id(item)] = tensor
                if stored.nbytes and _has_same_bytes(item, stored, tensor):
                    direct[stored.offset] = tensor
        nbytes = self.items[0][1].block_nbytes
        plain = {at: tensor for at, tensor in direct.items() if uses[at] == 1}
        self._direct = set(plain)
        if sum(tensor.nbytes for tensor in plain.values()) < nbytes:
            self._scratch = aligned_buffer(nbytes)
        return _tile(plain, self._scratch, nbytes)

    def bytes_of(self, stored: ItemLocation) -> bytes:
        """Return a copy of an item's bytes."""
        return bytes(self._scratch[stored.offset : stored.offset + stored.nbytes])

    def fill(self, item: ReadItem, stored: ItemLocation) -> None:
        """Copy the needed part of an item into its tensor, unless it was read there directly."""
        if stored.nbytes and stored.offset in self._direct:
            return
        sizes, dtype = stored.sizes or (), getattr(torch, stored.dtype or "uint8")
        if stored.nbytes:
            # Copy, because the item's offset may not be aligned for the dtype.
            raw = bytearray(self._scratch[stored.offset : stored.offset + stored.nbytes])
            source = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(sizes)
        else:
            source = torch.empty(sizes, dtype=dtype)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        self.tensors[id(item)].copy_(source)


def _tile(direct: dict[int, torch.Tensor], scratch: memoryview, nbytes: int) -> list[Any]:
    parts: list[Any] = []
    at = 0
    for start in sorted(direct):
        if at < start:
            parts.append(scratch[at:start])
        part = bytes_view(direct[start])
        parts.append(part)
        at = start + len(part)
    if at < nbytes:
        parts.append(scratch[at:nbytes])
    return parts


def _check_shape(item: ReadItem, stored: ItemLocation, tensor: torch.Tensor) -> None:
    fqn = item.storage_index.fqn
    if stored.dtype is None:
        raise CorruptBlockError(f"item {fqn!r} is bytes, but the plan needs a tensor")
    if tensor.size() != item.lengths:
        raise BlockSizeError(
            f"tensor {fqn!r}: the shape to load is {tuple(item.lengths)}, but the target tensor "
            f"has {tuple(tensor.size())}"
        )


def _has_same_bytes(item: ReadItem, stored: ItemLocation, tensor: torch.Tensor) -> bool:
    """Return whether the item's bytes can be read directly into the tensor's memory."""
    return (
        tuple(item.lengths) == stored.sizes
        and str(tensor.dtype) == f"torch.{stored.dtype}"
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
