"""The staging experiment says what failed, differed or was refused, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness import workers
from benchmarks.harness.machine import describe_file_system
from benchmarks.harness.run import Limits, Progress
from benchmarks.harness.workers import Job, Local, Workers, obey, wait_readable
from benchmarks.scenarios.staging import contenders, scenario
from benchmarks.scenarios.staging.contenders import (
    ACCEPT,
    DRAIN,
    FILES,
    MEMCPY,
    READ,
    WRITE,
    Rank,
)
from kvio import KiB, MiB
from kvio._native import crc32c
from tests.benchmarks.running import communicators
from tests.benchmarks.test_staging import children, recorded, run_command, run_small


def test_a_rank_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error, by its number; the last words of one that could not even begin."""
    members = Workers([Local(Rank, 0), Local(Rank, 1)])
    try:
        members.ask([_open(FILES[0], tmp_path / "nowhere", rank) for rank in range(2)])
        members.ask([{"do": "ready", "operation": WRITE}] * 2)
        with pytest.raises(kvio.StorageError, match=r"rank 0: FileNotFoundError: .*nowhere"):
            members.ask([{"do": "go", "operation": WRITE, "at_s": 0.0}] * 2)
    finally:
        members.close()
    broken = (sys.executable, "-c", "raise OSError('no mood')")
    monkeypatch.setattr(workers, "module_command", lambda *_: broken)
    lone = Workers([Local(Rank, 0)])
    try:
        with pytest.raises(kvio.StorageError, match=r"rank 0 died: exit status 1: .*no mood"):
            lone.ask([{"do": "close"}])
    finally:
        lone.close()


def _open(name: str, root: Path, rank: int) -> dict[str, Any]:
    job = {
        "contender": name, "root": str(root), "tag": "t", "rank": rank, "nbytes": 4 * KiB,
        "count": 2, "drain_threads": 1, "checksum": True,
    }  # fmt: skip
    return {"do": "open", "job": job}


