"""Bandwidth by I/O size: buffered, dontcache, direct, and what hybrid makes of them.

One block per file through kvio, and one long file by plain system calls beside it. After the figure
of the Lustre hybrid I/O talks, whose defaults kvio's `hybrid` started from.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

import kvio
from benchmarks.harness import page_cache
from benchmarks.harness.columns import SIZE, Column, number, ratio_text, table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import (
    COLD,
    HOT,
    WRITE,
    WRITTEN_BACK,
    Sample,
    Summary,
    Timed,
    time_calls,
)
from benchmarks.harness.plot import draw_lines, size_text
from benchmarks.harness.run import Limits, Run, Scenario, check_names, check_room
from benchmarks.harness.table import Table
from kvio import ConfigError, KiB, MiB, UnsupportedError
from kvio.diagnostics import tuning
from kvio.filesystem.io_mode import Calibration, Step
from kvio.types import IOMode

Verb: TypeAlias = Literal["write", "read"]
Call: TypeAlias = Callable[[], Any]

CALIBRATED: Final = "hybrid calibrated"
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (
    "buffered", "dontcache", "direct", "unaligned 1 thread", "unaligned",
    "hybrid", CALIBRATED, "buffered stream", "direct stream",
)  # fmt: skip
SIZES: Final = tuple(4 * KiB << step for step in range(0, 15, 2))
OPERATIONS: Final = (WRITE, WRITTEN_BACK, COLD, HOT)

_BACKENDS: Final = {"buffered": "posix-tmpfile", "dontcache": "hybrid"}
#: The share of the budget that tuning takes before the first round.
_TUNING: Final = 0.25
_MAX_BLOCKS: Final = 64
_ALL_DIRECTORIES: Final[dict[str, Any]] = {"create": True, "durability": "durable"}
_SCRATCH: Final = ".scratch"
_SEED: Final = 20260102
_MISALIGNED_BY: Final = 33


def _from_4_mib(sample: Sample) -> bool:
    return sample.block_nbytes >= 4 * MiB


def _claims() -> Iterator[Claim]:
    """List what the talks say, and what kvio says of its own choice."""
    for operation, what in ((WRITTEN_BACK, "writes until they are on the disk"), (COLD, "reads")):
        yield Claim(
            text=f"from 4 MiB on, direct {what} are faster than buffered (Lustre talk)",
            pairs=[("direct", "buffered")],
            at_least=1.0,
            operations=[operation],
            where=_from_4_mib,
        )
    for name in ("unaligned 1 thread", "unaligned"):
        yield Claim(
            text=f"{name} direct I/O costs little more than aligned (Lustre talk)",
            pairs=[(name, "direct")],
            at_least=0.90,
            operations=[WRITE, COLD, HOT],
        )
    for name in ("hybrid", CALIBRATED):
        yield Claim(
            text=f"{name} is as fast as the better of buffered and direct",
            pairs=[(name, "buffered"), (name, "direct")],
            at_least=0.95,
            operations=[WRITE, COLD, HOT],
        )


SCENARIO: Final = Scenario(
    name="hybrid",
    title="Bandwidth by I/O size: buffered, direct and hybrid",
    reference="buffered",
    contenders=CONTENDERS,
    claims=tuple(_claims()),
)


def run(
    limits: Limits, *, sizes: Sequence[int] = SIZES, contenders: Sequence[str] | None = None
) -> int:
    """Measure every contender at every size, and print, write and plot what was found.

    Args:
        limits: where, and how much.
        sizes: of a block, or of one call of a stream, in bytes; multiples of 4 KiB.
        contenders: names of `CONTENDERS`; all without it.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a size cannot be, or the disk has no room.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    _check(limits, sizes, names)
    this = Run(SCENARIO, limits, {"sizes": list(sizes), "contenders": names})
    with this.workplace() as base, ExitStack() as stack:
        this.progress.say("tuning" if CALIBRATED in names else "opening")
        opened = open_contenders(
            base, names, limits.max_bytes, tune_s=_TUNING * limits.budget_s, stack=stack
        )
        this.left_out |= {name: why for name, why in opened.items() if isinstance(why, str)}
        able = {name: one for name, one in opened.items() if isinstance(one, Contender)}
        this.take_trials(
            [Size(nbytes) for nbytes in sizes],
            list(able),
            lambda size, name, index: able[name].trial(size.nbytes, index),
        )
        return this.finish([*_NOTES, *_crossovers(this.samples)], _tables, draw_lines)


