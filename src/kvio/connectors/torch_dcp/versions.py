"""List, read and remove the saves of one checkpoint name."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

from kvio import BlockStore
from kvio.connectors.torch_dcp.manifest import (
    Head,
    Manifest,
    decode,
    decode_head,
    manifest_key,
)
from kvio.errors import (
    BlockNotFoundError,
    CorruptBlockError,
    InvalidKeyError,
    KvioError,
    UnsupportedError,
)
from kvio.types import Level, check_key

_log = logging.getLogger(__name__)
_VERSION: Final = re.compile(r"\d{8,}-[0-9a-f]{16}").fullmatch


def check_name(name: str) -> None:
    """Raise `InvalidKeyError` unless the keys of a checkpoint with this name are valid."""
    try:
        check_key(f"{manifest_key(name, new_version(10**8))}/rank-00000/000000")
    except InvalidKeyError as exc:
        raise InvalidKeyError(
            f"invalid checkpoint name {name!r:.80}: it must be a valid key of at most 140 "
            "characters",
            key=name,
        ) from exc


def is_name(name: str) -> bool:
    """Return whether a checkpoint can have this name."""
    try:
        check_name(name)
    except InvalidKeyError:
        return False
    return True


def new_version(sequence: int) -> str:
    """Return a unique version for a save, also if other jobs use the same name."""
    return f"{sequence:08d}-{secrets.token_hex(8)}"


def read_manifest(store: BlockStore, name: str, version: str | None = None) -> Manifest:
    """Read the manifest of the newest save, or of the given one.

    Raises:
        BlockNotFoundError: there is no such checkpoint.
        CorruptBlockError: its manifest is corrupt.
        UnsupportedError: a later kvio wrote it.
    """
    return decode(*_read(store, name, version))


def read_head(store: BlockStore, name: str, version: str | None = None) -> Head:
    """Read what the manifest of the newest save, or of the given one, says before its items.

    Raises:
        BlockNotFoundError: there is no such checkpoint.
        CorruptBlockError: its manifest is corrupt.
        UnsupportedError: a later kvio wrote it.
    """
    return decode_head(*_read(store, name, version))


def _read(store: BlockStore, name: str, version: str | None) -> tuple[Any, str, str]:
    """Return the bytes of a manifest, the checkpoint's name and the manifest's key."""
    key = manifest_key(name, version)
    try:
        return store.read_block(key), name, key
    except BlockNotFoundError as exc:
        which = "" if version is None else f", version {version}"
        raise BlockNotFoundError(
            f"there is no checkpoint {name!r}{which} in {store!r}: no save has completed, or it "
            f"was removed (no block {key!r})",
            key=key,
        ) from exc


def find_head(store: BlockStore, name: str) -> Head | None:
    """Read the head of the newest save; return None if there is none or it is corrupt."""
    try:
        return read_head(store, name)
    except BlockNotFoundError:
        return None
    except CorruptBlockError as exc:
        _log.warning("the checkpoint's manifest will be replaced: %s", exc)
        return None


def versions(store: BlockStore, name: str) -> list[str]:
    """Return the versions of a checkpoint that can be loaded, newest first.

    Raises:
        CorruptBlockError: the manifest is corrupt.
    """
    try:
        return list(read_manifest(store, name).versions)
    except BlockNotFoundError:
        return []


def remove_versions(store: BlockStore, name: str, doomed: Iterable[str]) -> list[str]:
    """Remove saves that the published manifest no longer lists; return those that failed.

    The manifest keeps these in ``removing``, and the next save tries again.
    """
    stuck = []
    for version in doomed:
        try:
            _remove(store, _keys_of(store, name, version))
        except KvioError as exc:
            _log.warning("version %s of checkpoint %r is not removed yet: %s", version, name, exc)
            stuck.append(version)
    return stuck


def _keys_of(store: BlockStore, name: str, version: str) -> list[str]:
    """Return the keys of a save, its manifest last, so that an interrupted removal can resume."""
    own = manifest_key(name, version)
    try:
        return [*read_head(store, name, version).block_keys, own]
    except BlockNotFoundError:
        return []
    except (CorruptBlockError, UnsupportedError):
        found = [key for key in store.list_keys(f"{name}/{version}/") if key != own]
        return [*found, own]


def _remove(store: BlockStore, keys: list[str]) -> None:
    for key in keys:
        store.delete_block(key)


def remove_unfinished(store: BlockStore, name: str, *, dry_run: bool = False) -> list[str]:
    """Remove the blocks of unfinished saves and return their keys; *dry_run* removes nothing.

    Call it only while no save of this name is running: its blocks look the same.

    Raises:
        CorruptBlockError: the manifest is corrupt, so its blocks are unknown.
    """
    keep = set(versions(store, name))
    found = []
    for key in store.list_keys(f"{name}/"):
        version = key.removeprefix(f"{name}/").partition("/")[0]
        if _VERSION(version) and version not in keep:
            found.append(key)
    if not dry_run:
        _remove(store, found)
    return found


def settle(receipt: Any, level: Level, key: str) -> Any:
    """Wait until a write has reached a level and return its receipt.

    Raises:
        UnsupportedError: the store does not provide the level.
        KvioError: the write failed.
    """
    if hasattr(receipt, "wait"):
        receipt = receipt.wait(level)
    if receipt.level < level:
        raise UnsupportedError(
            f"block {key!r} is only {receipt.level}, but the checkpoint must be {level}: open the "
            f"store with durability='durable', or use KvioWriter(level={str(receipt.level)!r})"
        )
    return receipt
