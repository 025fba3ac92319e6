"""Measure blocks in alternating I/O modes, within a budget.

One trial writes blocks, settles them (writes back dirty pages and drops them from the page cache),
and reads them cold. A round makes one trial per mode, in rotating order, so that drift of the
machine affects all modes equally.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from kvio import _native, buffers
from kvio.backends.posix.root import CALIBRATION_NAME
from kvio.errors import KvioError
from kvio.opening import open_store
from kvio.policies import Calibration, Step, dump_calibration
from kvio.store import Store
from kvio.types import BlockResult, Durability, IOMode, KiB, MiB

#: A callback with the share of the budget that is spent (0 to 1) and the current measurement.
Report: TypeAlias = Callable[[float, str], None]
_Blocks: TypeAlias = Sequence[tuple[str, memoryview]]

SIZES: Final = tuple(4 * KiB << 2 * step for step in range(8))
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 25
#: Maximum of bytes per trial, in memory and in the file system.
MAX_TRIAL_BYTES: Final = 256 * MiB
_SINGLE_BYTES: Final = MiB
_BATCH_BYTES: Final = 4 * MiB
_MAX_BLOCKS: Final = 256
_MAX_SINGLE_BLOCKS: Final = 64
_BACKENDS: Final = {IOMode.BUFFERED: "posix-tmpfile", IOMode.DIRECT: "posix-direct"}


@dataclass(slots=True)
class Cell:
    """One size at one concurrency, with one sample per round and mode.

    Attributes:
        nblocks: blocks per trial.
        write_s: seconds per block until it reached the requested level.
        settle_s: seconds per block of the writeback after that.
        read_s: seconds per block of a cold read.
        dirty: dirty bytes of a trial when its writes had returned.
    """

    nbytes: int
    concurrency: int
    nblocks: int
    rounds: int = 0
    spent_s: float = 0.0
    write_s: dict[IOMode, list[float]] = field(default_factory=dict)
    settle_s: dict[IOMode, list[float]] = field(default_factory=dict)
    read_s: dict[IOMode, list[float]] = field(default_factory=dict)
    dirty: dict[IOMode, list[int]] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Return whether there are enough rounds for a median."""
        return self.rounds >= MIN_ROUNDS

    @property
    def trial_bytes(self) -> int:
        """Return the bytes that one trial writes."""
        return self.nbytes * self.nblocks

    def samples(self, direction: str) -> dict[IOMode, list[float]]:
        """Return the samples for a direction."""
        return self.write_s if direction == "write" else self.read_s


class Budget:
    """The remaining time and bytes to write."""

    def __init__(self, seconds: float, nbytes: int, report: Report | None) -> None:
        self.seconds = seconds
        self.written = 0
        self._max_bytes = nbytes
        self._report = report
        self._started = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    def allows(self, seconds: float, nbytes: int, share: float) -> bool:
        """Return whether a round fits into a *share* of the time and of the bytes."""
        fits = self.spent_s + seconds <= self.seconds * share
        return fits and self.written + nbytes <= self._max_bytes * share

    def take(self, nbytes: int, what: str) -> None:
        """Record the start of a round."""
        self.written += nbytes
        if self._report is not None:
            self._report(min(1.0, self.spent_s / self.seconds), what)


class Trials(Protocol):
    """The interface through which a schedule runs trials."""

    modes: Sequence[IOMode]

    def trial(self, cell: Cell, mode: IOMode) -> None:
        """Measure a cell once in one mode."""


class Bench:
    """One open store per mode below a directory, and a buffer to write from and read into."""

    def __init__(
        self,
        directory: str,
        modes: Sequence[IOMode],
        *,
        threads: int,
        durability: Durability,
        trial_bytes: int,
        stack: ExitStack,
    ) -> None:
        self.modes = modes
        self.memory = _random_memory(max(trial_bytes, 4 * KiB))
        self._stores = {
            mode: stack.enter_context(_open(directory, mode, threads, durability)) for mode in modes
        }
        self._files = {mode: self._warm_up(directory, mode) for mode in modes}
        self.cold = True
        for mode in modes:
            self.cold &= self._can_drop_cache(mode)

    def trial(self, cell: Cell, mode: IOMode) -> None:
        """Write, settle and read the blocks of a cell once; remove them."""
        files = self._files[mode][: cell.nblocks]
        cuts = range(0, cell.trial_bytes, cell.nbytes)
        blocks = [
            (key, self.memory[at : at + cell.nbytes])
            for (key, _), at in zip(files, cuts, strict=True)
        ]
        paths = [path for _, path in files]
        store, single = self._stores[mode], cell.concurrency == 1
        write_s = _timed(lambda: _write(store, blocks, single=single))
        dirty = _dirty_bytes(paths)
        settle_s = _timed(lambda: _settle(paths))
        read_s = _timed(lambda: _read(store, blocks, single=single))
        cell.write_s.setdefault(mode, []).append(write_s / cell.nblocks)
        cell.settle_s.setdefault(mode, []).append(settle_s / cell.nblocks)
        cell.read_s.setdefault(mode, []).append(read_s / cell.nblocks)
        cell.dirty.setdefault(mode, []).extend(dirty)
        for path in paths:
            os.unlink(path)

    def _warm_up(self, directory: str, mode: IOMode) -> list[tuple[str, str]]:
        """Write every key once to create the directories; return (key, path) pairs."""
        keys = [f"block-{number}" for number in range(_MAX_BLOCKS)]
        block = self.memory[: 4 * KiB]
        _check(self._stores[mode].write_blocks([(key, block) for key in keys]))
        found = {
            name: os.path.join(parent, name)
            for parent, _, names in os.walk(os.path.join(directory, mode))
            for name in names
        }
        return [(key, found[key]) for key in keys]

    def _can_drop_cache(self, mode: IOMode) -> bool:
        """Return whether a file's pages can be dropped; remove the files of the warm-up."""
        path = self._files[mode][0][1]
        _settle([path])
        with open(path, "rb") as file:
            cached = _native.cached_fraction(file.fileno(), 4 * KiB)
        for _, path in self._files[mode]:
            os.unlink(path)
        return not cached


