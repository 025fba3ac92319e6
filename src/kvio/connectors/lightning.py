"""Save and load the checkpoints of Lightning in a kvio store.

```python
trainer = Trainer(plugins=[KvioCheckpointIO(store)])
```

Lightning gives a checkpoint as a dictionary, which ``torch.save`` turns into bytes and
``torch.load`` back; nothing else is pickled. docs/recipes/lightning.md says what Lightning itself
still does with files.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
from typing import Any, Final

from kvio import BlockStore
from kvio.errors import (
    BlockNotFoundError,
    ConfigError,
    InvalidKeyError,
    MissingDependencyError,
    UnsupportedError,
)
from kvio.types import Level, check_key


def _interfaces() -> tuple[Any, ...]:
    """Return ``CheckpointIO`` of both distributions, since each trainer takes its own alone."""
    found = []
    for package in ("lightning.fabric", "lightning_fabric"):  # lightning, pytorch-lightning
        try:
            found.append(importlib.import_module(f"{package}.plugins").CheckpointIO)
        except ImportError:
            continue
    return tuple(found)


_INTERFACES: Final = _interfaces()
if not _INTERFACES:
    raise MissingDependencyError(
        "kvio.connectors.lightning needs Lightning (2.6 is tested): pip install lightning"
    )
import torch  # noqa: E402  # Lightning needs it

__all__ = ["KvioCheckpointIO"]


class KvioCheckpointIO(*_INTERFACES):  # type: ignore[misc, unused-ignore]
    """Stores each checkpoint of a Lightning trainer as one block.

    The key is the checkpoint's path below *directory*, so ``dirpath`` of ``ModelCheckpoint`` must
    lie there. A checkpoint appears whole or not at all, and replaces one of its name; its checksum
    is verified when it is loaded.

    Args:
        store: a `kvio.Store`, or a staging tier over one; it stays the caller's to close.
        directory: what the paths of checkpoints are relative to; the default is the working
            directory. No checkpoint is written there.
        level: the level that a checkpoint must reach before a save returns.

    Raises:
        ConfigError: *level* is invalid.
    """

    def __init__(
        self,
        store: BlockStore,
        directory: str | os.PathLike[str] = ".",
        *,
        level: str = Level.DURABLE,
    ) -> None:
        if level not in (Level.VISIBLE, Level.DURABLE):
            raise ConfigError(f"level must be 'visible' or 'durable', not {level!r}")
        self._store = store
        self._directory = os.path.realpath(directory)
        self._level = Level(level)

    def key_of(self, path: str | os.PathLike[str]) -> str:
        """Return the key of a checkpoint that Lightning knows by a path.

        Raises:
            InvalidKeyError: the path is not below the directory, or has characters that no key has.
        """
        absolute = os.path.realpath(path)
        key = os.path.relpath(absolute, self._directory)
        if key.split(os.sep)[0] in ("..", "."):
            raise InvalidKeyError(
                f"checkpoint {os.fspath(path)!r} is not below {self._directory!r}: give "
                "ModelCheckpoint a dirpath below it, or KvioCheckpointIO another directory"
            )
        check_key(key)
        return key

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Store a checkpoint, and return when it has reached the level.

        Raises:
            UnsupportedError: there are *storage_options*, or the store does not provide the level.
            StorageError: the storage failed; an earlier checkpoint of the name is unchanged.
        """
        if storage_options is not None:
            raise UnsupportedError("storage_options are not used: give options to kvio.open_store")
        key = self.key_of(path)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        receipt: Any = self._store.write_block(key, buffer.getbuffer(), if_exists="replace")
        if hasattr(receipt, "wait"):  # a staging tier's
            receipt = receipt.wait(self._level)
        if receipt.level < self._level:
            raise UnsupportedError(
                f"checkpoint {key!r} is only {receipt.level}, but must be {self._level}: open the "
                "store with durability='durable', or use "
                f"KvioCheckpointIO(level={str(receipt.level)!r})"
            )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,  # noqa: FBT001  # the interface of Lightning
    ) -> dict[str, Any]:
        """Read a checkpoint and verify it; by default unpickle nothing but plain data and tensors.

        Raises:
            BlockNotFoundError: there is no such checkpoint.
            CorruptBlockError: the stored bytes are not those written.
            UnsupportedError: the checkpoint has objects of other types, and *weights_only* is not
                False.
        """
        key = self.key_of(path)
        try:
            data = self._store.read_block(key)
        except BlockNotFoundError as exc:
            raise BlockNotFoundError(
                f"there is no checkpoint {os.fspath(path)!r} in {self._store!r} (no block {key!r})",
                key=key,
            ) from exc
        restricted = weights_only is None or weights_only
        file: Any = _File(data)
        try:
            found: dict[str, Any] = torch.load(
                file, map_location=map_location, weights_only=restricted
            )
        except pickle.UnpicklingError as exc:
            if not restricted:
                raise
            raise UnsupportedError(
                f"checkpoint {key!r} has more than plain data: torch.load(weights_only=True) "
                "refuses it. Allow its types with torch.serialization.add_safe_globals, or, if you "
                "trust all users who can write to the store, pass weights_only=False to fit, test "
                f"or load_checkpoint: {exc}"
            ) from exc
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint if there is one."""
        self._store.delete_block(self.key_of(path))


class _File(io.RawIOBase):
    """A block in memory as the file that ``torch.load`` reads from; `io.BytesIO` would copy it."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        into = memoryview(out).cast("B")
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at
