"""The shared-file scenario says what failed, differed or was refused, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from benchmarks.harness.machine import describe_file_system
from benchmarks.harness.run import Limits, Progress
from benchmarks.harness.workers import Job, Workers, obey, wait_readable
from benchmarks.scenarios.shared_file import scenario
from benchmarks.scenarios.shared_file.contenders import (
    CONTENDERS,
    IOR,
    PROCESSES,
    SHAPES,
    THREADS,
    Case,
    JobSpec,
    Rank,
    run_writers,
)
from kvio import KiB, MiB
from tests.benchmarks.running import communicators

from .test_shared_file import recorded, run_command


def run_small(root: Path, results: Path, **options: Any) -> int:
    limits = Limits(root=root, results=results, max_rounds=1, max_bytes=2 * MiB)
    chosen = {"writers": (2,), "shapes": ("ior",), "kinds": (PROCESSES,), **options}
    return scenario.run(limits, **chosen)


def children() -> list[int]:
    """List the processes that this one began, the youngest last."""
    tasks = Path("/proc/self/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def _job(name: str, root: Path, *, writers: int = 2, own: list[int] | None = None) -> Any:
    case = Case.within(2 * MiB, SHAPES["ior"], kind=PROCESSES, writers=writers)
    numbers = list(range(writers)) if own is None else own
    return {
        "contender": name, "root": str(root), "case": asdict(case), "writers": numbers,
        "cpus": [None] * len(numbers), "program": "",
    }  # fmt: skip


class _Here:
    """A process that is this one, where a test can reach its code."""

    def __init__(self) -> None:
        self.rank = Rank()
        self.killed = False
        self._answer: dict[str, Any] = {}

    def send(self, command: Any) -> None:
        self._answer = obey(self.rank, json.loads(json.dumps(command)))

    def receive(self) -> dict[str, Any]:
        return self._answer

    def kill(self) -> None:
        self.rank.close()
        self.killed = True


@pytest.mark.parametrize("name", ["shared buffered", "python buffered", "files posix-tmpfile"])
@pytest.mark.parametrize("kind", [PROCESSES, THREADS])
def test_wrong_bytes_are_noticed(
    name: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One byte flipped on its way is exit status 1, although all were content with it."""
    pwrite, block, by_hand = kvio.SharedFile.pwrite, kvio.Store.write_block, os.pwrite

    def flipped(data: Any, *, when: bool) -> bytearray:
        copy = bytearray(b"".join(data) if isinstance(data, list) else data)
        copy[-1] ^= when
        return copy

    def wrong_pwrite(self: kvio.SharedFile, data: Any, offset: int) -> int:
        return pwrite(self, flipped(data, when=offset == MiB), offset)

    def wrong_block(self: kvio.Store, key: str, data: Any, **options: Any) -> kvio.Receipt:
        return block(self, key, flipped(data, when=key == "own-0001"), **options)

    def wrong_by_hand(fd: int, data: Any, offset: int) -> int:
        return by_hand(fd, flipped(data, when=offset == MiB), offset)

    here = [_Here(), _Here()]
    monkeypatch.setattr(Job, "workers", lambda *_: Workers(here))
    monkeypatch.setattr(kvio.SharedFile, "pwrite", wrong_pwrite)
    monkeypatch.setattr(kvio.Store, "write_block", wrong_block)
    monkeypatch.setattr(os, "pwrite", wrong_by_hand)

    assert run_small(tmp_path, tmp_path / "r", contenders=[name], kinds=(kind,)) == 1
    assert f"BYTES DIFFER: {name}, 2 {kind}, ior" in capsys.readouterr().out


