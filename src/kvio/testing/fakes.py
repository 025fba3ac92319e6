"""Backends that misbehave on purpose, each a wrapper around a real one, and stores over them.

store = WrappedStore(url, FaultyBackend)
store.wrapper.fail("write_block", kvio.StorageFullError("no room", errno=28), nth=3)
"""

# ruff: noqa: ARG002, ARG003, D102  # overrides do not repeat the contract
from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from kvio.abc import Backend, RawBlock, RunAll, Source, SourceFile
from kvio.core.calls import Settings
from kvio.core.store import Store
from kvio.errors import KvioError, UnsupportedError
from kvio.types import (
    BlockResult,
    Blocks,
    BlockStat,
    Cancellation,
    Capabilities,
    Finding,
    IfExists,
    Parts,
    Receipt,
    status_of,
)
from kvio.url import StoreURL, parse_url

Wrapper = TypeVar("Wrapper", bound="ForwardingBackend")


class ForwardingBackend(Backend):
    """Does everything as the backend it wraps."""

    name: ClassVar[str] = "forwarding"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @classmethod
    def from_url(cls, url: StoreURL) -> Self:
        raise UnsupportedError("a wrapper has no URL: make a WrappedStore")

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        return self.inner.write_block(key, parts, if_exists=if_exists, cancel=cancel)

    def read_block_into(
        self,
        key: str,
        parts: Parts,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        cancel: Cancellation | None = None,
    ) -> int:
        return self.inner.read_block_into(key, parts, offset=offset, nbytes=nbytes, cancel=cancel)

    def read_block(self, key: str, *, cancel: Cancellation | None = None) -> memoryview | None:
        return self.inner.read_block(key, cancel=cancel)

    def open_raw(self, key: str) -> RawBlock:
        return self.inner.open_raw(key)

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        return self.inner.stat_block(key, cancel=cancel)

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        return self.inner.delete_block(key, cancel=cancel)

    def delete_blocks(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        return self.inner.delete_blocks(keys, cancel=cancel)

    def drop_cache(
        self, keys: Sequence[str], *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        return self.inner.drop_cache(keys, cancel=cancel)

    def path_of(self, key: str) -> str:
        return self.inner.path_of(key)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return self.inner.list_keys(prefix)

    def close(self) -> None:
        self.inner.close()

    def write_stream(
        self,
        key: str,
        source: Source,
        *,
        nbytes: int | None,
        at_least: int,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt | None:
        return self.inner.write_stream(
            key, source, nbytes=nbytes, at_least=at_least, if_exists=if_exists, cancel=cancel
        )

    def write_file(
        self,
        key: str,
        source: SourceFile,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> Receipt | None:
        return self.inner.write_file(key, source, if_exists=if_exists, cancel=cancel)

    def scratch_dir(self) -> AbstractContextManager[Path] | None:
        return self.inner.scratch_dir()

    def write_blocks(
        self, blocks: Blocks, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        return self.inner.write_blocks(blocks, if_exists=if_exists, cancel=cancel)

    def read_blocks_into(
        self, blocks: Blocks, *, cancel: Cancellation | None = None
    ) -> list[BlockResult] | None:
        return self.inner.read_blocks_into(blocks, cancel=cancel)

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        return self.inner.count_leading(keys, cancel=cancel)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        return self.inner.verify_block(key, payload=payload, cancel=cancel)

    def fast_reads(self) -> None:
        """Return nothing: every read goes through `read_block_into` here."""

    def use_threads(self, run_all: RunAll) -> None:
        self.inner.use_threads(run_all)

    def after_fork(self) -> None:
        self.inner.after_fork()

    def sweep(self, *, older_than_s: float, dry_run: bool = False) -> list[str]:
        return self.inner.sweep(older_than_s=older_than_s, dry_run=dry_run)

    def probe(self) -> list[Finding]:
        return self.inner.probe()

    @property
    def modes_taken(self) -> dict[str, int]:
        return self.inner.modes_taken

    @property
    def retries_made(self) -> int:
        return self.inner.retries_made


class BatchlessBackend(ForwardingBackend):
    """Hides native batches and moves of files, so that each block is a call of its own."""

    name = "batchless"

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, native_batch=False)

    def write_blocks(
        self, blocks: Blocks, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> None:
        return None

    def read_blocks_into(self, blocks: Blocks, *, cancel: Cancellation | None = None) -> None:
        return None

    def delete_blocks(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> None:
        return None

    def write_file(
        self,
        key: str,
        source: SourceFile,
        *,
        if_exists: IfExists,
        cancel: Cancellation | None = None,
    ) -> None:
        return None

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        return Backend.count_leading(self, keys, cancel=cancel)


@dataclass(slots=True)
class _Fault:
    error: KvioError
    key: str | None
    skip: int
    times: int

    def hits(self, key: str | None) -> bool:
        if self.key not in (None, key) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


#: The verbs that `FaultyBackend` can fail; a block of a native batch counts as one of its verb.
VERBS: Final = (
    *("write_block", "read_block_into", "stat_block", "delete_block", "list_keys"),
    *("count_leading", "verify_block", "sweep"),
)


class FaultyBackend(BatchlessBackend):
    """Fails chosen calls before they reach the backend it wraps."""

    name = "faulty"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._faults: dict[str, list[_Fault]] = {verb: [] for verb in VERBS}
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str | None]] = []

    def fail(
        self, verb: str, error: KvioError, *, key: str | None = None, nth: int = 1, times: int = 1
    ) -> None:
        """Let calls *nth* to *nth* + *times* - 1 of a verb, from now on, raise *error*.

        With *key* only calls for that key count.
        """
        with self._lock:
            self._faults[verb].append(_Fault(error, key, nth - 1, times))

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        self._meet("write_block", key)
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
        self._meet("read_block_into", key)
        return super().read_block_into(key, parts, offset=offset, nbytes=nbytes, cancel=cancel)

    def open_raw(self, key: str) -> RawBlock:
        return self.inner.open_raw(key)

    def stat_block(self, key: str, *, cancel: Cancellation | None = None) -> BlockStat:
        self._meet("stat_block", key)
        return super().stat_block(key, cancel=cancel)

    def delete_block(self, key: str, *, cancel: Cancellation | None = None) -> bool:
        self._meet("delete_block", key)
        return super().delete_block(key, cancel=cancel)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        self._meet("list_keys", None)
        return super().list_keys(prefix)

    def count_leading(self, keys: Sequence[str], *, cancel: Cancellation | None = None) -> int:
        self._meet("count_leading", None)
        return super().count_leading(keys, cancel=cancel)

    def verify_block(
        self, key: str, *, payload: bool = True, cancel: Cancellation | None = None
    ) -> BlockResult:
        try:
            self._meet("verify_block", key)
        except KvioError as exc:
            return BlockResult(key, status_of(exc), 0, exc)
        return super().verify_block(key, payload=payload, cancel=cancel)

    def sweep(self, *, older_than_s: float, dry_run: bool = False) -> list[str]:
        self._meet("sweep", None)
        return super().sweep(older_than_s=older_than_s, dry_run=dry_run)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        super().after_fork()

    def _meet(self, verb: str, key: str | None) -> None:
        with self._lock:
            self.calls.append((verb, key))
            hit = [fault for fault in self._faults[verb] if fault.hits(key)]
        if hit:
            raise hit[0].error


class LatencyBackend(BatchlessBackend):
    """Holds reads and writes at a gate that the test opens and shuts; open at first."""

    name = "latency"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._make_gate()

    def _make_gate(self) -> None:
        self._moved = threading.Condition()
        self._open = True
        self._waiting = 0

    def shut(self) -> None:
        """Hold every read and write that begins from now on."""
        with self._moved:
            self._open = False

    def release(self) -> None:
        """Release all held calls."""
        with self._moved:
            self._open = True
            self._moved.notify_all()

    def wait_until_held(self, calls: int, *, limit_s: float = 60.0) -> bool:
        """Wait until this many calls are held; False on a timeout."""
        with self._moved:
            return self._moved.wait_for(lambda: self._waiting >= calls, limit_s)

    def write_block(
        self, key: str, parts: Parts, *, if_exists: IfExists, cancel: Cancellation | None = None
    ) -> Receipt:
        self._pass()
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
        self._pass()
        return super().read_block_into(key, parts, offset=offset, nbytes=nbytes, cancel=cancel)

    def after_fork(self) -> None:
        self._make_gate()
        super().after_fork()

    def _pass(self) -> None:
        with self._moved:
            self._waiting += 1
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._open)
            self._waiting -= 1


class WrappedStore(Store, Generic[Wrapper]):
    """A store whose backend is wrapped; ``wrapper`` is the test's handle on it.

    Pickles as its URL and the wrapping class, and wraps anew where it is opened.
    """

    wrapper: Wrapper

    def __init__(
        self, url: str | StoreURL, wrap: Callable[[Backend], Wrapper], *, io_threads: int = 4
    ) -> None:
        parsed = parse_url(url) if isinstance(url, str) else url
        super().__init__(parsed, Settings(io_threads=io_threads))
        self._wrap = wrap
        self._backend = self.wrapper = wrap(self._backend)
        self._attach()

    def __reduce__(self) -> tuple[Any, ...]:
        super().__reduce__()  # refuses what cannot be shared
        return WrappedStore, (self._url, self._wrap)
