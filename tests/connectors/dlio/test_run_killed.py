"""A run that is ended from outside: nothing hangs, and nothing but blocks is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.staging.daemon.daemons import until

from .running import command_of, needs_dlio, plugged, run_dlio

pytestmark = [needs_dlio, pytest.mark.slow]

_LONG = (
    "++workload.dataset.num_files_train=3000",
    "++workload.train.computation_time=0.05",
)
_BEGUN = {"generation": "Generating dataset in ", "training": "Rank 0 step 3 processed"}


@functools.cache
def tracer_works() -> bool:
    """Return whether DLIO starts with its tracer, which since 2.0 needs torch."""
    enabled = plugged({"DFTRACER_ENABLE": "1"})
    command = [sys.executable, "-c", "import dlio_benchmark.main"]
    return subprocess.run(command, env=enabled, capture_output=True, check=False).returncode == 0


class Started:
    """A run of DLIO that has come to a phase, all its directories below one."""

    def __init__(self, work: Path, phase: str, *, ranks: int, tracer: bool) -> None:
        for name in ("store", "tmp", "staging"):
            (work / name).mkdir()
        self.work = work
        self._mark = f"{uuid.uuid4()}"
        environment = {"TMPDIR": f"{work}/tmp", "KVIO_TEST_MARK": self._mark}
        given = plugged({**environment, "DFTRACER_ENABLE": str(int(tracer))})
        where = ("+kvio=posix-tmpfile", f"kvio.root={work}/store")
        options = [*where, f"kvio.staging_dir={work}/staging", *_LONG]
        if phase == "training":
            options.append("++workload.dataset.num_files_train=100")
        self.process = subprocess.Popen(
            command_of(given["PATH"], work, *options, ranks=ranks),
            env=given,
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if _BEGUN[phase].encode() in line:
                until(lambda: any((work / "store").rglob("*.npz")))
                return
            said.append(line.decode(errors="replace"))
        self.kill()
        pytest.fail(f"{phase} did not begin: {''.join(said)}")

    def end(self) -> int:
        """Wait for the end, which must come."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def processes(self) -> dict[int, bytes]:
        """Find all processes of this run, wherever they are now, by their environment."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue  # it is gone
        return found

    def ranks(self) -> list[int]:
        """Find the processes of the ranks."""
        return [pid for pid, line in self.processes().items() if b"mpirun" not in line[:200]]

    def left(self, *places: str) -> list[str]:
        """List what of kvio's is left beside the store."""
        names = [name for place in places for name in os.listdir(self.work / place)]
        return [name for name in names if name.startswith("kvio-dlio-")]

    def kill(self) -> None:
        """End whatever is left."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def runs() -> Iterator[list[Started]]:
    """Yield a list of runs, of which none outlives the test."""
    found: list[Started] = []
    yield found
    for run in found:
        run.kill()


@pytest.mark.parametrize("tracer", [True, False], ids=["traced", "untraced"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("phase", ["generation", "training"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_leaves_no_directory_and_no_process(
    number: signal.Signals,
    phase: str,
    ranks: int,
    tracer: bool,  # noqa: FBT001
    disk_path: Path,
    runs: list[Started],
    ctrl_c: None,
) -> None:
    """By Ctrl-C or a scheduler, whether DLIO's tracer handles signals or nothing does.

    Of several ranks, one that waits for another in MPI is killed there, and its counts are left
    for the next run to remove.
    """
    del ctrl_c
    if tracer and not tracer_works():
        pytest.skip("DLIO's tracer does not start: it needs torch")
    run = Started(disk_path, phase, ranks=ranks, tracer=tracer)
    runs.append(run)
    run.process.send_signal(number)

    assert run.end() != 0
    assert run.processes() == {}
    assert run.left("staging", *(["tmp"] if ranks == 1 else [])) == []


@pytest.mark.parametrize("phase", ["generation", "training"])
def test_a_rank_that_is_killed_ends_the_others(
    phase: str, disk_path: Path, runs: list[Started]
) -> None:
    """What they had in hand is left, and removed by the next run."""
    run = Started(disk_path, phase, ranks=2, tracer=tracer_works())
    runs.append(run)
    os.kill(max(run.ranks()), signal.SIGKILL)

    assert run.end() != 0
    assert run.processes() == {}
    after = run_dlio(
        disk_path,
        *("+kvio=posix-tmpfile", f"kvio.root={disk_path}/store"),
        f"kvio.staging_dir={disk_path}/staging",
        environment={"TMPDIR": f"{disk_path}/tmp"},
    )
    assert after.status == 0, after.text
    assert run.left("tmp", "staging") == []
