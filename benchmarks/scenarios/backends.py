"""Compare the POSIX backends with each other and with plain Python on this machine.

Blocks have the KV-cache shapes of real models. Every contender in turn writes, reads hot and reads
cold; synchronising, filling and emptying the page cache and comparing every byte happen outside
what is timed.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import kvio
from benchmarks.harness import columns, page_cache
from benchmarks.harness.blocks import Arena, Block, is_same
from benchmarks.harness.columns import Column, table_of
from benchmarks.harness.intervals import interval
from benchmarks.harness.measure import COLD, HOT, WRITE, Sample, Summary, Timed, time_calls
from benchmarks.harness.plot import draw_bars, size_text
from benchmarks.harness.run import (
    Limits,
    Run,
    Scenario,
    check_least,
    check_names,
    check_room,
    fresh_directory,
)
from benchmarks.harness.shapes import SHAPES, TOKENS_PER_BLOCK, ModelShape
from benchmarks.harness.table import Table
from kvio import UnsupportedError
from kvio.types import Durability

PLAIN: Final = "plain Python"
BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
#: From the smallest to the largest block.
DEFAULT_MODELS: Final = ("gpt-oss-120b", "Llama-3.1-8B", "Llama-3.1-70B")
_SEED: Final = 20260101
_OPERATIONS: Final = (WRITE, HOT, COLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared with what, and how much of it.

    Attributes:
        max_bytes: payload bytes of one contender's trial; at least one block is taken.
    """

    shapes: Sequence[ModelShape]
    entries: Sequence[Entry]
    tokens: int
    max_bytes: int
    threads: int
    durability: Durability

    def blocks_of(self, shape: ModelShape) -> int:
        """Count the blocks of one trial."""
        return max(1, min(64, self.max_bytes // shape.block_nbytes(self.tokens)))

    def arena_nbytes(self) -> int:
        """Count the bytes of the largest trial."""
        return max(self.blocks_of(s) * s.block_nbytes(self.tokens) for s in self.shapes)


def run(
    limits: Limits,
    *,
    models: Sequence[str] = DEFAULT_MODELS,
    backends: Sequence[str] = BACKENDS,
    tokens: int = TOKENS_PER_BLOCK,
    checksum: str = "both",
    durability: Durability = "visible",
    threads: int = 1,
) -> int:
    """Run the comparison, print its tables and write them down.

    Args:
        limits: where, and how much.
        models: names of `SHAPES`.
        backends: names of `BACKENDS`.
        tokens: per block.
        checksum: of kvio's blocks: ``on``, ``off`` or ``both``.
        durability: of every write.
        threads: concurrent callers.

    Returns:
        The exit status: 0; 1 if a byte differed; 130 after Ctrl-C, which keeps what was measured
        until then.

    Raises:
        ConfigError: an unknown name, a number below 1, or too little space.
    """
    check_names("model", models, SHAPES)
    check_names("backend", backends, BACKENDS)
    check_names("checksum", [checksum], ("on", "off", "both"))
    check_names("durability", [durability], ("visible", "durable"))
    check_least(tokens=tokens, threads=threads)
    plan = Plan(
        shapes=[SHAPES[name] for name in models],
        entries=entries(backends, checksum),
        tokens=tokens,
        max_bytes=limits.max_bytes,
        threads=threads,
        durability=durability,
    )
    check_room(limits.root, 2 * plan.arena_nbytes(), 2 * plan.arena_nbytes())
    names = [entry.name for entry in plan.entries]
    scenario = Scenario(
        name="backends",
        title=f"POSIX backends: KV blocks of {tokens} tokens, {durability}",
        reference=PLAIN,
        contenders=names,
    )
    options = {"models": list(models), "backends": list(backends), "tokens": tokens}
    options |= {"checksum": checksum, "durability": durability, "threads": threads}
    this = Run(scenario, limits, {**options, "shapes": [asdict(shape) for shape in plan.shapes]})
    with this.workplace() as base:
        if this.file_system is not None and this.file_system.is_memory:
            kind = this.file_system.kind
            sys.stderr.write(f"warning: {limits.root} is on {kind}: this measures memory\n")
        trials = _Trials(plan, base)
        this.take_trials(plan.shapes, names, trials.take)
        return this.finish(
            _notes(plan, this.samples),
            partial(_tables, plan),
            _draw,
            details=_details,
            conclusions=_sentences(plan, this.samples),
        )


# ---- contenders ----


class Taken(NamedTuple):
    """The I/O mode of one write and why it was taken."""

    mode: str
    reason: str


class Contender(Protocol):
    """Writes and reads blocks of several pieces below one directory."""

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        """Store a block of these pieces."""

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        """Fill the pieces from a block and count the bytes."""

    def modes(self) -> Counter[str]:
        """Count blocks by the I/O mode so far."""

    def close(self) -> None:
        """Release what is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender before it is opened; *backend* None is plain Python."""

    backend: str | None
    checksum: bool

    @property
    def name(self) -> str:
        """The name in tables."""
        if self.backend is None:
            return PLAIN
        return self.backend if self.checksum else f"{self.backend}, no checksum"

    def open(self, root: Path, durability: Durability) -> Contender:
        """Open it on an empty directory.

        Raises:
            KvioError: the file system cannot do it; says why.
        """
        if self.backend is None:
            return _PlainPython(root, durability)
        return _Kvio(self.backend, root, durability, checksum=self.checksum)


def entries(backends: Sequence[str], checksum: str) -> list[Entry]:
    """List plain Python and each backend with checksums ``on``, ``off`` or ``both``."""
    wanted = {"on": (True,), "off": (False,), "both": (True, False)}[checksum]
    plain = Entry(backend=None, checksum=False)
    return [plain, *(Entry(backend=b, checksum=c) for b in backends for c in wanted)]


class _PlainPython:
    """open, write, os.replace; open, readinto: no checksum, no sweep, no exclusive create."""

    def __init__(self, root: Path, durability: Durability) -> None:
        self._root = os.fspath(root)
        self._durable = durability == "durable"
        self._modes: Counter[str] = Counter()

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        path = os.path.join(self._root, key)
        with open(f"{path}.tmp", "wb") as file:
            for piece in pieces:
                file.write(piece)
            if self._durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
        if self._durable:
            self._sync_directory()
        return Taken("buffered", "open, write, os.replace")

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        done = 0
        with open(os.path.join(self._root, key), "rb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view.nbytes and (got := file.readinto(view)):
                    view = view[got:]
                    done += got
        self._modes["buffered"] += 1
        return done

    def modes(self) -> Counter[str]:
        return self._modes.copy()

    def close(self) -> None:
        pass

    def _sync_directory(self) -> None:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Kvio:
    """One call of the public interface per block."""

    def __init__(self, backend: str, root: Path, durability: Durability, *, checksum: bool) -> None:
        options = None if checksum else {"checksum": "none", "verify": "length"}
        self._store = kvio.open_store(backend, root=root, durability=durability, options=options)

    def write(self, key: str, pieces: Sequence[Any]) -> Taken:
        receipt = self._store.write_block(key, pieces)
        return Taken(str(receipt.mode), receipt.reason)

    def read(self, key: str, pieces: Sequence[Any]) -> int:
        return self._store.read_block_into(key, pieces)

    def modes(self) -> Counter[str]:
        return Counter(self._store.stats().modes)

    def close(self) -> None:
        self._store.close()


# ---- trials ----


class _Trials:
    """What the trials of a run share; each yields a sample per operation."""

    def __init__(self, plan: Plan, base: Path) -> None:
        self._plan, self._base = plan, base
        self._source, self._target = Arena(plan.arena_nbytes()), Arena(plan.arena_nbytes())
        self._source.fill_random(_SEED)
        self._entries = {entry.name: entry for entry in plan.entries}

    def take(self, shape: ModelShape, name: str, index: int) -> Iterator[Sample]:
        """Store blocks in a fresh directory and read them back."""
        plan = self._plan
        cut = partial(
            Arena.cut,
            blocks=plan.blocks_of(shape),
            pieces=shape.pieces(),
            piece_nbytes=shape.piece_nbytes(plan.tokens),
        )
        with fresh_directory(self._base) as root:
            try:
                yield from self._take(
                    self._entries[name], shape, index, cut(self._source), cut(self._target), root
                )
            except UnsupportedError as exc:
                raise UnsupportedError(str(exc).replace(str(self._base), "…")) from exc

    def _take(
        self,
        entry: Entry,
        shape: ModelShape,
        index: int,
        blocks: list[Block],
        copies: list[Block],
        root: Path,
    ) -> Iterator[Sample]:
        plan = self._plan
        sample = partial(
            Sample,
            subject=shape.name,
            block_nbytes=shape.block_nbytes(plan.tokens),
            contender=entry.name,
            checksum=entry.checksum,
            round=index,
        )
        with closing(entry.open(root, plan.durability)) as contender:
            writes = [partial(contender.write, block.key, block.pieces) for block in blocks]
            timed = time_calls(writes, plan.threads)
            yield sample(
                operation=WRITE,
                wall_s=timed.wall_s,
                latencies_s=timed.latencies_s,
                modes=dict(Counter(taken.mode for taken in timed.results)),
                reasons=list(dict.fromkeys(taken.reason for taken in timed.results)),
            )
            for operation in (HOT, COLD):
                page_cache.drop(root)
                if operation == HOT:
                    page_cache.warm(root)
                self._target.wipe()
                cached = page_cache.cached_fraction(root)
                before = contender.modes()
                reads = [partial(contender.read, copy.key, copy.pieces) for copy in copies]
                got = time_calls(reads, plan.threads)
                yield sample(
                    operation=operation,
                    wall_s=got.wall_s,
                    latencies_s=got.latencies_s,
                    modes=dict(contender.modes() - before),
                    cached_before=cached,
                    intact=_intact(blocks, copies, got),
                )


def _intact(blocks: list[Block], copies: list[Block], timed: Timed[int]) -> bool:
    nbytes = sum(piece.nbytes for piece in blocks[0].pieces)
    whole = all(got == nbytes for got in timed.results)
    return whole and all(map(is_same, blocks, copies))


# ---- what was found ----


def _notes(plan: Plan, samples: Sequence[Sample]) -> list[str]:
    notes = [
        f"one block per call, {plan.threads} caller{'s' * (plan.threads > 1)}, source and target "
        "memory page-aligned; synchronised and compared byte for byte outside what is timed",
        "plain Python: open, write, os.replace and open, readinto; no checksum, no key, no "
        "exclusive create. kvio 'no checksum': trailer only",
        "p99 by nearest rank: the slowest call where there were fewer than 100",
    ]
    for operation, state in ((HOT, "hot"), (COLD, "cold")):
        cached = [s.cached_before for s in samples if s.operation == operation]
        known = [fraction for fraction in cached if fraction is not None]
        share = f"{min(known):.0%} to {max(known):.0%}" if known else "unknown"
        notes.append(f"page cache before {state} reads: {share} of the bytes")
        if state == "cold" and known and max(known) > 0.01:
            notes.append("NOT COMPARABLE: the page cache could not be emptied; 'cold' is not cold")
    return notes


def _tables(plan: Plan, summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation: contenders down, sizes across, as narrow as a terminal."""
    found = {(s.contender, s.subject, s.operation): s for s in summaries}

    def cell(shape: ModelShape) -> Column:
        def write(summary: Summary, _: Sequence[Sample]) -> str:
            one = found.get((summary.contender, shape.name, summary.operation))
            return "" if one is None else _speed_or_ratio(one)

        return write

    across: dict[str, Column] = {
        "contender": lambda s, _: s.contender.removeprefix("posix-"),
        "n": columns.ROUNDS,
    }
    across |= {size_text(shape.block_nbytes(plan.tokens)): cell(shape) for shape in plan.shapes}
    tables = []
    for operation in _OPERATIONS:
        own = {s.contender: s for s in reversed(summaries) if s.operation == operation}
        rows = [own[entry.name] for entry in plan.entries if entry.name in own]
        if rows:
            title = f"{operation}: plain Python in MB/s, the others by it [95 % of medians]"
            made = table_of(title, rows, samples, across)
            tables.append(replace(made, rule_after=frozenset()))
    return tables


def _speed_or_ratio(summary: Summary) -> str:
    if summary.contender == PLAIN or summary.ratio is None:
        return f"{summary.bytes_per_s / 1e6:.0f} MB/s"
    if summary.ratio_low is None:
        return f"{summary.ratio:.2f}"
    return f"{summary.ratio:.2f} [{summary.ratio_low:.2f}-{summary.ratio_high:.2f}]"


def _details(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation with everything that is known of each contender."""
    everything: dict[str, Column] = {
        "model": columns.SUBJECT,
        "block": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "MB/s": columns.SPEED,
        "range": columns.RANGE,
        "calls": lambda s, _: str(s.calls),
        "p50 ms": columns.P50_MS,
        "p99 ms": columns.P99_MS,
        "x plain": columns.RATIO,
        "mode": lambda s, _: columns.mode_text(s) or "not reported",
        "because": lambda s, _: "; ".join(s.reasons),
    }
    left = ("model", "contender", "mode", "because")
    return [
        table_of(f"{operation}, in full", own, samples, everything, left=left)
        for operation in _OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _draw(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw the backends as they are used: with checksums, where both kinds were measured."""
    checked = [s for s in summaries if s.checksum or s.contender == PLAIN]
    return draw_bars(checked if any(s.checksum for s in checked) else summaries, **where)


def _sentences(plan: Plan, samples: Sequence[Sample]) -> list[str]:
    """Return a sentence for each operation: the backend that is the fastest here over all sizes."""
    names = [entry.name for entry in plan.entries if entry.backend is not None]
    sentences = []
    for operation in _OPERATIONS:
        found = {name: ratios for name in names if (ratios := _ratios(samples, name, operation))}
        if not found:
            continue
        best = max(found, key=lambda name: statistics.median(found[name]))
        ratio = interval(found[best])
        if not ratio.is_bounded:
            verdict = "too few rounds to tell"
        elif ratio.low > 1:
            verdict = "faster"
        else:
            verdict = "slower" if ratio.high < 1 else "no difference shown"
        sentences.append(
            f"{operation}: the fastest backend is {best}, at {ratio} times plain Python "
            f"over all sizes ({verdict}, n = {ratio.rounds})."
        )
    return sentences


def _ratios(samples: Sequence[Sample], name: str, operation: str) -> list[float]:
    """List each round's ratio to plain Python, the geometric mean over sizes."""
    speed = {
        (s.contender, s.round, s.block_nbytes): s.bytes_per_s
        for s in samples
        if s.operation == operation
    }
    by_round: dict[int, list[float]] = {}
    for (contender, number, nbytes), value in speed.items():
        plain = speed.get((PLAIN, number, nbytes))
        if contender == name and plain:
            by_round.setdefault(number, []).append(value / plain)
    return [statistics.geometric_mean(ratios) for ratios in by_round.values()]
