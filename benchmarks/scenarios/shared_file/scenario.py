"""Write one file by many writers: run, trials, claims, tables and plot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import columns, page_cache
from benchmarks.harness.columns import Column, median_of, number, table_of
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.page_cache import touched_memory
from benchmarks.harness.plot import Look, Panel, draw_panels, size_text, speed_points
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
from benchmarks.scenarios.shared_file.contenders import (
    C_DIRECT,
    C_FILES,
    CONTENDERS,
    DURABLE,
    FILES_DIRECT,
    IOR,
    KINDS,
    OPERATIONS,
    SHAPES,
    SHARED_BARE,
    SHARED_DIRECT,
    SHARED_HOLE,
    THREADS,
    WRITE,
    Case,
    JobSpec,
    Rank,
    Window,
    compile_program,
)
from kvio import ConfigError, GiB, MiB, StorageError, UnsupportedError
from kvio.placement import Placement, Topology

WRITERS: Final = (1, 2, 4, 8, 16)
PACKED: Final = "core/pack"
SPREAD: Final = "socket/spread"
#: Where writers run on a machine with several memory nodes, beside where the kernel puts them.
PLACEMENTS: Final = (PACKED, "core/spread", "socket/pack", SPREAD)
#: A fact of samples of spread writers: their speed by that of packed ones in the same round.
BY_PACKED: Final = "speed_by_packed"
ANYWHERE: Final = "none"
#: Of a trial's bytes: what writers have, what a C program has again, and the page cache.
_COPIES: Final = 4
#: From the command to the start of the clock: every process has it by then.
_LEAD_S: Final = 0.01
_LEAD_OF_WRITER_S: Final = 0.002


def _writers(least: int, most: int = 1 << 30) -> Callable[[Sample], bool]:
    return lambda sample: least <= sample.facts["writers"] <= most


def _by_packed(sample: Sample) -> float | None:
    """Return what `compare_placements` found; only writers over sockets have it."""
    return sample.facts.get(BY_PACKED)


def seal_share(sample: Sample) -> float | None:
    """Return seal by sync where every writer had synced before; threads leave that to the seal."""
    seal_s = sample.facts.get("seal_s")
    if seal_s is None or "thread" in sample.subject:
        return None
    return float(seal_s / sample.facts["synced_s"])


_DIRECT: Final = (SHARED_DIRECT, SHARED_BARE)
SCENARIO: Final = Scenario(
    name="shared-file",
    title="One file, many writers",
    reference=C_DIRECT,
    contenders=tuple(CONTENDERS),
    claims=(
        Claim(
            text="8 writers and more of one file: direct ones are done before buffered (paper)",
            pairs=[
                (SHARED_DIRECT, "shared buffered"),
                ("python direct", "python buffered"),
                (C_DIRECT, "C buffered"),
            ],
            at_least=1.0,
            operations=[DURABLE],
            where=_writers(8),
        ),
        Claim(
            text="one shared file is written as fast as a file per writer (paper)",
            pairs=[(SHARED_DIRECT, FILES_DIRECT), (C_DIRECT, C_FILES)],
            at_least=0.95,
            where=_writers(2),
        ),
        Claim(
            text="preallocation makes direct writes of several writers faster (paper)",
            pairs=[("python direct", "python direct, not preallocated")],
            at_least=1.0,
            operations=[WRITE],
            where=_writers(2),
        ),
        Claim(
            text="direct writers are faster spread over sockets than packed (paper)",
            pairs=[(name, "") for name in (SHARED_DIRECT, "python direct", C_DIRECT)],
            at_least=1.0,
            where=_writers(2),
            value=_by_packed,
        ),
        Claim(
            text="2 to 4 buffered writers are slower spread over sockets than packed (paper)",
            pairs=[(name, "") for name in ("shared buffered", "python buffered", "C buffered")],
            at_most=1.0,
            operations=[WRITE],
            where=_writers(2, 4),
            value=_by_packed,
        ),
        Claim(
            text="4 writers of a shared file are as fast as with a file each",
            pairs=[(SHARED_DIRECT, FILES_DIRECT)],
            at_least=0.95,
            where=_writers(4, 4),
        ),
        Claim(
            text="4 writers are 1.3 times as fast into preallocated blocks",
            pairs=[(SHARED_DIRECT, SHARED_HOLE)],
            at_least=1.3,
            operations=[WRITE],
            where=_writers(4, 4),
        ),
        Claim(
            text="kvio is as fast as the C program",
            pairs=[(name, C_DIRECT) for name in _DIRECT],
            at_least=1 / 1.05,
        ),
        Claim(
            text="a seal is a small share of a durable write",
            pairs=[(name, "") for name in ("shared buffered", *_DIRECT, "shared hybrid")],
            at_most=0.05,
            operations=[DURABLE],
            value=seal_share,
        ),
    ),
)


def run(
    limits: Limits,
    *,
    writers: Sequence[int] | None = None,
    shapes: Sequence[str] = tuple(SHAPES),
    kinds: Sequence[str] = KINDS,
    placements: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
) -> int:
    """Run the scenario, print its tables and write them down.

    Args:
        limits: where, and how much of it; ``max_bytes`` is what all writers of a trial write.
        writers: how many write at the same time, a case each; None: 1, 2, 4, 8 and 16, or under
            mpirun those of them that the job has, and all.
        shapes: of `SHAPES`, scaled down to ``max_bytes``.
        kinds: of writers: ``processes``, ``threads``.
        placements: ``map_by/order`` as `kvio.placement.Placement` has them, or ``none``: where
            the kernel puts them; None: that, and all of `PLACEMENTS` where there are several nodes.
        contenders: of `CONTENDERS`; None: all.

    Returns:
        0; 1 if a byte differed, or a process failed or died; 2 if nothing could be measured; 130
        after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    with job_of(Rank) as job:
        if job.follows:
            job.serve()
            return 0
        nodes = memory_nodes()
        if placements is None:
            placements = (ANYWHERE, *(PLACEMENTS if nodes > 1 else ()))
        counts = job.counts(writers, WRITERS)
        _check(limits, counts, shapes, kinds, placements, names)
        cases = [
            Case.within(
                limits.max_bytes,
                SHAPES[shape],
                kind=kind,
                writers=count,
                placement="" if placement == ANYWHERE else placement,
            )
            for shape, kind, placement, count in product(shapes, kinds, placements, counts)
        ]
        most = max(case.total_bytes for case in cases)
        check_room(limits.root, 3 * most, _COPIES * most)
        options = {
            "cases": [asdict(case) for case in cases],
            "contenders": names,
            "mpi_ranks": job.size,
            "numa_nodes": nodes,
        }
        this = Run(SCENARIO, limits, options)
        with this.workplace() as base:
            trials = _Trials(base, job)
            try:
                this.take_trials(cases, names, trials.take, takes_part)
            finally:
                trials.close()
            this.failed += trials.lost
            compare_placements(this.samples)
            return this.finish(_notes(cases, limits, nodes, job), _tables, _draw)


