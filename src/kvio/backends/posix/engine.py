"""Run groups of blocks through the C core: one call per group, without the GIL."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final

from kvio import _native
from kvio._native import LeafTable, Memory, lib
from kvio._native.ops import Answer, IOCounters, Ops
from kvio.abc import RunAll
from kvio.backends.posix import outcome
from kvio.backends.posix.groups import Groups
from kvio.backends.posix.layout import Directories, split_key
from kvio.backends.posix.modes import BOUNCING, LOOK, Choice, Chooser, choose_all
from kvio.backends.posix.options import PosixOptions
from kvio.backends.posix.root import RootWatch
from kvio.buffers import BouncePool
from kvio.descriptors import SHARED
from kvio.errors import StorageError
from kvio.medium import Medium
from kvio.types import BlockResult, Blocks, Cancellation, IfExists, Level, Parts, Receipt

IF_EXISTS: Final = {"keep": lib.KVIO_KEEP, "replace": lib.KVIO_REPLACE, "error": lib.KVIO_ERROR}
VERIFY: Final = {
    "off": lib.KVIO_VERIFY_OFF,
    "length": lib.KVIO_VERIFY_LENGTH,
    "full": lib.KVIO_VERIFY_FULL,
}
_ANY_SIZE: Final = 1 << 40
_MISSING: Final = -errno.ENOENT


def run_in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other, for a backend without threads."""
    return [task() for task in tasks]


