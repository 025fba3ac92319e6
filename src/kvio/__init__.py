"""kvio (not kvikio): blocks of bytes on any storage, fast, atomic and honest about durability."""

from __future__ import annotations

from kvio.aio import AsyncStore
from kvio.buffers import aligned as aligned_buffer
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
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    StoreClosedError,
    TransientStorageError,
    UnknownBackendError,
    UnsupportedError,
)
from kvio.opening import open_store
from kvio.registry import backend_names
from kvio.store import Store
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
    StoreStats,
)

__all__ = [
    "AccessDeniedError",
    "AsyncStore",
    "BlockError",
    "BlockExistsError",
    "BlockNotFoundError",
    "BlockResult",
    "BlockSizeError",
    "BlockStat",
    "BlockStatus",
    "Capabilities",
    "ConfigError",
    "CorruptBlockError",
    "GiB",
    "IOMode",
    "InvalidKeyError",
    "KiB",
    "KvioError",
    "Level",
    "MiB",
    "MissingDependencyError",
    "Receipt",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "Store",
    "StoreClosedError",
    "StoreStats",
    "TransientStorageError",
    "UnknownBackendError",
    "UnsupportedError",
    "aligned_buffer",
    "backend_names",
    "open_store",
]
__version__ = "0.1.0"
