"""Stage state dicts for ``async_save`` in memory that is reused only when it is free."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager

from kvio import aligned_buffer
from kvio.errors import ConfigError, StorageTimeoutError, StoreClosedError

if TYPE_CHECKING:
    from _collections_abc import dict_items

#: Interval to check whether a saving thread has ended; the end of a save itself is signalled.
_POLL_S: Final = 0.02


class KvioStager(AsyncStager):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """Copies state dicts to host memory for ``async_save``, and keeps the saves in order.

    The memory of a state dict is reused only after its last tensor has been freed. While a save
    runs, or a planner keeps the state, later saves use other memory. A save starts when the save
    staged before it has ended or failed, so the newest state is published last, and the collective
    calls of two saves never mix. Memory is page-aligned, not pinned.

    Use one stager per process group, in one thread, for all saves of a job.

    Args:
        saves: maximum of staged saves that have not ended; at the limit, `stage` waits.
        timeout: seconds to wait.

    Raises:
        ConfigError: *saves* is not positive.
    """

    _synchronize_after_execute = False

    def __init__(self, *, saves: int = 2, timeout: float | None = None) -> None:
        if saves < 1:
            raise ConfigError(f"saves={saves} must be at least 1")
        self._most = saves
        self._timeout = timeout
        self._pool = _BufferPool()
        self._saves: list[_QueuedSave] = []
        self._closed = False

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return a copy of a state dict; the original may then be changed.

        Raises:
            StorageTimeoutError: an older save had not ended before the timeout.
            StoreClosedError: the stager is closed.
        """
        if self._closed:
            raise StoreClosedError("the stager is closed")
        self._saves = [save for save in self._saves if not save.ended]
        if len(self._saves) >= self._most:
            self._saves[-self._most].wait(self._timeout)
        with self._pool.stager() as stager:
            copied = stager.stage(state_dict)
        save = _QueuedSave(self._saves[-1] if self._saves else None)
        staged = _StagedState(copied, save)
        self._saves.append(save)
        return staged

    def synchronize_staging(self) -> None:
        """Return at once, because `stage` copies synchronously."""

    def close(self) -> None:
        """Free the unused memory; memory in use is freed with its state dict."""
        self._closed = True
        self._pool.clear()


class _QueuedSave:
    """A save in the order of saves.

    It has ended when its state dict is freed, which torch does last. If an error keeps the state
    dict alive, it has ended when its thread has ended or starts another save.
    """

    def __init__(self, previous: _QueuedSave | None) -> None:
        self.previous = previous
        self._thread: threading.Thread | None = None
        self._freed = False
        #: Free once the save has ended. Not a SimpleQueue: in Python 3.11 its get(timeout=) waits
        #: for ever if the interpreter comes back to it after the timeout.
        self._signal = threading.Lock()
        self._signal.acquire()

    def end(self) -> None:
        """Record that the state dict is freed; waits for nothing, since a finalizer may call it."""
        self._freed = True
        self._signal.release()

    @property
    def ended(self) -> bool:
        thread = self._thread
        return self._freed or (
            thread is not None and (thread is threading.current_thread() or not thread.is_alive())
        )

    def begin(self) -> None:
        """Wait until all earlier saves have ended; called by the saving thread."""
        previous, self.previous = self.previous, None
        while previous is not None:
            previous.wait(None)
            previous = previous.previous  # set if that save was dropped before it began
        self._thread = threading.current_thread()

    def wait(self, timeout: float | None) -> None:
        """Wait until the save has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended:
            if deadline is not None and time.monotonic() >= deadline:
                raise StorageTimeoutError(
                    f"a staged save had not ended after {timeout} s: wait for its future, delete "
                    "the state dict that stage() returned, or raise KvioStager(saves=)"
                )
            if self._signal.acquire(timeout=_POLL_S):
                self._signal.release()  # for the next that waits


class _StagedState(dict[str, Any]):
    """A staged state dict; torch calls items() once, when the save starts."""

    def __init__(self, copied: dict[str, Any], save: _QueuedSave) -> None:
        self._save = save
        super().__init__(copied)

    def __del__(self) -> None:
        self.clear()  # free the memory before the next save starts
        self._save.end()

    def items(self) -> dict_items[str, Any]:
        self._save.begin()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # for a separate process that saves


class _BufferPool:
    """Host buffers by size; buffers that the last state dict did not use are freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._returned: deque[memoryview] = deque()  # finalizers append to it, so without a lock

    def stager(self) -> _PooledStager:
        """Collect returned buffers and return a stager for one state dict."""
        while self._returned:
            memory = self._returned.popleft()
            self._free.setdefault(len(memory), []).append(memory)
        return _PooledStager(self)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return a buffer as a storage; it returns to the pool when no tensor uses it."""
        spare = self._free.get(nbytes)
        memory = spare.pop() if spare else aligned_buffer(nbytes)
        view = memory[:]
        weakref.finalize(view, self._returned.append, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def clear(self) -> None:
        """Free all unused buffers."""
        self._free.clear()
        self._returned.clear()


class _PooledStager(StateDictStager):  # type: ignore[misc, unused-ignore]  # Any without torch
    """torch's stager, with memory from a `_BufferPool`."""

    def __init__(self, pool: _BufferPool) -> None:
        super().__init__(pin_memory=False, share_memory=False)
        self._pool = pool

    def __enter__(self) -> _PooledStager:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool._free.clear()  # noqa: SLF001  # the same module
        self.close()  # type: ignore[no-untyped-call, unused-ignore]  # torch's

    def _stage_untyped_storage(self, storage: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001
        if not storage.size():
            return type(storage)(0)
        copied = self._pool.allocate(storage.size())
        copied.copy_(storage, non_blocking=non_blocking)
        return copied
