"""Run blocks through the C core without the GIL, and turn its answers into results."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias

from kvio import _native
from kvio._native import NULL, LeafTable, Memory, lib
from kvio._native.ops import Answer, IOCounters, Ops
from kvio._native.signals import reraise
from kvio.abc import RunAll
from kvio.backends.posix import outcome
from kvio.backends.posix.directories import LEAVES, Directories, KeptDirectory, RootWatch, split_key
from kvio.backends.posix.options import PosixOptions
from kvio.core.buffers import BouncePool
from kvio.errors import StorageError
from kvio.filesystem.descriptors import SHARED
from kvio.filesystem.io_mode import Decision
from kvio.filesystem.probe import FileSystem
from kvio.types import (
    BlockResult,
    Blocks,
    Cancellation,
    IfExists,
    IOMode,
    Level,
    Parts,
    Receipt,
    Verify,
)

_NUMBERS: Final = {
    (IOMode.BUFFERED, False): lib.KVIO_MODE_BUFFERED,
    (IOMode.DONTCACHE, False): lib.KVIO_MODE_DONTCACHE,
    (IOMode.DIRECT, False): lib.KVIO_MODE_DIRECT,
    (IOMode.DIRECT, True): lib.KVIO_MODE_DIRECT_IF_COLD,
}
#: The mode of calls that transfer no payload.
LOOK: Final[int] = lib.KVIO_MODE_BUFFERED
#: Modes that may need a bounce buffer.
BOUNCING: Final = frozenset((lib.KVIO_MODE_DIRECT, lib.KVIO_MODE_DIRECT_IF_COLD))

#: The number of a mode, and the reason for it.
Choice: TypeAlias = tuple[int, str]
#: Chooses by size in bytes and number of calls in flight.
Chooser: TypeAlias = Callable[[int, int], Choice]


def chooser(decide: Callable[[int, int], Decision]) -> Chooser:
    """Return a cached version of a policy's decision."""

    @lru_cache(maxsize=4096)
    def choose(nbytes: int, concurrency: int) -> Choice:
        decision = decide(nbytes, concurrency)
        return _NUMBERS[decision.mode, decision.unless_hot], decision.reason

    return choose


def choose_all(
    choose: Chooser, sizes: Sequence[int], concurrency: int
) -> tuple[list[int], list[str]]:
    """Choose for every block of a batch; return the modes, or one for all, and the reasons."""
    by_size = {nbytes: choose(nbytes, concurrency) for nbytes in set(sizes)}
    if len(set(by_size.values())) == 1:
        ((mode, reason),) = set(by_size.values())
        return [mode], [reason] * len(sizes)
    return [by_size[nbytes][0] for nbytes in sizes], [by_size[nbytes][1] for nbytes in sizes]


IF_EXISTS: Final[dict[IfExists, int]] = {
    "keep": lib.KVIO_KEEP,
    "replace": lib.KVIO_REPLACE,
    "error": lib.KVIO_ERROR,
}
VERIFY: Final = {
    "off": lib.KVIO_VERIFY_OFF,
    "length": lib.KVIO_VERIFY_LENGTH,
    "full": lib.KVIO_VERIFY_FULL,
}
_ANY_SIZE: Final = 1 << 40
_MISSING: Final = -errno.ENOENT


class Steps(Protocol):
    """The transfer of one block in several C calls, where one call cannot do it."""

    def transfer(self, call: Any, op: Any) -> None:
        """Write or read the block of a ``kvio_op *``, and leave the answer there.

        It is called again where the directory was removed meanwhile.
        """


@dataclass(slots=True, kw_only=True)  # not frozen: that costs every block 2 us
class Request:
    """One kind of operation on one or more blocks.

    Attributes:
        function: what the C core does with an array of operations.
        steps: does it instead, for a request of one block.
        modes: the number of the I/O mode of each block, or one for all.
        flags: of the call; *op_flags* of each operation.
        create: make missing directories.
        results: returns the results so far of a batch that is cancelled.
        counted: blocks that succeed are counted as transferred in their mode.
    """

    function: Any
    blocks: Blocks
    modes: Sequence[int]
    flags: int
    op_flags: int = 0
    offset: int = 0
    create: bool = False
    if_exists: IfExists = "keep"
    verify: Verify = "full"
    cancel: Cancellation | None = None
    results: Callable[[Ops], list[BlockResult]] | None = None
    counted: bool = True
    steps: Steps | None = None


