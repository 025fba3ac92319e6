"""One file, many writers: kvio, a file each, os.pwrite, C and IOR, by writers and placement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final

from kvio import ConfigError, GiB, KiB
from kvio.experiments.machine import FileSystem, describe_file_system, describe_machine
from kvio.experiments.measure import Sample, summarise
from kvio.experiments.plot import size_text
from kvio.experiments.record import Record, present
from kvio.experiments.run import Limits, Run, workplace
from kvio.experiments.sharedfile import bars, fleet, presenting
from kvio.experiments.sharedfile.order import (
    C_DIRECT,
    CONTENDERS,
    KINDS,
    SHAPES,
    Case,
)
from kvio.experiments.sharedfile.turns import Turns
from kvio.placement import Placement, Topology

WRITERS: Final = (1, 2, 4, 8, 16)
#: Where writers run on a machine with several memory nodes, beside where the kernel puts them.
PLACEMENTS: Final = ("core/pack", "core/spread", "socket/pack", "socket/spread")
ANYWHERE: Final = "none"
#: Of a turn's bytes: what writers have, what a C program has again, and the page cache.
_COPIES: Final = 4


def run(
    limits: Limits,
    *,
    writers: Sequence[int] | None = None,
    shapes: Sequence[str] = tuple(SHAPES),
    kinds: Sequence[str] = KINDS,
    placements: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
) -> int:
    """Run the experiment, print its tables and write them down.

    Args:
        limits: where, and how much of it; ``max_bytes`` is what all writers of a turn write.
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
    with fleet.world() as world:
        if world.follows:
            world.serve()
            return 0
        nodes = len(Topology.from_system().numa)
        if placements is None:
            placements = (ANYWHERE, *(PLACEMENTS if nodes > 1 else ()))
        counts = _counts(writers, world.size)
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
        file_system = describe_file_system(limits.root)
        _check_room(cases, file_system)
        taken = Run(limits.budget_s, limits.max_rounds)
        with workplace(limits.root) as base:
            turns = Turns(base, world.fleet, cases, in_job=world.size is not None)
            try:
                taken.take_turns(cases, names, turns.take)
            finally:
                turns.close()
    options = {
        **{name: str(value) for name, value in asdict(limits).items()},
        "cases": [asdict(case) for case in cases],
        "contenders": names,
        "mpi_ranks": world.size,
        "numa_nodes": nodes,
    }
    notes = [*_notes(cases, limits, nodes, file_system), *turns.lost, *taken.notes()]
    if world.size is not None:
        notes.append(f"started under MPI: {world.size} ranks, on one machine")
    if taken.samples:
        _present(taken.samples, file_system, options, notes, limits.results)
    else:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
    return taken.status() or bool(turns.lost)


def _counts(wanted: Sequence[int] | None, job: int | None) -> list[int]:
    """Choose the cases; of a job no more than it has."""
    if job is None:
        return list(WRITERS if wanted is None else wanted)
    if wanted is None:
        return [count for count in WRITERS if count <= job] + ([] if job in WRITERS else [job])
    beyond = [count for count in wanted if count > job]
    if beyond:
        raise ConfigError(f"{beyond[0]} writers: this job has {job} ranks")
    return list(wanted)


def _check(
    limits: Limits,
    writers: Sequence[int],
    shapes: Sequence[str],
    kinds: Sequence[str],
    placements: Sequence[str],
    names: Sequence[str],
) -> None:
    if not limits.root.is_dir():
        raise ConfigError(f"{limits.root}: no such directory")
    least = [("max_bytes", limits.max_bytes), ("max_rounds", limits.max_rounds)]
    for name, value in [*least, *(("writers", count) for count in writers)]:
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    known: list[tuple[str, Sequence[str], Sequence[str]]] = [
        ("contender", names, tuple(CONTENDERS)),
        ("shape", shapes, tuple(SHAPES)),
        ("kind", kinds, KINDS),
    ]
    for kind, given, there in known:
        unknown = [name for name in given if name not in there]
        if unknown:
            raise ConfigError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(there)}")
    for placement in placements:
        _check_placement(placement)
    chosen: list[tuple[str, Sequence[object]]] = [(kind, given) for kind, given, _ in known]
    for kind, own in [*chosen, ("writers", writers), ("placement", placements)]:
        if not own or len(set(own)) < len(own):
            raise ConfigError(f"{kind}: give at least one, and each once")


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


def _check_room(cases: Sequence[Case], file_system: FileSystem) -> None:
    most = max(case.total_bytes for case in cases)
    if file_system.free_bytes < 3 * most:
        raise ConfigError(f"{file_system.path}: less than {3 * most / GiB:.1f} GiB are free")
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(fields["MemAvailable"].split()[0]) * KiB
    if memory < _COPIES * most:
        raise ConfigError(
            f"{size_text(most)} a turn need {size_text(_COPIES * most)} of memory: "
            f"{size_text(memory)} are free; give less --max-bytes or --writers"
        )


def _notes(cases: Sequence[Case], limits: Limits, nodes: int, file_system: FileSystem) -> list[str]:
    notes = [
        "writers begin at the same moment and write transfer after transfer, each byte once; the "
        "rate is from the first start to the end of the last call of any. Processes have a handle "
        "or descriptor each, threads of one process share one",
        "write: pwrite returned; durable: every process has synced (SharedFile.close, or "
        "fdatasync), and then the first one has sealed, which syncs once more, writes the index "
        "and syncs the directory; nobody else here syncs a directory. Of threads the seal is the "
        "only sync. What it takes to tell the first one that all have synced is left out",
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
        "turn sync(2) leaves nothing of others to be written back; ratios: in the same round, then "
        "the median",
    ]
    notes.append(_scaled(cases, limits))
    if any(case.placement for case in cases):
        notes.append(
            "core/pack and others: writers run on the CPUs of kvio.placement.Placement's slots, "
            "and these touched their bytes first; without: where the kernel puts them"
        )
    if nodes == 1:
        notes.append("AFFINITY CANNOT BE TOLD APART: this machine has one memory node")
    if file_system.is_memory:
        notes.append(f"NOT COMPARABLE: {file_system.kind} is memory; nothing reached a disk")
    return notes


def _scaled(cases: Sequence[Case], limits: Limits) -> str:
    """Say what became of a shape's parameters."""
    plain = [
        case for case in cases if (case.kind, case.placement) == (cases[0].kind, cases[0].placement)
    ]
    said = ", ".join(
        f"{case.writers} x {case.segments} x {size_text(case.block_bytes)} ({case.shape})"
        for case in plain
    )
    over = [case for case in plain if case.total_bytes > limits.max_bytes]
    more = f"; MORE than {size_text(limits.max_bytes)} with {over[-1].writers}" if over else ""
    return (
        f"writers x segments x block, scaled to {size_text(limits.max_bytes)} a turn: {said}{more}"
    )


def _present(
    samples: Sequence[Sample],
    file_system: FileSystem,
    options: dict[str, Any],
    notes: list[str],
    results: Path | None,
) -> None:
    summaries = summarise(samples, C_DIRECT, tuple(CONTENDERS))
    judged = bars.judge(samples)
    record = Record(
        experiment="shared-file",
        title="One file, many writers",
        machine=describe_machine(),
        file_system=file_system,
        options=options,
        notes=[*notes, *bars.verdicts(judged)],
        samples=samples,
        summaries=summaries,
    )
    tables = presenting.tables(summaries, samples)
    if judged:
        tables.insert(0, bars.table(judged))
    present(record, tables, results, presenting.draw)
