"""Runs groups of blocks through the C core: one call a group, without the GIL."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvio import _native
from kvio._native import Ops, Request, lib
from kvio.abc import RunAll
from kvio.backends.posix import outcome
from kvio.backends.posix.layout import Directories, Place, place
from kvio.backends.posix.medium import Medium
from kvio.backends.posix.options import PosixOptions
from kvio.buffers import BouncePool
from kvio.errors import BlockNotFoundError, KvioError, storage_error
from kvio.policies import Decision, Policy
from kvio.types import (
    BlockResult,
    BlockStatus,
    Cancellation,
    IfExists,
    IOMode,
    Level,
    Parts,
    ReadItem,
    WriteItem,
)

IF_EXISTS: Final = {"keep": lib.KVIO_KEEP, "replace": lib.KVIO_REPLACE, "error": lib.KVIO_ERROR}
VERIFY: Final = {
    "off": lib.KVIO_VERIFY_OFF,
    "length": lib.KVIO_VERIFY_LENGTH,
    "full": lib.KVIO_VERIFY_FULL,
}
_BUFFERED: Final[int] = lib.KVIO_MODE_BUFFERED
_DIRECT: Final[int] = lib.KVIO_MODE_DIRECT
_UNLESS_HOT: Final[int] = lib.KVIO_MODE_DIRECT_IF_COLD
_STALE: Final = -errno.ESTALE


def run_in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other, for a backend that was given no threads."""
    return [task() for task in tasks]


class Target(NamedTuple):
    """One block of a group: where it lies and how it goes there."""

    at: int
    key: str
    place: Place
    parts: Parts
    nbytes: int
    decision: Decision


