"""Write checkpoints by many ranks at the same time: run, trials, claims, tables and plot."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final, Self

import kvio
from benchmarks.harness import columns, page_cache
from benchmarks.harness.columns import Column, median_of, number, samples_of, table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary, percentile
from benchmarks.harness.page_cache import touched_memory
from benchmarks.harness.plot import (
    Look,
    Panel,
    Point,
    draw_panels,
    place_text,
    size_text,
    speed_points,
)
from benchmarks.harness.run import (
    Limits,
    Run,
    Scenario,
    check_least,
    check_names,
    check_room,
)
from benchmarks.harness.table import Table
from benchmarks.harness.workers import Job, Workers, job_of
from benchmarks.scenarios.staging.contenders import (
    ACCEPT,
    CONTENDERS,
    DAEMON,
    DRAIN,
    FILES,
    MEMCPY,
    OPERATIONS,
    READ,
    SAFE,
    TIERS,
    WRITE,
    Daemon,
    JobSpec,
    Rank,
    Window,
    serving,
    steps_of,
    store_of,
    url_of,
)
from kvio import ConfigError, GiB, KiB, MiB, StorageError, UnsupportedError

RANKS: Final = (1, 8, 16)
_STEP: Final = 4 * KiB
#: Blocks of a rank in one trial, at most.
_MOST_BLOCKS: Final = 256
#: Of a trial's bytes: source, target, tier, a memcpy's target, the page cache and scratch.
_COPIES: Final = 6
#: From the command to the start of the clock: every rank has it by then.
_LEAD_S: Final = 0.005
_LEAD_OF_RANK_S: Final = 0.001


def _p99(sample: Sample) -> float:
    return percentile(sample.latencies_s, 99)


def _direct_of(tier: str) -> str:
    """Return the direct I/O of the same durability."""
    return "posix-direct durable" if tier in SAFE else "posix-direct"


_BY_DIRECT: Final = [(tier, _direct_of(tier)) for tier in TIERS]
SCENARIO: Final = Scenario(
    name="staging",
    title="Checkpoints of many ranks: the staging tier, the page cache and the disk",
    reference=MEMCPY,
    contenders=CONTENDERS,
    claims=(
        Claim(
            text="a tier accepts blocks of 1 MiB and more at memcpy's speed",
            pairs=[(tier, MEMCPY) for tier in TIERS],
            at_least=0.85,
            operations=[ACCEPT],
            where=lambda sample: sample.block_nbytes >= MiB,
        ),
        Claim(
            text="a drain is as fast as the backend written directly",
            pairs=[(tier, store_of(tier)) for tier in TIERS],
            at_least=0.95,
            operations=[DRAIN],
        ),
        Claim(
            text="p99 of accept is a tenth of that of direct writes (time)",
            pairs=_BY_DIRECT,
            at_most=0.1,
            operations=[ACCEPT],
            rival_operation=WRITE,
            value=_p99,
        ),
        Claim(
            text="p99 of writes while drains run is a tenth of that of direct writes (time)",
            pairs=_BY_DIRECT,
            at_most=0.1,
            operations=[WRITE],
            value=_p99,
        ),
        Claim(
            text="staged blocks are read at memcpy's speed",
            pairs=[(tier, MEMCPY) for tier in TIERS],
            at_least=0.85,
            operations=[READ],
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """So many ranks write *count* blocks of *nbytes* each, one after the other."""

    ranks: int
    nbytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.subject}, {size_text(self.nbytes)}"

    @property
    def subject(self) -> str:
        """Name the number of ranks."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def total_bytes(self) -> int:
        """Count what all ranks write in one operation."""
        return self.ranks * self.count * self.nbytes

    @classmethod
    def within(cls, max_bytes: int, *, ranks: int, nbytes: int) -> Self:
        """Return as many blocks as a trial may write, and one at least."""
        return cls(ranks, nbytes, max(1, min(_MOST_BLOCKS, max_bytes // (ranks * nbytes))))


def run(
    limits: Limits,
    *,
    ranks: Sequence[int] | None = None,
    sizes: Sequence[int] = (MiB, 8 * MiB),
    contenders: Sequence[str] | None = None,
    drain_threads: int = 2,
    checksum: bool = True,
) -> int:
    """Run the scenario, print its tables and write them down.

    Args:
        limits: where, and how much of it; ``max_bytes`` is a checkpoint of all ranks, which fits
            their tiers.
        ranks: processes that write at the same time, a case each; None: 1, 8 and 16, or under
            mpirun those of them that the job has, and all.
        sizes: of a block, in bytes; multiples of 4 KiB.
        contenders: of `CONTENDERS`; None: all.
        drain_threads: of each tier, and of the writes that its drain is compared with.
        checksum: of kvio's blocks, staged and stored.

    Returns:
        0; 1 if a byte differed, or a rank failed or died; 2 if nothing could be measured; 130
        after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    with job_of(Rank) as job:
        if job.follows:
            job.serve()
            return 0
        counts = job.counts(ranks, RANKS)
        _check(limits, counts, sizes, names, drain_threads)
        cases = [
            Case.within(limits.max_bytes, ranks=count, nbytes=nbytes)
            for count, nbytes in product(counts, sizes)
        ]
        most = max(case.total_bytes for case in cases)
        check_room(limits.root, 3 * most, _COPIES * most)
        options = {
            "cases": [asdict(case) for case in cases],
            "contenders": names,
            "drain_threads": drain_threads,
            "checksum": checksum,
            "mpi_ranks": job.size,
        }
        this = Run(SCENARIO, limits, options)
        with this.workplace() as base:
            trials = _Trials(base, job, cases, drain_threads=drain_threads, checksum=checksum)
            try:
                this.take_trials(cases, names, trials.take)
            finally:
                trials.close()
            this.failed += trials.lost
            return this.finish(
                _notes(cases, limits, drain_threads, job), _tables, _Draw(this.samples)
            )


def _check(
    limits: Limits,
    ranks: Sequence[int],
    sizes: Sequence[int],
    names: Sequence[str],
    drain_threads: int,
) -> None:
    check_names("contender", names, CONTENDERS)
    check_names("ranks", ranks, ranks)
    check_names("sizes", sizes, sizes)
    least = {"max_bytes": limits.max_bytes, "max_rounds": limits.max_rounds}
    check_least(**least, drain_threads=drain_threads, ranks=min(ranks))
    wrong = [nbytes for nbytes in sizes if nbytes < _STEP or nbytes % _STEP]
    if wrong:
        raise ConfigError(f"sizes must be multiples of 4 KiB, not {wrong[0]}")


# ---- trials ----


class _Trials:
    """What the trials of a run share.

    Args:
        base: an empty directory.
        job: starts the ranks.

    Attributes:
        lost: trials that ended early because a rank failed or died.
    """

    def __init__(
        self, base: Path, job: Job, cases: Sequence[Case], *, drain_threads: int, checksum: bool
    ) -> None:
        self.lost: list[str] = []
        self._base = base
        self._job = job
        self._ranks = max(case.ranks for case in cases)
        self._workers: Workers | None = None
        self._drain_threads = drain_threads
        self._checksum = checksum
        self._emptied: set[str] = set()
        self._memory = touched_memory(max(MiB, *(case.total_bytes for case in cases)))
        self._roots = {kind: base / kind for kind in ("blocks", "files")}
        for root in self._roots.values():
            root.mkdir(mode=0o700)
        with suppress(UnsupportedError):  # a durable store makes every directory when it opens
            blocks = self._roots["blocks"]
            kvio.open_store("posix-tmpfile", root=blocks, durability="durable").close()

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take all operations of a contender, a sample each.

        Raises:
            UnsupportedError: the file system cannot do it, or a rank failed or died.
        """
        if self._workers is None:
            self._workers = self._job.workers(self._ranks)
        root = self._roots["files" if name in FILES else "blocks"]
        try:
            scratch = self._memory[: max(MiB, case.total_bytes)]
            page_cache.touch_memory(self._base / "scratch", scratch)
            with self._daemon(case, name, root) as daemon:
                socket = daemon.socket if daemon else None
                self._workers.ask(self._opens(case, name, index, root, socket))
                for operation in steps_of(name):
                    yield self._measure(self._workers, case, name, index, operation, daemon)
                self._workers.ask([{"do": "close"}] * case.ranks)
        except UnsupportedError as exc:
            raise UnsupportedError(str(exc).replace(str(self._base), "…")) from exc
        except StorageError as exc:
            self.lost.append(f"LOST: {name}, {case}, round {index + 1}: {exc}")
            self.close()
            raise UnsupportedError(f"{exc} ({case}, round {index + 1})") from exc
        finally:
            self._empty(root)

    def _daemon(self, case: Case, name: str, root: Path) -> AbstractContextManager[Daemon | None]:
        if name != DAEMON:
            return nullcontext()
        url = url_of(TIERS[name], str(root), checksum=self._checksum)
        threads = case.ranks * self._drain_threads
        return serving(url, capacity_bytes=case.total_bytes, drain_threads=threads)

    def _opens(
        self, case: Case, name: str, index: int, root: Path, socket: str | None
    ) -> list[dict[str, Any]]:
        tag = f"{re.sub('[^a-zA-Z0-9]+', '_', name)}/{case.ranks}x{case.nbytes}/{index}"
        specs = [
            JobSpec(
                contender=name,
                root=str(root),
                tag=tag,
                rank=rank,
                nbytes=case.nbytes,
                count=case.count,
                drain_threads=self._drain_threads,
                checksum=self._checksum,
                socket=socket,
            )
            for rank in range(case.ranks)
        ]
        return [{"do": "open", "job": asdict(spec)} for spec in specs]

    def _measure(
        self,
        workers: Workers,
        case: Case,
        name: str,
        index: int,
        operation: str,
        daemon: Daemon | None,
    ) -> Sample:
        """Run the clock over one operation, and compare the bytes after it."""
        workers.ask([{"do": "ready", "operation": operation}] * case.ranks)
        stores = operation in (WRITE, DRAIN)
        if stores:
            os.sync()  # what others left to be written back must not land on this one
        busy_s, daemon_s = machine_cpu_s(), daemon.cpu_s() if daemon else 0.0
        at_s = time.monotonic() + _LEAD_S + case.ranks * _LEAD_OF_RANK_S
        go = {"do": "go", "operation": operation, "at_s": at_s}
        windows = [Window(**answer) for answer in workers.ask([go] * case.ranks)]
        if daemon:
            daemon_s = daemon.cpu_s() - daemon_s
        if stores:
            os.sync()
        synced_s, busy_s = time.monotonic(), machine_cpu_s() - busy_s
        checked = workers.ask([{"do": "check", "operation": operation}] * case.ranks)
        start_s = min(window.start_s for window in windows)
        settled_s = max(window.settled_s for window in windows) - start_s
        facts: dict[str, Any] = {
            "ranks": case.ranks,
            "late_s": max(window.start_s for window in windows) - start_s,
            "cpu_s": sum(window.cpu_s for window in windows) + daemon_s,
        }
        if stores:
            facts |= {"settled_s": settled_s, "machine_cpu_s": busy_s}
            if name != MEMCPY:
                facts["durable_s"] = settled_s if name in SAFE else synced_s - start_s
        verdicts = [answer["intact"] for answer in checked]
        return Sample(
            subject=case.subject,
            block_nbytes=case.nbytes,
            contender=name,
            checksum=self._checksum,
            operation=operation,
            round=index,
            wall_s=max(window.end_s for window in windows) - start_s,
            latencies_s=[one for window in windows for one in window.latencies_s],
            intact=None if None in verdicts else all(verdicts),
            facts=facts,
        )

    def _empty(self, root: Path) -> None:
        """Free the files' space; they are removed at the very end, see `machine.creates_slowly`."""
        for directory, _, files in os.walk(root):
            for name in files:
                path = os.path.join(directory, name)
                if path not in self._emptied:
                    os.truncate(path, 0)
                    self._emptied.add(path)

    def close(self) -> None:
        """End the ranks; the next trial starts others."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()


def machine_cpu_s() -> float:
    """Read what all processors have done so far, the kernel's own threads included: proc(5)."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# ---- what was found ----


def _notes(cases: Sequence[Case], limits: Limits, drain_threads: int, job: Job) -> list[str]:
    threads = f"{drain_threads} thread{'s' * (drain_threads > 1)}"
    notes = [
        "each rank is a process with a source of its own, a tier of its own and one thread that "
        "writes block after block; a checkpoint is all blocks of all ranks, and fits the tiers. "
        "All start at the same moment; the rate is from there to the end of the last call of any; "
        "kvio's first call, which starts threads and makes directories, comes before",
        "accept: drains are paused; write: drains run from the first block on, as they do by "
        f"default; drain: {threads} per rank for tiers and for the backends written directly, all "
        "blocks known at the start, until the barrier",
        "daemon: one `kvio stage-daemon` for all ranks, with the memory and the drain threads that "
        "their own tiers have together; its CPU time counts, in steps of 10 ms",
        "memcpy: by assignment of one memoryview to another, from the same source to memory like "
        "a tier's; all memory, source, target and tier, on huge pages where possible and touched "
        "before the clock",
        "durable s: from the start until every byte would survive a power cut: until the "
        "barrier or the last call of what promises it, else until sync(2) returned, called when "
        "all had ended. write(2) fsync and O_DIRECT fdatasync sync the file, not its directory",
        "CPU s/GiB: user and system time of the ranks, drains included; machine's: of all "
        "processors and the kernel's own threads until sync(2) returned, in steps of 10 ms",
        "all reads are compared byte for byte, and every stored block is read back and compared, "
        "after the clock; before each trial memory is touched, so that no host has to find it, and "
        "before what writes files sync(2) leaves nothing of others to be written back",
        "read: page-cache files by readv(2) just after they were written; ratios: in the same "
        "round, then the median; p95, p99 by nearest rank over all rounds; CV: standard deviation "
        "by mean, of all calls",
        f"ranks share {len(os.sched_getaffinity(0))} processors: of more ranks each waits for its "
        "turn on one, which is in their p99, that of memcpy too",
    ]
    blocks = ", ".join(f"{case}: {case.count}" for case in cases)
    notes.append(f"blocks of a rank in a checkpoint: {blocks}")
    over = [str(case) for case in cases if case.total_bytes > limits.max_bytes]
    if over:
        notes.append(f"MORE than {size_text(limits.max_bytes)} per trial: {'; '.join(over)}")
    if job.size is not None:
        notes.append(f"started under MPI: {job.size} ranks, on one machine")
    return notes


TITLES: Final = {
    WRITE: "write: a checkpoint while drains run, as its writers see it",
    ACCEPT: "accept: into the tier alone, drains held back",
    DRAIN: "drain: from the tier to the store, and the same blocks written directly",
    READ: "read: staged blocks, and their peers",
}


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation."""
    return [
        table_of(TITLES[operation], own, samples, _columns(operation))
        for operation in OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _columns(operation: str) -> dict[str, Column]:
    place: dict[str, Column] = {
        "ranks": lambda s, _: s.subject.partition(" ")[0],
        "size": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "MB/s": columns.SPEED,
        "range": columns.RANGE,
    }
    calls: dict[str, Column] = {
        "p50 ms": columns.P50_MS,
        "p95 ms": lambda _, own: f"{percentile(latencies(own), 95) * 1e3:.2f}",
        "p99 ms": columns.P99_MS,
        "CV": lambda _, own: f"{variation(latencies(own)):.2f}",
    }
    safe: dict[str, Column] = {
        "durable s": columns.fact("durable_s", ".3f"),
        "CPU s/GiB": _by_gib("cpu_s"),
        "machine's": _by_gib("machine_cpu_s"),
    }
    floor: dict[str, Column] = {"x memcpy": columns.RATIO}
    if operation == WRITE:
        return {**place, **calls, **safe, **floor}
    if operation == DRAIN:
        return {**place, **safe}
    return {**place, **calls, "CPU s/GiB": safe["CPU s/GiB"], **floor}


def _by_gib(fact: str) -> Column:
    """Return a column with what a GiB of a trial took."""

    def value(sample: Sample) -> float | None:
        nbytes = sample.block_nbytes * len(sample.latencies_s)
        return float(sample.facts[fact] / (nbytes / GiB)) if fact in sample.facts else None

    return lambda _, own: number(median_of(own, value), ".3f")


def latencies(samples: Iterable[Sample]) -> list[float]:
    """List every call of all rounds."""
    return [one for sample in samples for one in sample.latencies_s]


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: the standard deviation by the mean."""
    return pstdev(values) / fmean(values)


_COLOURS: Final = (
    "#000000",
    *("#9ecae1", "#6baed6", "#3182bd", "#08519c", "#756bb1"),
    *("#fdd0a2", "#fdae6b", "#f16913", "#a63603"),
    *("#74c476", "#31a354", "#006d2c"),
)
_LOOKS: Final = {
    name: Look(colour, hatch="//" if name in TIERS else None)
    for name, colour in zip(CONTENDERS, _COLOURS, strict=True)
}


class _Draw:
    """Draws what a writer sees: speed, p50 to p99 of a call, time until durable, and the drain."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __call__(self, summaries: Sequence[Summary], **where: Any) -> str | None:
        def own(operation: str) -> list[Summary]:
            return [s for s in summaries if s.operation == operation]

        panels = [
            Panel(
                title="rate a writer sees while drains run",
                unit="MB/s",
                points=speed_points(own(WRITE), place_text),
                log=True,  # from the disk to memory
            ),
            Panel(
                title="one call while drains run: p50, whisker to p99",
                unit="ms",
                points=_points(own(WRITE), lambda s: (s.p50_s * 1e3, s.p50_s * 1e3, s.p99_s * 1e3)),
                log=True,
            ),
            Panel(
                title="a checkpoint until all is durable",
                unit="s",
                points=_points(own(WRITE), self._until_durable),
            ),
            Panel(
                title="drain, and the backend written directly",
                unit="MB/s",
                points=speed_points(own(DRAIN), place_text),
            ),
            Panel(
                title="read of staged blocks",
                unit="MB/s",
                points=speed_points(own(READ), place_text),
            ),
        ]
        return draw_panels([panel for panel in panels if panel.points], looks=_LOOKS, **where)

    def _until_durable(self, summary: Summary) -> tuple[float, float, float] | None:
        rounds = samples_of(summary, self._samples)
        found = sorted(s.facts["durable_s"] for s in rounds if "durable_s" in s.facts)
        middle = median_of(rounds, lambda sample: sample.facts.get("durable_s"))
        return None if middle is None else (middle, found[0], found[-1])


def _points(
    summaries: Sequence[Summary], value: Callable[[Summary], tuple[float, float, float] | None]
) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for one in summaries:
        if (values := value(one)) is not None:
            found.setdefault(one.contender, []).append(Point(place_text(one), *values))
    return found
