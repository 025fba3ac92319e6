"""Implement DLIO's storage interface with a store: folders are prefixes of keys."""

from __future__ import annotations

import posixpath
from typing import Any

from dlio_benchmark.common.enumerations import MetadataType, NamespaceType
from dlio_benchmark.storage.storage_handler import DataStorage, Namespace
from dlio_benchmark.utils.config import ConfigArguments

import kvio
from kvio.connectors.dlio import blocks
from kvio.connectors.dlio.settings import key_of, path_of
from kvio.types import BlockStatus


class KvioStorage(DataStorage):  # type: ignore[misc, unused-ignore]  # DLIO has no types
    """DLIO's storage with keys as names; kvio's errors stop the run."""

    def __init__(self, namespace: str, framework: object = None) -> None:
        del framework  # its native I/O would bypass kvio
        super().__init__(None)
        self.namespace = Namespace(namespace, NamespaceType.FLAT)

    def get_uri(self, id: object) -> str:  # noqa: A002  # DLIO's name
        """Return a name that does not change when DLIO makes it absolute."""
        return path_of(id)

    def get_basename(self, id: str) -> str:  # noqa: A002
        """Return the last part of a name."""
        return posixpath.basename(id)

    def create_namespace(self, exist_ok: bool = False) -> bool:  # noqa: FBT001
        """List a prefix, so that a missing bucket is an error before any work starts."""
        del exist_ok
        any(True for _ in blocks.data_store().list_keys("kvio-dlio-asks-first/"))
        return True

    def get_namespace(self) -> Any:
        """Return the name of the namespace."""
        return self.namespace.name

    def create_node(self, id: object, exist_ok: bool = False) -> bool:  # noqa: A002, FBT001
        """Return True: folders need not be created."""
        del id, exist_ok
        return True

    def get_node(self, id: object = "") -> Any:  # noqa: A002
        """Return FILE for a block, DIRECTORY for a prefix of blocks, or None."""
        key = key_of(id)
        store = _store_of(key)
        if store.contains(key):
            return MetadataType.FILE
        below = store.list_keys(f"{key}/")
        return MetadataType.DIRECTORY if any(True for _ in below) else None

    def walk_node(self, id: str, use_pattern: bool = False) -> list[str]:  # noqa: A002, FBT001
        """Return the names in a folder, or the paths that match ``D/*/*.npz`` or ``D/*.npz``."""
        if not use_pattern:
            return self._names_in(key_of(id))
        folder, _, rest = id.partition("/*")
        depth, extension = rest.count("/") + 1, id.rpartition(".")[2]
        prefix = f"{key_of(folder)}/"
        return [
            path_of(key)
            for key in _store_of(prefix).list_keys(prefix)
            if key.count("/") - prefix.count("/") == depth - 1 and key.endswith(f".{extension}")
        ]

    def delete_node(self, id: object) -> bool:  # noqa: A002
        """Remove a block, or all blocks in a folder.

        Raises:
            KvioError: a block could not be removed.
        """
        key = key_of(id)
        store = _store_of(key)
        own = [key] if store.contains(key) else []
        for result in store.delete_blocks([*own, *store.list_keys(f"{key}/")]):
            if result.error is not None and result.status is not BlockStatus.MISSING:
                raise result.error
        return True

    def put_data(
        self,
        id: object,  # noqa: A002
        data: Any,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        """Store text, a buffer, or an `io.BytesIO`, since versions of DLIO differ."""
        del offset, length
        if isinstance(data, str):
            data = data.encode()
        view = data.getbuffer() if hasattr(data, "getbuffer") else memoryview(data)
        blocks.write_sample(key_of(id), view)

    def get_data(
        self,
        id: object,  # noqa: A002
        data: Any = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> memoryview:
        """Read a block, or a range of it."""
        del data
        return blocks.read_sample(key_of(id), offset=offset or 0, nbytes=length)

    def isfile(self, id: object) -> bool:  # noqa: A002
        """Return whether a block has this name."""
        key = key_of(id)
        return _store_of(key).contains(key)

    def file_exists(self, id: object) -> bool:  # noqa: A002
        """Return whether a block has this name."""
        return self.isfile(id)

    def islocalfs(self) -> bool:
        """Return False: names are not paths to open."""
        return False

    def _names_in(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        keys = _store_of(prefix).list_keys(prefix)
        return list(dict.fromkeys(key[len(prefix) :].partition("/")[0] for key in keys))


def _store_of(key: str) -> kvio.Store:
    """Return the store of a key or prefix: that of the checkpoints for those in their folder."""
    folder = ConfigArguments.get_instance().checkpoint_folder
    below = folder and f"{key}/".startswith(f"{key_of(folder)}/")
    return blocks.checkpoint_store() if below else blocks.data_store()