class Size:
    """A size that says itself in units."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __str__(self) -> str:
        return size_text(self.nbytes)


def _check(limits: Limits, sizes: Sequence[int], names: Sequence[str]) -> None:
    check_names("contender", names, CONTENDERS)
    wrong = [nbytes for nbytes in sizes if nbytes < 4 * KiB or nbytes % (4 * KiB)]
    if wrong or not sizes:
        raise ConfigError(f"sizes must be multiples of 4 KiB, not {wrong[0] if wrong else 'none'}")
    check_room(limits.root, 2 * len(names) * max(limits.max_bytes, max(sizes)))


# ---- contenders ----


class Mover(Protocol):
    """Writes pieces of memory to storage and reads them back, one call a piece."""

    def calls(self, verb: Verb, pieces: Sequence[memoryview], tag: str) -> list[Call]:
        """Make the calls; *tag* tells trials apart."""

    def modes(self) -> Counter[str]:
        """Count calls by the I/O mode so far, where it is known."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Writes, waits for the writeback, reads cold and reads hot: a sample each."""

    name: str
    root: Path
    max_bytes: int
    mover: Mover
    misaligned_by: int = 0

    def trial(self, nbytes: int, index: int) -> Iterator[Sample]:
        """Take one trial at a size; leaves empty files, since deletions make creations slow."""
        count = max(1, min(_MAX_BLOCKS, self.max_bytes // nbytes))
        source, target = self._memory(count * nbytes), self._memory(count * nbytes)
        _fill(source)
        sample = partial(
            Sample,
            subject="one file" if isinstance(self.mover, Stream) else "one block a file",
            block_nbytes=nbytes,
            contender=self.name,
            checksum=False,
            round=index,
        )
        page_cache.touch_memory(self.root / _SCRATCH, source)
        os.sync()
        timed, modes = self._move("write", source, nbytes, index)
        start = time.perf_counter()
        os.sync()
        settled_s = timed.wall_s + time.perf_counter() - start
        for operation, wall_s in ((WRITE, timed.wall_s), (WRITTEN_BACK, settled_s)):
            yield sample(
                operation=operation, wall_s=wall_s, latencies_s=timed.latencies_s, modes=modes
            )
        for operation in (COLD, HOT):
            page_cache.drop(self.root)
            if operation == HOT:
                page_cache.warm(self.root)
            np.frombuffer(target, np.uint8)[:] = 0
            cached = page_cache.cached_fraction(self.root)
            timed, modes = self._move("read", target, nbytes, index)
            yield sample(
                operation=operation,
                wall_s=timed.wall_s,
                latencies_s=timed.latencies_s,
                modes=modes,
                cached_before=cached,
                intact=_same(source, target),
            )
        _empty(self.root)

    def _memory(self, nbytes: int) -> memoryview:
        return kvio.aligned_buffer(nbytes + self.misaligned_by)[self.misaligned_by :]

    def _move(
        self, verb: Verb, memory: memoryview, nbytes: int, index: int
    ) -> tuple[Timed[Any], dict[str, int]]:
        pieces = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
        before = self.mover.modes()
        timed = time_calls(
            self.mover.calls(verb, pieces, f"{_key(self.name)}/{index}/{nbytes}"), threads=1
        )
        return timed, dict(self.mover.modes() - before)


class Blocks:
    """A block a file through one kvio store."""

    def __init__(self, store: kvio.Store) -> None:
        self._store = store

    def calls(self, verb: Verb, pieces: Sequence[memoryview], tag: str) -> list[Call]:
        """Make one call of the public interface a piece."""
        call = self._store.write_block if verb == "write" else self._store.read_block_into
        return [partial(call, f"{tag}/{i}", piece) for i, piece in enumerate(pieces)]

    def modes(self) -> Counter[str]:
        """Count blocks by mode."""
        return Counter(self._store.stats().modes)


class Stream:
    """One long file by pwrite and preadv, written over and over.

    Raises:
        UnsupportedError: the file system has no direct I/O.
    """

    def __init__(self, root: Path, stack: ExitStack, *, direct: bool) -> None:
        path = root / ("direct" if direct else "buffered")
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as exc:
            raise UnsupportedError(f"open the stream: {exc.strerror}") from exc
        stack.callback(os.close, self._fd)

    def calls(self, verb: Verb, pieces: Sequence[memoryview], _: str) -> list[Call]:
        """Make one system call a piece, each behind the one before in the file."""
        call = os.pwritev if verb == "write" else os.preadv
        return [partial(call, self._fd, [p], i * len(p)) for i, p in enumerate(pieces)]

    def modes(self) -> Counter[str]:
        """Count nothing: the mode is in the name."""
        return Counter()


def open_contenders(
    base: Path, names: Sequence[str], max_bytes: int, *, tune_s: float, stack: ExitStack
) -> dict[str, Contender | str]:
    """Open the named contenders below *base*, or say why one cannot be."""
    opened: dict[str, Contender | str] = {}
    blocks, streams = base / "blocks", base / "streams"
    # All blocks go to the same directories: on some file systems one is slower than the next.
    # A durable store makes them all when it opens, so that no trial has to.
    try:
        kvio.open_store("posix-tmpfile", root=blocks, options=_ALL_DIRECTORIES).close()
    except UnsupportedError:
        blocks.mkdir(mode=0o700, exist_ok=True)
    streams.mkdir(mode=0o700)
    for name in names:
        try:
            if name.endswith("stream"):
                stream = Stream(streams, stack, direct=name.startswith("direct"))
                opened[name] = Contender(name, streams, max_bytes, stream)
            else:
                opened[name] = _open(name, blocks, max_bytes, tune_s, stack)
        except UnsupportedError as exc:
            opened[name] = str(exc).replace(str(base), "…")
    return opened


def _open(name: str, root: Path, max_bytes: int, tune_s: float, stack: ExitStack) -> Contender:
    calibration = None  # a store reads it when it opens
    if name == CALIBRATED:
        calibrated = tuning.tune(str(root), budget_s=max(tune_s, 1.0), max_bytes="4GiB")
        calibration = tuning.save(str(root), calibrated)
    if name == "dontcache":
        always: dict[int, tuple[Step, ...]] = {1: (Step(None, IOMode.DONTCACHE),)}
        alone = tuning.Tuning(Calibration(always, always, "dontcache alone"), {})
        calibration = tuning.save(str(root), alone)
    backend = "hybrid" if name.startswith("hybrid") else _BACKENDS.get(name, "posix-direct")
    settings: dict[str, Any] = {"io_threads": 1} if name.endswith("1 thread") else {}
    try:
        store = kvio.open_store(
            backend, root=root, options={"checksum": "none", "verify": "length"}, **settings
        )
    finally:
        if calibration:
            os.unlink(calibration)
    stack.callback(store.close)
    shift = _MISALIGNED_BY if "unaligned" in name else 0
    return Contender(name, root, max_bytes, Blocks(store), shift)


def _key(name: str) -> str:
    return name.replace(" ", "-")


def _fill(memory: memoryview) -> None:
    pattern = np.random.default_rng(_SEED).integers(0, 256, 1 << 20, np.uint8)
    whole = np.frombuffer(memory, np.uint8)
    for at in range(0, len(whole), len(pattern)):
        whole[at : at + len(pattern)] = pattern[: len(whole) - at]
        pattern[0] += 1  # no two pieces are alike


def _same(left: memoryview, right: memoryview) -> bool:
    return bool(np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)))


