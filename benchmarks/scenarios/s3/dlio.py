"""The same loads through DLIO: it generates what the direct harness puts, library by library.

Plan, runs of DLIO, trials, claims, notes, tables and plot. The direct harness is `scenario`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol
from urllib.parse import quote

from benchmarks.harness.columns import (
    ROUNDS,
    SIZE,
    Column,
    fact,
    median_of,
    number,
    table_of,
)
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Look, draw_panels, size_text
from benchmarks.harness.run import Limits, Run, Scenario
from benchmarks.harness.s3_libraries import LIBRARIES, versions
from benchmarks.harness.s3_server import Server
from benchmarks.harness.table import Table
from benchmarks.harness.workers import Job, communicator
from benchmarks.scenarios.dlio.process import (
    DlioRun,
    missing,
    of_phase,
    overrides,
    quoted,
    run_dlio,
)
from benchmarks.scenarios.s3.client import Client
from benchmarks.scenarios.s3.libraries import (
    CONNECTIONS,
    PART_BYTES,
    PUT,
    direct_options,
    kind_of,
    library_of,
    signing_options,
)
from benchmarks.scenarios.s3.plan import (
    LEVELS,
    PARTS,
    PROCESSES,
    REAL,
    ROUNDS_WANTED,
    SCALE,
    THREADS,
    Case,
    Thinness,
    cases_of,
    real_cases,
)
from benchmarks.scenarios.s3.plan import LIBRARIES as PART_LIBRARIES
from benchmarks.scenarios.s3.presenting import (
    BARS,
    COLOURS,
    TITLES,
    bar_panel,
    in_part,
    interval_text,
    line_panel,
    load_text,
    parts_of,
    scaling,
)
from benchmarks.scenarios.s3.scenario import (
    MAIN,
    Options,
    Trials,
    case_facts,
    hypotheses,
    scratch_of,
    servers_of,
    take_trials,
)
from kvio import ConfigError, KiB, MiB, UnsupportedError

#: Parts that only put, which is what generation does.
GENERATED: Final = tuple(part for part in PARTS if part != "get")
#: DLIO's format by the payload asked for.
FORMATS: Final = {"random": "npy", "jpeg": "jpeg"}
#: DLIO on its own storage, a directory in memory: start and generation, and nothing stored.
STOCK: Final = "stock"
#: Through DLIO, and by the direct harness.
KINDS: Final = ("dlio", "kvio")
#: Every contender's name, in the order of tables.
CONTENDERS: Final = (STOCK, *(f"{library} {kind}" for library in LIBRARIES for kind in KINDS))
SCENARIO: Final = Scenario(
    name="s3-dlio",
    title="Objects that DLIO generates through kvio and five S3 libraries",
    reference=STOCK,
    contenders=CONTENDERS,
)
#: More ranks than any load has.
_MANY: Final = 1 << 20


# ---- plan ----


_NPY_HEADER_NBYTES: Final = 128
#: Of DLIO's JPEGs of noise, by Pillow at its own quality: by pixel, where its blocks are whole.
_JPEG_NBYTES: Final = 0.5557
_JPEG_BLOCK: Final = 8
#: A run's seconds beside its bytes, on two cores: one rank, and each further.
_START_S: Final = 3.0
_RANK_S: Final = 1.6
_BYTES_PER_S: Final = 120e6
#: Objects so small wait for acknowledgements in torch, each so long.
_SMALL_NBYTES: Final = 128 * KiB
_WAIT_S: Final = 0.04
_WHOLE: Final = LEVELS[0]
#: From everything to the least; fewer objects would not shorten what is mostly DLIO starting.
DLIO_LEVELS: Final = (
    _WHOLE,
    replace(_WHOLE, threads=(1, 8, 32, 128), processes=(1, 2, 4), size_threads=(8, 1, 32)),
    replace(
        _WHOLE, threads=(1, 8, 32), processes=(1, 2, 4), sizes=(64 * KiB, MiB, 16 * MiB),
        size_threads=(8, 1),
    ),
    replace(
        _WHOLE, threads=(1, 8, 32), processes=(1, 4), sizes=(64 * KiB, 4 * MiB), size_threads=(8,)
    ),
    replace(
        _WHOLE, threads=(8, 32), processes=(1, 2), sizes=(64 * KiB, 4 * MiB), size_threads=(8,)
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What DLIO generates and the direct harness puts.

    Attributes:
        case: as the direct harness takes it; its objects are as long as DLIO makes them.
        parts: all that it belongs to: with 32 threads, parts 1 and 2.
        format: DLIO's.
    """

    case: Case
    parts: tuple[str, ...]
    format: str

    def __str__(self) -> str:
        return f"{self.case.subject}, {size_text(self.case.nbytes)}"

    @property
    def objects(self) -> int:
        """The number of objects of all processes."""
        return self.case.count * self.case.processes

    @property
    def record_length(self) -> int:
        """What DLIO is asked for: the pixels, or bytes, of a square."""
        return side_of(self.format, self.case.nbytes) ** 2

    def seconds(self, libraries: Sequence[str]) -> float:
        """Estimate how long a round takes."""
        case, once = self.case, start_s(self.case.processes)
        moved = self.objects * case.nbytes / _BYTES_PER_S
        waits = self.objects * _WAIT_S / (case.threads * case.processes)
        slow = waits if "torch" in libraries and case.nbytes < _SMALL_NBYTES else 0.0
        direct = case.seconds([f"{library} kvio" for library in libraries])
        return (len(libraries) + 1) * (once + moved) + slow + direct