def memory_nodes() -> int:
    """Count the memory nodes of this machine."""
    return len(Topology.from_system().numa)


def takes_part(case: Case, name: str) -> bool:
    """Report whether a contender is measured in a case: IOR has processes, and no placement."""
    return CONTENDERS[name].way != "ior" or (case.kind != THREADS and not case.placement)


def _check(
    limits: Limits,
    writers: Sequence[int],
    shapes: Sequence[str],
    kinds: Sequence[str],
    placements: Sequence[str],
    names: Sequence[str],
) -> None:
    check_names("contender", names, CONTENDERS)
    check_names("shape", shapes, SHAPES)
    check_names("kind", kinds, KINDS)
    check_names("writers", writers, writers)
    check_names("placement", placements, placements)
    least = {"max_bytes": limits.max_bytes, "max_rounds": limits.max_rounds}
    check_least(**least, writers=min(writers))
    for placement in placements:
        _check_placement(placement)


def _check_placement(placement: str) -> None:
    if placement == ANYWHERE:
        return
    map_by, slash, order = placement.partition("/")
    if not slash:
        raise ConfigError(f"placement {placement!r}: give {ANYWHERE}, or MAP_BY/ORDER: core/pack")
    try:
        Placement(map_by=map_by, order=order)  # type: ignore[arg-type]  # that is what is asked
    except ConfigError as exc:
        raise ConfigError(f"placement {placement!r}: {exc}") from None


# ---- trials ----