def _empty(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for file in files:
            if not file.startswith("."):
                os.truncate(os.path.join(directory, file), 0)


# ---- what was found ----


_NOTES: Final = (
    "one caller, one call after the other; every byte compared outside what is timed",
    "'write' ends when the call returns, 'write + writeback' when sync(2) has returned too; "
    "sync(2) before every trial, so that no other writeback lands on the next, and memory is "
    "touched, so that no host of a virtual machine has to find it",
    "stream: one file by pwrite and preadv of the size, no publishing, no trailer; all others: one "
    "block per file by kvio, checksum off",
    "unaligned: direct from memory that direct I/O cannot take, through bounce buffers, on one "
    "or on several threads; dontcache falls back to buffered where the kernel has none",
)


def crossover(by_size: Mapping[int, float]) -> int | None:
    """Return the smallest size from which on every ratio is above 1."""
    best = None
    for nbytes, ratio in sorted(by_size.items(), reverse=True):
        if ratio <= 1:
            break
        best = nbytes
    return best


def _crossovers(samples: Sequence[Sample]) -> list[str]:
    """Return from which size on direct is faster than buffered, by the medians."""
    found = []
    for operation in OPERATIONS:
        own = [s for s in samples if s.operation == operation]
        rivals = {(s.block_nbytes, s.round): s for s in own if s.contender == "buffered"}
        ratios: dict[int, list[float]] = {}
        for s in own:
            rival = rivals.get((s.block_nbytes, s.round))
            if s.contender == "direct" and rival is not None:
                ratios.setdefault(s.block_nbytes, []).append(s.bytes_per_s / rival.bytes_per_s)
        if ratios:
            start = crossover({nbytes: median(values) for nbytes, values in ratios.items()})
            where = "at no size up to the end" if start is None else f"from {size_text(start)} on"
            found.append(f"{operation}: direct is faster than buffered {where} (medians)")
    return found


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation: sizes down, contenders across, and hybrid beside its choices."""
    return [
        _table(operation, own, samples)
        for operation in OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _table(operation: str, summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    found = {(s.contender, s.block_nbytes): s for s in summaries}
    names = [name for name in CONTENDERS if any(s.contender == name for s in summaries)]
    first = {s.block_nbytes: s for s in reversed(summaries)}

    def speed(name: str) -> Column:
        return lambda s, _: number(
            None if (one := found.get((name, s.block_nbytes))) is None else one.bytes_per_s / 1e6,
            ".0f",
        )

    def ratio(name: str) -> Column:
        return lambda s, _: (
            "" if (one := found.get((name, s.block_nbytes))) is None else ratio_text(one)
        )

    columns: dict[str, Column] = {"size": SIZE}
    columns |= {"rounds": lambda s, _: str(s.rounds)}
    columns |= {name: speed(name) for name in names}
    columns |= {f"{name} / buffered": ratio(name) for name in ("direct", "hybrid") if name in names}
    rows = [first[nbytes] for nbytes in sorted(first)]
    made = table_of(f"{operation}, MB/s", rows, samples, columns, left=())
    return replace(made, rule_after=frozenset())
