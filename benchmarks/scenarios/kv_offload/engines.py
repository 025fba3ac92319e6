"""What inference engines keep blocks with: LMCache's local disk and NIXL's POSIX plugin.

Both are driven without an engine and without a GPU, by the interfaces that engines call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.scenarios.kv_offload.serving import Contender, Items, Unreported, scatter, sync
from kvio import GiB, MiB, StorageError, UnsupportedError
from kvio.errors import StorageTimeoutError
from kvio.types import Durability

#: Memory of LMCache for each thread, where the machine has eight times as much: its default is
#: 5 GB for all. The largest block of 256 tokens has 80 MiB.
STAGING_NBYTES: Final = 128 * MiB
#: LMCache aligns what it lends.
_ALIGNED: Final = 4096
#: Blocks in one transfer of NIXL: each is a file that is open, and 64 threads open theirs at once.
_TRANSFERRED: Final = 8
#: A write of LMCache that fails is not reported, so the wait must end.
_PATIENCE_S: Final = 60.0


class _LMCacheDisk(Unreported):
    """LocalDiskBackend with memory of its own, which every block is copied into or out of."""

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        if durability == "durable":
            raise UnsupportedError("LMCache's local disk never synchronises")
        # Read when it is imported; else it logs between the lines of the table.
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        try:
            import torch
            from lmcache.utils import CacheEngineKey
            from lmcache.v1.config import LMCacheEngineConfig
            from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
            from lmcache.v1.memory_management import MemoryFormat
            from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
            from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
        except ImportError as exc:
            raise UnsupportedError(f"lmcache cannot be imported: {exc}") from exc
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,  # no second copy of a block in memory: the disk is compared
            local_disk=os.fspath(root),
            max_local_disk_size=shutil.disk_usage(root).total / GiB,
            extra_config={"disk_io_threads": threads},
        )
        self._key_class, self._dtype, self._size = CacheEngineKey, torch.uint8, torch.Size
        self._format = MemoryFormat.KV_2LTD
        self._nbytes = min(threads * STAGING_NBYTES, describe_machine().memory_bytes // 8)
        self._share = self._nbytes // threads
        self._allocator = MixedMemoryAllocator(self._nbytes, align_bytes=_ALIGNED)
        self._allocator.buffer.zero_()  # it is there before the clock starts, as pinned memory is
        self._memory = LocalCPUBackend(config, memory_allocator=self._allocator)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._disk = LocalDiskBackend(config, self._loop, self._memory, dst_device="cpu")

    def count_leading(self, keys: Sequence[str]) -> int:
        return sum(1 for _ in takewhile(self._disk.contains, map(self._key, keys)))

    def load(self, items: Items) -> int:
        return sum(self._load(part) for part in self._parts(items))

    def offload(self, items: Items) -> Counter[str]:
        for part in self._parts(items):
            filled = [self._fill(pieces) for _, pieces in part]
            self._put([self._key(key) for key, _ in part], filled)
            for memory in filled:
                memory.ref_count_down()
        return Counter(buffered=len(items))

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._allocator.close()

    def _load(self, part: Items) -> int:
        done = 0
        found = self._disk.batched_get_blocking([self._key(key) for key, _ in part])
        for memory, (_, pieces) in zip(found, part, strict=True):
            if memory is not None:
                done += scatter(memory.byte_array, pieces)
                memory.ref_count_down()
        return done

    def _put(self, keys: Sequence[Any], filled: Sequence[Any]) -> None:
        """Write, and wait until LMCache has every key in its index."""
        ended = threading.Semaphore(0)
        self._disk.batched_submit_put_task(
            keys, filled, on_complete_callback=lambda _key: ended.release()
        )
        for key in keys:
            while not self._disk.contains(key):
                # A key that leaves the one has entered the other.
                if not (self._disk.exists_in_put_tasks(key) or self._disk.contains(key)):
                    raise StorageError("LMCache takes no block: see its log", backend="lmcache")
                if not ended.acquire(timeout=_PATIENCE_S):
                    raise StorageTimeoutError("LMCache stores no block", backend="lmcache")

    def _fill(self, pieces: Sequence[Any]) -> Any:
        """Copy a block into LMCache's memory, as an engine copies it from the GPU."""
        nbytes = sum(piece.nbytes for piece in pieces)
        memory = self._memory.allocate(self._size([nbytes]), self._dtype, self._format)
        view, done = memoryview(memory.byte_array).cast("B"), 0
        for piece in pieces:
            view[done : done + piece.nbytes] = memoryview(piece)
            done += piece.nbytes
        return memory

    def _parts(self, items: Items) -> Iterator[Items]:
        """Cut the request into what fits into a thread's share of the memory."""
        most = max(sum(piece.nbytes for piece in pieces) for _, pieces in items)
        most += -most % _ALIGNED
        if most > self._nbytes:  # LMCache would wait for ever
            raise UnsupportedError(f"a block has {most} bytes, LMCache here {self._nbytes}")
        return _cut(items, max(1, self._share // most))

    def _key(self, key: str) -> Any:
        return self._key_class("kvio", 1, 0, key.encode(), self._dtype)


class _NixlPosix(Unreported):
    """Pieces and files of several blocks in one transfer; NIXL is given files that are open.

    An agent is for one thread at a time, so there is one for each.
    """

    def __init__(self, root: Path, durability: Durability, threads: int) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
            from nixl._bindings import nixlBackendError
        except ImportError as exc:
            raise UnsupportedError(f"nixl cannot be imported: {exc}") from exc
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on standard output
        self._root, self._durable = os.fspath(root), durability == "durable"
        self._failure: type[Exception] = nixlBackendError
        self._agents: SimpleQueue[Any] = SimpleQueue()
        for index in range(threads):
            agent = nixl_agent(f"kvio-{index}", nixl_agent_config(backends=[]))
            agent.create_backend("POSIX", {})
            self._agents.put(agent)

    def count_leading(self, keys: Sequence[str]) -> int:
        return sum(1 for _ in takewhile(os.path.exists, map(self._path, keys)))

    def load(self, items: Items) -> int:
        done = 0
        for part in _cut(items, _TRANSFERRED):
            with ExitStack() as opened:
                fds = [_open(opened, self._path(key), os.O_RDONLY) for key, _ in part]
                if self._transfer("READ", fds, part):
                    done += sum(piece.nbytes for _, pieces in part for piece in pieces)
        return done

    def offload(self, items: Items) -> Counter[str]:
        for part in _cut(items, _TRANSFERRED):
            paths = [self._path(key) for key, _ in part]
            temporaries = [f"{path}.{threading.get_ident()}.tmp" for path in paths]
            with ExitStack() as opened:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                fds = [_open(opened, temporary, flags) for temporary in temporaries]
                if not self._transfer("WRITE", fds, part):
                    raise StorageError("NIXL wrote no block: see its log", backend="nixl")
                for fd in fds if self._durable else ():
                    os.fsync(fd)
            for temporary, path in zip(temporaries, paths, strict=True):
                os.replace(temporary, path)
        if self._durable:
            sync(self._root)
        return Counter(buffered=len(items))

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _transfer(self, operation: str, fds: Sequence[int], part: Items) -> bool:
        """Move all bytes of some blocks; return whether NIXL reports success."""
        agent = self._agents.get()
        try:
            return self._drive(agent, operation, fds, part)
        except self._failure:
            return False
        finally:
            self._agents.put(agent)

    def _drive(self, agent: Any, operation: str, fds: Sequence[int], part: Items) -> bool:
        memory, files = [], []
        for fd, (_, pieces) in zip(fds, part, strict=True):
            done = 0
            for piece in pieces:
                memory.append((piece.ctypes.data, piece.nbytes, 0))
                files.append((done, piece.nbytes, fd))
                done += piece.nbytes
        with ExitStack() as held:
            for kind, regions in (("DRAM", _regions(part)), ("FILE", _whole_files(fds, part))):
                registered = agent.register_memory(regions, kind, ["POSIX"])
                held.callback(agent.deregister_memory, registered, ["POSIX"])
            ours, theirs = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(files, "FILE")
            handle = agent.initialize_xfer(operation, ours, theirs, agent.name, backends=["POSIX"])
            held.callback(agent.release_xfer_handle, handle)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(0)  # another thread may have the interpreter
                state = agent.check_xfer_state(handle)
        return bool(state == "DONE")


def _regions(part: Items) -> list[tuple[int, int, int, str]]:
    """Name the memory that the pieces are cut from, which an engine has registered as a whole."""
    owners = {}
    for _, pieces in part:
        for piece in pieces:
            owner = piece.base if isinstance(piece.base, np.ndarray) else piece
            owners[owner.ctypes.data] = owner.nbytes
    return [(address, nbytes, 0, "") for address, nbytes in owners.items()]


def _whole_files(fds: Sequence[int], part: Items) -> list[tuple[int, int, int, str]]:
    return [
        (0, sum(piece.nbytes for piece in pieces), fd, "")
        for fd, (_, pieces) in zip(fds, part, strict=True)
    ]


def _open(opened: ExitStack, path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    opened.callback(os.close, fd)
    return fd


def _cut(items: Items, most: int) -> Iterator[Items]:
    return (items[start : start + most] for start in range(0, len(items), most))


ENGINES: Final = (
    Contender(
        name="LMCache local disk",
        package="lmcache",
        guarantee="writes in place, under the last name, and is waited for here (an engine is not "
        "kept waiting); found through an index in memory, so a reader of this process sees whole "
        "blocks, and after a crash there is none; every block copied through its own memory; no "
        "checksum, and a short file passes; never an fsync",
        open=_LMCacheDisk,
    ),
    Contender(
        name="NIXL POSIX",
        package="nixl",
        guarantee="moves bytes between memory and open files, and no more: the temporary, "
        "os.replace, and the fsync of every file and of the directory once a request when durable "
        "are plain Python's here; no checksum, but a short file fails the transfer",
        open=_NixlPosix,
    ),
)