class Schedule:
    """Orders the rounds: first enough for each cell, small sizes first, then equally many."""

    def __init__(self, bench: Trials, budget: Budget, *, trial_bytes: int) -> None:
        self.cells: list[Cell] = []
        self._bench = bench
        self._budget = budget
        self._trial_bytes = trial_bytes

    def add(self, nbytes: int, concurrency: int) -> None:
        """Add a cell, unless it exists or does not fit."""
        room = self._trial_bytes // nbytes
        single = concurrency == 1
        wanted = -(-(_SINGLE_BYTES if single else _BATCH_BYTES) // nbytes)
        most = _MAX_SINGLE_BLOCKS if single else _MAX_BLOCKS
        nblocks = min(max(wanted, concurrency), most, room)
        exists = any((c.nbytes, c.concurrency) == (nbytes, concurrency) for c in self.cells)
        if nblocks >= min(2, concurrency) and not exists:
            self.cells.append(Cell(nbytes, concurrency, nblocks))

    def row(self, concurrency: int) -> list[Cell]:
        """Return the cells of one concurrency, sorted by size."""
        cells = (cell for cell in self.cells if cell.concurrency == concurrency)
        return sorted(cells, key=lambda cell: cell.nbytes)

    def spend(self, *, share: float) -> None:
        """Run rounds until *share* of the budget is spent or all cells have the maximum."""
        while ready := [cell for cell in self.cells if self._affordable(cell, share)]:
            self._round(min(ready, key=_urgency))

    def _affordable(self, cell: Cell, share: float) -> bool:
        seconds = cell.spent_s / cell.rounds if cell.rounds else self._guess_s(cell)
        nbytes = cell.trial_bytes * len(self._bench.modes)
        return cell.rounds < MAX_ROUNDS and self._budget.allows(seconds, nbytes, share)

    def _guess_s(self, cell: Cell) -> float:
        """Estimate the seconds of a first round from the next smaller trial."""
        known = [c for c in self.cells if c.rounds and c.trial_bytes <= cell.trial_bytes]
        near = max(known, key=lambda c: (c.trial_bytes, c.nbytes), default=None)
        if near is None:
            return 0.0
        return cell.trial_bytes / near.trial_bytes * near.spent_s / near.rounds

    def _round(self, cell: Cell) -> None:
        modes = self._bench.modes
        first = cell.rounds % len(modes)
        many = f"{cell.nblocks} at once" if cell.concurrency > 1 else "one at a time"
        size = cell.nbytes // KiB
        self._budget.take(cell.trial_bytes * len(modes), f"{size} KiB, {many}")
        started = time.monotonic()
        for mode in (*modes[first:], *modes[:first]):
            self._bench.trial(cell, mode)
        cell.rounds += 1
        cell.spent_s += time.monotonic() - started


def _urgency(cell: Cell) -> tuple[bool, int, int]:
    return cell.measured, cell.rounds if cell.measured else cell.nbytes, cell.rounds


def _open(directory: str, mode: IOMode, threads: int, durability: Durability) -> Store:
    """Open a store that uses only one I/O mode."""
    root = os.path.join(directory, mode)
    os.mkdir(root, 0o700)
    if mode not in _BACKENDS:
        always: dict[int, tuple[Step, ...]] = {1: (Step(None, mode),)}
        text = dump_calibration(Calibration(always, always, "one mode"), {})
        with open(os.path.join(root, CALIBRATION_NAME), "w", encoding="utf-8") as file:
            file.write(text)
    name = _BACKENDS.get(mode, "hybrid")
    return open_store(name, root=root, io_threads=threads, durability=durability)


def _random_memory(nbytes: int) -> memoryview:
    """Return page-aligned memory, already paged in, with incompressible bytes."""
    memory = buffers.aligned(nbytes)
    pattern = random.Random(nbytes).randbytes(min(nbytes, MiB + 1))  # noqa: S311  # not secret
    for at in range(0, nbytes, len(pattern)):
        memory[at : at + len(pattern)] = pattern[: nbytes - at]
    return memory


def _write(store: Store, blocks: _Blocks, *, single: bool) -> None:
    if not single:
        _check(store.write_blocks(blocks))
        return
    for key, block in blocks:
        store.write_block(key, block)


def _read(store: Store, blocks: _Blocks, *, single: bool) -> None:
    if not single:
        _check(store.read_blocks_into(blocks))
        return
    for key, block in blocks:
        store.read_block_into(key, block)


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _dirty_bytes(paths: Sequence[str]) -> list[int]:
    """Return the sum of the files' dirty bytes, or [] if the kernel does not report them."""
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            dirty = _native.dirty_bytes(file.fileno(), os.fstat(file.fileno()).st_size)
        if dirty is None:
            return []
        total += dirty
    return [total]


def _settle(paths: Iterable[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _native.drop_cache(fd)
        finally:
            os.close(fd)


def _check(results: Iterable[BlockResult]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error
        if not result.ok:
            raise KvioError(f"block {result.key!r}: unexpected status {result.status}")
