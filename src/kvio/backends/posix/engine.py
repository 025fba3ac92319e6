"""Runs groups of blocks through the C core: one call a group, without the GIL."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvio import _native
from kvio._native import Answer, lib
from kvio.abc import RunAll
from kvio.backends.posix import outcome
from kvio.backends.posix.group import LOOK, Chooser, Group
from kvio.backends.posix.layout import Directories, Placer
from kvio.backends.posix.medium import Medium
from kvio.backends.posix.options import PosixOptions
from kvio.buffers import BouncePool
from kvio.errors import BlockNotFoundError, storage_error
from kvio.types import (
    BlockResult,
    BlockStatus,
    Cancellation,
    IfExists,
    Level,
    Parts,
    ReadItem,
    Receipt,
    WriteItem,
)

IF_EXISTS: Final = {"keep": lib.KVIO_KEEP, "replace": lib.KVIO_REPLACE, "error": lib.KVIO_ERROR}
VERIFY: Final = {
    "off": lib.KVIO_VERIFY_OFF,
    "length": lib.KVIO_VERIFY_LENGTH,
    "full": lib.KVIO_VERIFY_FULL,
}
_ANY_SIZE: Final = 1 << 40
_STALE: Final = -errno.ESTALE


def run_in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks one after the other, for a backend that was given no threads."""
    return [task() for task in tasks]


