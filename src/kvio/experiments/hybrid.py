"""Bandwidth by I/O size: buffered, dontcache, direct, and what hybrid makes of them.

One block a file through kvio, and one long file by plain system calls beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

from kvio import ConfigError, GiB, KiB
from kvio.experiments.lanes import CALIBRATED, LANES, Lane, open_lanes
from kvio.experiments.machine import describe_file_system, describe_machine
from kvio.experiments.measure import COLD, HOT, WRITE, WRITTEN_BACK, Sample, Summary, summarise
from kvio.experiments.plot import draw_lines, size_text
from kvio.experiments.record import Record, present
from kvio.experiments.run import Limits, Run, workplace
from kvio.experiments.table import Table

SIZES: Final = tuple(4 * KiB << step for step in range(0, 15, 2))
OPERATIONS: Final = (WRITE, WRITTEN_BACK, COLD, HOT)
#: The share of the budget that tuning takes before the first round.
_TUNING: Final = 0.25
_BEST: Final = ("buffered", "direct")
_WITHIN: Final = 0.95
_UNALIGNED: Final = 0.90


def run(
    limits: Limits, *, sizes: Sequence[int] = SIZES, contenders: Sequence[str] | None = None
) -> int:
    """Measure every contender at every size, and print, write and plot what came of it.

    Args:
        limits: where, and how much.
        sizes: of a block, or of one call of a stream, in bytes; multiples of 4 KiB.
        contenders: names of `LANES`; all without it.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C.

    Raises:
        ConfigError: a name or a size cannot be, or the disk has no room.
    """
    names = _checked(limits, sizes, contenders)
    turns = Run(limits.budget_s, limits.max_rounds)
    with workplace(limits.root) as base, ExitStack() as stack:
        turns.progress.say("tuning" if CALIBRATED in names else "opening")
        lanes = open_lanes(base, names, limits, tune_s=_TUNING * limits.budget_s, stack=stack)
        turns.left_out |= {name: why for name, why in lanes.items() if isinstance(why, str)}
        able: dict[str, Lane] = {n: lane for n, lane in lanes.items() if isinstance(lane, Lane)}
        turns.take_turns(
            [Size(nbytes) for nbytes in sizes],
            list(able),
            lambda size, name, index: able[name].turn(size.nbytes, index),
        )
    if turns.samples:
        _present(limits, turns, sizes)
    return turns.status()


class Size:
    """A size that says itself in units."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __str__(self) -> str:
        return size_text(self.nbytes)


def _checked(
    limits: Limits, sizes: Sequence[int], contenders: Sequence[str] | None
) -> Sequence[str]:
    names = list(LANES) if contenders is None else contenders
    unknown = [name for name in names if name not in LANES]
    if unknown:
        raise ConfigError(f"unknown contender {unknown[0]!r}; known: {', '.join(LANES)}")
    wrong = [nbytes for nbytes in sizes if nbytes < 4 * KiB or nbytes % (4 * KiB)]
    if wrong or not sizes:
        raise ConfigError(f"sizes must be multiples of 4 KiB, not {wrong[0] if wrong else 'none'}")
    file_system = describe_file_system(limits.root)
    needed = 2 * len(names) * max(limits.max_bytes, max(sizes))
    if file_system.free_bytes < needed:
        raise ConfigError(f"{file_system.path}: less than {needed / GiB:.1f} GiB are free")
    return names


def _present(limits: Limits, turns: Run, sizes: Sequence[int]) -> Path:
    file_system = describe_file_system(limits.root)
    summaries = summarise(turns.samples, "buffered", LANES)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(limits).items()}
    record = Record(
        experiment="hybrid",
        title="Bandwidth by I/O size: buffered, direct and hybrid",
        machine=describe_machine(),
        file_system=file_system,
        options={**options, "sizes": list(sizes)},
        notes=[*_NOTES, *_findings(turns.samples), *turns.notes()],
        samples=turns.samples,
        summaries=summaries,
    )
    return present(record, _tables(summaries, turns.samples), limits.results, draw_lines)