class _Trials:
    """What the trials of a run share.

    Args:
        base: an empty directory.
        job: starts the processes.

    Attributes:
        lost: trials that ended early because a process failed or died.
    """

    def __init__(self, base: Path, job: Job) -> None:
        self.lost: list[str] = []
        self._base, self._job = base, job
        self._workers: Workers | None = None
        self._processes = 0
        self._scratch = memoryview(b"")
        self._program: str | None = None
        self._topology = Topology.from_system()

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take a contender's trial: a sample for writing, and one until all is durable.

        Raises:
            UnsupportedError: the file system cannot do it, or a process failed or died.
        """
        root = Path(tempfile.mkdtemp(dir=self._base))
        try:
            if CONTENDERS[name].way == "ior":
                yield from self._take_ior(case, name, index, root)
            else:
                yield from self._take(case, name, index, root)
        except UnsupportedError as exc:
            raise UnsupportedError(str(exc).replace(str(root), "…")) from exc
        except StorageError as exc:
            said = str(exc).replace(str(root), "…")
            self.lost.append(f"LOST: {name}, {case}, round {index + 1}: {said}")
            self.close()
            raise UnsupportedError(f"{said} ({case}, round {index + 1})") from exc
        finally:
            shutil.rmtree(root)

    def _take(self, case: Case, name: str, index: int, root: Path) -> Iterator[Sample]:
        specs = self._specs(case, name, root)
        workers = self._started(len(specs))
        prepare = [{"do": "prepare", "job": asdict(spec)} for spec in specs]
        created = workers.ask(prepare)[0]["created_s"]
        workers.ask([{"do": "open"}] * len(specs))
        self._settle(case, name)
        at_s = time.monotonic() + _LEAD_S + len(specs) * _LEAD_OF_WRITER_S
        answers = workers.ask([{"do": "go", "at_s": at_s}] * len(specs))
        [sealed] = workers.ask([{"do": "seal"}])
        page_cache.drop(root)
        checked = workers.ask([{"do": "check"}] * len(specs))
        workers.ask([{"do": "close"}] * len(specs))
        windows = [Window(**answer) for answer in answers]
        intact = all(answer["intact"] for answer in checked)
        yield from _samples(case, name, index, windows, sealed, intact, created)

    def _started(self, count: int) -> Workers:
        """Return so many workers or more; a small case does not wait for those of a large one."""
        if self._workers is None or self._processes < count:
            self.close()
            self._workers, self._processes = self._job.workers(count), count
        return self._workers

    def _settle(self, case: Case, name: str) -> None:
        """Leave nothing of others to be written back, and memory for the page cache.

        Free memory is given back to the host of a virtual machine in large pieces, and writing to
        it again is ten times slower: transfers that take large pieces must have touched such ones.
        """
        if not CONTENDERS[name].direct:
            if len(self._scratch) < case.total_bytes:
                self._scratch = memoryview(b"")  # before there is other memory
                self._scratch = touched_memory(max(MiB, case.total_bytes))
            scratch, source = self._base / "scratch", self._scratch[: case.total_bytes]
            page_cache.touch_memory(scratch, source)
            with open(scratch, "wb", buffering=0) as file:
                for at in 2 * list(range(0, len(source), case.transfer_bytes)):
                    file.write(source[at : at + case.transfer_bytes])
                file.truncate(0)
        os.sync()

    def _specs(self, case: Case, name: str, root: Path) -> list[JobSpec]:
        """Divide the writers over processes: one each, or all in the first."""
        cpus = self._cpus(case)
        everyone = list(range(case.writers))
        shares = [everyone] if case.kind == THREADS else [[writer] for writer in everyone]
        return [
            JobSpec(
                contender=name,
                root=str(root),
                case=asdict(case),
                writers=share,
                cpus=[cpus[writer] for writer in share],
                program=self._compiled() if CONTENDERS[name].way == "C" else "",
            )
            for share in shares
        ]

    def _cpus(self, case: Case) -> list[list[int] | None]:
        if not case.placement:
            return [None] * case.writers
        map_by, _, order = case.placement.partition("/")
        wish = Placement(map_by=map_by, order=order)  # type: ignore[arg-type]  # it checks them
        return [list(slot.cpus) for slot in wish.slots(self._topology, case.writers)]

    def _compiled(self) -> str:
        if self._program is None:
            folder = self._base / "program"
            folder.mkdir(exist_ok=True)
            self._program = compile_program(folder)
        return self._program

    def _take_ior(self, case: Case, name: str, index: int, root: Path) -> Iterator[Sample]:
        if self._job.size is not None:
            raise UnsupportedError("this is an MPI job, in which mpirun cannot start another")
        self._settle(case, name)
        yield take_ior(case, name, index, root, direct=CONTENDERS[name].direct)

    def close(self) -> None:
        """End the processes; the next trial starts others."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()


