"""Compare S3 libraries: through kvio, called directly in the same configuration, by their defaults.

Run, trials, claims and notes; and several runs merged into one.
"""

from __future__ import annotations

import importlib.util
import io
import json
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness.judging import Claim
from benchmarks.harness.machine import Machine
from benchmarks.harness.measure import Sample
from benchmarks.harness.run import Limits, Run, Scenario, check_least, check_names
from benchmarks.harness.s3_libraries import LIBRARIES, missing, versions
from benchmarks.harness.s3_server import (
    Inspector,
    S3Storage,
    Server,
    given,
    in_memory,
    minio,
    storage_of,
)
from benchmarks.harness.workers import Answer, Job, communicator, job_of
from benchmarks.scenarios.s3 import presenting
from benchmarks.scenarios.s3.client import Client, Relay
from benchmarks.scenarios.s3.libraries import (
    CONTENDERS,
    FLOOR,
    GET,
    PUT,
    RANGE,
    TRAILER_NBYTES,
    JobSpec,
    kind_of,
    library_of,
)
from benchmarks.scenarios.s3.plan import LIBRARIES as PART_LIBRARIES
from benchmarks.scenarios.s3.plan import (
    PARTS,
    PROCESS_THREADS,
    PROCESSES,
    READS,
    REAL,
    SCALE,
    THREADS,
    Case,
    Thinness,
    choose,
    real_cases,
)
from benchmarks.scenarios.s3.presenting import (
    Measure,
    beside,
    cpu_s_per_gib,
    parts_of,
    scaling,
    speed,
)
from kvio import ConfigError, GiB, MiB, StorageError, UnsupportedError
from kvio.types import is_key

SCENARIO: Final = Scenario(
    name="s3",
    title="Objects by five S3 libraries: through kvio, by hand, and as they come",
    reference=FLOOR,
    contenders=CONTENDERS,
)
PAYLOADS: Final = ("random", "jpeg")
#: No call begins later in an operation's window: it is long enough for a library of 40 ms a call.
LIMIT_S: Final = 3.0
_BUCKET: Final = "kvio-experiment"
#: Of a server in memory: room for the objects of one trial, twice.
_RESERVE_BYTES: Final = GiB
MAIN: Final = "main"
_SEED: Final = 20260104
#: Payloads that differ, so that an object's bytes are not another's by chance.
_MOST_DISTINCT: Final = 8
_MOST_PAYLOAD_NBYTES: Final = 64 * MiB
_PIXELS: Final = 480
#: Two that are closer count as equal.
_MARGIN: Final = 1.05
#: Rounds of one run are kept apart from those of another.
_ROUNDS_OF_A_RUN: Final = 1000


# ---- claims ----


def claims(samples: Sequence[Sample]) -> list[Claim]:
    """List the claims of the four original experiments, and what is expected of kvio."""
    compared = [PUT, GET, RANGE]
    by_direct = [(f"{library} kvio", f"{library} direct") for library in LIBRARIES]
    return [
        *hypotheses(samples, "kvio", speed),
        Claim(
            text="kvio is as fast as the library called directly",
            pairs=by_direct,
            at_least=0.97,
            operations=compared,
        ),
        Claim(
            text="kvio takes no more CPU a byte than the library called directly",
            pairs=by_direct,
            at_most=1.05,
            operations=compared,
            value=cpu_s_per_gib,
        ),
        *(
            Claim(
                text=f"{kind} is as fast as the library's defaults",
                pairs=[(f"{library} {kind}", f"{library} defaults") for library in LIBRARIES],
                at_least=1.0,
                operations=compared,
                where=_of(SCALE),
            )
            for kind in ("kvio", "kvio block")
        ),
    ]


