"""Staging for ``async_save``: memory that is used again only when nothing looks at it any more."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager

from kvio import aligned_buffer
from kvio.errors import ConfigError, StorageTimeoutError, StoreClosedError

if TYPE_CHECKING:
    from _collections_abc import dict_items

_LOOK_AGAIN_S: Final = 0.02  # whether a thread has ended; that a save has is told at once


class KvioStager(AsyncStager):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """Copies state dicts to host memory for ``async_save``, and keeps the saves in order.

    Staging memory is lent to a state dict and comes back when its last tensor is gone: while an
    upload runs, or a planner holds on to what it saved, later saves get other memory. A save
    begins when the one staged before it has ended, well or not, so the newest state is published
    last and no two saves mix their collective calls. Memory is page-aligned, not pinned.

    One stager serves one process group from one thread; use it for all saves of a job.

    Args:
        saves: how many staged saves may not have ended; `stage` waits for the oldest.
        timeout: seconds to wait for it.

    Raises:
        ConfigError: *saves* is not positive.
    """

    _synchronize_after_execute = False

    def __init__(self, *, saves: int = 2, timeout: float | None = None) -> None:
        if saves < 1:
            raise ConfigError(f"saves={saves} must be at least 1")
        self._most = saves
        self._timeout = timeout
        self._memory = _Memory()
        self._saves: list[_Turn] = []
        self._closed = False

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Copy a state dict; the original may change when this returns.

        Raises:
            StorageTimeoutError: an older save had not ended in time.
            StoreClosedError: the stager is closed.
        """
        if self._closed:
            raise StoreClosedError("the stager is closed")
        self._saves = [save for save in self._saves if not save.ended]
        if len(self._saves) >= self._most:
            self._saves[-self._most].wait(self._timeout)
        with self._memory.lending() as stager:
            copied = stager.stage(state_dict)
        turn = _Turn(self._saves[-1] if self._saves else None)
        staged = _Staged(copied, turn)
        self._saves.append(turn)
        return staged

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied everything when it returns."""

    def close(self) -> None:
        """Give the free memory back; what is lent goes with its state dict."""
        self._closed = True
        self._memory.drop()


class _Turn:
    """One save's place in the order.

    It has ended when the state dict is gone, which torch lets go last of all, or, where an error
    keeps it alive, when the thread that saved it has ended or saves another.
    """

    def __init__(self, before: _Turn | None) -> None:
        self.before = before
        self._thread: threading.Thread | None = None
        self._gone = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def end(self) -> None:
        """Note that the state dict is gone: without a lock, Python may collect it anywhere."""
        self._gone = True
        self._told.put(None)

    @property
    def ended(self) -> bool:
        thread = self._thread
        return self._gone or (
            thread is not None and (thread is threading.current_thread() or not thread.is_alive())
        )

    def begin(self) -> None:
        """Wait until it is this save's turn; called by the thread that saves."""
        before, self.before = self.before, None
        while before is not None:
            before.wait(None)
            before = before.before  # of one that was dropped unsaved
        self._thread = threading.current_thread()

    def wait(self, timeout: float | None) -> None:
        """Wait until the save has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended:
            if deadline is not None and time.monotonic() >= deadline:
                raise StorageTimeoutError(
                    f"a staged save had not ended after {timeout} s: wait for its future, drop "
                    "the state dict that stage() gave, or allow more saves at once"
                )
            with suppress(Empty):
                self._told.get(timeout=_LOOK_AGAIN_S)


class _Staged(dict[str, Any]):
    """A staged state dict. torch reads its items once, where the save begins."""

    def __init__(self, copied: dict[str, Any], turn: _Turn) -> None:
        self._turn = turn
        super().__init__(copied)

    def __del__(self) -> None:
        self.clear()  # first: whoever waits for the turn wants the memory
        self._turn.end()

    def items(self) -> dict_items[str, Any]:
        self._turn.begin()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # to a process that saves for this one


class _Memory:
    """Host memory by size; what the last state dict did not need is let go."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._returned: deque[memoryview] = deque()  # appended to by finalizers, so without a lock

    def lending(self) -> _Lending:
        """Take back what was returned and lend for one state dict."""
        while self._returned:
            memory = self._returned.popleft()
            self._free.setdefault(len(memory), []).append(memory)
        return _Lending(self)

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Lend memory as a storage, until no tensor has that storage."""
        spare = self._free.get(nbytes)
        memory = spare.pop() if spare else aligned_buffer(nbytes)
        lent = memory[:]
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8).untyped_storage()

    def drop(self) -> None:
        """Let go of what is free."""
        self._free.clear()
        self._returned.clear()


class _Lending(StateDictStager):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """torch's copying of state dicts, into memory of ours instead of memory it keeps to itself."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__(pin_memory=False, share_memory=False)
        self._memory = memory

    def __enter__(self) -> _Lending:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory._free.clear()  # noqa: SLF001  # the two are one
        self.close()  # type: ignore[no-untyped-call, unused-ignore]  # torch's

    def _stage_untyped_storage(self, storage: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001
        if not storage.size():
            return type(storage)(0)
        lent = self._memory.take(storage.size())
        lent.copy_(storage, non_blocking=non_blocking)
        return lent