def _samples(
    case: Case,
    name: str,
    index: int,
    windows: Sequence[Window],
    sealed: dict[str, Any],
    intact: bool,  # noqa: FBT001
    created_s: float,
) -> Iterator[Sample]:
    started = [at for window in windows for at in window.started_s]
    ended = [at for window in windows for at in window.ended_s]
    start_s, written_s = min(started), max(ended) - min(started)
    synced_s = max(window.synced_s for window in windows) - start_s
    seal_s = sealed["seal_s"]
    facts = {
        "writers": case.writers,
        "placement": case.placement,
        "created_s": None if CONTENDERS[name].separate else created_s,
        "late_s": max(started) - start_s,
        "synced_s": synced_s,
        "seal_s": seal_s,
        "writer_s": [b - a for a, b in zip(started, ended, strict=True)],
        "user_s": sum(window.user_s for window in windows) + sealed["user_s"],
        "system_s": sum(window.system_s for window in windows) + sealed["system_s"],
    }
    walls = {WRITE: written_s, DURABLE: synced_s + (seal_s or 0.0)}
    if CONTENDERS[name].way == "store":  # a call returns when its block is durable
        walls = {DURABLE: written_s}
    for operation, wall_s in walls.items():
        yield Sample(
            subject=case.subject,
            block_nbytes=case.transfer_bytes,
            contender=name,
            checksum=CONTENDERS[name].checksum and CONTENDERS[name].way in ("kvio", "store"),
            operation=operation,
            round=index,
            wall_s=wall_s,
            latencies_s=[one for window in windows for one in window.latencies_s],
            modes={sealed["mode"]: 1} if sealed["mode"] else {},
            reasons=[sealed["reason"]] if sealed["reason"] else [],
            intact=intact,
            facts=facts,
        )


# ---- IOR ----


_IOR_TIMEOUT_S: Final = 300.0
#: Open MPI would start no more ranks than there are cores, and nothing as root; others ignore it.
_OPEN_MPI: Final = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def find_ior() -> tuple[str, str]:
    """Return the paths of ior and mpirun.

    Raises:
        UnsupportedError: one is not there.
    """
    found = {name: shutil.which(name) for name in ("ior", "mpirun")}
    for name, path in found.items():
        if path is None:
            raise UnsupportedError(f"{name} is not in $PATH")
    return str(found["ior"]), str(found["mpirun"])


