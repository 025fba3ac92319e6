"""A backend whose calls wait at a gate, and a real file whose readers do."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import kvio
from kvio.backends.memory import MemoryBackend, MemoryOptions
from kvio.types import Cancellation, IfExists, Parts
from tests.posix import children

LATE = b"late bytes"


class GateBackend(MemoryBackend):
    """Blocks in memory; calls on keys that begin with ``stuck`` wait until the gate opens.

    Attributes:
        entered: released once for every call that waits at the gate.
        order: the keys in the order in which their calls began.
        busy_at_close: how many calls were inside when the store closed the backend; None before.
    """

    name = "gate"

    def __init__(self, options: MemoryOptions) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.order: list[str] = []
        self.inside = 0
        self.busy_at_close: int | None = None

    def _wait(self, key: str) -> None:
        self.order.append(key)
        if key.startswith("stuck"):
            self.inside += 1
            self.entered.release()
            assert self.gate.wait(120), "nobody opened the gate"
            self.inside -= 1

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> kvio.Receipt:
        """Write after the gate has opened, unless cancelled by then."""
        self._wait(key)
        if cancel is not None and cancel.requested:
            raise kvio.StorageTimeoutError(f"timed out on {key}", key=key)
        return super().write_block(key, parts, if_exists=if_exists, cancel=cancel)

    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        """Read after the gate has opened, and touch the memory then, cancelled or not."""
        self._wait(key)
        if key.startswith("stuck"):
            for part in parts:
                part[: len(LATE)] = LATE[: len(part)]
            return sum(map(len, parts))
        return super().read_block_into(key, parts, offset=offset, nbytes=nbytes, cancel=cancel)

    def close(self) -> None:
        """Note whether anybody is inside."""
        self.busy_at_close = self.inside
        super().close()


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the backend as an installed distribution would."""
    info = directory / "kvio_gate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvio-gate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvio.backends]\ngate = tests.posix.gate:GateBackend\n")
    monkeypatch.syspath_prepend(directory)


def backend_of(store: kvio.Store) -> GateBackend:
    """Reach into a store for its gate."""
    backend = store._backend
    assert isinstance(backend, GateBackend)
    return backend


def wait_until_ended(threads: list[threading.Thread]) -> None:
    """Wait for threads that have nothing left to do but end."""
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


class SlowFile:
    """A file whose reads wait in the kernel until they are allowed: fanotify's FAN_ACCESS_PERM.

    fanotify(7). Leaving the context lets everybody go on.
    """

    _EVENT = struct.Struct("=IBBHQii")

    def __init__(self, path: Path) -> None:
        children.need_root()
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.fanotify_init(0x4 | 0x1, os.O_RDONLY | os.O_CLOEXEC)
        mark = (1, ctypes.c_uint64(0x20000), -100, os.fsencode(path))
        if self._fd < 0 or libc.fanotify_mark(self._fd, *mark):
            self.release()
            pytest.skip(f"needs fanotify permission events: {os.strerror(ctypes.get_errno())}")

    def wait_for_reader(self) -> None:
        """Return when a read has come and waits."""
        *_, fd, _ = self._EVENT.unpack(os.read(self._fd, self._EVENT.size))
        os.close(fd)

    def release(self) -> None:
        """Let all readers go on, now and later."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