def test_a_read_that_does_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory, or what the one before left in it, does not pass for what was written."""
    monkeypatch.setattr(Job, "workers", lambda *_: Workers([_Here(), _Here()]))
    monkeypatch.setattr(kvio.SharedFile, "pread_into", lambda *_: 0)

    assert run_small(tmp_path, tmp_path / "r", contenders=["shared buffered"]) == 1


def test_a_process_that_dies_is_a_named_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it took part in is lost by name, others are measured with new ones, and exit is 1."""
    before = set(children())

    def say(_: Progress, step: str) -> None:
        if "shared buffered" in step:
            youngest = [pid for pid in children() if pid not in before][-1]
            os.kill(youngest, signal.SIGKILL)

    monkeypatch.setattr(Progress, "say", say)
    names = ["python buffered", "shared buffered", "files posix-tmpfile"]

    assert run_small(tmp_path, tmp_path / "r", contenders=names) == 1
    record = recorded(tmp_path / "r")
    assert {s["contender"] for s in record["samples"]} == {names[0], names[2]}
    lost = "LOST: shared buffered, 2 processes, ior, 1 MiB, round 1: rank 1 died: killed by SIGKILL"
    assert lost in record["notes"]
    assert "rank 1 died" in capsys.readouterr().out
    assert set(children()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_trial_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a long run would fill the disk; what a trial wrote is gone when the next starts."""
    case = Case.within(2 * MiB, SHAPES["ior"], kind=THREADS, writers=2)
    job = Job(Rank)
    monkeypatch.setattr(Job, "workers", lambda *_: Workers([_Here()]))
    trials = scenario._Trials(tmp_path, job)
    for name in ("shared buffered", "files posix-tmpfile", "python buffered"):
        assert [s.intact for s in trials.take(case, name, 0)][-1:] == [True]
        left = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) == 0
    trials.close()


def test_processes_start_when_a_case_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or those of a large case would take processors while a small one is timed."""
    started: list[list[_Here]] = []

    def workers(_: Job, count: int) -> Workers:
        started.append([_Here() for _ in range(count)])
        return Workers(started[-1])

    monkeypatch.setattr(Job, "workers", workers)
    options: dict[str, Any] = {"writers": (1, 3), "contenders": ["python buffered"]}
    limits = Limits(root=tmp_path, results=tmp_path / "r", max_rounds=2, max_bytes=3 * MiB)
    assert scenario.run(limits, shapes=("ior",), kinds=(PROCESSES, THREADS), **options) == 0

    assert [len(members) for members in started] == [1, 3]
    assert all(member.killed for members in started for member in members)
    assert len(recorded(tmp_path / "r")["samples"]) == 2 * 2 * 4


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record holds the trials that ended, no process lives on, and the root is as it was."""
    before = set(children())

    def say(_: Progress, step: str) -> None:
        if "python" in step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "say", say)
    names = ["shared buffered", "python buffered"]

    assert run_small(tmp_path, tmp_path / "r", contenders=names) == 130
    assert {s["contender"] for s in recorded(tmp_path / "r")["samples"]} == {names[0]}
    assert set(children()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_processes_end_with_their_leader(tmp_path: Path) -> None:
    """A killed run leaves none behind."""
    code = (
        f"import os, signal, sys; sys.path.insert(0, {os.getcwd()!r})\n"
        "from benchmarks.harness.workers import Local\n"
        "from benchmarks.scenarios.shared_file.contenders import Rank\n"
        "local = Local(Rank, 0); print(local.pid, flush=True)\n"
        "local.send({'do': 'close'}); local.receive(); input()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as leader:
        assert leader.stdout is not None
        rank = os.pidfd_open(int(leader.stdout.readline()))
        leader.kill()
    try:
        assert wait_readable(rank, 30)
    finally:
        os.close(rank)


def test_what_a_file_system_refuses_is_a_line(tmp_path: Path) -> None:
    """On tmpfs nothing is durable, which is said for each; os.pwrite is measured, for nothing."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or describe_file_system(shm).kind != "tmpfs":
        pytest.skip("needs tmpfs on /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as root:
        names = ["shared buffered", "files posix-tmpfile", "python buffered"]
        assert run_small(Path(root), tmp_path, contenders=names) == 0
        assert os.listdir(root) == []

    record = recorded(tmp_path)
    assert {s["contender"] for s in record["samples"]} == {"python buffered"}
    for start in (
        "left out: shared buffered: ",
        "left out: files posix-tmpfile: ",
        "NOT COMPARABLE: tmpfs is memory",
    ):
        assert any(note.startswith(start) for note in record["notes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"writers": (1, 0)}, "writers"),
        ({"writers": ()}, "writers"),
        ({"writers": (2, 2)}, "writers"),
        ({"shapes": ("round",)}, "round"),
        ({"shapes": ()}, "shape"),
        ({"kinds": ("fibers",)}, "fibers"),
        ({"placements": ("core",)}, "core/pack"),
        ({"placements": ("rack/pack",)}, "rack"),
        ({"placements": ("core/tight",)}, "tight"),
        ({"placements": ("none", "none")}, "placement"),
        ({"contenders": ["tape"]}, "tape"),
        ({"contenders": []}, "contender"),
        ({"writers": (1 << 30,)}, "less --max-bytes"),
        ({"root": Path("/nonexistent")}, "no such directory"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The error names it."""
    with pytest.raises(kvio.ConfigError, match=named):
        run_small(**{"root": tmp_path, "results": tmp_path / "results", **options})
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_on_the_command_line_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """Exit status 2, and one line that names it."""
    for option, value in (("--writers", "many"), ("--placement", "rack/pack"), ("--as", "fibers")):
        done = run_command("--root", tmp_path, option, value)
        assert done.returncode == 2
        assert value in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_job_write_one_file(tmp_path: Path) -> None:
    """Each obeys the first one, and they end when they are dismissed."""
    jobs = [Job(Rank, one) for one in communicators(3)]
    assert [job.follows for job in jobs] == [False, True, True]
    followers = [threading.Thread(target=job.serve) for job in jobs[1:]]
    for thread in followers:
        thread.start()
    members = jobs[0].workers(3)
    try:
        specs = [_job("shared buffered", tmp_path, writers=3, own=[n]) for n in range(3)]
        members.ask([{"do": "prepare", "job": spec} for spec in specs])
        members.ask([{"do": "open"}] * 3)
        windows = members.ask([{"do": "go", "at_s": 0.0}] * 3)
        assert not (tmp_path / "shared").exists()
        [sealed] = members.ask([{"do": "seal"}])
        checked = members.ask([{"do": "check"}] * 3)
        members.ask([{"do": "close"}] * 3)
    finally:
        members.close()
        jobs[0].dismiss()
        for thread in followers:
            thread.join()

    assert [len(window["latencies_s"]) for window in windows] == [1, 1, 1]
    assert sealed["mode"] == "buffered"
    assert checked == [{"intact": True}] * 3
    contents = np.fromfile(tmp_path / "shared", np.uint8)[: 3 * MiB].reshape(3, MiB)
    assert len({row.tobytes() for row in contents}) == 3


def test_a_job_runs_the_cases_it_has_ranks_for() -> None:
    """The usual ones, and all of them; more than there are is a mistake."""

    def counts(size: int, wanted: tuple[int, ...] | None) -> list[int]:
        return Job(Rank, communicators(size)[0]).counts(wanted, scenario.WRITERS)

    assert counts(12, None) == [1, 2, 4, 8, 12]
    assert counts(4, (2, 4)) == [2, 4]
    with pytest.raises(kvio.ConfigError, match="this job has 4"):
        counts(4, (5,))


def test_writers_run_where_they_are_placed(tmp_path: Path) -> None:
    """Each thread on its own CPU, as the kernel says; the process is everywhere again after it."""
    everywhere = os.sched_getaffinity(0)
    if len(everywhere) < 2:
        pytest.skip("needs two CPUs")
    cpus = [[cpu] for cpu in sorted(everywhere)[:2]]
    seen: list[set[int]] = []

    def look() -> list[float]:
        seen.append(os.sched_getaffinity(0))
        return [0.0]

    run_writers([look, look], cpus, lambda: None, 0.0)
    assert sorted(map(sorted, seen)) == cpus
    assert os.sched_getaffinity(0) == everywhere

    rank = Rank()
    job = {**_job("python buffered", tmp_path, writers=1), "cpus": [cpus[1]]}
    obey(rank, {"do": "prepare", "job": job})
    obey(rank, {"do": "open"})
    obey(rank, {"do": "go", "at_s": 0.0})
    assert os.sched_getaffinity(0) == set(cpus[1])
    obey(rank, {"do": "close"})
    assert os.sched_getaffinity(0) == everywhere


def test_a_placement_is_a_case_of_its_own(tmp_path: Path) -> None:
    """Beside the one that leaves it to the kernel."""
    options = {"placements": ("none", "core/spread"), "contenders": ["python buffered"]}
    assert run_small(tmp_path, tmp_path / "r", **options) == 0
    subjects = {s["subject"] for s in recorded(tmp_path / "r")["samples"]}
    assert subjects == {"2 processes, ior", "2 processes, ior, core/spread"}


def test_several_memory_nodes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every placement and none by default, and no note says that it makes no difference."""
    monkeypatch.setattr(scenario, "memory_nodes", lambda: 2)
    assert run_small(tmp_path, tmp_path / "r", writers=(1,), contenders=["python buffered"]) == 0
    record = recorded(tmp_path / "r")
    placements = {case["placement"] for case in record["options"]["cases"]}
    assert placements == {"", *scenario.PLACEMENTS}
    assert len({s["subject"] for s in record["samples"]}) == len(placements)
    assert not any("CANNOT BE MEASURED" in note for note in record["notes"])


def test_bytes_of_writers_differ(tmp_path: Path) -> None:
    """Or a writer in another's place would not be noticed."""
    sources = set()
    for own in ([0], [1], [0, 1]):
        rank = Rank()
        spec = JobSpec(**_job("python buffered", tmp_path, own=own))
        rank._fill(spec, 64 * KiB)
        sources.add(bytes(rank._source[: 64 * KiB]))
        if len(own) > 1:
            sources.add(bytes(rank._source[64 * KiB :]))
    assert len(sources) == 3  # a process's bytes begin with those of its first writer
    assert set(CONTENDERS) > set(IOR)