_NOTES: Final = (
    "one caller, one call after the other; every byte compared outside what is timed",
    "'write' ends when the call returns, 'write + writeback' when sync(2) has returned too; "
    "sync(2) before every turn, so that nobody's writeback lands on the next, and memory is "
    "touched, so that no host of a virtual machine has to find it",
    "stream: one file by pwrite and preadv of the size, no publishing, no trailer; all others: one "
    "block a file by kvio, checksum off",
    "unaligned: direct from memory that direct I/O cannot take, by way of bounce buffers, on one "
    "or on several threads; dontcache falls back to buffered where the kernel has none",
)


def ratios_to_best(
    samples: Sequence[Sample], name: str, rivals: Sequence[str]
) -> dict[tuple[str, int], float]:
    """Give the median over rounds of a contender's speed by the best rival's in the same round.

    Keyed by operation and size; a round without all rivals does not count.
    """
    speeds = {(s.operation, s.block_nbytes, s.round, s.contender): s.bytes_per_s for s in samples}
    found: dict[tuple[str, int], list[float]] = {}
    for (operation, nbytes, index, contender), speed in speeds.items():
        others = [speeds.get((operation, nbytes, index, rival)) for rival in rivals]
        known = [other for other in others if other is not None]
        if contender == name and len(known) == len(rivals):
            found.setdefault((operation, nbytes), []).append(speed / max(known))
    return {key: median(values) for key, values in found.items()}


def crossover(by_size: Mapping[int, float]) -> int | None:
    """Give the smallest size from which on every ratio is above 1."""
    best = None
    for nbytes, ratio in sorted(by_size.items(), reverse=True):
        if ratio <= 1:
            break
        best = nbytes
    return best


def _findings(samples: Sequence[Sample]) -> list[str]:
    found = []
    direct = ratios_to_best(samples, "direct", ("buffered",))
    for operation in OPERATIONS:
        by_size = {nbytes: ratio for (op, nbytes), ratio in direct.items() if op == operation}
        start = crossover(by_size)
        if by_size:
            where = (
                f"from {size_text(start)} on" if start is not None else "at no size up to the end"
            )
            found.append(f"{operation}: direct is faster than buffered {where}")
    for name, rivals, bar in (
        ("hybrid", _BEST, _WITHIN),
        (CALIBRATED, _BEST, _WITHIN),
        ("unaligned 1 thread", ("direct",), _UNALIGNED),
        ("unaligned", ("direct",), _UNALIGNED),
    ):
        ratios = ratios_to_best(samples, name, rivals)
        short = [
            f"{operation} {size_text(nbytes)}: {ratio:.2f}"
            for (operation, nbytes), ratio in ratios.items()
            if ratio < bar and operation in (WRITE, COLD, HOT)
        ]
        if ratios:
            whose = "the better of buffered and direct" if rivals == _BEST else "aligned direct"
            told = "holds" if not short else f"misses at {', '.join(short)}"
            found.append(f"{name} at least {bar:.2f} of {whose}: {told}")
    return found


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    contenders = [name for name in LANES if any(s.contender == name for s in summaries)]
    sizes = sorted({s.block_nbytes for s in summaries})
    hybrid = ratios_to_best(samples, "hybrid", _BEST)
    calibrated = ratios_to_best(samples, CALIBRATED, _BEST)
    tables = []
    for operation in OPERATIONS:
        speeds = {
            (s.contender, s.block_nbytes): f"{s.bytes_per_s / 1e6:.0f}"
            for s in summaries
            if s.operation == operation
        }
        headings = ("size", *contenders, "hybrid / best", "calibrated / best")
        rows = [
            (
                size_text(nbytes),
                *(speeds.get((name, nbytes), "") for name in contenders),
                _ratio(hybrid.get((operation, nbytes))),
                _ratio(calibrated.get((operation, nbytes))),
            )
            for nbytes in sizes
        ]
        tables.append(
            Table(
                title=f"{operation}, MB/s",
                headings=headings,
                rows=rows,
                right=frozenset(headings),
            )
        )
    return tables


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