def start_s(ranks: int) -> float:
    """Estimate how long a run takes that generates nothing."""
    return _START_S + (ranks - 1) * _RANK_S


def side_of(form: str, nbytes: int) -> int:
    """Return the side of the square whose file is as near to *nbytes* as DLIO can make it.

    DLIO makes squares of `int(sqrt(record_length))`. An .npy of one is its bytes and a header; a
    JPEG of noise has a length in proportion to its blocks of eight by eight, within 1 %.
    """
    if form == "npy":
        return max(1, round(math.sqrt(max(0, nbytes - _NPY_HEADER_NBYTES))))
    return max(1, round(math.sqrt(nbytes / _JPEG_NBYTES) / _JPEG_BLOCK)) * _JPEG_BLOCK


def object_nbytes(form: str, nbytes: int) -> int:
    """Return the length of DLIO's objects: of an .npy exactly, of JPEGs what is asked for."""
    return side_of(form, nbytes) ** 2 + _NPY_HEADER_NBYTES if form == "npy" else nbytes


def choose(
    parts: Sequence[str],
    libraries: Sequence[str],
    *,
    form: str,
    objects: int,
    most_ranks: int,
    budget_s: float,
) -> tuple[list[Load], Thinness]:
    """Return the loads of the parts, as many as the budget has room for; see `plan.choose`."""
    for rounds in ROUNDS_WANTED:
        for thinness in DLIO_LEVELS:
            loads = loads_of(parts, thinness, form=form, objects=objects, most_ranks=most_ranks)
            starts = sum(map(start_s, {load.case.processes for load in loads}))
            once = starts + sum(load.seconds(libraries) for load in loads)
            if rounds * once <= budget_s:
                return loads, thinness
    return loads, thinness


def loads_of(
    parts: Sequence[str], thinness: Thinness, *, form: str, objects: int, most_ranks: int
) -> list[Load]:
    """Return each load of some parts once, with all parts that it belongs to."""
    wanted = [part for part in parts if part in GENERATED]
    found: dict[tuple[int, ...], Load] = {}
    for case in cases_of(wanted, thinness, objects=objects):
        if case.processes > most_ranks:
            continue
        load = _load(case, form)
        key = (load.case.nbytes, case.threads, case.processes, case.count)
        if key in found:
            load = replace(found[key], parts=(*found[key].parts, *load.parts))
        found[key] = load
    return list(found.values())


