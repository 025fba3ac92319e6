"""A turn: DLIO generates in a fresh place and trains from it, or checkpoints to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvio.experiments import page_cache
from kvio.experiments.dlio import options
from kvio.experiments.dlio.order import (
    CHECKPOINT,
    EPOCH,
    GENERATION,
    REFERENCE,
    Case,
    Load,
    backend_of,
    has_own_loader,
)
from kvio.experiments.dlio.places import Place, directory, place_of
from kvio.experiments.dlio.printed import DlioRun
from kvio.experiments.dlio.process import run_dlio
from kvio.experiments.measure import Sample
from kvio.experiments.s3.server import Server

_TELLING: Final = re.compile(r"^.*(?:Error|Exception|\[KVIO\]).*$", re.MULTILINE)


class TurnFailedError(Exception):
    """DLIO failed, or what went through kvio was not the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Blocks of all ranks: samples generated, samples read, files of checkpoints."""

    generated: int = 0
    read: int = 0
    saved: int = 0


class Turns:
    """What the turns of a run share.

    Args:
        base: an empty directory on the medium.
        server: where objects go; None: no contender stores any.

    Attributes:
        failed: turns that gave no numbers, and why; each makes the exit status 1.
    """

    def __init__(self, base: Path, load: Load, *, server: Server | None = None) -> None:
        self.failed: list[str] = []
        self._base = base
        self._load = load
        self._server = server
        self._expected: dict[Case, Path] = {}
        self._memory = memoryview(bytearray(load.max_bytes))

    def take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        """Take a contender's turn: a sample of each operation, or a line in `failed`."""
        if case.workload.saves and has_own_loader(name):
            return  # checkpoints know no loader
        try:
            yield from self._take(case, name, index)
        except (TurnFailedError, TimeoutError) as exc:
            self.failed.append(f"FAILED: {case}, {name}, round {index + 1}: {exc}")

    def _take(self, case: Case, name: str, index: int) -> Iterator[Sample]:
        expected = self._expect(case)
        sample = partial(
            Sample,
            subject=str(case),
            contender=name,
            checksum=False,
            round=index,
        )
        with place_of(name, self._base, self._server) as place:
            page_cache.touch_memory(self._base / "touched", self._memory)
            turn = self._saves if case.workload.saves else self._reads
            made = list(turn(case, name, place))
            difference = place.difference(expected)
            if difference is not None:
                self.failed.append(f"DIFFERENT: {case}, {name}, round {index + 1}: {difference}")
            below = options.CHECKPOINTS if case.workload.saves else options.DATA
            nbytes = _nbytes(expected / below)
            if case.workload.saves:
                nbytes //= self._load.epochs
            for operation, seconds, cached, facts in made:
                yield sample(
                    operation=operation,
                    block_nbytes=nbytes,
                    wall_s=seconds,
                    latencies_s=[seconds],
                    cached_before=cached,
                    intact=difference is None,
                    facts=facts,
                )

    def _reads(
        self, case: Case, name: str, place: Place
    ) -> Iterator[tuple[str, float, float | None, dict[str, Any]]]:
        files = case.files(self._load)
        run = self._run(case, place, options.of_phase(generate=True, train=False))
        _check_counts(run, name, _Plan(generated=files))
        yield GENERATION, _known(run.generation_s), None, _facts(run)
        cached = place.heat()
        run = self._run(case, place, options.of_phase(generate=False, train=True))
        _check_counts(run, name, _Plan(read=files * self._load.epochs))
        yield EPOCH, _known(median(run.epochs_s)), cached, _facts(run)

    def _saves(
        self, case: Case, name: str, place: Place
    ) -> Iterator[tuple[str, float, float | None, dict[str, Any]]]:
        run = self._run(case, place, options.of_phase(generate=True, train=True, save=True))
        files, saved = case.files(self._load), self._expected[case] / options.CHECKPOINTS
        plan = _Plan(
            generated=files,
            read=files * self._load.epochs,
            saved=sum(1 for path in saved.rglob("*") if path.is_file()),
        )
        _check_counts(run, name, plan)
        yield CHECKPOINT, _known(median(run.checkpoints_s)), None, _facts(run)

    def _expect(self, case: Case) -> Path:
        """Let stock DLIO store what every other must, once a case: its generators are seeded."""
        if case not in self._expected:
            root = self._base / f"expected-{len(self._expected)}"
            root.mkdir()
            saves = case.workload.saves
            phase = options.of_phase(generate=True, train=saves, save=saves)
            try:
                self._run(case, directory(root, REFERENCE), phase)
            except BaseException:
                shutil.rmtree(root)
                raise
            self._expected[case] = root
        return self._expected[case]

    def _run(self, case: Case, place: Place, phase: list[str]) -> DlioRun:
        work = self._base / "work"
        work.mkdir(exist_ok=True)
        try:
            run = run_dlio(
                [*options.of_case(case, self._load), *place.dlio_options(), *phase],
                work=work,
                ranks=case.ranks,
                environment=place.environment,
            )
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(work)
        if run.status != 0:
            said = _TELLING.findall(run.text) or run.text.splitlines() or ["nothing was said"]
            raise TurnFailedError(f"exit status {run.status}: {said[-1].strip()[:300]}")
        return run


def _check_counts(run: DlioRun, name: str, plan: _Plan) -> None:
    """Hold kvio's counts against the plan; DLIO's own loader reads ahead of it."""
    if backend_of(name) is None:
        return
    ranks = run.counts
    found = _Plan(
        generated=sum(one.wrote.blocks for one in ranks),
        read=sum(one.read.blocks for one in ranks),
        saved=sum(one.checkpoints_wrote.blocks for one in ranks),
    )
    ahead = has_own_loader(name) and found.read >= plan.read
    reads_agree = found.read == plan.read or ahead
    if (found.generated, found.saved) != (plan.generated, plan.saved) or not reads_agree:
        raise TurnFailedError(f"kvio counted {found} of {plan}")


def _known(seconds: float | None) -> float:
    if seconds is None:
        raise TurnFailedError("DLIO printed no such time")
    return seconds


def _facts(run: DlioRun) -> dict[str, Any]:
    """Keep what DLIO and kvio said, for the JSON and the tables."""
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


def _nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
