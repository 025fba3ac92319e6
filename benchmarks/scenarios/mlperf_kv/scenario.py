"""MLCommons' KV-cache benchmark on its own storage tier, and on kvio's backends.

A trial is the unmodified program for some seconds: users whose entries all go to the storage tier,
written and read as fast as it takes them, durable and cold on both sides. What is compared is what
the program reports. Before that one trace goes through every contender, byte by byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import kvio
from benchmarks.harness import page_cache
from benchmarks.harness.columns import (
    CONTENDER,
    ROUNDS,
    Column,
    fact,
    median_of,
    number,
    table_of,
)
from benchmarks.harness.intervals import interval
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Look, Panel, Point, draw_panels
from benchmarks.harness.run import (
    Limits,
    Run,
    Scenario,
    check_least,
    check_names,
    check_room,
    fresh_directory,
)
from benchmarks.harness.table import Table
from kvio import ConfigError, GiB, KiB, MiB, UnsupportedError
from kvio.connectors.mlperf_kv.program import SCRIPT

#: Where the program is, unless an argument says.
PROGRAM: Final = "KVIO_MLPERF_KV"
STOCK: Final = "stock"
BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
CONTENDERS: Final = (STOCK, *BACKENDS)

#: Operations: what one trial reports.
TIER: Final = "storage tier"
READ: Final = "read p95"
WRITE: Final = "write p95"
TRACE: Final = "trace"

_MODEL: Final = "tiny-1b"
_TOKEN_BYTES: Final = 24 * KiB
#: Users ask again after so long, whether they were answered or not: there is always work.
_THINK_S: Final = 0.05
#: Beyond the seconds of the trial: the program makes its noise first, and joins its threads.
_GRACE_S: Final = 120.0
_REPOSITORY: Final = str(Path(__file__).resolve().parents[3])
#: Numerical libraries start one thread per processor, and use none.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _time(sample: Sample) -> float:
    return sample.wall_s


def _claims() -> Iterator[Claim]:
    pairs = [(name, STOCK) for name in BACKENDS]
    yield Claim(
        text="the storage tier moves more bytes a second than stock's",
        pairs=pairs,
        at_least=1.0,
        operations=[TIER],
    )
    yield Claim(
        text="hybrid moves 1.5 times the bytes a second of stock's",
        pairs=[("hybrid", STOCK)],
        at_least=1.5,
        operations=[TIER],
    )
    for operation in (READ, WRITE):
        yield Claim(
            text=f"{operation} is less than stock's",
            pairs=pairs,
            at_most=1.0,
            operations=[operation],
            value=_time,
        )


SCENARIO: Final = Scenario(
    name="mlperf_kv",
    title="MLPerf KV-cache benchmark: kvio's backends beside the program's own storage tier",
    reference=STOCK,
    contenders=CONTENDERS,
    claims=tuple(_claims()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the program is asked to do, the same for every contender.

    Attributes:
        users: threads that process requests.
        tokens: least and most of a prompt; 24 KiB each.
        duration_s: of a trial, whole seconds.
        storage_bytes: capacity of the storage tier; older entries are evicted.
        seed: of the first round; the others count on.
    """

    users: int
    tokens: tuple[int, int]
    duration_s: int
    storage_bytes: int
    seed: int = 1

    def __str__(self) -> str:
        low, high = (count * _TOKEN_BYTES // MiB for count in self.tokens)
        return f"{self.users} users, entries of up to {low} to {high} MiB"

    @property
    def entry_nbytes(self) -> int:
        """The size by which throughput is counted: that of the middle of the range."""
        return sum(self.tokens) // 2 * _TOKEN_BYTES

    def arguments(self, index: int) -> list[str]:
        """Return the program's arguments for a round."""
        return [
            *("--model", _MODEL),
            *("--num-users", f"{self.users}"),
            *("--duration", f"{self.duration_s}"),
            *("--gpu-mem-gb", "0", "--cpu-mem-gb", "0"),
            *("--storage-capacity-gb", f"{self.storage_bytes / GiB:.3f}"),
            *("--generation-mode", "none", "--log-level", "WARNING"),
            *("--seed", f"{self.seed + index}"),
        ]

    def configuration(self) -> dict[str, Any]:
        """Return the program's configuration: one kind of user, and no pauses."""
        template = {
            "context_range": list(self.tokens),
            "generation_range": [50, 200],
            "think_time_range": [_THINK_S, _THINK_S],
        }
        return {"user_templates": dict.fromkeys(("chatbot", "coding", "document"), template)}


def run(
    limits: Limits,
    *,
    program: Path | None = None,
    contenders: Sequence[str] | None = None,
    users: int = 4,
    tokens: tuple[int, int] = (512, 2048),
    duration_s: int = 10,
) -> int:
    """Run the program on every contender, and print, write and plot what it reports.

    Args:
        limits: where, and how much; ``max_bytes`` is the capacity of the storage tier.
        program: its folder; None: the environment variable ``KVIO_MLPERF_KV`` names it.
        contenders: names of `CONTENDERS`; None: all. Stock's always takes part.
        users: of the program, a thread each.
        tokens: least and most of a prompt.
        duration_s: of a trial.

    Returns:
        The exit status: 0; 1 if a byte differed or a trial failed; 2 if nothing was measured; 130
        after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        UnsupportedError: the program is not here.
    """
    folder = _folder(program)
    wanted = list(CONTENDERS if contenders is None else contenders)
    check_names("contender", wanted, CONTENDERS)
    check_least(users=users, duration_s=duration_s, tokens=tokens[0])
    if tokens[1] < tokens[0]:
        raise ConfigError(f"tokens: {tokens[1]} is less than {tokens[0]}")
    load = Load(users=users, tokens=tokens, duration_s=duration_s, storage_bytes=limits.max_bytes)
    check_room(limits.root, 0 if limits.loop else 2 * limits.max_bytes)
    names = [name for name in CONTENDERS if name == STOCK or name in wanted]
    this = Run(SCENARIO, limits, {**asdict(load), "program": str(folder), "contenders": names})
    with this.workplace() as base:
        trust = _must_trust(base)
        trials = Trials(base, folder, load, this.failed, trust_fsync=trust)
        this.take_trials([load], names, trials.take)
        notes = [*_notes(load), *([_IN_MEMORY] if trust else [])]
        return this.finish(notes, tables, partial(draw, samples=this.samples))


def _folder(program: Path | None) -> Path:
    given = program or os.environ.get(PROGRAM)
    if not given:
        raise UnsupportedError(
            "needs MLCommons' KV-cache benchmark: --program, or "
            f"{PROGRAM}, names the folder kv_cache_benchmark of a clone of "
            "https://github.com/mlcommons/storage"
        )
    folder = Path(given).resolve()
    if not (folder / SCRIPT).is_file():
        raise ConfigError(f"{folder}: there is no {SCRIPT}")
    return folder


def _must_trust(base: Path) -> bool:
    """Return whether a durable store opens only where fsync is trusted, as in memory."""
    with fresh_directory(base) as root:
        try:
            kvio.open_store("hybrid", root=root / "kv", create=True, durability="durable").close()
        except UnsupportedError:
            return True
    return False


# ---- trials ----


class TrialFailedError(Exception):
    """The program failed, or reported nothing."""


class Trials:
    """What the trials of a run share.

    Args:
        base: an empty directory on the file system.
        program: the program's folder.
        load: what it is asked to do.
        failed: where trials that yielded no numbers, or other bytes, are noted.
        trust_fsync: of the stores.
    """

    def __init__(
        self, base: Path, program: Path, load: Load, failed: list[str], *, trust_fsync: bool
    ) -> None:
        self._base = base
        self._program = program
        self._load = load
        self._failed = failed
        self._trust_fsync = trust_fsync
        self._expected: dict[str, Any] | None = None
        self._memory = memoryview(bytearray(min(load.storage_bytes, 512 * MiB)))

    def take(self, load: Load, name: str, index: int) -> Iterator[Sample]:
        """Yield a sample of each operation; a trial that fails is noted and yields none."""
        try:
            if index == 0:
                yield self._traced(load, name)
            yield from self._measured(load, name, index)
        except (TrialFailedError, subprocess.TimeoutExpired) as exc:
            self._failed.append(f"FAILED: {name}, round {index + 1}: {exc}")

    def _traced(self, load: Load, name: str) -> Sample:
        expected = self._expect()
        start = time.perf_counter()
        found = expected if name == STOCK else self._trace(name)
        wall_s = time.perf_counter() - start
        if found != expected:
            self._failed.append(f"DIFFERENT: {name}: read {found}, stock {expected}")
        intact = found == expected and not found["wrong"]
        return _sample(load, name, TRACE, 0, wall_s=wall_s, intact=intact, facts=found)

    def _expect(self) -> dict[str, Any]:
        if self._expected is None:
            self._expected = self._trace(STOCK)
        return self._expected

    def _trace(self, name: str) -> dict[str, Any]:
        with fresh_directory(self._base) as root:
            command = [
                *("-m", "benchmarks.scenarios.mlperf_kv.trace", "--program", str(self._program)),
                *("--tier", name, "--root", str(root / "kv")),
                *(["--trust-fsync"] if self._trust_fsync else []),
            ]
            found: dict[str, Any] = json.loads(self._python(command).splitlines()[-1])
            return found

    def _measured(self, load: Load, name: str, index: int) -> Iterator[Sample]:
        with fresh_directory(self._base) as root, self._configured(load) as configuration:
            page_cache.touch_memory(self._base / "touched", self._memory)
            (self._base / "touched").unlink()
            os.sync()
            output = root / "results.json"
            arguments = [
                *load.arguments(index),
                *("--config", str(configuration), "--output", str(output)),
            ]
            before = os.times()
            printed = self._python(self._command(name, root, arguments))
            after = os.times()
            if not output.is_file():
                raise TrialFailedError(f"no results: {printed[-300:]}")
            summary = json.loads(output.read_text()).get("summary", {})
        cpu_s = sum(after[2:4]) - sum(before[2:4])
        yield from _samples(load, name, index, summary, cpu_s)

    def _command(self, name: str, root: Path, arguments: list[str]) -> list[str]:
        """Return what runs the program: its own script, or kvio's connector."""
        if name == STOCK:
            script = str(self._program / SCRIPT)
            return [script, *arguments, "--cache-dir", str(root / "cache")]
        options = "&trust_fsync=true" if self._trust_fsync else ""
        store = f"{name}://{root}/kv?create=true&durability=durable{options}"
        return [
            *("-m", "kvio.connectors.mlperf_kv", "--program", str(self._program)),
            *("--store", store, "--", *arguments),
        ]

    @contextmanager
    def _configured(self, load: Load) -> Iterator[Path]:
        """Write the configuration; the program reads YAML, of which JSON is a part."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=self._base) as file:
            json.dump(load.configuration(), file)
            file.flush()
            yield Path(file.name)

    def _python(self, command: Sequence[str]) -> str:
        """Run a Python program to its end and return what it printed."""
        path = os.pathsep.join(filter(None, (_REPOSITORY, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self._base,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=self._load.duration_s + _GRACE_S,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
            raise TrialFailedError(f"exit status {done.returncode}: {lines[-1].strip()[:300]}")
        return done.stdout


def _sample(
    load: Load,
    name: str,
    operation: str,
    index: int,
    *,
    wall_s: float,
    intact: bool | None = None,
    facts: dict[str, Any],
) -> Sample:
    return Sample(
        subject=str(load),
        block_nbytes=load.entry_nbytes,
        contender=name,
        checksum=name != STOCK,
        operation=operation,
        round=index,
        wall_s=wall_s,
        latencies_s=[wall_s],
        intact=intact,
        facts=facts,
    )


def _samples(
    load: Load, name: str, index: int, summary: dict[str, Any], cpu_s: float
) -> Iterator[Sample]:
    """Yield what the program reports of one trial."""
    stats = summary.get("cache_stats", {})
    if "storage_read_p95_ms" not in stats or "storage_write_p95_ms" not in stats:
        raise TrialFailedError("the program reports no reads and writes of its storage tier")
    gib_read = stats["tier_storage_kv_bytes_read_gb"]
    gib_written = stats["tier_storage_kv_bytes_written_gb"]
    moved_bytes = (gib_read + gib_written) * GiB
    elapsed_s = summary["elapsed_time"]
    facts = {
        "elapsed_s": elapsed_s,
        "gib_read": gib_read,
        "gib_written": gib_written,
        "gib_per_s": moved_bytes / GiB / elapsed_s,
        "tokens_per_s": summary["avg_throughput_tokens_per_sec"],
        "storage_tokens_per_s": summary["storage_throughput_tokens_per_sec"],
        "requests": summary["total_requests"],
        "cpu_s_per_gib": cpu_s / (moved_bytes / GiB),
    }
    entry_s = elapsed_s * load.entry_nbytes / moved_bytes
    yield _sample(load, name, TIER, index, wall_s=entry_s, facts=facts)
    for operation, verb in ((READ, "read"), (WRITE, "write")):
        found = {
            f"{part}{at}_ms": stats.get(f"storage_{verb}_{part}{at}_ms")
            for part in ("", "device_", "host_")
            for at in ("p50", "p95", "p99")
        }
        p95_s = stats[f"storage_{verb}_p95_ms"] / 1e3
        yield _sample(load, name, operation, index, wall_s=p95_s, facts=found)


# ---- what was found ----

_IN_MEMORY: Final = (
    "fsync reaches no disk here (trust_fsync=true): both sides ask for it all the same, and what "
    "is compared is the work, not the wait for a device"
)


def _notes(load: Load) -> list[str]:
    return [
        "every trial is the unmodified program in a fresh directory: with its own storage tier, or "
        "by python -m kvio.connectors.mlperf_kv; rounds have seeds of their own, the same for all",
        f"{load.users} users for {load.duration_s} s, model {_MODEL}, no GPU or CPU tier, no "
        "pauses: the storage tier has always work; requests are drawn by threads, so no two "
        "trials are quite alike",
        "durable on both sides: stock syncs the file of every entry, kvio file and directory; "
        "cold on both sides: pages are dropped before each read, within its time",
        "bytes a second: of the storage tier, read and written, by the program's elapsed time; "
        "ratios of p95 are of times, so less is better",
        "device and host: stock's device is fsync, or np.load; kvio's is the call of the store, "
        "with its checksum; only totals compare",
        "CPU s/GiB: of the whole process, its start and its generator of entries included",
        "bytes: one seeded trace through the program's own cache, on every contender, each entry "
        "compared with what was written and the digest of all with stock's",
    ]


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table of the tier, and one of its latencies each."""
    left = ("contender",)
    tier: dict[str, Column] = {
        "contender": CONTENDER,
        "rounds": ROUNDS,
        "GiB/s": fact("gib_per_s"),
        f"/ {STOCK}": _ratio(samples, [TIER], lambda s: 1 / s.wall_s),
        "tokens/s": fact("tokens_per_s", ".0f"),
        f"tokens/s / {STOCK}": _ratio(samples, [TIER], lambda s: float(s.facts["tokens_per_s"])),
        "GiB written": fact("gib_written"),
        "GiB read": fact("gib_read"),
        "CPU s/GiB": fact("cpu_s_per_gib"),
    }
    latencies: dict[str, Column] = {
        "contender": CONTENDER,
        "rounds": ROUNDS,
        "p50 ms": fact("p50_ms", ".1f"),
        "p95 ms": fact("p95_ms", ".1f"),
        "p99 ms": fact("p99_ms", ".1f"),
        f"p95 / {STOCK}": _ratio(samples, [READ, WRITE], _time),
        "device p95 ms": fact("device_p95_ms", ".1f"),
        "host p95 ms": fact("host_p95_ms", ".1f"),
    }
    trace: dict[str, Column] = {
        "contender": CONTENDER,
        "writes": fact("writes", ".0f"),
        "reads": fact("reads", ".0f"),
        "deletes": fact("deletes", ".0f"),
        "wrong": fact("wrong", ".0f"),
        "equal to stock's": lambda _, own: (
            number(median_of(own, lambda s: float(bool(s.intact))), ".0f")
            .replace("1", "yes")
            .replace("0", "NO")
        ),
    }
    titles = {
        TIER: (f"storage tier, {summaries[0].subject}", tier),
        READ: ("reads of an entry", latencies),
        WRITE: ("writes of an entry", latencies),
        TRACE: ("one trace, every byte compared", trace),
    }
    return [
        table_of(title, own, samples, columns, left=left)
        for operation, (title, columns) in titles.items()
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _ratio(
    samples: Sequence[Sample], operations: Sequence[str], value: Callable[[Sample], float]
) -> Column:
    """Return a column with a value by that of stock's in the same round."""
    theirs = {
        (s.operation, s.round): value(s)
        for s in samples
        if s.contender == STOCK and s.operation in operations
    }

    def column(_: Summary, own: Sequence[Sample]) -> str:
        ratios = [value(s) / theirs[key] for s in own if theirs.get(key := (s.operation, s.round))]
        if not ratios:
            return ""
        found = interval(ratios)
        return str(found) if found.is_bounded else f"{found.median:.2f}"

    return column


_LOOKS: Final = {
    STOCK: Look("#7f7f7f"),
    "posix-tmpfile": Look("#1f77b4"),
    "posix-direct": Look("#ff7f0e"),
    "hybrid": Look("#2ca02c"),
}


def _gib_per_s(sample: Sample) -> float:
    return float(sample.facts["gib_per_s"])


def _milliseconds(sample: Sample) -> float:
    return sample.wall_s * 1e3


#: The panels of the plot: an operation, its title, and what is drawn.
_PANELS: Final[tuple[tuple[str, str, str, Callable[[Sample], float]], ...]] = (
    (TIER, "storage tier", "GiB/s", _gib_per_s),
    (READ, "reads", "p95, ms (less is better)", _milliseconds),
    (WRITE, "writes", "p95, ms (less is better)", _milliseconds),
)


def draw(summaries: Sequence[Summary], *, samples: Sequence[Sample], **where: Any) -> str | None:
    """Draw a panel per operation."""
    panels = []
    for operation, title, unit, value in _PANELS:
        points: dict[str, list[Point]] = {}
        for name in CONTENDERS:
            found = [value(s) for s in samples if (s.operation, s.contender) == (operation, name)]
            if found:
                point = Point(summaries[0].subject, median(found), min(found), max(found))
                points[name] = [point]
        if points:
            panels.append(Panel(title=title, unit=unit, points=points))
    return draw_panels(panels, looks=_LOOKS, **where)
