"""kvio (not kvikio): blocks of bytes on any storage, fast, atomic and honest about durability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvio.abc import BlockStore
from kvio.core.async_store import AsyncStore
from kvio.core.block_files import BlockReader, BlockWriter
from kvio.core.buffers import aligned as aligned_buffer
from kvio.core.buffers import keep_freed_memory
from kvio.core.store import Store, open_store
from kvio.errors import (
    AccessDeniedError,
    BlockError,
    BlockExistsError,
    BlockNotFoundError,
    BlockSizeError,
    ConfigError,
    CorruptBlockError,
    InvalidKeyError,
    KvioError,
    MissingDependencyError,
    OutOfMemoryError,
    RankFailedError,
    RootMovedError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    StoreClosedError,
    TierNotDrainedError,
    TransientStorageError,
    UnknownBackendError,
    UnsupportedError,
)
from kvio.registry import backend_names
from kvio.types import (
    BlockResult,
    BlockStat,
    BlockStatus,
    Capabilities,
    GiB,
    IOMode,
    KiB,
    Level,
    MiB,
    Receipt,
    Removal,
    StoreStats,
)

if TYPE_CHECKING:
    from kvio.sharedfile import (
        Extent,
        Missing,
        SharedFile,
        SharedFileOptions,
        SharedFileStatus,
    )
    from kvio.staging import (
        StagedFile,
        StagedReader,
        StagedReceipt,
        StagedResult,
        StagingTier,
        TierStats,
        stage,
    )

__all__ = [
    "AccessDeniedError",
    "AsyncStore",
    "BlockError",
    "BlockExistsError",
    "BlockNotFoundError",
    "BlockReader",
    "BlockResult",
    "BlockSizeError",
    "BlockStat",
    "BlockStatus",
    "BlockStore",
    "BlockWriter",
    "Capabilities",
    "ConfigError",
    "CorruptBlockError",
    "Extent",
    "GiB",
    "IOMode",
    "InvalidKeyError",
    "KiB",
    "KvioError",
    "Level",
    "MiB",
    "MissingDependencyError",
    "Missing",
    "OutOfMemoryError",
    "RankFailedError",
    "Receipt",
    "Removal",
    "RootMovedError",
    "SharedFile",
    "SharedFileOptions",
    "SharedFileStatus",
    "StagedFile",
    "StagedReader",
    "StagedReceipt",
    "StagedResult",
    "StagingTier",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "Store",
    "StoreClosedError",
    "StoreStats",
    "TierNotDrainedError",
    "TierStats",
    "TransientStorageError",
    "UnknownBackendError",
    "UnsupportedError",
    "aligned_buffer",
    "backend_names",
    "keep_freed_memory",
    "open_store",
    "stage",
]
__version__ = "0.1.0"

_SHAREDFILE = ("Extent", "Missing", "SharedFile", "SharedFileOptions", "SharedFileStatus")
_STAGING = (
    *("StagedFile", "StagedReader", "StagedReceipt", "StagedResult", "StagingTier", "TierStats"),
    "stage",
)
#: Imported when first asked for: a third of the time `import kvio` would take.
_LAZY = {
    **dict.fromkeys(_SHAREDFILE, "kvio.sharedfile"),
    **dict.fromkeys(_STAGING, "kvio.staging"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvio' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
