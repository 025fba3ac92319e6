"""What the tests of torch.distributed.checkpoint share: stores that watch, torch's and kvio's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvio

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip(
    "torch.distributed.checkpoint._state_dict_stager", reason="this torch stages no state dicts"
)

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402

from kvio.connectors.torch_dcp import KvioReader, KvioStager, KvioWriter  # noqa: E402

__all__ = [
    "ALONE",
    "CheckpointException",
    "Kvio",
    "KvioReader",
    "KvioStager",
    "KvioWriter",
    "MakesDirectory",
    "Stock",
    "Watched",
    "cause_of",
    "dcp",
    "durable_store",
    "load",
    "memory_store",
    "raw",
    "save",
    "torch",
    "zeros",
]

#: Typed as torch means it to be used, not as its modules export.
dcp: Any = torch.distributed.checkpoint

#: torch says so of every save and load in one process.
ALONE = "ignore:torch.distributed is (disabled|unavailable|unini)"

Data = dict[str, Any]


def durable_store(root: Path, **options: Any) -> kvio.Store:
    """Open a store whose blocks survive a power cut."""
    root.mkdir(exist_ok=True)
    return kvio.open_store("posix-tmpfile", root=root, durability="durable", options=options)


def memory_store() -> kvio.Store:
    """Open a store in memory, where ``visible`` is all there is."""
    return kvio.open_store("memory")


def save(store: Any, state: Data, name: str = "run", **options: Any) -> None:
    """Save a state with a writer of its own; in memory unless asked otherwise."""
    options.setdefault("level", "visible")
    dcp.save(state, storage_writer=KvioWriter(store, name, **options))


def load(store: Any, state: Data, name: str = "run", **options: Any) -> Data:
    """Load into a state and give it."""
    dcp.load(state, storage_reader=KvioReader(store, name, **options))
    return state


def zeros(state: Data) -> Data:
    """Return a state of the same shape with nothing in it."""
    empty: Data = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            empty[key] = torch.zeros(value.shape, dtype=value.dtype)
        else:
            empty[key] = zeros(value) if type(value) is dict else None
    return empty


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor's elements, whatever its dtype."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def cause_of(caught: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """Find what torch wrapped for its ranks; there is one."""
    error = caught.value
    if isinstance(error, CheckpointException):
        ((wrapped, _),) = error.failures.values()
        assert isinstance(wrapped, BaseException)
        return wrapped
    return error


class Watched:
    """A store as a staging tier is one: no ``submit_…``, and a check at each write before it."""

    def __init__(self, store: Any, before_write: Callable[[str], None]) -> None:
        self._store = store
        self._before_write = before_write

    def __getattr__(self, name: str) -> Any:
        if name.startswith("submit_"):
            raise AttributeError(name)
        return getattr(self._store, name)

    def write_block(self, key: str, data: Any, *, if_exists: Any = "keep") -> Any:
        self._before_write(key)
        return self._store.write_block(key, data, if_exists=if_exists)


class _Hooks:
    """Calls what a test wants called before a writer writes and before it finishes."""

    before_write: Callable[[], Any] = staticmethod(lambda: None)
    before_finish: Callable[[], Any] = staticmethod(lambda: None)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.before_write()
        return super().write_data(plan, planner)  # type: ignore[misc]  # the writer beside it

    def finish(self, metadata: Any, results: Any) -> None:
        self.before_finish()
        super().finish(metadata, results)  # type: ignore[misc]


class _StockWriter(_Hooks, dcp.FileSystemWriter):  # type: ignore[misc, unused-ignore]
    pass


class _KvioWriter(_Hooks, KvioWriter):  # type: ignore[misc, unused-ignore]
    pass


class Stock:
    """torch's own writer, reader and stager."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def writer(self, name: str) -> Any:
        """Make a writer of a checkpoint."""
        return _StockWriter(self._root / name, overwrite=True)

    def reader(self, name: str) -> Any:
        """Make a reader of a checkpoint."""
        return dcp.FileSystemReader(self._root / name)

    def stager(self) -> Any:
        """Make a stager that works without a GPU."""
        return DefaultStager(StagingOptions(False, False, False, False))

    def replace_metadata(self, name: str, data: bytes) -> None:
        """Put other bytes where the checkpoint's metadata is."""
        (self._root / name / ".metadata").write_bytes(data)


class Kvio:
    """The same of kvio, over a durable store."""

    def __init__(self, root: Path) -> None:
        self._store = durable_store(root)
        weakref.finalize(self, self._store.close)

    def writer(self, name: str) -> Any:
        """Make a writer of a checkpoint."""
        return _KvioWriter(self._store, name)

    def reader(self, name: str) -> Any:
        """Make a reader of a checkpoint."""
        return KvioReader(self._store, name)

    def stager(self) -> Any:
        """Make a stager."""
        return KvioStager()

    def replace_metadata(self, name: str, data: bytes) -> None:
        """Put other bytes where the checkpoint's manifest is."""
        self._store.write_block(f"{name}/manifest", data, if_exists="replace")


class MakesDirectory:
    """Unpickling it makes a directory: a pickle that runs code."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)