def hypotheses(
    samples: Sequence[Sample], kind: str, measure: Measure, suffix: str = ""
) -> list[Claim]:
    """List the null hypotheses of the original, each as what it claims.

    Args:
        samples: of the run; loads of the same round are compared with each other.
        kind: of the contenders.
        measure: the throughput.
        suffix: says which throughput it is.
    """
    names = [f"{library} {kind}" for library in LIBRARIES]
    alone = [(name, "") for name in names]
    few = PROCESS_THREADS

    def has_few(part: str) -> Callable[[Sample], bool]:
        return lambda s: part in parts_of(s) and s.facts["threads"] == few

    def others(part: str) -> Callable[[Sample], bool]:
        return lambda s: part in parts_of(s) and s.facts["threads"] != few

    return [
        Claim(
            text=f"1: PUT is as fast by any thread count as by {few}{suffix}",
            pairs=alone,
            at_least=1 / _MARGIN,
            at_most=_MARGIN,
            operations=[PUT],
            where=others(THREADS),
            value=beside(samples, has_few(THREADS), measure),
        ),
        Claim(
            text=f"2: the libraries are equally fast at 32 threads{suffix}",
            pairs=list(combinations(names, 2)),
            at_least=1 / _MARGIN,
            at_most=_MARGIN,
            operations=[PUT],
            where=_of(PART_LIBRARIES),
            value=measure,
        ),
        Claim(
            text=f"3: PUT throughput scales ideally with processes{suffix}",
            pairs=alone,
            at_least=1 / _MARGIN,
            operations=[PUT],
            where=lambda s: PROCESSES in parts_of(s) and s.facts["processes"] > 1,
            value=scaling(samples, measure),
        ),
        Claim(
            text=f"4: at every object size no thread count is better for PUT than {few}{suffix}",
            pairs=alone,
            at_most=_MARGIN,
            operations=[PUT],
            where=others(SCALE),
            value=beside(samples, has_few(SCALE), measure),
        ),
    ]


def _of(part: str) -> Callable[[Sample], bool]:
    return lambda sample: part in parts_of(sample)


