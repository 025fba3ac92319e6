"""The experiment through DLIO: it generates what the direct harness puts, library by library."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvio import ConfigError
from kvio.experiments.dlio.process import missing
from kvio.experiments.machine import describe_machine
from kvio.experiments.run import Limits
from kvio.experiments.s3 import dlio_presenting, presenting, ranks
from kvio.experiments.s3.dlio_plan import (
    CONTENDERS,
    FORMATS,
    GENERATED,
    STOCK,
    Load,
    choose,
    real_loads,
)
from kvio.experiments.s3.dlio_runs import memory_directory
from kvio.experiments.s3.dlio_turns import DlioTurns
from kvio.experiments.s3.experiment import check, servers_of, take_turns
from kvio.experiments.s3.order import LIBRARIES, library_of
from kvio.experiments.s3.plan import PARTS, PROCESSES, Thinness
from kvio.experiments.s3.server import medium_of
from kvio.experiments.s3.turns import Turns

_MANY: Final = 1 << 20
#: What varies in a part, as `Thinness.left_out` says it.
_AXES: Final = {"1": "threads ", "3": "processes ", "4": "size"}


def run(
    limits: Limits,
    *,
    parts: Sequence[str] = GENERATED,
    objects: int = 400,
    contenders: Sequence[str] | None = None,
    payload_kind: str = "random",
    endpoint: str | None = None,
    bucket: str | None = None,
    prefix: str = "kvio-experiment",
    real: Path | None = None,
) -> int:
    """Run experiments 1 to 4 through DLIO, print tables and write them down.

    Args:
        limits: how much of it, and where results go; ``root`` is not used.
        parts: of `PARTS`; ``get`` is left out, since generation only puts.
        objects: of 322,957 bytes in a load; of other sizes as many bytes.
        contenders: names of libraries; None: all.
        payload_kind: ``random``, which is DLIO's npy, or ``jpeg``.
        endpoint: a server that runs; None: one in memory, of this run alone.
        bucket: on a given server; it must be there.
        prefix: below which all objects are; they are removed.
        real: a MinIO binary to measure some of it on, too.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments, or DLIO is not installed; nothing was written.
        UnsupportedError: something that all of it needs is not here.
    """
    libraries = _libraries(contenders)
    check(parts, objects, payload_kind, endpoint, bucket, prefix)
    if not set(parts) & set(GENERATED):
        raise ConfigError(f"DLIO generates in parts {', '.join(GENERATED)} alone, not in 'get'")
    _refuse_mpi()
    if absent := missing(1):
        raise ConfigError(f"--via dlio: {absent}")
    no_ranks, form = missing(2), FORMATS[payload_kind]
    more = real_loads(form, objects) if real is not None else []
    loads, thinness = choose(
        parts, libraries, form=form, objects=objects, most_ranks=1 if no_ranks else _MANY,
        budget_s=limits.budget_s - sum(load.seconds(libraries) for load in more),
    )  # fmt: skip
    loads += more
    names = [name for name in CONTENDERS if name == STOCK or library_of(name) in libraries]
    with ExitStack() as stack:
        servers = servers_of(stack, endpoint, bucket, real)
        scratch, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvio-s3-", dir=place)))
            for place in (None, memory_directory())
        )
        direct = Turns(servers, ranks.World().begin, scratch, kind=payload_kind, prefix=prefix)
        stack.callback(direct.close)
        turns = DlioTurns(servers, direct, memory=memory, scratch=scratch, prefix=prefix)
        stack.callback(turns.close)
        taken = take_turns(limits, loads, names, turns)
        medium = medium_of(servers["main"])
    notes = _notes(limits, parts, thinness, loads, no_ranks)
    options = {
        **presenting.plain(limits),
        "via": "dlio",
        "parts": list(parts),
        "objects": objects,
        "payload": payload_kind,
        "contenders": names,
        "loads": [asdict(load) for load in loads],
        "versions": presenting.versions(["dlio_benchmark", "mpi4py", *LIBRARIES.values()]),
    }
    dlio_presenting.show(
        taken.samples,
        machine=describe_machine(),
        medium=medium,
        options=options,
        notes=[*notes, *direct.notes, *turns.notes, *taken.notes()],
        results=limits.results,
    )
    return taken.status()


def _libraries(wanted: Sequence[str] | None) -> list[str]:
    unknown = [name for name in wanted or () if name not in LIBRARIES]
    if unknown:
        raise ConfigError(
            f"unknown library {unknown[0]!r}; via DLIO contenders are {', '.join(LIBRARIES)}"
        )
    return [name for name in LIBRARIES if wanted is None or name in wanted]


def _refuse_mpi() -> None:
    with ranks.world() as world:
        if world.follows:
            world.serve()
        if world.size > 1:
            raise ConfigError("--via dlio runs mpirun itself: start it without")


def _notes(
    limits: Limits,
    parts: Sequence[str],
    thinness: Thinness,
    loads: Sequence[Load],
    no_ranks: str | None,
) -> list[str]:
    notes = [
        "LIB dlio: the unmodified dlio_benchmark, generation only, through kvio's plugin and the "
        "library, kvio.write_threads as many as threads, processes by mpirun -np (one: without); "
        "LIB kvio: the direct harness, the same load in the same round; stock: DLIO alone, into a "
        "directory in memory, with nothing stored",
        "window: from the first PUT's start to the last PUT's end over all ranks, generating in "
        "it; stock: of generating; of LIB kvio: of putting what lies in memory; elapsed: all of "
        "the processes, from start to end, which is the original's metric",
        "user and system are of all ranks, start to end; start: the CPU of a stock run of one "
        "tiny file a rank; generate: of the stock run of this load less that; store: of the run "
        "through kvio less the stock run's, import of the library in it; all in the same round",
        f"objects are DLIO's {loads[0].format}: {_formats(loads)}",
        "after each run all names and lengths, and the bytes of the first, middle and last object "
        "of each process, are compared by the raw client with what stock DLIO generates of the "
        "same seed; errors: objects that are missing, too many or other",
        "DLIO tells no latencies: in the JSON all of a run's are the mean",
    ]
    if no_ranks:
        notes.append(f"LEFT OUT: {PROCESSES} other than 1: {no_ranks}")
    gone = [part for part in PARTS if part not in parts]
    if "get" in parts:
        notes.append("left out: part get: generation only puts; DLIO reads where it trains")
        gone = [part for part in gone if part != "get"]
    if gone:
        notes.append(f"left out: parts {', '.join(gone)}: not asked for")
    if missed := [told for told in thinness.left_out() if told.startswith(_axes(parts))]:
        notes.append(f"LEFT OUT to end within {limits.budget_s:g} s: {'; '.join(missed)}")
    return notes


def _axes(parts: Sequence[str]) -> tuple[str, ...]:
    """Give the words with which what is left out of some parts begins."""
    return tuple(word for part, word in _AXES.items() if part in parts)


def _formats(loads: Sequence[Load]) -> str:
    found = {load.case.nbytes: load.record_length for load in loads}
    about = "" if loads[0].format == "npy" else ", within 1 %"
    told = (f"{nbytes} B of record_length {length}" for nbytes, length in sorted(found.items()))
    return f"{', '.join(told)}{about}"