def _load(case: Case, form: str) -> Load:
    """Make a load of a case: only puts, by kvio."""
    nbytes = object_nbytes(form, case.nbytes)
    return Load(
        case=replace(case, nbytes=nbytes, operations=(PUT,), kinds=("kvio",)),
        parts=(case.part,),
        format=form,
    )


# ---- runs of the unmodified DLIO that only generate ----


_FOLDER: Final = "data"
_CLASSES: Final = "kvio.connectors.dlio"
#: Stock DLIO imports no torch where it neither reads nor saves with it; it does neither here.
_STOCK: Final = overrides({
    "reader.data_loader_classname": f"{_CLASSES}.loader.KvioLoader",
    "reader.data_loader_sampler": "iterative",
    "checkpoint.checkpoint_mechanism_classname": f"{_CLASSES}.checkpoints.NumpyCheckpointing",
})  # fmt: skip
_THROUGH_KVIO: Final = overrides({"storage.storage_type": "parallel_fs"})
_TIMEOUT_S: Final = 120.0
#: An error's own line at the end of a traceback, or what kvio says when it refuses.
_COMPLAINT: Final = re.compile(r"^(?:\[KVIO\] (?!rank \d+ failed).*|[\w.]+(?:Error|Exception)\b.*)")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a load must leave in a store: every name with its length, and three files a process."""

    sizes: Mapping[str, int]
    files: Mapping[str, Path]


def memory_directory() -> str:
    """Return where stock DLIO generates, and where kvio stages: in memory, if possible."""
    shared = "/dev/shm"  # a tmpfs
    return shared if os.access(shared, os.W_OK) else tempfile.gettempdir()


def generate_stock(load: Load, work: Path, keep: Path | None) -> tuple[DlioRun, Expected | None]:
    """Generate a load by DLIO alone below *work*, and copy into *keep* what is compared later.

    Raises:
        UnsupportedError: DLIO failed.
    """
    with tempfile.TemporaryDirectory(prefix="stock-", dir=work) as made:
        folder = Path(made, _FOLDER)
        options = _options(load.format, load.objects, load.record_length, str(folder))
        run = _run([*options, *_STOCK], Path(made), load, {})
        return run, None if keep is None else _kept(folder, keep, load.case.processes)


def start_up(load: Load, work: Path) -> DlioRun:
    """Run stock DLIO for one tiny file a rank.

    Raises:
        UnsupportedError: DLIO failed.
    """
    with tempfile.TemporaryDirectory(prefix="start-", dir=work) as made:
        folder = str(Path(made, _FOLDER))
        options = _options(load.format, load.case.processes, 1, folder)
        return _run([*options, *_STOCK], Path(made), load, {})


def generate(load: Load, library: str, server: Server, prefix: str, work: Path) -> DlioRun:
    """Generate a load through kvio and a library below a prefix of a server's bucket.

    Raises:
        UnsupportedError: DLIO failed; says with which error, without credentials.
    """
    threads = load.case.threads
    options: dict[str, Any] = {
        "endpoint_url": server.url,
        "region": server.region,
        "connections": max(CONNECTIONS, threads),
        **direct_options(max(PART_BYTES, load.case.nbytes + load.case.nbytes // 64)),
        **signing_options(library, unsigned=server.unsigned),
    }
    url = f"s3+{library}://{quote(f'{server.bucket}/{prefix}')}"
    settings = {"data": url, "options": options, "write_threads": threads}
    environment = {name: "" for name in ("AWS_SESSION_TOKEN",) if name in os.environ}
    environment |= {name: v for name, v in server.environ.items() if name.startswith("AWS_")}
    environment["KVIO_DLIO"] = json.dumps(settings)
    asked = _options(load.format, load.objects, load.record_length, _FOLDER)
    with tempfile.TemporaryDirectory(prefix="through-", dir=work) as made:
        return _run([*asked, *_THROUGH_KVIO], Path(made), load, environment, server)


def key_of(prefix: str, name: str) -> str:
    """Return the key of one of the names in `Expected`."""
    return f"{prefix}/{_FOLDER}/{name}"


def _options(form: str, files: int, record_length: int, folder: str) -> list[str]:
    settings = {
        "dataset.format": form,
        "dataset.num_files_train": files,
        "dataset.num_files_eval": 0,
        "dataset.num_samples_per_file": 1,
        "dataset.record_length": record_length,
        "dataset.record_length_stdev": 0,
        "dataset.record_length_resize": 1,
        "dataset.data_folder": quoted(folder),
        "checkpoint.model_size": 1,  # it is made, though never saved
    }
    return ["workload=unet3d_a100", *overrides(settings), *of_phase(generate=True, train=False)]


def _run(
    options: Sequence[str],
    work: Path,
    load: Load,
    environment: Mapping[str, str],
    server: Server | None = None,
) -> DlioRun:
    ranks = load.case.processes
    try:
        run = run_dlio(
            options, work=work, ranks=ranks, environment=environment, timeout_s=_TIMEOUT_S
        )
    except TimeoutError as exc:
        raise UnsupportedError(f"failed: {load}: {exc}") from None
    if run.status:
        lines = [line.strip() for line in run.text.splitlines() if line.strip()]
        errors = [line for line in lines if _COMPLAINT.match(line)]
        error = (errors or lines or ["it printed nothing"])[-1]
        shown = error if server is None else server.redacted(error)
        raise UnsupportedError(f"failed: {load}: {shown[:300]}")
    return run


def _kept(folder: Path, keep: Path, processes: int) -> Expected:
    """List all names and lengths, and copy the first, middle and last file of each process.

    DLIO deals its files, whose names sort as they are numbered, to one rank after the other.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    chosen: dict[str, Path] = {}
    for rank in range(processes):
        own = range(rank, len(files), processes)
        for at in {own[0], own[len(own) // 2], own[-1]} if own else ():
            chosen[names[at]] = Path(shutil.copyfile(files[at], keep / files[at].name))
    return Expected(dict(zip(names, (p.stat().st_size for p in files), strict=True)), chosen)


# ---- trials ----


class DlioTrials(Trials):
    """What the trials of a run share: the direct harness, and what DLIO alone makes."""

    def __init__(
        self, servers: Mapping[str, Server], scratch: Path, options: Options, memory: Path
    ) -> None:
        super().__init__(servers, Job(Client), scratch, options)
        self._memory = memory
        self._expected: dict[str, Expected] = {}
        self._start_up: dict[tuple[int, int], DlioRun] = {}
        self._stock_done: set[tuple[str, int]] = set()

    def take(self, load: Load, name: str, index: int) -> Iterator[Sample]:
        """Run a load, look at what was stored, remove it."""
        if kind_of(name) == "kvio":
            for sample in self.take_case(load.case, name, index):
                yield replace(sample, facts={**sample.facts, **_shared(load)})
            return
        if str(load) not in self._expected or name == STOCK:
            yield from self._stock(load, index)
        if name != STOCK:
            yield self._through(load, name, index, self._expected[str(load)])

    def _stock(self, load: Load, index: int) -> Iterator[Sample]:
        """Generate by DLIO alone, once a round, before the first that is compared with it."""
        if (str(load), index) in self._stock_done:
            return
        at = load.case.processes, index
        if at not in self._start_up:
            if not self._start_up:
                start_up(load, self._memory)  # the first run reads modules that others find cached
            self._start_up[at] = start_up(load, self._memory)
        keep = None
        if str(load) not in self._expected:
            keep = Path(tempfile.mkdtemp(prefix="expected-", dir=self.scratch))
        run, expected = generate_stock(load, self._memory, keep)
        if expected is not None:
            self._expected[str(load)] = expected
        self._stock_done.add((str(load), index))
        start = self._start_up[at]
        facts = _stored(self._expected[str(load)], 0)
        facts |= {"start_wall_s": start.wall_s, "start_cpu_s": start.user_s + start.system_s}
        yield _sample(load, STOCK, index, run.generation_s or run.wall_s, run, facts)

    def _through(self, load: Load, name: str, index: int, expected: Expected) -> Sample:
        """Generate through a library, and compare with what DLIO alone generates."""
        at = REAL if REAL in load.parts else MAIN
        server, inspector = self.servers[at], self.inspectors[at]
        prefix = f"{self.prefix}/{library_of(name)}"
        before = server.cpu_s()
        try:
            run = generate(load, library_of(name), server, prefix, self._memory)
            after = server.cpu_s()
            errors = errors_of(inspector, inspector.sizes(f"{prefix}/"), prefix, expected)
        finally:
            inspector.delete(list(inspector.sizes(f"{prefix}/")))
        counts = run.all_ranks
        if counts is None or counts.wrote.blocks != len(expected.sizes):
            errors = max(1, errors)  # it wrote, but not through kvio
        window = counts.wrote.seconds if counts is not None else None
        facts = _stored(expected, errors)
        facts["server_s"] = None if before is None or after is None else after - before
        return _sample(load, name, index, window or run.wall_s, run, facts)


class Holds(Protocol):
    """What knows whether an object begins with some bytes."""

    def holds(self, key: str, payload: bytes) -> bool:
        """Report whether it does."""


def errors_of(inspector: Holds, sizes: Mapping[str, int], prefix: str, expected: Expected) -> int:
    """Count objects that are missing, too many, of another length or of other bytes."""
    wanted = {key_of(prefix, name): nbytes for name, nbytes in expected.sizes.items()}
    wrong = {key for key in wanted.keys() | sizes.keys() if wanted.get(key) != sizes.get(key)}
    for name, path in expected.files.items():
        key = key_of(prefix, name)
        if key not in wrong and not inspector.holds(key, path.read_bytes()):
            wrong.add(key)
    return len(wrong)


def _stored(expected: Expected, errors: int) -> dict[str, Any]:
    nbytes = sum(expected.sizes.values())
    return {"objects": len(expected.sizes), "bytes": nbytes, "errors": errors}


def _shared(load: Load) -> dict[str, Any]:
    return {"part": load.parts[0], "parts": list(load.parts), "format": load.format}


def _sample(
    load: Load, name: str, index: int, window_s: float, run: DlioRun, facts: Mapping[str, Any]
) -> Sample:
    """Keep a run; DLIO reports no latencies, so they are all the mean."""
    case = load.case
    return Sample(
        subject=case.subject,
        block_nbytes=case.nbytes,
        contender=name,
        checksum=False,
        operation=PUT,
        round=index,
        wall_s=window_s,
        latencies_s=[window_s / load.objects] * load.objects,
        intact=facts["errors"] == 0,
        facts={
            **case_facts(case, name),
            **_shared(load),
            "kind": kind_of(name) if name != STOCK else STOCK,
            "user_s": run.user_s,
            "system_s": run.system_s,
            "server_s": None,
            "cut_short": False,
            "process_wall_s": run.wall_s,
            "process_cpu_s": run.user_s + run.system_s,
            "generation_s": run.generation_s,
            **facts,
        },
    )


# ---- a run ----


def run(limits: Limits, options: Options) -> int:
    """Run experiments 1 to 4 through DLIO, print tables and write them down.

    Args:
        limits: how much of it, and where results go; ``root`` is not used.
        options: of what; part ``get`` is left out, since generation only puts. A random payload is
            DLIO's npy.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the options, or DLIO is not installed; nothing was written.
        UnsupportedError: something that all of it needs is missing.
    """
    libraries = _libraries(options.contenders)
    options.check()
    parts, objects = options.parts, options.objects
    if not set(parts) & set(GENERATED):
        raise ConfigError(f"DLIO generates in parts {', '.join(GENERATED)} alone, not in 'get'")
    if communicator() is not None:
        raise ConfigError("--via dlio runs mpirun itself: start it without")
    if absent := missing(1):
        raise ConfigError(f"--via dlio: {absent}")
    no_ranks, form = missing(2), FORMATS[options.payload]
    more = [_load(case, form) for case in real_cases(objects)] if options.real is not None else []
    loads, thinness = choose(
        parts, libraries, form=form, objects=objects, most_ranks=1 if no_ranks else _MANY,
        budget_s=limits.budget_s - sum(load.seconds(libraries) for load in more),
    )  # fmt: skip
    loads += more
    names = [name for name in CONTENDERS if name == STOCK or library_of(name) in libraries]
    this = Run(
        SCENARIO,
        limits,
        {
            **options.record(),
            "via": "dlio",
            "contenders": names,
            "loads": [asdict(load) for load in loads],
            "versions": versions(["dlio_benchmark", "mpi4py", *LIBRARIES.values()]),
        },
    )
    with ExitStack() as stack:
        servers = servers_of(stack, options)
        memory = scratch_of(stack, memory_directory())
        trials = DlioTrials(servers, scratch_of(stack), options, memory)
        stack.callback(trials.close)
        take_trials(this, loads, names, trials)
    notes = _notes(limits, options, thinness, loads, no_ranks)
    this.scenario = replace(SCENARIO, claims=claims(this.samples))
    return this.finish([*notes, *trials.notes], tables, partial(_draw, this.samples))


def _libraries(wanted: Sequence[str] | None) -> list[str]:
    unknown = [name for name in wanted or () if name not in LIBRARIES]
    if unknown:
        raise ConfigError(
            f"unknown library {unknown[0]!r}; via DLIO contenders are {', '.join(LIBRARIES)}"
        )
    return [name for name in LIBRARIES if wanted is None or name in wanted]


def claims(samples: Sequence[Sample]) -> list[Claim]:
    """List the claims of the original experiments, by its own metric and by the window."""
    return [
        *hypotheses(samples, "dlio", elapsed_speed, ", by elapsed time"),
        *hypotheses(samples, "dlio", window_speed, ", by the window"),
    ]


def _notes(
    limits: Limits,
    options: Options,
    thinness: Thinness,
    loads: Sequence[Load],
    no_ranks: str | None,
) -> list[str]:
    lengths = sorted({(load.case.nbytes, load.record_length) for load in loads})
    about = "" if loads[0].format == "npy" else ", within 1 %"
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
        f"objects are DLIO's {loads[0].format}: "
        + ", ".join(f"{nbytes} B of record_length {length}" for nbytes, length in lengths)
        + about,
        "after each run all names and lengths, and the bytes of the first, middle and last object "
        "of each process, are compared by the raw client with what stock DLIO generates of the "
        "same seed; errors: objects that are missing, too many or other",
        "DLIO reports no latencies: in the JSON all of a run's are the mean",
    ]
    if no_ranks:
        notes.append(f"LEFT OUT: {PROCESSES} other than 1: {no_ranks}")
    if "get" in options.parts:
        notes.append("left out: part get: generation only puts; DLIO reads where it trains")
    if gone := [part for part in GENERATED if part not in options.parts]:
        notes.append(f"left out: parts {', '.join(gone)}: not asked for")
    if absent := thinness.left_out(options.parts):
        notes.append(f"LEFT OUT to end within {limits.budget_s:g} s: {'; '.join(absent)}")
    return notes


# ---- tables ----


def window_speed(sample: Sample) -> float:
    """Return bytes a second from the first PUT to the end of the last."""
    return _moved(sample) / sample.wall_s


def elapsed_speed(sample: Sample) -> float:
    """Return bytes a second of all that the processes took: the original's metric."""
    return _moved(sample) / float(sample.facts["process_wall_s"])


def _moved(sample: Sample) -> float:
    return float(sample.facts.get("bytes", sample.block_nbytes * len(sample.latencies_s)))


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make every table that has a row."""
    found = []
    speeds, cpu, left = _speed_columns(samples), _cpu_columns(samples), ("load", "library")
    for part, title in TITLES.items():
        own = [
            one
            for one, _ in in_part(part, summaries, samples)
            if not one.contender.endswith(" kvio")
        ]
        found.append(table_of(title, own, samples, speeds, left=left))
        title = f"{title}: CPU of all ranks, from start to end"
        found.append(table_of(title, own, samples, cpu, left=left))
        if part == PROCESSES:
            found.append(_scaling(own, samples))
    return [table for table in found if table.rows]


def _first_columns() -> dict[str, Column]:
    return {
        "load": load_text,
        "size": SIZE,
        "library": lambda one, _: library_of(one.contender),
        "rounds": ROUNDS,
    }


def _speed_columns(samples: Sequence[Sample]) -> dict[str, Column]:
    direct = _of(samples, "kvio")

    def by_direct(one: Summary, own: Sequence[Sample]) -> str:
        others = {sample.round: window_speed(sample) for sample in direct(one)}
        return interval_text(
            (sample for sample in own if sample.round in others),
            lambda sample: window_speed(sample) / others[sample.round],
        )

    def speed_range(_: Summary, own: Sequence[Sample]) -> str:
        speeds = [window_speed(sample) / 1e6 for sample in own]
        return f"{min(speeds):.0f}-{max(speeds):.0f}"

    def mb_per_s(sample: Sample) -> float:
        return window_speed(sample) / 1e6

    return {
        **_first_columns(),
        "MB/s": lambda _, own: number(median_of(own, mb_per_s), ".0f"),
        "range": speed_range,
        "direct MB/s": lambda one, _: number(median_of(direct(one), mb_per_s), ".0f"),
        "via DLIO : direct": by_direct,
        "MiB/s of elapsed": lambda _, own: number(
            median_of(own, lambda s: elapsed_speed(s) / MiB), ".0f"
        ),
        "elapsed s": fact("process_wall_s"),
        "direct elapsed s": lambda one, _: fact("process_wall_s")(one, _whole(direct(one))),
        "objects": lambda _, own: str(own[0].facts["objects"]),
        "MB": lambda _, own: f"{own[0].facts['bytes'] / 1e6:.0f}",
        "errors": lambda _, own: str(sum(sample.facts["errors"] for sample in own)),
    }


def _cpu_columns(samples: Sequence[Sample]) -> dict[str, Column]:
    direct, stock = _of(samples, "kvio"), _of(samples, STOCK)

    def generated(sample: Sample) -> float:
        return float(sample.facts["process_cpu_s"] - sample.facts["start_cpu_s"])

    def stored(one: Summary, own: Sequence[Sample]) -> str:
        if one.contender == STOCK:
            return ""
        alone = {sample.round: sample.facts["process_cpu_s"] for sample in stock(one)}
        more = [s.facts["process_cpu_s"] - alone[s.round] for s in own if s.round in alone]
        return number(median(more) if more else None)

    return {
        **_first_columns(),
        "user s": fact("user_s"),
        "system s": fact("system_s"),
        "start s": lambda one, _: fact("start_cpu_s")(one, stock(one)),
        "generate s": lambda one, _: number(median_of(stock(one), generated)),
        "store s": stored,
        "direct s": lambda one, _: fact("process_cpu_s")(one, _whole(direct(one))),
        "server s": fact("server_s"),
    }


def _scaling(summaries: Sequence[Summary], samples: Sequence[Sample]) -> Table:
    """Return which share of the ideal several processes reach, by one."""
    direct = _of(samples, "kvio")
    by_window, by_elapsed = scaling(samples, window_speed), scaling(samples, elapsed_speed)
    columns: dict[str, Column] = {
        "library": lambda one, _: library_of(one.contender),
        "processes": lambda _, own: str(own[0].facts["processes"]),
        "rounds": ROUNDS,
        "window": lambda _, own: interval_text(own, by_window),
        "elapsed": lambda _, own: interval_text(own, by_elapsed),
        "direct window": lambda one, _: interval_text(direct(one), by_window),
    }
    several = {
        (sample.subject, sample.contender)
        for sample in samples
        if sample.facts["processes"] > 1 and by_window(sample) is not None
    }
    rows = [
        one
        for one in sorted(summaries, key=lambda one: CONTENDERS.index(one.contender))
        if one.contender != STOCK and (one.subject, one.contender) in several
    ]
    made = table_of("Scaling efficiency: actual / ideal", rows, samples, columns, left=("library",))
    return replace(made, rule_after=frozenset())


def _of(samples: Sequence[Sample], kind: str) -> Callable[[Summary], list[Sample]]:
    """Return what finds the samples of the same load: of stock DLIO, or of the direct harness."""
    found: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.subject, sample.block_nbytes, sample.contender), []).append(sample)

    def of(one: Summary) -> list[Sample]:
        name = STOCK if kind == STOCK else f"{library_of(one.contender)} {kind}"
        return found.get((one.subject, one.block_nbytes, name), [])

    return of


def _whole(direct: Sequence[Sample]) -> list[Sample]:
    """Leave out rounds in which the direct harness put fewer objects, as its time was over."""
    return [sample for sample in direct if not sample.facts["cut_short"]]


# ---- plot ----


_VIA: Final = "via DLIO"
_DIRECT: Final = "direct"
_ELAPSED: Final = "via DLIO, elapsed"
_LOOKS: Final = {
    STOCK: Look("#7f7f7f"),
    **{f"{library} {_VIA}": Look(COLOURS[library]) for library in LIBRARIES},
    **{f"{library} {_DIRECT}": Look(COLOURS[library], "--") for library in LIBRARIES},
    **{f"{library} {_ELAPSED}": Look(COLOURS[library], ":") for library in LIBRARIES},
    **dict(zip((_VIA, _DIRECT, _ELAPSED), BARS, strict=False)),
}


def _draw(
    samples: Sequence[Sample], _: Sequence[Summary], *, title: str, footnote: str, path: Path
) -> str | None:
    """Draw throughput by the window and by elapsed time, and processor time by library."""
    ordered = sorted(samples, key=lambda sample: CONTENDERS.index(sample.contender))

    def own(part: str) -> list[Sample]:
        return [sample for sample in ordered if part in parts_of(sample)]

    def speeds(sample: Sample) -> list[tuple[str, float]]:
        """Return the values of a sample by name."""
        window, elapsed = window_speed(sample) / 1e6, elapsed_speed(sample) / 1e6
        if sample.contender == STOCK:
            return [(STOCK, window)]
        if kind_of(sample.contender) == "kvio":
            return [(_DIRECT, window)]
        return [(_VIA, window), (_ELAPSED, elapsed)]

    def by_library(sample: Sample) -> list[tuple[str, float]]:
        library = library_of(sample.contender)
        if library == STOCK:
            return speeds(sample)
        return [(f"{library} {name}", value) for name, value in speeds(sample)]

    def cpu(sample: Sample) -> list[tuple[str, float]]:
        return [(speeds(sample)[0][0], float(sample.facts["process_cpu_s"]))]

    at_32 = own(PART_LIBRARIES)
    panels = [
        *line_panel(own(THREADS), "By write threads", "threads", by_library),
        *line_panel(own(PROCESSES), "By processes of 8 threads", "processes", by_library),
        *bar_panel(
            [sample for sample in at_32 if sample.contender != STOCK],
            "By library at 32 threads",
            "MB/s",
            speeds,
            log=True,
        ),
        *bar_panel(at_32, "CPU of a run at 32 threads; stock: DLIO alone", "CPU s", cpu),
        *line_panel(own(SCALE), "By object size", "object_nbytes", by_library),
    ]
    if not panels:
        return "no plot: no part has anything to draw"
    return draw_panels(panels, title=title, footnote=footnote, path=path, looks=_LOOKS)