def run_in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other, for a backend without threads."""
    return [task() for task in tasks]


@dataclass(slots=True)
class Engine:
    """The state that all calls of a store share: open directories, policy and buffers.

    *fixed*: the choice of a policy that always makes the same one, else None. *clones*: the file
    system has not refused a clone yet.
    """

    name: str
    options: PosixOptions
    root: RootWatch
    fs: FileSystem
    for_write: Chooser
    for_read: Chooser
    fixed: Choice | None
    buffered_below: int
    directories: Directories
    leaf_table: LeafTable | None
    bounce: BouncePool
    publish: int
    template: _native.Template
    run_all: RunAll = run_in_turn
    clones: bool = True
    counters: IOCounters = field(default_factory=IOCounters)
    level: Level = field(init=False)
    flags: int = field(init=False)
    write_flags: int = field(init=False)
    checksum: bool = field(init=False)

    def __post_init__(self) -> None:
        self.level = Level(self.options.durability)
        self.checksum = self.options.checksum == "crc32c"
        self.flags = lib.KVIO_TRAILER if self.options.layout == "block" else 0
        if self.level is Level.DURABLE:
            self.flags |= lib.KVIO_DURABLE
            self.flags |= 0 if self.fs.journaled else lib.KVIO_UNJOURNALED
        self.write_flags = self.flags | (lib.KVIO_CHECKSUM if self.checksum else 0)

    # Batches

    def write(
        self, blocks: Blocks, if_exists: IfExists, cancel: Cancellation | None
    ) -> list[BlockResult]:
        """Write a batch; return one result per block, in order."""
        modes, reasons = choose_all(self.for_write, blocks.sizes, self.counters.in_flight + 1)

        def results(ops: Ops) -> list[BlockResult]:
            done = outcome.written(
                blocks, reasons, ops, self.level, checksum=self.checksum, backend=self.name
            )
            error = self.root_error(ops)
            return done if error is None else outcome.without_receipts(done, error)

        return results(
            self.run(
                Request(
                    function=lib.kvio_write_batch,
                    blocks=blocks,
                    modes=modes,
                    flags=self.write_flags,
                    create=True,
                    if_exists=if_exists,
                    cancel=cancel,
                    results=results,
                )
            )
        )

    def read(self, blocks: Blocks, cancel: Cancellation | None) -> list[BlockResult]:
        """Read a batch of whole blocks; return one result per block, in order."""
        modes, _ = choose_all(self.for_read, blocks.sizes, self.counters.in_flight + 1)

        def results(ops: Ops) -> list[BlockResult]:
            return outcome.was_read(blocks, ops, self.name)

        return results(
            self.run(
                Request(
                    function=lib.kvio_read_batch,
                    blocks=blocks,
                    modes=modes,
                    flags=self.flags,
                    verify=self.options.verify,
                    cancel=cancel,
                    results=results,
                )
            )
        )

    def delete(self, keys: Sequence[str], cancel: Cancellation | None) -> list[BlockResult]:
        """Remove a batch of blocks; return one result per block, in order."""

        def results(ops: Ops) -> list[BlockResult]:
            return outcome.deleted(keys, ops, self.name)

        request = self._without_payload(lib.kvio_delete_batch, keys)
        request.cancel, request.results = cancel, results
        return results(self.run(request))

    def count_present(self, keys: Sequence[str]) -> int:
        """Return how many keys from the front have a file long enough for a block."""
        ops = self.run(self._without_payload(lib.kvio_look_batch, keys))
        found = ops.leading()
        if found < len(keys) and ops.answers()[found].status == -errno.ECANCELED:
            return found + self.count_present(keys[found:])  # it went on in a new directory
        return found

    # One block

    def write_one(
        self,
        key: str,
        parts: Parts,
        nbytes: int,
        if_exists: IfExists,
        cancel: Cancellation | None,
        *,
        steps: Steps | None = None,
    ) -> Receipt:
        """Write one block, or raise its error."""
        mode, reason = self.for_write(nbytes, self.counters.in_flight + 1)
        ops = self.run(
            Request(
                function=lib.kvio_write_batch,
                steps=steps,
                blocks=Blocks((key,), (parts,), (nbytes,)),
                modes=(mode,),
                flags=self.write_flags,
                create=True,
                if_exists=if_exists,
                cancel=cancel,
            )
        )
        error = self.root_error(ops, key)
        if error is not None:
            raise error
        answer = self._only(ops, key, nbytes)
        return outcome.receipt_of(answer, key, nbytes, self.level, reason, checksum=self.checksum)

    def read_one(
        self,
        key: str,
        parts: Parts,
        nbytes: int,
        cancel: Cancellation | None,
        *,
        offset: int = 0,
        op_flags: int = 0,
        steps: Steps | None = None,
    ) -> int:
        """Read one block or range and return the count, or raise its error."""
        mode, _ = self.for_read(nbytes, self.counters.in_flight + 1)
        ops = self.run(
            Request(
                function=lib.kvio_read_batch,
                steps=steps,
                blocks=Blocks((key,), (parts,), (nbytes,)),
                modes=(mode,),
                flags=self.flags,
                offset=offset,
                op_flags=op_flags,
                verify=self.options.verify,
                cancel=cancel,
            )
        )
        return self._only(ops, key, nbytes, offset).done

    def run_one(
        self, function: Any, key: str, *, op_flags: int = 0, verify: Verify | None = None
    ) -> Answer:
        """Run one operation without payload and return its answer, or raise its error.

        A scrub uses direct I/O if the policy ever does, so that checking a store does not evict
        other data from the page cache.
        """
        mode = self.for_read(_ANY_SIZE, 1)[0] if op_flags & lib.KVIO_OP_SCRUB else LOOK
        request = Request(
            function=function,
            blocks=Blocks((key,), ((),), (0,)),
            modes=(mode,),
            flags=self.flags,
            op_flags=op_flags,
            verify=verify or self.options.verify,
            counted=False,
        )
        return self._only(self.run(request), key, 0)

    def _without_payload(self, function: Any, keys: Sequence[str]) -> Request:
        n = len(keys)
        return Request(
            function=function,
            blocks=Blocks(keys, [()] * n, [0] * n),
            modes=[LOOK],
            flags=self.flags,
            counted=False,
        )

    def _only(self, ops: Ops, key: str, nbytes: int, offset: int = 0) -> Answer:
        (answer,) = ops.answers()
        if answer.status:
            raise outcome.error_of(answer, key, nbytes, offset, self.name)
        return answer

    def root_error(self, ops: Ops, key: str | None = None) -> StorageError | None:
        """Return the error if the root has moved, so that no receipts may be returned.

        See `RootWatch`. The root is checked when that is due, or when a directory is missing, as
        below a removed root.
        """
        due = monotonic() >= self.root.due_s
        if not due and ops.sum_up().good != ops.count:
            due = any(answer.status == _MISSING for answer in ops.answers())
        return self.root.find(key) if due else None

    # Pieces

    def run(self, request: Request) -> Ops:
        """Open directories, run the C core over the blocks, and retry stale operations."""
        ended: Ops | None = None
        keys, cancel = request.blocks.keys, request.cancel
        bounces = request.op_flags & lib.KVIO_OP_SCRUB or not BOUNCING.isdisjoint(request.modes)
        bounce = self.bounce.take() if bounces else None
        self.counters.enter()
        try:
            call = self.make_call(
                request.flags, request.if_exists, request.verify, cancel, bounce=bounce
            )
            if request.create and request.flags & lib.KVIO_DURABLE:
                call.spare_files = SHARED.for_files()
            names: Sequence[str] = keys
            dirs: list[Any] = []
            if self.leaf_table is None:
                paths, names = zip(*map(split_key, keys), strict=True)
                dirs = [self.directories.find(path, create=request.create) for path in paths]
            with Ops(
                names,
                request.blocks.parts,
                request.blocks.sizes,
                request.modes,
                leaf_table=self.leaf_table,
                dirs=dirs,
                offset=request.offset,
                flags=request.op_flags,
            ) as ops:
                ended = ops
                if cancel is not None and request.results is not None:
                    cancel.results = partial(request.results, ops)
                Groups(request, call, ops, self.directories, self.leaf_table).run()
            if call.publish > self.publish:
                self.publish = call.publish
        finally:
            self.counters.leave(ended if request.counted else None)
            if bounce is not None:
                self.bounce.give(bounce)
        return ops

    def forget_read(self, inode: int, mtime_ns: int) -> None:
        """Take the next read of a block for the first one, which is no reason to cache it."""
        lib.kvio_forget_read(self.template.call.recent, inode, mtime_ns)

    def make_call(
        self,
        flags: int,
        if_exists: IfExists = "keep",
        verify: Verify = "full",
        cancel: Cancellation | None = None,
        *,
        bounce: Memory | None = None,
    ) -> Any:
        """Return the settings of a C call; *bounce* must outlive it."""
        call = _native.copy_call(self.template)
        call.flags = flags
        call.if_exists = IF_EXISTS[if_exists]
        call.verify = VERIFY[verify]
        call.publish = self.publish
        if bounce is not None:
            _native.set_bounce(call, bounce)
        if cancel is not None:
            cancel.on_request(lambda: setattr(call, "cancel", 1))
        return call


_STALE: Final = -errno.ESTALE
_STALE_TRIES: Final = 8
#: A group opens at most so many directories that are closed at its end.
_TEMPORARY: Final = 8
#: How long, and at which interval, an operation that lacks a descriptor is retried: other calls
#: end meanwhile and close theirs.
_EXHAUSTED_S: Final = 1.0
_EXHAUSTED_WAIT_S: Final = 0.002


class Groups:
    """Runs the operations of a request in groups whose directories are open at the same time.

    With enough descriptors the group is the whole batch. With few, a group ends after some
    directories that could not be kept open.
    """

    def __init__(
        self,
        request: Request,
        call: Any,
        ops: Ops,
        directories: Directories,
        leaf_table: LeafTable | None,
    ) -> None:
        self._request = request
        self._call = call
        self._ops = ops
        self._directories = directories
        self._hashed = leaf_table is not None
        self._is_lookup = request.function is lib.kvio_look_batch
        self._acquired: list[KeptDirectory] = []  # operations point into them

    def run(self) -> None:
        """Run all operations; a lookup ends with the first group that lacks a block."""
        ops, start = self._ops, 0
        while start < ops.count:
            stop, good = self._run_group(start, ops.count)
            if good < stop - start:
                if ops.sum_up(start, stop).exhausted:
                    self._retry_exhausted(start, stop)
                if self._is_lookup and ops.leading() < stop:
                    return
            start = stop

    def _run_group(self, start: int, most: int) -> tuple[int, int]:
        """Run a group from *start* on; return its end and how many operations succeeded at once."""
        ops, stop = self._ops, start
        temporary: dict[str, int] = {}
        try:
            while len(temporary) < _TEMPORARY:
                stop = ops.acquire(stop, most)
                if stop == most:
                    break
                found = self._open(stop, temporary)
                stop += 1
                if self._is_lookup and not found:
                    break
            good = self._transfer(start, stop)
            if good < stop - start and ops.sum_up(start, stop).stale:
                self._retry_stale(start, stop, temporary)
        finally:
            ops.release(start, stop)
            for fd in temporary.values():
                os.close(fd)
        return stop, good

    def _open(self, index: int, temporary: dict[str, int]) -> bool:
        """Open the directory of an operation; False: that failed, and the operation will fail."""
        path = self._path(index)
        fd, kept = temporary.get(path, -1), None
        if fd < 0:
            try:
                fd, kept = self._directories.open(path, create=self._request.create)
            except OSError as exc:
                self._ops.set_directory(index, -(exc.errno or errno.EIO))
                return False
        if kept is None:
            temporary[path] = fd
            self._ops.set_directory(index, fd)
        else:
            self._acquired.append(kept)
            self._ops.set_directory(index, fd, kept.cdata)
        return True

    def _path(self, index: int) -> str:
        if self._hashed:
            return LEAVES[self._ops.leaf(index)]
        return split_key(self._request.blocks.keys[index])[0]

    def _transfer(self, start: int, stop: int) -> int:
        """Run some operations and return how many succeeded."""
        steps = self._request.steps
        if steps is not None:
            op = self._ops.ops + start
            steps.transfer(self._call, op)
            reraise()
            return int(op.status == 0)
        return self._ops.run(self._request.function, self._call, start, stop)

    def _retry_stale(self, start: int, stop: int, temporary: dict[str, int]) -> None:
        """Retry operations whose directory was removed meanwhile, or whose file is stale.

        A file is stale only if another machine or a FUSE server replaced it, which may happen
        several times.
        """
        for index in range(start, stop):
            for _ in range(_STALE_TRIES):
                if self._ops.ops[index].status != _STALE:
                    break
                self._reopen(index, temporary)
                self._ops.begin_again(index)
                self._transfer(index, index + 1)

    def _reopen(self, index: int, temporary: dict[str, int]) -> None:
        op, path = self._ops.ops[index], self._path(index)
        if op.dir == NULL:
            if path in temporary:
                os.close(temporary.pop(path))
            self._open(index, temporary)
            return
        try:
            op.dirfd = self._directories.refresh(path, create=self._request.create)
        except OSError as exc:
            op.dirfd = -(exc.errno or errno.EIO)

    def _retry_exhausted(self, start: int, stop: int) -> None:
        """Retry operations that lacked a descriptor one by one, while others are closed."""
        with SHARED.undisturbed():
            for index in range(start, stop):
                until = time.monotonic() + _EXHAUSTED_S
                wait_s = 0.0
                while self._ops.sum_up(index, index + 1).exhausted:
                    if time.monotonic() > until or self._call.cancel:
                        return
                    time.sleep(wait_s)
                    wait_s = _EXHAUSTED_WAIT_S
                    SHARED.give_back()
                    self._ops.begin_again(index)
                    self._run_group(index, index + 1)