def test_ranks_end_with_their_leader(tmp_path: Path) -> None:
    """A killed run leaves no process behind."""
    code = (
        f"import os, signal, sys; sys.path.insert(0, {os.getcwd()!r})\n"
        "from benchmarks.harness.workers import Local\n"
        "from benchmarks.scenarios.staging.contenders import Rank\n"
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


class _Here:
    """A rank in this process, where a test can reach its code."""

    def __init__(self) -> None:
        self._rank = Rank()
        self._answer: dict[str, Any] = {}

    def send(self, command: Any) -> None:
        self._answer = obey(self._rank, json.loads(json.dumps(command)))

    def receive(self) -> dict[str, Any]:
        return self._answer

    def kill(self) -> None:
        self._rank.close()


@pytest.mark.parametrize("name", ["posix-tmpfile", "tier tmpfile"])
def test_wrong_bytes_are_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte flipped on its way to the store is exit status 1, although the store was content."""
    honest = kvio.Store.write_block

    def wrong(self: kvio.Store, key: str, data: Any, **options: Any) -> kvio.Receipt:
        parts = data if isinstance(data, list) else [data]
        copy = bytearray(b"".join(parts))
        copy[-1] ^= key.endswith("write/0000/00003")
        receipt = honest(self, key, copy, **options)
        return receipt._replace(checksum=crc32c(b"".join(parts)))

    monkeypatch.setattr(Job, "workers", lambda *_: Workers([_Here()]))
    monkeypatch.setattr(kvio.Store, "write_block", wrong)

    # Small blocks would go to the store many at a time, by another call.
    limits = Limits(root=tmp_path, results=tmp_path / "r", max_rounds=1, max_bytes=4 * MiB)
    assert scenario.run(limits, ranks=(1,), sizes=(MiB,), contenders=[name]) == 1
    said = capsys.readouterr().out
    assert f"BYTES DIFFER: {name}, 1 rank, write" in said
    assert f"BYTES DIFFER: {name}, 1 rank, drain" not in said


def test_a_tier_that_reads_wrong_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of staged blocks are compared with what was written."""
    honest = kvio.StagingTier.read_block_into

    def wrong(self: kvio.StagingTier, key: str, out: Any, **options: Any) -> int:
        got = honest(self, key, out, **options)
        out[0] ^= key.endswith("accept/0000/00000") and not options
        return got

    monkeypatch.setattr(Job, "workers", lambda *_: Workers([_Here()]))
    monkeypatch.setattr(kvio.StagingTier, "read_block_into", wrong)

    assert run_small(tmp_path, tmp_path / "r", contenders=["tier tmpfile"]) == 1
    wrong_ones = [
        s["operation"] for s in recorded(tmp_path / "r")["samples"] if s["intact"] is False
    ]
    assert wrong_ones == [READ]


def test_a_read_does_not_see_what_an_earlier_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that does nothing is wrong bytes, not the right ones of before."""
    monkeypatch.setattr(Job, "workers", lambda *_: Workers([_Here()]))
    monkeypatch.setattr(kvio.StagingTier, "read_block_into", lambda *_, **__: 64 * KiB)

    assert run_small(tmp_path, tmp_path / "r", contenders=[MEMCPY, "tier tmpfile"]) == 1
    samples = recorded(tmp_path / "r")["samples"]
    [read] = [s for s in samples if (s["contender"], s["operation"]) == ("tier tmpfile", READ)]
    assert read["intact"] is False


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record holds the turns that ended, no rank lives on, and the root is as it was."""
    before = set(children())

    def say(_: Progress, step: str) -> None:
        if FILES[0] in step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "say", say)

    assert run_small(tmp_path, tmp_path / "r", contenders=[MEMCPY, FILES[0]]) == 130
    assert {s["contender"] for s in recorded(tmp_path / "r")["samples"]} == {MEMCPY}
    assert set(children()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_what_a_medium_refuses_is_a_line(tmp_path: Path) -> None:
    """On tmpfs nothing is durable, and the notes say so; the rest is measured."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or describe_file_system(shm).kind != "tmpfs":
        pytest.skip("needs tmpfs on /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as root:
        names = [MEMCPY, "tier tmpfile", "tier tmpfile durable", "posix-tmpfile durable"]
        assert run_small(Path(root), tmp_path, contenders=names) == 0
        assert os.listdir(root) == []

    record = recorded(tmp_path)
    assert {s["contender"] for s in record["samples"]} == {MEMCPY, "tier tmpfile"}
    for reported in (
        "left out: tier tmpfile durable: ",
        "left out: posix-tmpfile durable: ",
        "NOT COMPARABLE: tmpfs is memory",
    ):
        assert any(note.startswith(reported) for note in record["notes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ranks": (1, 0)}, "ranks"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (2, 2)}, "ranks"),
        ({"sizes": (5000,)}, "5000"),
        ({"sizes": ()}, "sizes"),
        ({"drain_threads": 0}, "drain_threads"),
        ({"contenders": ["tape"]}, "tape"),
        ({"contenders": []}, "contender"),
        ({"ranks": (1,), "sizes": (1 << 50,)}, "GiB are free"),
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
    for option, value in (("--ranks", "many"), ("--sizes", "5000"), ("--contenders", "tape")):
        done = run_command("--root", tmp_path, option, value)
        assert done.returncode == 2
        assert value in done.stderr
        assert "Traceback" not in done.stderr


def test_ranks_of_a_job_obey_its_first_one(tmp_path: Path) -> None:
    """Each prepares, runs and checks what it is told, and they end when they are dismissed."""
    jobs = [Job(Rank, one) for one in communicators(3)]
    assert [job.follows for job in jobs] == [False, True, True]
    followers = [threading.Thread(target=job.serve) for job in jobs[1:]]
    for thread in followers:
        thread.start()
    members = jobs[0].workers(3)
    try:
        members.ask([_open("posix-tmpfile", tmp_path, rank) for rank in range(3)])
        members.ask([{"do": "ready", "operation": WRITE}] * 3)
        windows = members.ask([{"do": "go", "operation": WRITE, "at_s": 0.0}] * 3)
        checked = members.ask([{"do": "check", "operation": WRITE}] * 3)
        members.ask([{"do": "close"}] * 3)
    finally:
        members.close()
        jobs[0].dismiss()
        for thread in followers:
            thread.join()

    assert [len(window["latencies_s"]) for window in windows] == [2, 2, 2]
    assert checked == [{"intact": True}] * 3
    with kvio.open_store("posix-tmpfile", root=tmp_path) as store:
        keys = {key for key in store.list_keys() if "/write/" in key}
        contents = {bytes(store.read_block(key)) for key in keys}
    assert len(keys) == len(contents) == 6


def test_a_job_runs_the_cases_it_has_ranks_for() -> None:
    """The usual ones, and all of them; more than there are is a mistake."""

    def counts(size: int, wanted: tuple[int, ...] | None) -> list[int]:
        return Job(Rank, communicators(size)[0]).counts(wanted, scenario.RANKS)

    assert counts(12, None) == [1, 8, 12]
    assert counts(16, None) == [1, 8, 16]
    assert counts(4, (2, 4)) == [2, 4]
    with pytest.raises(kvio.ConfigError, match="this job has 4"):
        counts(4, (5,))
    assert Job(Rank).counts(None, scenario.RANKS) == [1, 8, 16]


def test_a_job_of_mpirun_without_mpi4py_is_refused(tmp_path: Path) -> None:
    """Each rank would be a run of its own."""
    if importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is installed")
    done = run_command("--root", tmp_path, OMPI_COMM_WORLD_SIZE="2")

    assert done.returncode == 2
    assert "mpi4py" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_accept_is_measured_before_anything_is_drained(tmp_path: Path) -> None:
    """Until the drain's clock starts nothing is in the store; when it stops all of it is."""
    rank = Rank()
    try:
        obey(rank, _open("tier tmpfile", tmp_path, 0))
        for operation in (ACCEPT, READ, DRAIN):
            stored = [path.name for path in tmp_path.rglob("t~accept~*")]
            assert stored == []
            assert obey(rank, {"do": "ready", "operation": operation}) == {}
            assert rank._contender._tier.stats().paused  # type: ignore[union-attr]  # a tier's lane
            window = obey(rank, {"do": "go", "operation": operation, "at_s": 0.0})
            assert len(window["latencies_s"]) == 2
        assert len(list(tmp_path.rglob("t~accept~*"))) == 2
    finally:
        rank.close()


def test_a_drain_is_held_against_as_many_threads() -> None:
    """Each call is made once, by no other thread than these, all of which take part."""
    meet = threading.Barrier(3)
    made: list[tuple[int, int]] = []

    def call(index: int) -> None:
        meet.wait(30)
        made.append((index, threading.get_ident()))

    contenders.Threads(call, count=6, threads=3).run()

    assert sorted(index for index, _ in made) == list(range(6))
    assert len({thread for _, thread in made}) == 3


def test_a_call_that_fails_in_a_thread_is_raised() -> None:
    """No drain is compared with writes that did not happen."""

    def call(index: int) -> None:
        raise kvio.StorageFullError(f"block {index}")

    with pytest.raises(kvio.StorageFullError, match="block"):
        contenders.Threads(call, count=2, threads=1).run()


def test_a_daemon_that_does_not_begin_says_why(tmp_path: Path) -> None:
    """As a refusal, which leaves its contender out; nothing of it stays."""
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    before = set(children())
    url = f"tape://{tmp_path}"
    with (
        pytest.raises(kvio.UnsupportedError, match=r"no daemon: .*tape"),
        contenders.serving(url, capacity_bytes=MiB, drain_threads=1),
    ):
        pytest.fail("it serves")
    assert set(children()) == before
