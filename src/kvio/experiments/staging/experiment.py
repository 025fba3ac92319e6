"""Checkpoints of many ranks: into the tier, straight to the file system, and by memcpy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from kvio import ConfigError, GiB, KiB, MiB
from kvio.experiments.machine import FileSystem, describe_file_system, describe_machine
from kvio.experiments.measure import Sample, summarise
from kvio.experiments.plot import size_text
from kvio.experiments.record import Record, present
from kvio.experiments.run import Limits, Run, workplace
from kvio.experiments.staging import bars, fleet, presenting
from kvio.experiments.staging.order import CONTENDERS, MEMCPY, Case
from kvio.experiments.staging.turns import Turns

RANKS: Final = (1, 8, 16)
SIZES: Final = (MiB, 8 * MiB)
#: Of a tier, and of the direct writes that its drain is compared with.
DRAIN_THREADS: Final = 2
_STEP: Final = 4 * KiB
#: Of a turn's bytes: source, target and tier of the ranks; what the leader touches.
_COPIES: Final = 5


def run(
    limits: Limits,
    *,
    ranks: Sequence[int] | None = None,
    sizes: Sequence[int] = SIZES,
    contenders: Sequence[str] | None = None,
    drain_threads: int = DRAIN_THREADS,
    checksum: bool = True,
) -> int:
    """Run the experiment, print its tables and write them down.

    Args:
        limits: where, and how much of it; ``max_bytes`` is what all ranks write in one operation,
            and what their tiers hold, in equal shares.
        ranks: processes at the same time, a case each; None: 1, 8 and 16, or under mpirun those
            of them that the job has, or all.
        sizes: of a block, in bytes; multiples of 4 KiB.
        contenders: of `CONTENDERS`; None: all.
        drain_threads: of each tier.
        checksum: of kvio's blocks.

    Returns:
        0; 1 if a byte differed, or a rank failed or died; 2 if nothing could be measured; 130
        after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
    """
    names = list(CONTENDERS if contenders is None else contenders)
    with fleet.world() as world:
        if world.follows:
            world.serve()
            return 0
        counts = _ranks(ranks, world.size)
        _check(limits, counts, sizes, names, drain_threads)
        cases = [
            Case.within(limits.max_bytes, ranks=count, nbytes=nbytes)
            for count, nbytes in product(counts, sizes)
        ]
        file_system = describe_file_system(limits.root)
        _check_room(cases, file_system)
        taken = Run(limits.budget_s, limits.max_rounds)
        with workplace(limits.root) as base:
            turns = Turns(base, world.fleet, cases, drain_threads=drain_threads, checksum=checksum)
            try:
                taken.take_turns(cases, names, turns.take)
            finally:
                turns.close()
    options = {
        **{name: str(value) for name, value in asdict(limits).items()},
        "cases": [asdict(case) for case in cases],
        "contenders": names,
        "drain_threads": drain_threads,
        "checksum": checksum,
        "mpi_ranks": world.size,
    }
    notes = [*_notes(cases, limits, drain_threads, file_system), *turns.lost, *taken.notes()]
    if world.size is not None:
        notes.append(f"started under MPI: {world.size} ranks, on one machine")
    if taken.samples:
        _present(taken.samples, file_system, options, notes, limits.results)
    else:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
    return taken.status() or bool(turns.lost)


def _ranks(wanted: Sequence[int] | None, job: int | None) -> list[int]:
    """Choose the cases; of a job no more than it has."""
    if job is None:
        return list(RANKS if wanted is None else wanted)
    if wanted is None:
        return [count for count in RANKS if count <= job] + ([] if job in RANKS else [job])
    beyond = [count for count in wanted if count > job]
    if beyond:
        raise ConfigError(f"{beyond[0]} ranks: this job has {job}")
    return list(wanted)


def _check(
    limits: Limits,
    ranks: Sequence[int],
    sizes: Sequence[int],
    names: Sequence[str],
    drain_threads: int,
) -> None:
    if not limits.root.is_dir():
        raise ConfigError(f"{limits.root}: no such directory")
    least = [("max_bytes", limits.max_bytes), ("max_rounds", limits.max_rounds)]
    least += [("drain_threads", drain_threads), *(("ranks", count) for count in ranks)]
    for name, value in least:
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    wrong = [nbytes for nbytes in sizes if nbytes < _STEP or nbytes % _STEP]
    if wrong:
        raise ConfigError(f"sizes must be multiples of 4 KiB, not {wrong[0]}")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ConfigError(f"unknown contender {unknown[0]!r}; known: {', '.join(CONTENDERS)}")
    chosen: list[tuple[str, Sequence[object]]] = [("contender", names)]
    for kind, given in [*chosen, ("ranks", ranks), ("sizes", sizes)]:
        if not given or len(set(given)) < len(given):
            raise ConfigError(f"{kind}: give at least one, and each once")


def _check_room(cases: Sequence[Case], file_system: FileSystem) -> None:
    most = max(case.total_bytes for case in cases)
    if file_system.free_bytes < 3 * most:
        raise ConfigError(f"{file_system.path}: less than {3 * most / GiB:.1f} GiB are free")
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(fields["MemAvailable"].split()[0]) * KiB
    if memory < _COPIES * most:
        raise ConfigError(
            f"{size_text(most)} a turn need {size_text(_COPIES * most)} of memory: "
            f"{size_text(memory)} are free; give less --max-bytes, --ranks or --sizes"
        )


def _notes(
    cases: Sequence[Case], limits: Limits, drain_threads: int, file_system: FileSystem
) -> list[str]:
    threads = f"{drain_threads} thread{'s' * (drain_threads > 1)}"
    notes = [
        "each rank is a process with a source of its own, a tier of its own and one thread that "
        "writes block after block; a checkpoint is all blocks of all ranks, and fits the tiers. "
        "All start at the same moment; the rate is from there to the end of the last call of any; "
        "kvio's first call, which starts threads and makes directories, comes before",
        "accept: drains are paused; write: drains run from the first block on, as they do by "
        f"default; drain: {threads} a rank for tiers and for the backends written directly, all "
        "blocks known at the start, until the barrier",
        "daemon: one `kvio stage-daemon` for all ranks, with the memory and the drain threads that "
        "their own tiers have together; its CPU time counts, in steps of 10 ms",
        "memcpy: by assignment of one memoryview to another, from the same source to memory like "
        "a tier's; all memory, source, target and tier, on huge pages where given and touched "
        "before the clock",
        "durable s: from the start until every byte would survive a power cut: until the "
        "barrier or the last call of what promises it, else until sync(2) returned, called when "
        "all had ended. write(2) fsync and O_DIRECT fdatasync sync the file, not its directory",
        "CPU s/GiB: user and system time of the ranks, drains included; machine's: of all "
        "processors and the kernel's own threads until sync(2) returned, in steps of 10 ms",
        "all reads are compared byte for byte, and every stored block is read back and compared, "
        "after the clock; before each turn memory is touched, so that no host has to find it, and "
        "before what writes files sync(2) leaves nothing of others to be written back",
        "read: page-cache files by readv(2) just after they were written; ratios: in the same "
        "round, then the median; p95, p99 by nearest rank over all rounds; CV: standard deviation "
        "by mean, of all calls",
        f"ranks share {len(os.sched_getaffinity(0))} processors: of more ranks each waits for its "
        "turn, which is in their p99, that of memcpy too",
    ]
    blocks = ", ".join(f"{case}: {case.count}" for case in cases)
    notes.append(f"blocks of a rank in a checkpoint: {blocks}")
    over = [str(case) for case in cases if case.total_bytes > limits.max_bytes]
    if over:
        notes.append(f"MORE than {size_text(limits.max_bytes)} a turn: {'; '.join(over)}")
    if file_system.is_memory:
        notes.append(f"NOT COMPARABLE: {file_system.kind} is memory; nothing reached a disk")
    return notes


def _present(
    samples: Sequence[Sample],
    file_system: FileSystem,
    options: dict[str, Any],
    notes: list[str],
    results: Path | None,
) -> None:
    summaries = summarise(samples, MEMCPY, CONTENDERS)
    judged = bars.judge(samples)
    record = Record(
        experiment="staging",
        title="Checkpoints of many ranks: the staging tier, the page cache and the disk",
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
    present(record, tables, results, partial(presenting.draw, samples=samples))
