"""Encode and decode the manifest of a checkpoint as JSON, which cannot execute code."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kvio.errors import CorruptBlockError, InvalidKeyError, UnsupportedError, out_of_memory
from kvio.types import check_key

FORMAT: Final = "kvio-torch-dcp"
FORMAT_VERSION: Final = 1

_SCALARS: Final = (type(None), bool, int, float, str)
_BROKEN: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The location of one rank's data of one save.

    Attributes:
        name: the checkpoint's name, the start of its keys.
        version: the save, unique among all saves of this name.
        rank: the rank that writes the data.
    """

    name: str
    version: str
    rank: int

    @property
    def prefix(self) -> str:
        """Return the prefix of this rank's keys, without the last ``/``."""
        return f"{self.name}/{self.version}/rank-{self.rank:05d}"


@dataclass(frozen=True, slots=True)
class ItemLocation:
    """The location of one item's bytes.

    Attributes:
        key: the block that holds the bytes, or "" if there are none.
        offset: start of the bytes in the block.
        nbytes: number of bytes.
        block_nbytes: length of the block.
        checksum: CRC32C of the block, or None if the store computes none.
        dtype: name of a tensor's dtype; None for bytes.
        sizes: shape of a tensor; None for bytes.
    """

    key: str
    offset: int
    nbytes: int
    block_nbytes: int
    checksum: int | None
    dtype: str | None
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One save and the list of earlier saves.

    Attributes:
        version: the save.
        sequence: number of the save, counted per name.
        versions: the saves that can be loaded, newest first.
        removing: the saves that are being removed.
        metadata: torch's metadata, with an `ItemLocation` per item in ``storage_data``.
    """

    version: str
    sequence: int
    versions: tuple[str, ...]
    removing: tuple[str, ...]
    metadata: Metadata

    def block_keys(self) -> list[str]:
        """Return the keys of all data blocks, without duplicates."""
        return list(
            {stored.key: None for stored in self.metadata.storage_data.values() if stored.key}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a manifest says before its items: all that a later save needs.

    Attributes:
        version: the save.
        sequence: number of the save, counted per name.
        versions: the saves that can be loaded, newest first.
        removing: the saves that are being removed.
        block_keys: the keys of all data blocks.
    """

    version: str
    sequence: int
    versions: tuple[str, ...]
    removing: tuple[str, ...]
    block_keys: tuple[str, ...]


def manifest_key(name: str, version: str | None = None) -> str:
    """Return the key of the manifest of the newest save, or of the given one."""
    return f"{name}/manifest" if version is None else f"{name}/{version}/manifest"


def encode(manifest: Manifest, name: str) -> bytes:
    """Return a manifest as JSON.

    Raises:
        UnsupportedError: a value in torch's metadata has no representation in JSON.
    """
    metadata = manifest.metadata
    root = f"{name}/{manifest.version}/"
    blocks: dict[str, int] = {}
    rows: list[list[Any]] = []
    items: list[list[Any]] = []
    for index, stored in metadata.storage_data.items():
        number = -1
        if stored.key:
            number = blocks.setdefault(stored.key, len(blocks))
            if number == len(rows):
                rows.append([stored.key.removeprefix(root), stored.block_nbytes, stored.checksum])
        at = None if index.offset is None else list(index.offset)
        tensor = [stored.dtype, None if stored.sizes is None else list(stored.sizes)]
        items.append([index.fqn, at, index.index, number, stored.offset, stored.nbytes, *tensor])
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": manifest.version,
        "sequence": manifest.sequence,
        "versions": list(manifest.versions),
        "removing": list(manifest.removing),
        "torch_metadata_version": metadata.version,
        "storage_meta": _encode_storage_meta(metadata.storage_meta),
        "blocks": rows,
        "items": items,
        "state": {fqn: _encode_entry(fqn, e) for fqn, e in metadata.state_dict_metadata.items()},
        "planner_data": _encode_plain(metadata.planner_data, "planner_data"),
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def decode(data: bytes | bytearray | memoryview, name: str, key: str) -> Manifest:
    """Parse a manifest and validate every value in it.

    Raises:
        CorruptBlockError: *data* is no manifest, or is inconsistent.
        OutOfMemoryError: there is not enough memory to decode it.
        UnsupportedError: a later kvio wrote it, or it uses a name that this torch lacks.
    """
    try:
        document = json.loads(bytes(data))
        _check_format(document, key)
        return _decode_document(document, name)
    except MemoryError as exc:
        raise out_of_memory(exc, key, len(data)) from exc
    except (*_BROKEN, InvalidKeyError) as exc:
        raise _no_manifest(key, exc) from exc