@dataclass(slots=True)
class Engine:
    """The state that all calls of a store share: open directories, policy and buffers.

    *fixed*: the choice of a policy that always makes the same one, else None.
    """

    name: str
    options: PosixOptions
    root: RootWatch
    medium: Medium
    for_write: Chooser
    for_read: Chooser
    fixed: Choice | None
    directories: Directories
    leaf_table: LeafTable | None
    bounce: BouncePool
    publish: int
    template: _native.Template
    run_all: RunAll = run_in_turn
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
            self.flags |= 0 if self.medium.journaled else lib.KVIO_UNJOURNALED
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
                lib.kvio_write_batch,
                blocks,
                modes,
                self.write_flags,
                create=True,
                if_exists=if_exists,
                cancel=cancel,
                results=results,
            )
        )

    def read(self, blocks: Blocks, cancel: Cancellation | None) -> list[BlockResult]:
        """Read a batch of whole blocks; return one result per block, in order."""
        modes, _ = choose_all(self.for_read, blocks.sizes, self.counters.in_flight + 1)

        def results(ops: Ops) -> list[BlockResult]:
            return outcome.was_read(blocks, ops, self.name)

        return results(
            self.run(
                lib.kvio_read_batch,
                blocks,
                modes,
                self.flags,
                verify=self.options.verify,
                cancel=cancel,
                results=results,
            )
        )

    def delete(self, keys: Sequence[str], cancel: Cancellation | None) -> list[BlockResult]:
        """Remove a batch of blocks; return one result per block, in order."""

        def results(ops: Ops) -> list[BlockResult]:
            return outcome.deleted(keys, ops, self.name)

        n = len(keys)
        return results(
            self.run(
                lib.kvio_delete_batch,
                Blocks(keys, [()] * n, [0] * n),
                [LOOK],
                self.flags,
                cancel=cancel,
                results=results,
                moves=False,
            )
        )

    def count_present(self, keys: Sequence[str]) -> int:
        """Return how many keys from the front have a file long enough for a block."""
        n = len(keys)
        ops = self.run(
            lib.kvio_look_batch,
            Blocks(keys, [()] * n, [0] * n),
            [LOOK],
            self.flags,
            moves=False,
        )
        found = ops.leading()
        if found < n and ops.answers()[found].status == -errno.ECANCELED:
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
        function: Any = lib.kvio_write_batch,
    ) -> Receipt:
        """Write one block, or raise its error."""
        mode, reason = self.for_write(nbytes, self.counters.in_flight + 1)
        ops = self.run(
            function,
            Blocks((key,), (parts,), (nbytes,)),
            (mode,),
            self.write_flags,
            create=True,
            if_exists=if_exists,
            cancel=cancel,
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
        function: Any = lib.kvio_read_batch,
    ) -> int:
        """Read one block or range and return the count, or raise its error."""
        mode, _ = self.for_read(nbytes, self.counters.in_flight + 1)
        ops = self.run(
            function,
            Blocks((key,), (parts,), (nbytes,)),
            (mode,),
            self.flags,
            offset=offset,
            op_flags=op_flags,
            verify=self.options.verify,
            cancel=cancel,
        )
        return self._only(ops, key, nbytes, offset).done

    def run_one(
        self, function: Any, key: str, *, op_flags: int = 0, verify: str | None = None
    ) -> Answer:
        """Run one operation without payload and return its answer, or raise its error.

        A scrub uses direct I/O if the policy ever does, so that checking a store does not evict
        other data from the page cache.
        """
        mode = self.for_read(_ANY_SIZE, 1)[0] if op_flags & lib.KVIO_OP_SCRUB else LOOK
        ops = self.run(
            function,
            Blocks((key,), ((),), (0,)),
            (mode,),
            self.flags,
            op_flags=op_flags,
            verify=verify or self.options.verify,
            moves=False,
        )
        return self._only(ops, key, 0)

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

    def run(
        self,
        function: Any,
        blocks: Blocks,
        modes: Sequence[int],
        flags: int,
        *,
        offset: int = 0,
        op_flags: int = 0,
        create: bool = False,
        if_exists: IfExists = "keep",
        verify: str = "full",
        cancel: Cancellation | None = None,
        results: Callable[[Ops], list[BlockResult]] | None = None,
        moves: bool = True,
    ) -> Ops:
        """Open directories, run the C core over the blocks, and retry stale operations.

        *results*: returns the results of a batch, for *cancel*. *moves*: blocks that succeeded
        are counted as transferred in their mode.
        """
        ended: Ops | None = None
        bounces = op_flags & lib.KVIO_OP_SCRUB or not BOUNCING.isdisjoint(modes)
        bounce = self.bounce.take() if bounces else None
        self.counters.enter()
        try:
            call = self.make_call(flags, IF_EXISTS[if_exists], verify, cancel, bounce)
            if create and flags & lib.KVIO_DURABLE:
                call.spare_files = SHARED.for_files()
            names: Sequence[str] = blocks.keys
            dirs: list[Any] = []
            if self.leaf_table is None:
                paths, names = zip(*map(split_key, blocks.keys), strict=True)
                dirs = [self.directories.find(path, create=create) for path in paths]
            with Ops(
                names,
                blocks.parts,
                blocks.sizes,
                modes,
                leaf_table=self.leaf_table,
                dirs=dirs,
                offset=offset,
                flags=op_flags,
            ) as ops:
                ended = ops
                if cancel is not None and results is not None:
                    cancel.results = partial(results, ops)
                Groups(
                    function,
                    call,
                    ops,
                    blocks.keys,
                    self.directories,
                    hashed=self.leaf_table is not None,
                    create=create,
                ).run()
            if call.publish > self.publish:
                self.publish = call.publish
        finally:
            self.counters.leave(ended if moves else None)
            if bounce is not None:
                self.bounce.give(bounce)
        return ops

    def make_call(
        self,
        flags: int,
        if_exists: int,
        verify: str,
        cancel: Cancellation | None,
        bounce: Memory | None,
    ) -> Any:
        """Return the settings of a C call; *bounce* must outlive it."""
        call = _native.copy_call(self.template)
        call.flags = flags
        call.if_exists = if_exists
        call.verify = VERIFY[verify]
        call.publish = self.publish
        if bounce is not None:
            _native.set_bounce(call, bounce)
        if cancel is not None:
            cancel.on_request(lambda: setattr(call, "cancel", 1))
        return call