@dataclass(slots=True)
class Engine:
    """What a store's calls share: the open medium, its policy and its buffers."""

    name: str
    options: PosixOptions
    medium: Medium
    policy: Policy
    directories: Directories
    bounce: BouncePool
    publish: int
    temp_prefix: bytes
    run_all: RunAll = run_in_turn
    level: Level = field(init=False)
    flags: int = field(init=False)
    checksum: bool = field(init=False)

    def __post_init__(self) -> None:
        self.level = Level(self.options.durability)
        self.checksum = self.options.checksum == "crc32c"
        self.flags = lib.KVIO_TRAILER if self.options.layout == "block" else 0
        if self.level is Level.DURABLE:
            self.flags |= lib.KVIO_DURABLE

    # Groups

    def write(
        self,
        items: Sequence[WriteItem],
        if_exists: IfExists,
        cancel: Cancellation | None,
        concurrency: int,
    ) -> list[BlockResult]:
        """Write a group; results in order."""
        decide = self.policy.for_write
        targets = [
            Target(i, key, self.place(key), parts, nbytes, decide(nbytes, concurrency))
            for i, (key, parts, nbytes) in enumerate(items)
        ]
        flags = self.flags | (lib.KVIO_CHECKSUM if self.checksum else 0)
        ops, ready, results = self.run(
            lib.kvio_write_batch,
            targets,
            create=True,
            flags=flags,
            if_exists=IF_EXISTS[if_exists],
            cancel=cancel,
        )
        for target, op in zip(ready, ops.array, strict=True):
            results[target.at] = self.written(target, op)
        return results  # type: ignore[return-value]  # every index is filled by now

    def read(
        self, items: Sequence[ReadItem], cancel: Cancellation | None, concurrency: int
    ) -> list[BlockResult]:
        """Read a group of whole blocks; results in order."""
        decide = self.policy.for_read
        targets = [
            Target(i, key, self.place(key), parts, nbytes, decide(nbytes, concurrency))
            for i, (key, parts, nbytes) in enumerate(items)
        ]
        ops, ready, results = self.run(
            lib.kvio_read_batch,
            targets,
            flags=self.flags,
            verify=self.options.verify,
            cancel=cancel,
        )
        for target, op in zip(ready, ops.array, strict=True):
            results[target.at] = self.was_read(target, op)
        return results  # type: ignore[return-value]  # every index is filled by now

    def run_one(
        self,
        function: Any,
        key: str,
        *,
        parts: Parts = (),
        nbytes: int = 0,
        offset: int = 0,
        decision: Decision | None = None,
        op_flags: int = 0,
        verify: str | None = None,
        cancel: Cancellation | None = None,
    ) -> tuple[Ops, KvioError | None]:
        """Run one operation; the operation as it ended, and its error if it failed."""
        target = Target(
            0, key, self.place(key), parts, nbytes, decision or Decision(IOMode.BUFFERED, "")
        )
        ops, _, results = self.run(
            function,
            [target],
            flags=self.flags,
            verify=verify or self.options.verify,
            offset=offset,
            op_flags=op_flags,
            cancel=cancel,
        )
        if results[0] is not None:
            return ops, results[0].error
        op = ops.array[0]
        return ops, outcome.error_of(op, key, self.name) if op.status else None

    def run(
        self,
        function: Any,
        targets: Sequence[Target],
        *,
        flags: int,
        create: bool = False,
        if_exists: int = 0,
        verify: str = "full",
        offset: int = 0,
        op_flags: int = 0,
        cancel: Cancellation | None = None,
    ) -> tuple[Ops, list[Target], list[BlockResult | None]]:
        """Open directories, run one C call over the group, and repeat what was stale.

        Returns the operations that ran, their targets, and a result list that holds the failures
        of those that did not run. The operations live only as long as the first value.
        """
        results: list[BlockResult | None] = [None] * len(targets)
        bounce = self._needs_bounce(targets, op_flags)
        with self.lease() as leased, self.call(flags, if_exists, verify, cancel, bounce) as call:
            ready, fds = self._open_directories(targets, results, create, leased)
            requests = [
                Request(
                    fd, _mode(t.decision), t.place.name, t.parts, t.nbytes, offset,
                    t.place.key_hash, op_flags,
                )
                for t, fd in zip(ready, fds, strict=True)
            ]  # fmt: skip
            ops = _native.make_ops(requests)
            if function(call, ops.array, ops.count) != ops.count:
                self._repeat_stale(function, call, ready, ops, create, leased)
            self.publish = max(self.publish, call.publish)
        return ops, ready, results

    def count_present(self, keys: Sequence[str]) -> int:
        """Count how many keys from the front have an intact trailer."""
        look = Decision(IOMode.BUFFERED, "")
        targets = [Target(i, key, self.place(key), (), 0, look) for i, key in enumerate(keys)]
        flags = self.flags | lib.KVIO_STOP_AT_MISSING
        ops, ready, _ = self.run(
            lib.kvio_stat_batch, targets, flags=flags, verify=self.options.verify
        )
        for count, (target, op) in enumerate(zip(ready, ops.array, strict=True)):
            if target.at != count or op.status:
                return count
        return len(ready)

    # Pieces

    def place(self, key: str) -> Place:
        """Find where a key lives."""
        return place(self.options.layout, self.options.namespace, key)

    @contextmanager
    def lease(self) -> Iterator[list[int]]:
        """Close the directories that are not kept open, whatever happens."""
        leased: list[int] = []
        try:
            yield leased
        finally:
            for fd in leased:
                _native.close(fd)

    @contextmanager
    def call(
        self,
        flags: int,
        if_exists: int,
        verify: str,
        cancel: Cancellation | None,
        bounce: bool,  # noqa: FBT001  # always by position, one line away
    ) -> Iterator[Any]:
        """Make the settings of a C call, with a bounce buffer if one is needed."""
        buffer = self.bounce.take() if bounce else None
        call, keep = _native.make_call(
            flags=flags,
            if_exists=if_exists,
            publish=self.publish,
            verify=VERIFY[verify],
            memory_align=self.medium.memory_align,
            offset_align=self.medium.offset_align,
            chunk_bytes=self.options.chunk_bytes,
            bounce=buffer,
            temp_prefix=self.temp_prefix,
        )
        if cancel is not None:
            cancel.on_request(lambda: setattr(call, "cancel", 1))
        try:
            yield call
        finally:
            del keep
            if buffer is not None:
                self.bounce.give(buffer)

    def _needs_bounce(self, targets: Sequence[Target], op_flags: int) -> bool:
        return bool(op_flags & lib.KVIO_OP_SCRUB) or any(
            t.decision.mode is IOMode.DIRECT for t in targets
        )

    def _open_directories(
        self,
        targets: Sequence[Target],
        results: list[BlockResult | None],
        create: bool,  # noqa: FBT001
        leased: list[int],
    ) -> tuple[list[Target], list[int]]:
        ready, fds = [], []
        get = self.directories.get
        for target in targets:
            try:
                fds.append(get(target.place.directory, create=create, leased=leased))
            except OSError as exc:
                results[target.at] = self._no_directory(target.key, exc)
            else:
                ready.append(target)
        return ready, fds

    def _no_directory(self, key: str, exc: OSError) -> BlockResult:
        number = exc.errno or errno.EIO
        if number in (errno.ENOENT, errno.ENOTDIR) and isinstance(exc, FileNotFoundError):
            return outcome.failure(key, BlockNotFoundError(f"no block {key!r}", key=key))
        text = f"{self.name}: open the directory failed"
        return outcome.failure(key, storage_error(number, text, key=key, backend=self.name))

    def _repeat_stale(
        self,
        function: Any,
        call: Any,
        ready: Sequence[Target],
        ops: Ops,
        create: bool,  # noqa: FBT001
        leased: list[int],
    ) -> None:
        """Run once more what hit a directory that was removed under us."""
        for index, target in enumerate(ready):
            op = ops.array + index
            if op.status != _STALE:
                continue
            try:
                self.directories.refresh(target.place.directory, create=create)
                op.dirfd = self.directories.get(
                    target.place.directory, create=create, leased=leased
                )
            except FileNotFoundError:
                op.status, op.site = -errno.ENOENT, lib.KVIO_SITE_OPEN_READ
            except OSError as exc:
                op.status, op.site = -(exc.errno or errno.EIO), lib.KVIO_SITE_OPEN_DIR
            else:
                function(call, op, 1)

    def written(self, target: Target, op: Any) -> BlockResult:
        """Make the result of a write that ran."""
        if op.status:
            return outcome.failure(target.key, outcome.error_of(op, target.key, self.name))
        receipt = outcome.receipt_of(
            op, target.key, self.level, target.decision.reason, checksum=self.checksum
        )
        status = BlockStatus.KEPT if receipt.existed else BlockStatus.OK
        return BlockResult(target.key, status, target.nbytes, None, receipt)

    def was_read(self, target: Target, op: Any) -> BlockResult:
        """Make the result of a read that ran."""
        if op.status:
            return outcome.failure(target.key, outcome.error_of(op, target.key, self.name))
        status = BlockStatus.OK if op.done == target.nbytes else BlockStatus.SHORT
        return BlockResult(target.key, status, op.done)


def _mode(decision: Decision) -> int:
    if decision.mode is IOMode.DIRECT:
        return _UNLESS_HOT if decision.unless_hot else _DIRECT
    return _BUFFERED if decision.mode is IOMode.BUFFERED else int(lib.KVIO_MODE_DONTCACHE)
