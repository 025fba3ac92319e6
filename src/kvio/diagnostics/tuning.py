"""Measure the fastest I/O mode per size on one mount, to calibrate the hybrid backend."""

from __future__ import annotations

import datetime as dt
import errno
import importlib.metadata
import itertools
import json
import math
import os
import platform
import random
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, Protocol, TypeAlias

from kvio import _native
from kvio.backends.posix.directories import (
    CALIBRATION_NAME,
    TEMP_MARK,
    is_leftover,
    read_calibration,
    temp_prefix,
)
from kvio.core import buffers
from kvio.core.store import Store, open_store
from kvio.errors import ConfigError, KvioError, UnsupportedError, storage_error
from kvio.filesystem.io_mode import (
    BY_SIZE,
    CACHE_AWARE,
    Calibration,
    Step,
    dump_calibration,
    load_calibration,
)
from kvio.filesystem.probe import FileSystem, examine
from kvio.types import BlockResult, Durability, IOMode, KiB, MiB
from kvio.url import parse_size

Direction: TypeAlias = Literal["write", "read"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("write", "read")

#: The cost of a mode other than the default, per size: it must be 5 % faster.
NON_DEFAULT_COST: Final = math.log(1.05)
#: The cost of a step that the default does not have: it must save 10 % of the time of one size.
STEP_COST: Final = math.log(1.10)


def default_steps(direction: Direction) -> tuple[Step, ...]:
    """Return the steps used without calibration.

    For reads these are the steps for cold blocks, because cold reads are measured.
    """
    return BY_SIZE.write[1] if direction == "write" else CACHE_AWARE.read[1]


def medians(row: Sequence[Cell], direction: Direction) -> dict[int, dict[IOMode, float]]:
    """Return the median seconds per block by size and mode; a size with few rounds has none."""
    return {
        cell.nbytes: {mode: median(seconds) for mode, seconds in cell.samples(direction).items()}
        if cell.measured
        else {}
        for cell in row
    }


def choose(
    seconds: Mapping[int, Mapping[IOMode, float]], default: Sequence[Step]
) -> tuple[Step, ...]:
    """Return the steps with the least cost for median seconds by size and mode.

    The cost is summed over all sizes: the logarithm of how much slower the mode is than the best
    mode of the size, plus `NON_DEFAULT_COST` if it is not the default, plus `STEP_COST` for every
    step that the default does not have. A size without medians keeps the default.
    """
    sizes = sorted(seconds)
    if not sizes:
        return tuple(default)
    best: dict[IOMode, tuple[float, list[IOMode]]] = {
        mode: (cost, [mode]) for mode, cost in _costs(seconds[sizes[0]], default, sizes[0]).items()
    }
    for before, nbytes in itertools.pairwise(sizes):
        default_pair = (mode_at(default, before), mode_at(default, nbytes))
        best = {
            mode: min(
                (
                    so_far
                    + cost
                    + (mode is not path[-1] and (path[-1], mode) != default_pair) * STEP_COST,
                    [*path, mode],
                )
                for so_far, path in best.values()
            )
            for mode, cost in _costs(seconds[nbytes], default, nbytes).items()
        }
    return _merge(list(zip(sizes, min(best.values())[1], strict=True)), default)


def calibrate(rows: Mapping[int, Sequence[Cell]], reason: str, *, cold: bool) -> Calibration:
    """Return the calibration for cells by concurrency; ignore reads that were not *cold*."""

    def table(direction: Direction) -> dict[int, tuple[Step, ...]]:
        default = default_steps(direction)
        if direction == "read" and not cold:
            return {1: default}
        return {
            concurrency: choose(medians(row, direction), default)
            for concurrency, row in rows.items()
            if concurrency == 1 or any(cell.measured for cell in row)
        }

    return Calibration(write=table("write"), read=table("read"), reason=reason)


def crossings(row: Sequence[Cell], direction: Direction) -> list[int]:
    """Return the geometric means of adjacent sizes with different modes, if over 2x apart."""
    steps = choose(medians(row, direction), default_steps(direction))
    return [
        math.isqrt(below.nbytes * above.nbytes)
        for below, above in itertools.pairwise(row)
        if above.nbytes > 2 * below.nbytes
        and mode_at(steps, below.nbytes) is not mode_at(steps, above.nbytes)
    ]


def mode_at(steps: Sequence[Step], nbytes: int) -> IOMode:
    """Return the mode of a size."""
    for step in steps:
        if step.below_nbytes is None or nbytes < step.below_nbytes:
            return step.mode
    return IOMode.BUFFERED


def _costs(
    seconds: Mapping[IOMode, float], default: Sequence[Step], nbytes: int
) -> dict[IOMode, float]:
    """Return the cost of each mode at one size, in logarithms of time."""
    default_mode = mode_at(default, nbytes)
    if not seconds:
        return {default_mode: 0.0}
    least = min(seconds.values())
    return {
        mode: math.log(value / least) + (mode is not default_mode) * NON_DEFAULT_COST
        for mode, value in seconds.items()
    }


def _merge(chosen: Sequence[tuple[int, IOMode]], default: Sequence[Step]) -> tuple[Step, ...]:
    steps = []
    for (below, mode), (above, next_mode) in itertools.pairwise(chosen):
        if mode is not next_mode:
            steps.append(Step(_threshold(below, mode, above, next_mode, default), mode))
    return (*steps, Step(None, chosen[-1][1]))


def _threshold(
    below: int, mode: IOMode, above: int, next_mode: IOMode, default: Sequence[Step]
) -> int:
    """Return the threshold of a step: the default's if it has this step, else the middle (log)."""
    if (mode_at(default, below), mode_at(default, above)) == (mode, next_mode):
        for step in default:
            if step.below_nbytes is not None and below < step.below_nbytes <= above:
                return step.below_nbytes
    return -(-math.isqrt(below * above) // KiB) * KiB


# --------------------------------------------------------------------------------------------------
# Measure blocks in alternating I/O modes, within a budget.
#
# One trial writes blocks, settles them (writes back dirty pages and drops them from the page
# cache), and reads them cold. A round makes one trial per mode, in rotating order, so that drift
# of the machine affects all modes equally.


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


# --------------------------------------------------------------------------------------------------
# Tune one mount, and save and load its calibration file.


_SUFFIX: Final = "tune"
_ABANDONED_S: Final = 86400.0
#: Share of the budget for the first pass; the rest measures sizes where the best mode changes.
_FIRST_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Tuning:
    """A calibration and its measurements; *measured* is plain JSON."""

    calibration: Calibration
    measured: dict[str, Any]

    @property
    def decides(self) -> bool:
        """Return whether any size had enough rounds; else the calibration is the default."""
        return any(cell["rounds"] >= MIN_ROUNDS for cell in self.measured["cells"])

    def dump(self) -> str:
        """Return both as the text of a calibration file."""
        return dump_calibration(self.calibration, self.measured)


def tune(
    path: str,
    *,
    budget_s: float = 30.0,
    max_bytes: int | str = "16GiB",
    io_threads: int | None = None,
    writes: Durability = "visible",
    sizes: Sequence[int] = SIZES,
    report: Report | None = None,
) -> Tuning:
    """Measure the mount of a directory and choose I/O modes; leave no files behind.

    Args:
        path: a directory on the mount; a private directory is created in it and removed.
        budget_s: no round starts that would end after this many seconds.
        max_bytes: maximum of bytes written in all.
        io_threads: the concurrency to measure besides 1; default: as `open_store` chooses.
        writes: measure writes until they are ``visible`` or ``durable``.
        sizes: block sizes in bytes, ascending; more are added where the best mode changes.
        report: callback before every round.

    Raises:
        ConfigError: *path* is no directory, or a number is invalid.
        UnsupportedError: there is only one I/O mode, or durable writes are not supported.
        StorageError: the file system failed.
    """
    threads = _default_threads() if io_threads is None else io_threads
    if not budget_s > 0 or threads < 1:
        raise ConfigError("the budget must be above 0 seconds, and io_threads at least 1")
    limit = parse_size(max_bytes)
    with scratch_directory(path) as directory, ExitStack() as stack:
        fs = _examine(directory)
        modes = _modes(fs)
        trial_bytes = _trial_bytes(directory, sizes, limit // len(modes))
        bench = Bench(
            directory,
            modes,
            threads=threads,
            durability=writes,
            trial_bytes=trial_bytes,
            stack=stack,
        )
        budget = Budget(budget_s, limit, report)
        rows = _measure(Schedule(bench, budget, trial_bytes=trial_bytes), sizes, threads)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    calibration = calibrate(rows, f"tuned {today}", cold=bench.cold)
    setting = {
        "kvio": importlib.metadata.version("kvio"),
        "when": today,
        "system": f"{platform.system()} {platform.release()}",
        "file_system": fs.name,
        "writes": writes,
        "io_threads": threads,
        "cold_reads": bench.cold,
        "seconds": round(budget.spent_s, 1),
        "bytes_written": budget.written,
    }
    cells = [_describe(cell) for row in rows.values() for cell in row]
    return Tuning(calibration, setting | {"cells": cells})


def save(path: str, tuning: Tuning) -> str:
    """Write the calibration file of *path* atomically and return its path.

    Only this user can write it. Users who can list the directory can read it if this user may
    set its group.

    Raises:
        StorageError: the file could not be written.
    """
    target = os.path.join(path, CALIBRATION_NAME)
    temporary = os.path.join(path, f"{temp_prefix()}{secrets.token_hex(16)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                directory = os.stat(path)
                with suppress(PermissionError):  # this user is not a member of the group
                    os.fchown(fd, -1, directory.st_gid)
                os.fchmod(fd, 0o600 | stat.S_IMODE(directory.st_mode) & 0o044)
                file.write(tuning.dump() + "\n")
                file.flush()
                os.fsync(fd)
            os.rename(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"write {target!r}") from exc
    return target


def load(path: str) -> Tuning:
    """Read the existing calibration of *path*.

    Raises:
        ConfigError: there is none, or it is invalid.
        StorageError: the file could not be read.
    """
    source = os.path.join(path, CALIBRATION_NAME)
    try:
        text = read_calibration(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no calibration in {path!r}; create one with kvio tune") from None
    except ValueError:
        raise ConfigError(f"{source} is not a calibration file; tune again") from None
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"read {source!r}") from exc
    calibration = load_calibration(text, source)
    measured = json.loads(text).get("measured")
    return Tuning(calibration, measured if isinstance(measured, dict) else {})


@contextmanager
def scratch_directory(path: str) -> Iterator[str]:
    """Create a private directory in *path*, yield it, and remove it.

    Leftovers of killed runs are removed too.

    Raises:
        ConfigError: *path* is no directory.
        StorageError: the directory could not be created.
    """
    if not os.path.isdir(path):
        raise ConfigError(f"{path!r} is not a directory")
    directory = os.path.join(path, f"{temp_prefix()}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        _remove_leftovers(path)
        os.mkdir(directory, 0o700)
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"create a directory in {path!r}") from exc
    try:
        os.chmod(directory, 0o700)
        yield directory
    finally:
        with _interrupts_ignored():
            shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers(path: str) -> None:
    for found in Path(path).glob(f"{TEMP_MARK}*{_SUFFIX}"):
        if is_leftover(found, older_than_s=_ABANDONED_S):
            shutil.rmtree(found, ignore_errors=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore a second Ctrl-C during the cleanup after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _measure(schedule: Schedule, sizes: Sequence[int], threads: int) -> dict[int, list[Cell]]:
    levels = sorted({1, threads})
    for nbytes in sizes:
        for concurrency in levels:
            schedule.add(nbytes, concurrency)
    schedule.spend(share=_FIRST_SHARE)
    for concurrency in levels:
        row = schedule.row(concurrency)
        for direction in DIRECTIONS:
            for nbytes in crossings(row, direction):
                schedule.add(nbytes, concurrency)
    schedule.spend(share=1.0)
    # An unmeasured size between two others must not insert the default mode between them.
    schedule.cells = [c for c in schedule.cells if c.measured or c.nbytes in sizes]
    return {concurrency: schedule.row(concurrency) for concurrency in levels}


def _describe(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON, with rates in 10^6 bytes per second and seconds per block."""

    def rates(samples: dict[IOMode, list[float]]) -> dict[str, float]:
        return {str(m): round(cell.nbytes / median(s) / 1e6, 1) for m, s in samples.items()}

    return {
        "nbytes": cell.nbytes,
        "concurrency": cell.concurrency,
        "nblocks": cell.nblocks,
        "rounds": cell.rounds,
        "write_mb_per_s": rates(cell.write_s),
        "read_mb_per_s": rates(cell.read_s),
        "settle_s": {str(m): round(median(s), 7) for m, s in cell.settle_s.items()},
        "dirty_bytes": {str(m): int(median(s)) for m, s in cell.dirty.items() if s},
    }


def _examine(directory: str) -> FileSystem:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return examine(fd, temp_prefix() + secrets.token_hex(16))
    except OSError as exc:
        raise storage_error(exc.errno or errno.EIO, f"probe {directory!r}") from exc
    finally:
        os.close(fd)


def _modes(fs: FileSystem) -> list[IOMode]:
    if not fs.direct_io:
        raise UnsupportedError(
            f"nothing to tune: {fs.notes[0]}, so the hybrid backend always uses buffered I/O"
        )
    return [IOMode.BUFFERED, IOMode.DIRECT] + [IOMode.DONTCACHE] * fs.dontcache


def _trial_bytes(directory: str, sizes: Sequence[int], limit: int) -> int:
    """Return the maximum of bytes per trial: at most a quarter of the free space.

    Raises:
        ConfigError: the smallest size does not fit.
    """
    free = os.statvfs(directory)
    room = min(MAX_TRIAL_BYTES, free.f_bavail * free.f_frsize // 4, limit)
    if not sizes or min(sizes) < 1 or room < min(sizes):
        raise ConfigError(
            f"no room to measure: only {room // KiB} KiB may be written per trial; "
            "free disk space or raise max_bytes"
        )
    return room


def _default_threads() -> int:
    """Return the same default as `open_store`."""
    return min(32, max(4, 2 * len(os.sched_getaffinity(0))))