def decode_head(data: bytes | bytearray | memoryview, name: str, key: str) -> Head:
    """Parse and validate what precedes the items, in a time that does not grow with them.

    Raises:
        CorruptBlockError: *data* is no manifest, or its head is inconsistent.
        OutOfMemoryError: there is not enough memory to decode it.
        UnsupportedError: a later kvio wrote it.
    """
    try:
        document = _read_until_items(str(data, "ascii"))
        _check_format(document, key)
        version = _text(document["version"])
        return Head(
            version=version,
            sequence=_count(document["sequence"]),
            versions=tuple(_version(name, each) for each in document["versions"]),
            removing=tuple(_version(name, each) for each in document["removing"]),
            block_keys=tuple(
                _key(f"{name}/{version}/{_text(suffix)}") for suffix, *_ in document["blocks"]
            ),
        )
    except MemoryError as exc:
        raise out_of_memory(exc, key, len(data)) from exc
    except (*_BROKEN, InvalidKeyError) as exc:
        raise _no_manifest(key, exc) from exc


def _read_until_items(text: str) -> dict[str, Any]:
    """Parse the members of a JSON object up to "items", which `encode` writes after the head."""
    parse, found, at = json.JSONDecoder().raw_decode, {}, 1
    try:
        while not text.startswith('"items":', at):
            name, at = parse(text, at)
            found[name], at = parse(text, at + 1)
            at += 1
    except ValueError:  # JSON with spaces, or none at all
        return dict(json.loads(text))
    return found


def _no_manifest(key: str, exc: BaseException) -> CorruptBlockError:
    return CorruptBlockError(
        f"block {key!r} is no manifest of a checkpoint: {type(exc).__name__}: {exc}", key=key
    )


def _check_format(document: dict[str, Any], key: str) -> None:
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']!r:.40}, not {FORMAT!r}")
    version = document["format_version"]
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            f"the checkpoint manifest {key!r} has format version {version!r:.40}; this kvio reads "
            f"{FORMAT_VERSION}: load it with the kvio that saved it, or a later one"
        )


def _decode_document(document: dict[str, Any], name: str) -> Manifest:
    version = _text(document["version"])
    root = f"{name}/{version}/"
    blocks = [
        (_key(root + _text(suffix)), _count(nbytes), None if crc is None else _count(crc))
        for suffix, nbytes, crc in document["blocks"]
    ]
    state = {_text(fqn): _decode_entry(entry) for fqn, entry in document["state"].items()}
    storage = dict(_decode_item(item, blocks, state) for item in document["items"])
    metadata = Metadata(
        state,
        planner_data=_decode_plain(document["planner_data"]),
        storage_data=storage,
        storage_meta=_decode_storage_meta(document["storage_meta"]),
        version=_optional_text(document["torch_metadata_version"]),
    )
    return Manifest(
        version=version,
        sequence=_count(document["sequence"]),
        versions=tuple(_version(name, each) for each in document["versions"]),
        removing=tuple(_version(name, each) for each in document["removing"]),
        metadata=metadata,
    )


def _decode_item(
    item: list[Any], blocks: list[tuple[str, int, int | None]], state: dict[str, Any]
) -> tuple[MetadataIndex, ItemLocation]:
    fqn, at, index, number, offset, nbytes, dtype, sizes = item
    if fqn not in state:
        raise ValueError(f"item {fqn!r:.80} has no description")
    key, block_nbytes, checksum = blocks[_count(number)] if number != -1 else ("", 0, None)
    if _count(offset) + _count(nbytes) > block_nbytes:
        raise ValueError(f"item {fqn!r:.80} lies beyond the end of its block")
    if (dtype is None) != isinstance(state[fqn], BytesStorageMetadata):
        raise ValueError(f"item {fqn!r:.80} is described as something else")
    shape = None if dtype is None else tuple(_size(sizes))
    if shape is not None and math.prod(shape) * _torch(dtype, torch.dtype).itemsize != nbytes:
        raise ValueError(f"item {fqn!r:.80} has {nbytes} bytes, not those of its shape")
    place = None if at is None else _size(at)
    found = MetadataIndex(_text(fqn), place, None if index is None else _count(index))
    return found, ItemLocation(key, offset, nbytes, block_nbytes, checksum, dtype, shape)