def take_ior(case: Case, name: str, index: int, root: Path, *, direct: bool) -> Sample:
    """Let it write and check once; its own clock counts: writes and their fsync.

    Raises:
        UnsupportedError: it is not installed, or does not run.
        StorageError: its output cannot be understood.
    """
    ior, mpirun = find_ior()
    command = [mpirun, "-n", str(case.writers), ior]
    command += ["-a", "POSIX", "-w", "-W", "-e", "-i", "1", "-o", str(root / "ior")]
    command += ["-b", str(case.block_bytes), "-t", str(case.transfer_bytes)]
    command += ["-s", str(case.segments), *(["--posix.odirect"] if direct else [])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_IOR_TIMEOUT_S,
            env={**os.environ, **_OPEN_MPI},
        )
    except subprocess.TimeoutExpired:
        raise StorageError(f"ior did not end for {_IOR_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UnsupportedError(f"ior fails: {(last or [f'exit status {done.returncode}'])[0]}")
    wall_s = written_s(done.stdout)
    calls = case.total_bytes // case.transfer_bytes
    return Sample(
        subject=case.subject,
        block_nbytes=case.transfer_bytes,
        contender=name,
        checksum=False,
        operation=DURABLE,
        round=index,
        wall_s=wall_s,
        latencies_s=[wall_s * case.writers / calls] * calls,
        intact="incorrect data on write" not in (done.stdout + done.stderr).lower(),
        facts={"writers": case.writers, "command": command},
    )


def written_s(printed: str) -> float:
    """Read the seconds of writing from IOR's table, whose columns differ between versions.

    Raises:
        StorageError: there is no such table.
    """
    headings: list[str] = []
    for line in printed.splitlines():
        words = line.split()
        if words[:1] == ["access"]:
            headings = words
        elif words[:1] == ["write"] and len(words) == len(headings):
            return float(words[headings.index("wr/rd(s)")])
    raise StorageError("ior printed nothing of its writes")


# ---- what was found ----


def compare_placements(samples: Sequence[Sample]) -> None:
    """Add to samples of writers over sockets their speed by that of the same ones packed."""

    def key(sample: Sample) -> tuple[object, ...]:
        writers = sample.subject.removesuffix(sample.facts["placement"])
        place = (writers, sample.block_nbytes, sample.operation)
        return (sample.contender, *place, sample.round)

    packed, spread_out = (
        [sample for sample in samples if sample.facts.get("placement") == placement]
        for placement in (PACKED, SPREAD)
    )
    rivals = {key(sample): sample.bytes_per_s for sample in packed}
    for sample in spread_out:
        if key(sample) in rivals:
            sample.facts[BY_PACKED] = sample.bytes_per_s / rivals[key(sample)]


def _notes(cases: Sequence[Case], limits: Limits, nodes: int, job: Job) -> list[str]:
    notes = [
        "writers begin at the same moment and write transfer after transfer, each byte once; the "
        "rate is from the first start to the end of the last call of any. Processes have a handle "
        "or descriptor each, threads of one process share one",
        "write: pwrite returned; durable: every process has synced (SharedFile.close, or "
        "fdatasync), and then the first one has sealed, which syncs once more, writes the index "
        "and syncs the directory; no other contender here syncs a directory. Of threads the seal "
        "is the only sync. The time to report to the first one that all have synced is left out",
        "create ms, before the clock: making the shared file and allocating its blocks",
        "shared: one kvio.SharedFile; files direct: one each, made the same way; files posix-*: a "
        "block of a store each, one durable call, whose time is shared out to its transfers; "
        "not preallocated: kvio makes a hole of full size, os.pwrite extends the file",
        "python: os.pwrite; C: a program compiled here that makes the same calls, on memory of its "
        "own; both without checksums. ior: its own start, clock and bytes, writes and fsync",
        "efficiency: the rate by that of the fewest writers, by how many times more they are; "
        "slowest/fastest: times of writers, each of which writes as much; in calls: the share of "
        "the writers' time inside write calls; user, system: CPU time of all processes until all "
        "is durable, not that of the kernel's own threads",
        "every byte is read back after the clock, past the page cache, and compared; before each "
        "trial sync(2) leaves nothing of others to be written back; ratios: in the same round, "
        "then the median",
    ]
    notes.append(_scaled(cases, limits))
    if any(case.placement for case in cases):
        notes.append(
            "core/pack and others: writers run on the CPUs of kvio.placement.Placement's slots, "
            "and these touched their bytes first; without: where the kernel puts them"
        )
    if nodes == 1:
        notes.append("AFFINITY CANNOT BE MEASURED: this machine has one memory node")
    if job.size is not None:
        notes.append(f"started under MPI: {job.size} ranks, on one machine")
    return notes


def _scaled(cases: Sequence[Case], limits: Limits) -> str:
    """Describe how a shape's parameters were scaled."""
    plain = [
        case for case in cases if (case.kind, case.placement) == (cases[0].kind, cases[0].placement)
    ]
    said = ", ".join(
        f"{case.writers} x {case.segments} x {size_text(case.block_bytes)} ({case.shape})"
        for case in plain
    )
    over = [case for case in plain if case.total_bytes > limits.max_bytes]
    more = f"; MORE than {size_text(limits.max_bytes)} with {over[-1].writers}" if over else ""
    most = size_text(limits.max_bytes)
    return f"writers x segments x block, scaled to {most} per trial: {said}{more}"


TITLES: Final = {
    WRITE: "write: from the common start to the end of the last call of any",
    DURABLE: "durable: until every writer has synced, and the file is sealed",
}
#: Colour and line: warm is kvio with direct I/O, blue through the page cache, green one file each.
_STYLES: Final = {
    "shared buffered": ("#1f77b4", "-"),
    SHARED_DIRECT: ("#d62728", "-"),
    SHARED_BARE: ("#ff7f0e", "-"),
    SHARED_HOLE: ("#d62728", ":"),
    "shared hybrid": ("#9467bd", "-"),
    FILES_DIRECT: ("#2ca02c", "-"),
    "files posix-tmpfile": ("#98df8a", "-"),
    "files posix-direct": ("#006d2c", "--"),
    "python buffered": ("#17becf", "--"),
    "python buffered, not preallocated": ("#17becf", ":"),
    "python direct": ("#8c564b", "--"),
    "python direct, not preallocated": ("#8c564b", ":"),
    "C buffered": ("#7f7f7f", "-."),
    C_DIRECT: ("#000000", "-."),
    C_FILES: ("#bcbd22", "-."),
    IOR[0]: ("#e377c2", "-."),
    IOR[1]: ("#e377c2", "-"),
}


_LOOKS: Final = {name: Look(colour, line) for name, (colour, line) in _STYLES.items()}


def writers_of(subject: str) -> int:
    """Read the number that a subject begins with."""
    return int(subject.split()[0])


def group_of(subject: str) -> str:
    """Name what a curve over writers has in common: what runs, what is written, and where."""
    kind, *rest = subject.split(" ", 1)[1].split(", ")
    kind = "processes" if kind.startswith("process") else "threads"
    return ", ".join([kind, *rest])


def _tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table per operation."""
    return [
        table_of(
            TITLES[operation], own, samples, _columns(operation, own), left=("writers", "contender")
        )
        for operation in OPERATIONS
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _columns(operation: str, summaries: Sequence[Summary]) -> dict[str, Column]:
    speed: dict[str, Column] = {
        "writers": columns.SUBJECT,
        "transfer": columns.SIZE,
        "contender": columns.CONTENDER,
        "rounds": columns.ROUNDS,
        "MB/s": columns.SPEED,
        "range": columns.RANGE,
        "efficiency": lambda s, _: number(efficiency(s, summaries)),
        "x C direct": columns.RATIO,
    }
    if operation == WRITE:
        return {
            **speed,
            "slowest/fastest": lambda _, own: number(median_of(own, spread)),
            "p50 ms": columns.P50_MS,
            "p99 ms": columns.P99_MS,
            "in calls": lambda _, own: number(median_of(own, in_calls)),
        }
    return {
        **speed,
        "create ms": columns.fact("created_s", ".1f", scale=1e3),
        "sync ms": lambda _, own: number(median_of(own, _sync_ms), ".1f"),
        "seal ms": columns.fact("seal_s", ".1f", scale=1e3),
        "user s/GiB": lambda _, own: number(median_of(own, lambda s: _by_gib(s, "user_s")), ".3f"),
        "system s/GiB": lambda _, own: number(
            median_of(own, lambda s: _by_gib(s, "system_s")), ".3f"
        ),
        "mode": columns.MODE,
    }


def efficiency(summary: Summary, summaries: Sequence[Summary]) -> float | None:
    """Divide a rate by that of the fewest writers, times how many more there are."""
    curve = [
        s
        for s in summaries
        if (s.contender, s.operation, s.block_nbytes, group_of(s.subject))
        == (summary.contender, summary.operation, summary.block_nbytes, group_of(summary.subject))
    ]
    fewest = min(curve, key=lambda s: writers_of(s.subject))
    more = writers_of(summary.subject) / writers_of(fewest.subject)
    return summary.bytes_per_s / fewest.bytes_per_s / more if len(curve) > 1 else None


def spread(sample: Sample) -> float | None:
    """Divide the longest time of a writer by the shortest; each writes as much."""
    own = sample.facts.get("writer_s")
    return max(own) / min(own) if own else None


def in_calls(sample: Sample) -> float | None:
    """Return the share of the writers' time that passed inside the calls that write."""
    own = sample.facts.get("writer_s")
    return sum(sample.latencies_s) / sum(own) if own else None


def _by_gib(sample: Sample, fact: str) -> float | None:
    if fact not in sample.facts:
        return None
    return float(sample.facts[fact] / (sample.block_nbytes * len(sample.latencies_s) / GiB))


def _sync_ms(sample: Sample) -> float | None:
    """Return the time from the end of the last writer until all had synced."""
    if "synced_s" not in sample.facts:
        return None
    return float(sample.facts["synced_s"] - max(sample.facts["writer_s"])) * 1e3


def _draw(summaries: Sequence[Summary], **where: Any) -> str | None:
    """Draw MB/s by writers: a curve per contender, a row per shape, a column per operation."""
    rows = list(dict.fromkeys((group_of(s.subject), s.block_nbytes) for s in summaries))
    panels = []
    for (group, nbytes), operation in product(rows, OPERATIONS):
        own = [
            s
            for s in summaries
            if (group_of(s.subject), s.block_nbytes, s.operation) == (group, nbytes, operation)
        ]
        panels.append(
            Panel(
                title=f"{operation}: {group}, {size_text(nbytes)}",
                unit="MB/s",
                points=speed_points(own, lambda one: writers_of(one.subject)),
                lines=True,
                axis="writers",
                log=operation == WRITE,  # the page cache is memory
            )
        )
    return draw_panels(panels, looks=_LOOKS, columns=len(OPERATIONS), **where)