@dataclass(slots=True)
class Engine:
    """What a store's calls share: the open medium, its policy and its buffers."""

    name: str
    options: PosixOptions
    medium: Medium
    for_write: Chooser
    for_read: Chooser
    directories: Directories
    place: Placer
    bounce: BouncePool
    publish: int
    template: _native.Template
    run_all: RunAll = run_in_turn
    lock: threading.Lock = field(default_factory=threading.Lock)
    in_flight: int = 0
    modes_taken: list[int] = field(default_factory=lambda: [0, 0, 0])
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
        self.write_flags = self.flags | (lib.KVIO_CHECKSUM if self.checksum else 0)

    # Whole groups

    def write(
        self,
        items: Sequence[WriteItem],
        if_exists: IfExists,
        cancel: Cancellation | None,
    ) -> list[BlockResult]:
        """Write a group; results in order."""
        group = self.group(items, self.for_write)
        self.run(
            lib.kvio_write_batch,
            group,
            self.write_flags,
            create=True,
            if_exists=IF_EXISTS[if_exists],
            cancel=cancel,
        )
        return self._in_order(group, self._written)

    def read(self, items: Sequence[ReadItem], cancel: Cancellation | None) -> list[BlockResult]:
        """Read a group of whole blocks; results in order."""
        group = self.group(items, self.for_read)
        self.run(lib.kvio_read_batch, group, self.flags, verify=self.options.verify, cancel=cancel)
        return self._in_order(group, self._was_read)

    def count_present(self, keys: Sequence[str]) -> int:
        """Count how many keys from the front have an intact trailer."""
        n = len(keys)
        group = Group(keys, list(map(self.place, keys)), [()] * n, [0] * n, [LOOK] * n)
        flags = self.flags | lib.KVIO_STOP_AT_MISSING
        self.run(lib.kvio_stat_batch, group, flags, verify=self.options.verify)
        for count, (index, answer) in enumerate(zip(group.ready, group.answers, strict=True)):
            if index != count or answer.status:
                return count
        return len(group.ready)

    # One block: what a group of one does, without the lists

    def write_one(
        self, key: str, parts: Parts, nbytes: int, if_exists: IfExists, cancel: Cancellation | None
    ) -> Receipt:
        """Write one block, or raise why not."""
        choice = self.for_write(nbytes, self.in_flight + 1)
        group = Group([key], [self.place(key)], [parts], [nbytes], [choice])
        self.run(
            lib.kvio_write_batch,
            group,
            self.write_flags,
            create=True,
            if_exists=IF_EXISTS[if_exists],
            cancel=cancel,
        )
        return self.receipt(group)

    def read_one(
        self,
        key: str,
        parts: Parts,
        nbytes: int,
        cancel: Cancellation | None,
        *,
        offset: int = 0,
        op_flags: int = 0,
    ) -> int:
        """Read one block or range and return the count, or raise why not."""
        choice = self.for_read(nbytes, self.in_flight + 1)
        group = Group([key], [self.place(key)], [parts], [nbytes], [choice], offset, op_flags)
        self.run(lib.kvio_read_batch, group, self.flags, verify=self.options.verify, cancel=cancel)
        return self.count_read(group)

    def run_one(
        self, function: Any, key: str, *, op_flags: int = 0, verify: str | None = None
    ) -> Answer:
        """Run one operation without bytes and return how it ended, or raise why it failed.

        A scrub goes past the page cache where the policy ever does, so that checking a store
        does not push everybody's data out.
        """
        choice = self.for_read(_ANY_SIZE, 1) if op_flags & lib.KVIO_OP_SCRUB else LOOK
        group = Group([key], [self.place(key)], [()], [0], [choice], 0, op_flags)
        self.run(function, group, self.flags, verify=verify or self.options.verify)
        return self._answer_of_one(group)

    def receipt(self, group: Group) -> Receipt:
        """Give the receipt of a group's only write, or raise why there is none."""
        answer = self._answer_of_one(group)
        self._count(group.answers)
        return outcome.receipt_of(
            answer,
            group.keys[0],
            group.sizes[0],
            self.level,
            group.choices[0][1],
            checksum=self.checksum,
        )

    def count_read(self, group: Group) -> int:
        """Give the byte count of a group's only read, or raise why there is none."""
        answer = self._answer_of_one(group)
        self._count(group.answers)
        return answer.done

    # Pieces

    def group(self, items: Sequence[WriteItem] | Sequence[ReadItem], choose: Chooser) -> Group:
        """Place every item and decide its mode."""
        concurrency = self.in_flight + 1
        keys, parts, sizes = zip(*items, strict=True)
        choices = [choose(nbytes, concurrency) for nbytes in sizes]
        return Group(keys, list(map(self.place, keys)), parts, sizes, choices)

    def run(
        self,
        function: Any,
        group: Group,
        flags: int,
        *,
        create: bool = False,
        if_exists: int = 0,
        verify: str = "full",
        cancel: Cancellation | None = None,
    ) -> None:
        """Open directories, run one C call over the group, and repeat what was stale."""
        leased: list[int] = []
        bounce = self.bounce.take() if group.needs_bounce() else None
        with self.lock:
            self.in_flight += 1
        try:
            fds = self._open_directories(group, create, leased)
            call = self.make_call(flags, if_exists, verify, cancel, bounce)
            good, answers = group.run(function, call, group.ready, fds)
            group.answers = answers
            if good != len(answers):
                self._repeat_stale(function, call, group, create, leased)
            if call.publish > self.publish:
                self.publish = call.publish
        finally:
            with self.lock:
                self.in_flight -= 1
            if bounce is not None:
                self.bounce.give(bounce)
            for fd in leased:
                os.close(fd)

    def make_call(
        self,
        flags: int,
        if_exists: int,
        verify: str,
        cancel: Cancellation | None,
        bounce: memoryview | None,
    ) -> Any:
        """Make the settings of a C call; *bounce* must outlive it."""
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

    def _written(self, group: Group, index: int, answer: Answer) -> BlockResult:
        key, nbytes = group.keys[index], group.sizes[index]
        if answer.status:
            return self._failure(group, index, answer)
        receipt = outcome.receipt_of(
            answer, key, nbytes, self.level, group.choices[index][1], checksum=self.checksum
        )
        status = BlockStatus.KEPT if answer.existed else BlockStatus.OK
        return BlockResult(key, status, nbytes, None, receipt)

    def _was_read(self, group: Group, index: int, answer: Answer) -> BlockResult:
        if answer.status:
            return self._failure(group, index, answer)
        done = answer.done
        status = BlockStatus.OK if done == group.sizes[index] else BlockStatus.SHORT
        return BlockResult(group.keys[index], status, done)

    def _failure(self, group: Group, index: int, answer: Answer) -> BlockResult:
        key = group.keys[index]
        error = outcome.error_of(answer, key, group.sizes[index], group.offset, self.name)
        return outcome.failure(key, error)

    def _in_order(
        self, group: Group, result_of: Callable[[Group, int, Answer], BlockResult]
    ) -> list[BlockResult]:
        ran = [
            result_of(group, index, answer)
            for index, answer in zip(group.ready, group.answers, strict=True)
        ]
        self._count(group.answers)
        if not group.failures:
            return ran
        by_index = group.failures | dict(zip(group.ready, ran, strict=True))
        return [by_index[index] for index in range(len(group.keys))]

    def _answer_of_one(self, group: Group) -> Answer:
        if group.failures:
            raise outcome.raisable(group.failures[0])
        answer = group.answers[0]
        if answer.status:
            raise outcome.error_of(answer, group.keys[0], group.sizes[0], group.offset, self.name)
        return answer

    def _count(self, answers: Iterable[Answer]) -> None:
        with self.lock:
            for answer in answers:
                if not answer.status and not answer.existed:
                    self.modes_taken[answer.mode_taken] += 1

    def _open_directories(
        self,
        group: Group,
        create: bool,  # noqa: FBT001  # always by position, a few lines away
        leased: list[int],
    ) -> list[int]:
        kept = self.directories.kept
        try:
            fds = [kept[place[0]] for place in group.places]
        except KeyError:
            return self._open_some(group, create, leased)
        group.ready = range(len(fds))
        return fds

    def _open_some(
        self,
        group: Group,
        create: bool,  # noqa: FBT001
        leased: list[int],
    ) -> list[int]:
        ready, fds = [], []
        for index, place in enumerate(group.places):
            try:
                fds.append(self.directories.get(place[0], create=create, leased=leased))
            except OSError as exc:
                group.failures = group.failures or {}
                group.failures[index] = self._no_directory(group.keys[index], exc, create)
            else:
                ready.append(index)
        group.ready = ready
        return fds

    def _no_directory(
        self,
        key: str,
        exc: OSError,
        create: bool,  # noqa: FBT001
    ) -> BlockResult:
        if isinstance(exc, FileNotFoundError | NotADirectoryError) and not create:
            return outcome.failure(key, BlockNotFoundError(f"no block {key!r}", key=key))
        text = f"{self.name}: open the directory failed"
        number = exc.errno or errno.EIO
        return outcome.failure(key, storage_error(number, text, key=key, backend=self.name))

    def _repeat_stale(
        self,
        function: Any,
        call: Any,
        group: Group,
        create: bool,  # noqa: FBT001
        leased: list[int],
    ) -> None:
        """Run once more what hit a directory that was removed under us."""
        answers = group.answers
        for position, index in enumerate(group.ready):
            if answers[position].status != _STALE:
                continue
            directory = group.places[index][0]
            try:
                self.directories.refresh(directory, create=create)
                fd = self.directories.get(directory, create=create, leased=leased)
            except OSError as exc:
                site = lib.KVIO_SITE_OPEN_DIR if create else lib.KVIO_SITE_OPEN_READ
                answers[position] = _native.failed_answer(exc.errno or errno.EIO, site)
            else:
                _, (answers[position],) = group.run(function, call, [index], [fd])
