"""Power cuts: crash states of a disk, made from its log, each mounted and checked.

A state is what a disk may have after a cut: all records up to the last flush before it, and of the
writes behind that flush all, none, or some in any order; of those that it stores in several pieces
perhaps not all pieces. No two states are the same disk; each is mounted by the kernel and checked
through kvio and without it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Final, NamedTuple

from tests.faults.blocks import kernel
from tests.faults.blocks.checks import Promises, Verdicts, check
from tests.faults.blocks.disk import mount, repair
from tests.faults.blocks.log import CHANGES, Image, Kind, Record, apply_to_file
from tests.faults.blocks.sameness import Piece, Sameness
from tests.faults.blocks.workload import SCENARIOS

#: What a disk stores whole or not at all.
_ATOM: Final = 4096
#: States of one moment: all, none, some, some with torn writes among them.
_WAYS: Final = ("all", "none", "some", "torn")
_DRAWS: Final = 50
#: Of the moments; the others may lie behind the work, where the file system is unmounted.
_WHILE_AT_WORK: Final = 0.9


class Cut(NamedTuple):
    """A moment of a log, and the first record behind the flush before it."""

    at: int
    flushed: int
    way: str


class Replay:
    """The crash states of one log.

    Args:
        kind: of the file system.
        scenario: what was recorded.
        records: the log.
        before: the disk as it was before; it is used up.
        work: a directory for what is needed meanwhile.
        seed: what the states are drawn by.
    """

    def __init__(
        self,
        kind: str,
        scenario: str,
        records: Sequence[Record],
        *,
        before: Image,
        work: str,
        seed: int,
    ) -> None:
        self._kind, self._name, self._scenario = kind, scenario, SCENARIOS[scenario]
        self._records, self._seed = records, seed
        self._state, self._root = f"{work}/state", f"{work}/state-root"
        self._random = random.Random(f"{seed} {kind} {scenario}")
        self._base = before
        self._applied = 0
        self._promises, self._learnt = Promises(), 0
        self.verdicts = Verdicts()

    def run(self, states: int) -> Verdicts:
        """Check so many states that differ; fewer where the log has no more."""
        os.makedirs(self._root, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(self._base.close)
            with open(self._state, "wb") as file:
                file.truncate(self._base.nbytes)
            self._fd = os.open(self._state, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, self._fd)
            self._loop, self._device = kernel.attach(self._state)
            stack.callback(os.close, self._loop)
            for cut, kept in self._plan(states):
                self._go_to(cut)
                self._check(cut, kept)
        self._learn(len(self._records))
        self.verdicts.receipts = self._promises.receipts
        return self.verdicts

    def _plan(self, states: int) -> list[tuple[Cut, list[Piece]]]:
        """Draw states that differ in bytes, each with the most that was promised, in order."""
        sameness = Sameness(self._base, self._records)
        marks = [i for i, one in enumerate(self._records) if one.kind is Kind.MARK]
        flushed = [0]
        for number, record in enumerate(self._records):
            flushed.append(number + 1 if record.kind is Kind.FLUSH else flushed[-1])
        drawn: dict[int, tuple[Cut, list[Piece]]] = {}
        for _ in range(states * _DRAWS):
            at_work = self._random.random() < _WHILE_AT_WORK
            at = self._random.randint(marks[0], marks[-1] + 1 if at_work else len(self._records))
            cut = Cut(at, flushed[at], self._random.choice(_WAYS))
            kept = self._kept(cut)
            disk = sameness.of(cut.flushed, kept)
            if disk not in drawn or at > drawn[disk][0].at:
                drawn[disk] = (cut, kept)
            if len(drawn) == states:
                break
        return sorted(drawn.values(), key=lambda state: state[0])

    def _go_to(self, cut: Cut) -> None:
        for record in self._records[self._applied : cut.flushed]:
            self._base.apply(record)
        self._applied = cut.flushed
        self._learn(cut.at)

    def _learn(self, until: int) -> None:
        for record in self._records[self._learnt : until]:
            if record.kind is Kind.MARK:
                self._promises.learn(record.mark)
        self._learnt = until

    def _kept(self, cut: Cut) -> list[Piece]:
        """Choose what the disk stored behind the flush, in the order in which it did."""
        tail = [
            (number, 0, self._records[number].nbytes)
            for number in range(cut.flushed, cut.at)
            if self._records[number].kind in CHANGES
        ]
        if cut.way == "all":
            return tail
        if cut.way == "none" or not tail:
            return []
        kept = [one for one in tail if self._random.random() < 0.5]
        if cut.way == "torn":
            kept = [piece for one in kept for piece in self._pieces(one)]
        self._random.shuffle(kept)
        return kept

    def _pieces(self, whole: Piece) -> list[Piece]:
        """Tear a write: some of its pieces, each on a boundary of the disk's."""
        number, _, nbytes = whole
        record = self._records[number]
        if record.kind is not Kind.WRITE or nbytes <= _ATOM:
            return [whole]
        first = _ATOM - record.offset % _ATOM
        edges = [0, *range(first, nbytes, _ATOM), nbytes]
        pieces = [(number, *edge) for edge in pairwise(edges)]
        return [piece for piece in pieces if self._random.random() < 0.6]

    def _check(self, cut: Cut, kept: Sequence[Piece]) -> None:
        self._base.write_to(self._fd)
        for number, start, stop in kept:
            record = self._records[number]
            if record.kind is Kind.WRITE:
                record = record._replace(
                    offset=record.offset + start,
                    nbytes=stop - start,
                    data=record.data[start:stop],
                )
            apply_to_file(self._fd, record)
        kernel.forget_buffers(self._loop)
        before = len(self.verdicts.examples)
        self.verdicts.states += 1
        self._mount_and_check()
        where = f"{self._kind} {self._name} seed {self._seed} record {cut.at} keeps {cut.way}"
        for number in range(before, len(self.verdicts.examples)):
            self.verdicts.examples[number] += f" ({where})"

    def _mount_and_check(self) -> None:
        if trouble := repair(self._kind, self._device):
            self.verdicts.bad("unmountable", trouble)
            return
        try:
            mount(self._kind, self._device, self._root)
        except OSError as exc:
            self.verdicts.bad("unmountable", str(exc))
            return
        try:
            check(self._root, self._scenario, self._promises, self.verdicts)
        finally:
            kernel.unmount(self._root)
