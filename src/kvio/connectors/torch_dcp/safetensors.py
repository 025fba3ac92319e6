"""Export whole tensors in the layout of Hugging Face: safetensors files and their index.

The header of a file is described at https://huggingface.co/docs/safetensors/index#format. The files
have the names, dtypes and metadata of torch's HuggingFaceStorageWriter (torch 2.15).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kvio import BlockStore
from kvio.connectors.torch_dcp.manifest import bytes_view
from kvio.connectors.torch_dcp.versions import check_name, is_name, settle
from kvio.errors import BlockExistsError, ConfigError, UnsupportedError
from kvio.types import Level

INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Headers are padded, so that the data begins at a multiple of this in the file.
_ALIGNMENT: Final = 8


class KvioSafetensorsWriter(StorageWriter):  # type: ignore[misc, unused-ignore]  # Any without torch
    """Exports a state dict of whole tensors as safetensors files and their index.

    The keys are ``NAME/model-00001-of-0000N.safetensors`` and so on, and
    ``NAME/model.safetensors.index.json``; in a store opened with ``layout=plain`` they are files
    that any program opens. Each file is visible whole or not at all. The export is complete when
    its index is there, which is written last, when all files have reached *level*. No export
    replaces a complete one, since for a time its files would be those of two.

    The process that has the whole tensors saves alone (``no_dist=True``, if there are several).

    Args:
        store: a `kvio.Store`, or a staging tier over one.
        name: the start of the keys; ``checkpoint_id`` of a save replaces it.
        fqn_to_index: the file, from 1 on, of every tensor; None: all are in one.
        level: the level that the files must reach; the store must provide it.

    Raises:
        ConfigError: *fqn_to_index* has a number below 1, or *level* is invalid.
        InvalidKeyError: *name* cannot start a key.
    """

    def __init__(
        self,
        store: BlockStore,
        name: str,
        *,
        fqn_to_index: Mapping[str, int] | None = None,
        level: str = Level.DURABLE,
    ) -> None:
        super().__init__()
        check_name(name)
        if fqn_to_index is not None and any(number < 1 for number in fqn_to_index.values()):
            raise ConfigError("fqn_to_index must have numbers of files from 1 on")
        if level not in (Level.VISIBLE, Level.DURABLE):
            raise ConfigError(f"level must be 'visible' or 'durable', not {level!r}")
        self._store = store
        self._name = name
        self._files = None if fqn_to_index is None else dict(fqn_to_index)
        self._level = Level(level)

    @property
    def checkpoint_id(self) -> str:
        """Return the name of the export."""
        return self._name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an export can have this name."""
        return is_name(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin an export."""
        if checkpoint_id is not None:
            check_name(os.fspath(checkpoint_id))
            self._name = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Refuse a name that has an export.

        Raises:
            BlockExistsError: there is one.
        """
        if is_coordinator and self._store.contains(self._key(INDEX)):
            raise BlockExistsError(
                f"there is an export {self._name!r} already: choose another name, or delete its "
                "blocks, the index first",
                key=self._key(INDEX),
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that every item is a whole tensor that safetensors has a dtype for.

        Raises:
            UnsupportedError: names the item that is not.
        """
        for item in plan.items:
            self._check(item)
        return plan

    def _check(self, item: WriteItem) -> None:
        fqn, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            raise UnsupportedError(f"item {fqn!r} is no tensor, and safetensors holds tensors only")
        if data.chunk.sizes != data.size:
            raise UnsupportedError(
                f"tensor {fqn!r} is sharded: gather it first, by "
                "get_model_state_dict(options=StateDictOptions(full_state_dict=True))"
            )
        if data.properties.dtype not in _DTYPES:
            raise UnsupportedError(f"tensor {fqn!r}: no {data.properties.dtype} in safetensors")
        if self._files is not None and fqn not in self._files:
            raise ConfigError(f"tensor {fqn!r} is not in fqn_to_index")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse an export by several ranks, which would write the same files.

        Raises:
            UnsupportedError: more than one rank has items.
        """
        if sum(bool(plan.items) for plan in plans) > 1:
            raise UnsupportedError(
                "several ranks have tensors to export: save on one, with no_dist=True"
            )
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files and wait until they have reached the level."""
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(1 if self._files is None else self._files[item.index.fqn], []).append(
                item
            )
        last = (
            max(files, default=1) if self._files is None else max(self._files.values(), default=1)
        )
        results = []
        for number, items in sorted(files.items()):
            file_name = f"model-{number:05d}-of-{last:05d}.safetensors"
            tensors = {item.index.fqn: _host(item, planner.resolve_data(item)) for item in items}
            key = self._key(file_name)
            receipt = self._store.write_block(key, encode(tensors), if_exists="replace")
            settle(receipt, self._level, key)
            results += [
                WriteResult(item.index, tensors[item.index.fqn].nbytes, file_name) for item in items
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Write the index, which completes the export.

        Raises:
            BlockExistsError: another export of this name was completed meanwhile.
        """
        written = [result for rank in results for result in rank]
        document = {
            "metadata": {"total_size": sum(result.size_in_bytes for result in written)},
            "weight_map": {result.index.fqn: result.storage_data for result in written},
        }
        key, data = self._key(INDEX), json.dumps(document, indent=2).encode()
        receipt = settle(self._store.write_block(key, data, if_exists="keep"), self._level, key)
        if receipt.existed:
            raise BlockExistsError(f"export {self._name!r} was completed by another", key=key)

    def _key(self, file_name: str) -> str:
        return f"{self._name}/{file_name}"


def _host(item: WriteItem, tensor: Any) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedError(
            f"tensor {item.index.fqn!r} is {tensor.layout} on {tensor.device}: only dense tensors "
            "with data can be exported"
        )
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain


def encode(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return the parts of a safetensors file of contiguous CPU tensors, without copying them."""
    # Larger elements first, as safetensors itself does, so that all are aligned in a mapped file.
    order = sorted(tensors, key=lambda fqn: (-tensors[fqn].element_size(), fqn))
    offsets = {fqn: {"saved_offsets": [0] * tensors[fqn].dim()} for fqn in tensors}
    own = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header: dict[str, Any] = {"__metadata__": own}
    parts: list[Any] = []
    at = 0
    for fqn in order:
        tensor = tensors[fqn]
        header[fqn] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        if tensor.nbytes:
            parts.append(bytes_view(tensor))
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *parts]