# ---- a run ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is asked for.

    Attributes:
        parts: of `PARTS`.
        objects: of 322,957 bytes in a load; of other sizes as many bytes.
        contenders: of `CONTENDERS`, or names of libraries; None: all. The floor takes part always.
            Through DLIO they are names of libraries.
        payload: ``random`` or ``jpeg``.
        endpoint: a server that runs; None: one in memory, of this run alone.
        bucket: on a given server; it must exist.
        prefix: below which all objects are; they are removed.
        real: a MinIO binary to measure some of it on, too.
    """

    parts: Sequence[str] = PARTS
    objects: int = 400
    contenders: Sequence[str] | None = None
    payload: str = "random"
    endpoint: str | None = None
    bucket: str | None = None
    prefix: str = "kvio-experiment"
    real: Path | None = None

    def check(self) -> None:
        """Look for mistakes.

        Raises:
            ConfigError: one was found.
        """
        check_names("part", self.parts, PARTS)
        check_least(objects=self.objects)
        check_names("payload", [self.payload], PAYLOADS)
        if not all(map(is_key, self.prefix.split("/"))):
            raise ConfigError(f"not a prefix: {self.prefix!r:.80}")
        if self.endpoint is not None and not self.bucket:
            raise ConfigError("--endpoint needs --bucket, which must exist")
        if self.endpoint is None and self.bucket:
            raise ConfigError("--bucket needs --endpoint")

    def record(self) -> dict[str, Any]:
        """Return what a record says of them; the server is recorded in another place."""
        return {"parts": list(self.parts), "objects": self.objects, "payload": self.payload}


def run(limits: Limits, options: Options) -> int:
    """Run the scenario, print its tables and write them down.

    Args:
        limits: how much of it, and where results go; ``root`` is not used.
        options: of what.

    Returns:
        0; 1 if a byte differed; 2 if nothing could be measured; 130 after Ctrl-C.

    Raises:
        ConfigError: a mistake in the options; nothing was written.
        UnsupportedError: something that all of it needs is missing.
    """
    names = _contenders(options.contenders)
    options.check()
    if options.payload == "jpeg" and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("no JPEG: matplotlib is not installed")
    parts, objects = options.parts, options.objects
    with client_job() as job, ExitStack() as stack:
        if job.follows:
            job.serve()
            return 0
        chosen, thinness = choose(parts, names, objects=objects, budget_s=limits.budget_s)
        cases = [case for case in chosen if job.size is None or case.processes <= job.size]
        cases += real_cases(objects) if options.real is not None else []
        this = Run(
            SCENARIO,
            limits,
            {
                **options.record(),
                "contenders": names,
                "cases": [asdict(case) for case in cases],
                "versions": versions([*LIBRARIES.values(), "botocore", "urllib3"]),
            },
        )
        servers = servers_of(stack, options)
        trials = Trials(servers, job, scratch_of(stack), options)
        stack.callback(trials.close)
        take_trials(this, cases, names, trials)
    notes = _notes(limits, options, thinness, job.size, servers[MAIN])
    this.scenario = replace(SCENARIO, claims=claims(this.samples))
    return this.finish(
        [*notes, *trials.notes], presenting.tables, partial(presenting.draw, this.samples)
    )


def _contenders(wanted: Sequence[str] | None) -> list[str]:
    """Return the floor and what is wanted, in the order of tables."""
    known = (*CONTENDERS, *LIBRARIES)
    unknown = [name for name in wanted or () if name not in known]
    if unknown:
        raise ConfigError(
            f"unknown contender {unknown[0]!r}; known: {', '.join(LIBRARIES)}, or one of a "
            f"library: {', '.join(name for name in CONTENDERS if name.startswith('boto3'))}, ..."
        )
    return [
        name
        for name in CONTENDERS
        if wanted is None or name == FLOOR or name in wanted or library_of(name) in wanted
    ]


@contextmanager
def client_job() -> Iterator[Job]:
    """Lend what starts the clients: this process, or under mpirun every rank.

    Raises:
        ConfigError: mpirun started this process, and mpi4py is missing.
    """
    with job_of(Client if communicator() is None else Relay) as job:
        yield job


def servers_of(stack: ExitStack, options: Options) -> dict[str, Server]:
    """Start or find the servers to measure on, with a bucket each."""
    if options.endpoint is None:
        server = stack.enter_context(in_memory(_BUCKET, _RESERVE_BYTES))
    else:
        server = given(options.endpoint, options.bucket or "")
    inspector = server.inspector()
    if options.endpoint is None:
        inspector.make_bucket()
    else:
        inspector.check_bucket()
    inspector.close()
    servers = {MAIN: server}
    if options.real is not None:
        servers[REAL] = stack.enter_context(minio(options.real, _BUCKET))
    return servers


def scratch_of(stack: ExitStack, directory: str | None = None) -> Path:
    """Make a temporary directory that is removed with the stack."""
    made = tempfile.TemporaryDirectory(prefix="kvio-s3-", dir=directory)
    return Path(stack.enter_context(made))


def take_trials(this: Run, cases: Sequence[Any], names: Sequence[str], trials: Trials) -> None:
    """Let all contenders whose library is installed take their trials."""
    this.file_system = storage_of(trials.servers[MAIN])
    for name in names:
        library = library_of(name)
        if library in LIBRARIES and (why := missing(library)):
            this.left_out[name] = why
    this.take_trials(cases, names, trials.take)


def _notes(
    limits: Limits, options: Options, thinness: Thinness, ranks: int | None, server: Server
) -> list[str]:
    notes = [
        "kvio: the store with layout=plain and checksum=none, one request an object; kvio block: "
        "the store as it is by default; direct: the library called directly, configured as kvio "
        "does; defaults: the library with nothing but an endpoint and credentials; floor: raw "
        "sockets, requests signed before the clock starts",
        "each load in a process of its own; its window is from the start signal, when every "
        "thread has a connection, to the end of the last call, and no call begins later than "
        f"{LIMIT_S:g} s in it; process s: from the start of a process that only puts to its end, "
        "interpreter and imports in it",
        "all reads end in memory of the caller that was touched before; every byte read is "
        "compared after the clock, and lengths of all and bytes of three objects of each process "
        "are read back by the raw client",
        f"bodies are {'not hashed' if server.unsigned else 'hashed (SHA-256)'} by kvio and direct "
        "where the library leaves the choice (minio over http always hashes, torch never does); "
        "defaults as they are",
        "x floor, and all ratios: of two in the same round, then the median over rounds, with the "
        "interval that contains the true median with a probability of 95 % where there are enough "
        f"rounds; within {_MARGIN - 1:.0%} two count as equally fast",
        "CPU is the client's alone; server s/GiB is the server's own, in steps of 10 ms",
    ]
    if options.payload == "jpeg":
        notes.append("objects are JPEGs, cut or repeated to the object's size")
    if ranks is not None:
        notes.append(
            f"started under MPI: {ranks} ranks run the client processes; loads of more "
            "processes than ranks are left out"
        )
    if gone := [part for part in PARTS if part not in options.parts]:
        notes.append(f"left out: parts {', '.join(gone)}: not asked for")
    if absent := thinness.left_out(options.parts):
        notes.append(f"LEFT OUT to end within {limits.budget_s:g} s: {'; '.join(absent)}")
    return notes


# ---- trials ----


@dataclass(frozen=True, slots=True)
class _Ended:
    """What the client processes of one load answered, one answer a process.

    Attributes:
        windows: of every operation.
        server_s: processor seconds of the server in every operation; None: not known.
        wall_s: from the start of the processes to their end.
        cpu_s: of all processes, from start to end.
    """

    windows: list[list[Answer]]
    server_s: list[float | None]
    wall_s: float
    cpu_s: float


class Trials:
    """What the trials of a run share.

    Attributes:
        servers: by name.
        inspectors: of each server.
        scratch: a directory that is removed later.
        prefix: of all objects; no other run uses it.
        notes: what could not be removed.
    """

    def __init__(
        self, servers: Mapping[str, Server], job: Job, scratch: Path, options: Options
    ) -> None:
        self.servers = servers
        self.inspectors = {name: server.inspector() for name, server in servers.items()}
        self.scratch = scratch
        self.prefix = f"{options.prefix}/{secrets.token_hex(4)}"
        self.notes: list[str] = []
        self._job = job
        self._kind = options.payload
        self._payloads: dict[int, tuple[Path, int]] = {}

    def take(self, case: Any, name: str, index: int) -> Iterator[Sample]:
        """Run the load of a case, look at what was stored, remove it."""
        yield from self.take_case(case, name, index)

    def take_case(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Run a load of client processes."""
        if not case.takes(name):
            return
        server = self.servers[_server_of(case)]
        specs = [self._spec(case, name, server, number) for number in range(case.processes)]
        try:
            ended = self._run(specs, server)
        except StorageError as exc:
            why = server.redacted(" ".join(str(exc).split()))[:300]
            raise UnsupportedError(f"failed: {case}: {why}") from None
        stored = self._look(self.inspectors[_server_of(case)], specs, ended, name)
        for operation, windows, server_s in zip(
            case.operations, ended.windows, ended.server_s, strict=True
        ):
            if case.part == READS and operation == PUT and stored:
                continue  # it only makes what is read
            wrong = [window["wrong"] for window in windows if window["wrong"]]
            yield Sample(
                subject=case.subject,
                block_nbytes=specs[0].extent[1] if operation == RANGE else case.nbytes,
                contender=name,
                checksum=kind_of(name) == "kvio block",
                operation=operation,
                round=index,
                wall_s=max(w["end_s"] for w in windows) - min(w["start_s"] for w in windows),
                latencies_s=[seconds for window in windows for seconds in window["latencies_s"]],
                reasons=wrong,
                intact=stored if operation == PUT else not wrong,
                facts={
                    **case_facts(case, name),
                    **_facts(case, operation, windows, ended),
                    "server_s": server_s,
                },
            )

    def close(self) -> None:
        """Remove what interrupted trials left, and close connections."""
        for inspector in self.inspectors.values():
            try:
                inspector.delete(list(inspector.sizes(f"{self.prefix}/")))
            except OSError as exc:
                self.notes.append(f"what is below {self.prefix}/ could not be removed: {exc}")
            inspector.close()

    def _run(self, specs: Sequence[JobSpec], server: Server) -> _Ended:
        """Run a client process for each spec, all at the same time.

        Raises:
            StorageError: one failed; says with which error.
        """
        count = len(specs)
        environ = {name: v for name, v in server.environ.items() if name.startswith("AWS_")}
        started = time.monotonic()
        workers = self._job.workers(count)
        try:
            workers.ask([{"do": "start", "spec": asdict(s), "environ": environ} for s in specs])
            windows, server_s = [], []
            for operation in specs[0].operations:
                workers.ask([{"do": "prepare", "operation": operation}] * count)
                before = server.cpu_s()
                windows.append(workers.ask([{"do": "run", "operation": operation}] * count))
                after = server.cpu_s()
                server_s.append(None if before is None or after is None else after - before)
            ends = workers.ask([{"do": "end"}] * count)
            wall_s = time.monotonic() - started
        finally:
            workers.close()
        wall_s = max(one.get("wall_s", wall_s) for one in ends)
        return _Ended(windows, server_s, wall_s, sum(one["cpu_s"] for one in ends))

    def _spec(self, case: Case, name: str, server: Server, number: int) -> JobSpec:
        if case.nbytes not in self._payloads:
            path = self.scratch / f"payload-{case.nbytes}"
            self._payloads[case.nbytes] = path, write_payloads(path, self._kind, case.nbytes)
        path, distinct = self._payloads[case.nbytes]
        return JobSpec(
            contender=name,
            endpoint=server.url,
            bucket=server.bucket,
            region=server.region,
            prefix=f"{self.prefix}/{name.replace(' ', '-')}/p{number}",
            payload=str(path),
            distinct=distinct,
            nbytes=case.nbytes,
            count=case.count,
            threads=case.threads,
            operations=case.operations,
            unsigned=server.unsigned,
            limit_s=LIMIT_S,
        )

    def _look(
        self, inspector: Inspector, specs: Sequence[JobSpec], ended: _Ended, name: str
    ) -> bool:
        """Compare all lengths and some bytes with what was put, then remove everything."""
        good = True
        more = TRAILER_NBYTES if kind_of(name) == "kvio block" else 0
        for spec, window in zip(specs, ended.windows[0], strict=True):
            count = len(window["latencies_s"])
            sizes = inspector.sizes(f"{spec.prefix}/")
            expected = {spec.key(index): spec.nbytes + more for index in range(count)}
            good = good and sizes == expected
            with open(spec.payload, "rb") as file:
                for index in {0, count // 2, count - 1} if sizes and good else ():
                    file.seek(index % spec.distinct * spec.nbytes)
                    good = good and inspector.holds(spec.key(index), file.read(spec.nbytes))
            inspector.delete([*sizes, *inspector.sizes(f"{spec.prefix}-warm/")])
        return good


def _server_of(case: Case) -> str:
    return REAL if case.part == REAL else MAIN


def case_facts(case: Case, name: str) -> dict[str, Any]:
    """Return what a sample says of its load and contender."""
    return {
        "part": case.part,
        "library": library_of(name),
        "kind": kind_of(name),
        "object_nbytes": case.nbytes,
        "threads": case.threads,
        "processes": case.processes,
    }


def _facts(case: Case, operation: str, windows: Sequence[Answer], ended: _Ended) -> dict[str, Any]:
    """Return what was measured beside the calls; times of processes are of those that only put."""
    facts = {
        "user_s": sum(window["user_s"] for window in windows),
        "system_s": sum(window["system_s"] for window in windows),
        "cut_short": any(len(window["latencies_s"]) < case.count for window in windows)
        and operation in (PUT, GET, RANGE),
    }
    if case.operations == (PUT,):
        facts |= {"process_wall_s": ended.wall_s, "process_cpu_s": ended.cpu_s}
    return facts


def write_payloads(path: Path, kind: str, nbytes: int) -> int:
    """Write different payloads of *nbytes* each into a file, and return how many.

    A JPEG is cut, or repeated, to the object's size.
    """
    distinct = max(2, min(_MOST_DISTINCT, _MOST_PAYLOAD_NBYTES // nbytes))
    with open(path, "wb") as file:
        for index in range(distinct):
            noise = random.Random(_SEED + index)  # not secret
            file.write(_jpeg(index, nbytes) if kind == "jpeg" else noise.randbytes(nbytes))
    return distinct


def _jpeg(index: int, nbytes: int) -> bytes:
    from matplotlib import image

    numbers = np.random.default_rng(_SEED + index)
    y, x = np.mgrid[0:_PIXELS, 0:_PIXELS] / _PIXELS
    waves = [np.sin(numbers.uniform(2, 20) * x + numbers.uniform(2, 20) * y) for _ in range(3)]
    picture = np.stack(waves, axis=-1) / 4 + 0.5 + numbers.normal(0, 0.05, (_PIXELS, _PIXELS, 3))
    file = io.BytesIO()
    image.imsave(file, np.clip(picture, 0, 1), format="jpeg")
    made = file.getvalue()
    return (made * (nbytes // len(made) + 1))[:nbytes]


# ---- several runs merged ----


class _Merged(Run):
    """Runs that have ended; the machine was as busy as in the busiest of them."""

    busiest = 0.0

    @property
    def load(self) -> float:
        """Other programs' runnable tasks per processor, the most of any run."""
        return self.busiest


def merge(folders: Sequence[Path], results: Path | None) -> int:
    """Merge runs, of one library each for example, into one record.

    Rounds of different runs have different numbers: nothing is compared across runs.

    Returns:
        0; 1 if a byte differed in one of them.

    Raises:
        ConfigError: a folder holds no run of this scenario.
    """
    paths = [path for folder in folders for path in _runs_in(folder, results)]
    runs = [_load(path) for path in paths]
    machines = [run["machine"] for run in runs]
    this = _Merged(
        SCENARIO,
        Limits(root=Path(), results=results),
        {"merged": [run["options"] for run in runs]},
    )
    this.busiest = max(float(machine.get("load_of_others", 0.0)) for machine in machines)
    this.machine = _known(Machine, machines[0])
    this.file_system = S3Storage(**runs[0]["file_system"])
    this.samples = [
        replace(sample, round=sample.round + at * _ROUNDS_OF_A_RUN)
        for at, run in enumerate(runs)
        for sample in (_known(Sample, one) for one in run["samples"])
    ]
    notes = [
        f"{len(runs)} runs joined; ratios are made within a run, and claims compare only what "
        "was measured in the same run"
    ]
    processors = list(dict.fromkeys(machine["processor"] for machine in machines))
    if len(processors) > 1 or len({one["processors_usable"] for one in machines}) > 1:
        notes.append(f"NOT COMPARABLE: different machines: {', '.join(processors)}")
    again = tuple(note.partition(":")[0] for note in this.notes())
    theirs = dict.fromkeys(note for run in runs for note in run["notes"])
    notes += [note for note in theirs if not note.startswith(again)]
    this.scenario = replace(SCENARIO, claims=claims(this.samples))
    return this.finish(notes, presenting.tables, partial(presenting.draw, this.samples))


def _runs_in(folder: Path, results: Path | None) -> list[Path]:
    """Find runs in a folder or below it; one that was merged before is not taken again."""
    file = f"{SCENARIO.name}.json"
    if not folder.is_dir():
        raise ConfigError(f"--merge {folder}: no such folder")
    found = [folder / file]
    if not found[0].is_file():
        found = sorted(folder.glob(f"*/{file}"))
    mine = None if results is None else (results / file).resolve()
    found = [path for path in found if path.resolve() != mine]
    if not found:
        raise ConfigError(f"--merge {folder}: no {file} in it or one below")
    return found


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"--merge {path}: no JSON") from None
    if not isinstance(content, dict) or content.get("experiment") != SCENARIO.name:
        raise ConfigError(f"--merge {path}: no run of this experiment")
    return content


def _known(kind: Callable[..., Any], content: Mapping[str, Any]) -> Any:
    """Make a dataclass of those items that are its fields; another version may have others."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in names})