def _encode_entry(fqn: str, entry: Any) -> Any:
    if type(entry) is BytesStorageMetadata:
        return "bytes"
    if type(entry) is not TensorStorageMetadata:
        raise UnsupportedError(f"item {fqn!r}: metadata of type {type(entry).__name__}")
    properties = entry.properties
    return {
        "dtype": dtype_name(properties.dtype),
        "layout": _name(properties.layout),
        "requires_grad": bool(properties.requires_grad),
        "memory_format": _name(properties.memory_format),
        "pin_memory": bool(properties.pin_memory),
        "strides": None if properties.strides is None else list(properties.strides),
        "size": list(entry.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
    }


def _decode_entry(entry: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if entry == "bytes":
        return BytesStorageMetadata()
    strides = entry["strides"]
    properties = TensorProperties(
        dtype=_torch(entry["dtype"], torch.dtype),
        layout=_torch(entry["layout"], torch.layout),
        requires_grad=bool(entry["requires_grad"]),
        memory_format=_torch(entry["memory_format"], torch.memory_format),
        pin_memory=bool(entry["pin_memory"]),
        strides=None if strides is None else tuple(_size(strides)),
    )
    chunks = [ChunkStorageMetadata(_size(at), _size(sizes)) for at, sizes in entry["chunks"]]
    return TensorStorageMetadata(properties, _size(entry["size"]), chunks)


def _encode_storage_meta(meta: StorageMeta | None) -> Any:
    if meta is None:
        return None
    where = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
    return {"checkpoint_id": where, "save_id": meta.save_id, "modules": list(meta.modules)}


def _decode_storage_meta(meta: Any) -> StorageMeta:
    if meta is None:
        return StorageMeta()
    modules = [_text(module) for module in meta["modules"]]
    where, save_id = _optional_text(meta["checkpoint_id"]), _optional_text(meta["save_id"])
    return StorageMeta(where, save_id=save_id, modules=modules)


def _encode_plain(value: Any, where: str) -> Any:
    """Return a planner's value as JSON; containers are tagged, so tuples stay tuples."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return {kind.__name__: [_encode_plain(each, where) for each in value]}
    if kind is dict:
        pairs = [[_encode_plain(k, where), _encode_plain(v, where)] for k, v in value.items()]
        return {"dict": pairs}
    raise UnsupportedError(
        f"{where} of the save planner has a {kind.__module__}.{kind.__qualname__}: a manifest "
        "can only hold None, bool, int, float, str, list, tuple and dict"
    )


def _decode_plain(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    ((kind, values),) = value.items()
    if kind == "dict":
        return {_decode_plain(key): _decode_plain(each) for key, each in values}
    return {"list": list, "tuple": tuple}[kind](_decode_plain(each) for each in values)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as an attribute of torch: ``bfloat16``."""
    return _name(dtype)


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor, which the view keeps alive.

    Through numpy it takes a fifteenth of what DLPack takes, by which a store views other tensors.
    """
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@functools.cache  # of a dozen values, asked for several times for every tensor
def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _torch(name: str, kind: type) -> Any:
    value = getattr(torch, _text(name), None)
    if not isinstance(value, kind):
        raise UnsupportedError(
            f"this torch ({torch.__version__}) has no {kind.__name__} {name!r:.40}"
        )
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} where there should be text")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} where there should be a count")
    return value


def _size(values: Any) -> torch.Size:
    for value in values:
        if type(value) is not int or value < 0:
            _count(value)  # which says what it is
    return torch.Size(values)


def _key(key: str) -> str:
    check_key(key)
    return key


def _version(name: str, version: Any) -> str:
    _key(manifest_key(name, _text(version)))
    return str(version)
