"""Through DLIO, the S3 scenario generates what it says, and checks all that was stored."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness import s3_server
from benchmarks.harness.run import Limits
from benchmarks.scenarios.dlio import process
from benchmarks.scenarios.s3 import dlio, plan
from benchmarks.scenarios.s3.dlio import STOCK, DlioTrials, Load
from benchmarks.scenarios.s3.libraries import PUT
from benchmarks.scenarios.s3.plan import Case
from benchmarks.scenarios.s3.scenario import Options
from kvio import KiB
from tests.benchmarks.running import COMMAND
from tests.s3.faulty import FaultyServer

_MODULES = {"obstore": "obstore", "boto3": "boto3", "minio": "minio"}
LIBRARY = next((name for name, module in _MODULES.items() if importlib.util.find_spec(module)), "")
needs_library = pytest.mark.skipif(not LIBRARY, reason="needs obstore, boto3 or minio")
needs_dlio = pytest.mark.skipif(process.missing(1) is not None, reason="needs dlio_benchmark")
needs_mpirun = pytest.mark.skipif(process.missing(2) is not None, reason="needs mpirun")


def _run(results: Path, **options: Any) -> int:
    limits = Limits(
        root=Path(), results=results, max_rounds=1, budget_s=options.pop("budget_s", 100)
    )
    given = {"objects": 8, "contenders": [LIBRARY], "parts": ["2"]}
    return dlio.run(limits, Options(**{**given, **options}))


def _recorded(results: Path) -> Any:
    return json.loads((results / "s3-dlio.json").read_text())


def _by_kind(record: Any) -> dict[str, Any]:
    return {sample["facts"]["kind"]: sample for sample in record["samples"]}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Run a server that misbehaves by key name, and let the environment hold its credentials."""
    with FaultyServer() as running:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", running.endpoint.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", running.endpoint.secret_key)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield running


@needs_dlio
@needs_library
@pytest.mark.slow
class TestARun:
    """What is left of a run."""

    def test_dlio_alone_through_kvio_and_the_direct_harness(
        self, faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All three take the load; window and elapsed differ; no file or object remains."""
        memory = tmp_path / "memory"
        memory.mkdir()
        monkeypatch.setattr(dlio, "memory_directory", lambda: str(memory))
        options = {"endpoint": faulty.url, "bucket": "bucket", "prefix": "mine"}
        assert _run(tmp_path, **options) == 0

        record = _recorded(tmp_path)
        kinds = _by_kind(record)
        assert sorted(kinds) == ["dlio", "kvio", STOCK]
        through, stock, direct = kinds["dlio"], kinds[STOCK], kinds["kvio"]
        facts = through["facts"]
        assert facts["objects"] == 128  # four a thread
        assert facts["bytes"] == 128 * (568 * 568 + 128)
        assert (facts["errors"], through["intact"], stock["intact"]) == (0, True, True)
        assert through["wall_s"] < facts["generation_s"] + 1 < facts["process_wall_s"] + 1
        assert facts["process_cpu_s"] == facts["user_s"] + facts["system_s"] > 0.3
        assert 0 < stock["facts"]["start_cpu_s"] < stock["facts"]["process_cpu_s"] * 2
        assert direct["block_nbytes"] == through["block_nbytes"]
        assert len(direct["latencies_s"]) == 128
        # The server's own account of it.
        put = [one.key for one in faulty.requests if one.operation == "PutObject"]
        generated = sorted(key for key in put if "/data/train/" in key)
        names = [key.rpartition("/")[2] for key in generated]
        assert names == [f"img_{index:03d}_of_128.npy" for index in range(128)]
        assert all(key.startswith("mine/") for key in put)
        assert all(faulty.get("bucket", key) is None for key in put)
        assert list(memory.iterdir()) == []
        self._tables_are_left(tmp_path, record)

    @staticmethod
    def _tables_are_left(results: Path, record: Any) -> None:
        text = (results / "s3-dlio.md").read_text()
        for heading in (
            "## 2. Libraries at 32 threads",
            "CPU of all ranks",
            "| via DLIO : direct |",
        ):
            assert heading in text
        assert f"| 32 threads | 315 KiB | {LIBRARY} |" in text
        assert any("322752 B of record_length 322624" in note for note in record["notes"])
        if importlib.util.find_spec("matplotlib"):
            assert (results / "s3-dlio.png").read_bytes().startswith(b"\x89PNG")

    def test_jpegs_are_compared_too(self, tmp_path: Path) -> None:
        """With what stock DLIO encodes of the same seed; reads are left out by name."""
        assert _run(tmp_path, payload="jpeg", parts=["2", "get"]) == 0

        record = _recorded(tmp_path)
        facts = _by_kind(record)["dlio"]["facts"]
        assert facts["errors"] == 0
        assert facts["bytes"] % facts["objects"] != 0
        assert abs(facts["bytes"] / facts["objects"] / plan.OBJECT_NBYTES - 1) < 0.01
        assert any("part get: generation only puts" in note for note in record["notes"])

    def test_what_has_no_time_is_named(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A budget of nothing has time for one trial, and says what was not reached."""
        assert _run(tmp_path, budget_s=0) == 0

        assert [sample["contender"] for sample in _recorded(tmp_path)["samples"]] == [STOCK]
        said = capfd.readouterr().out
        assert "NOT REACHED within 0 s: 2 of the first round's trials" in said
        assert f"from libraries: 32 threads, 315 KiB, {LIBRARY} " in said

    @needs_mpirun
    def test_ranks_are_one_load(self, tmp_path: Path) -> None:
        """Two ranks generate one set of objects, and three objects of each are compared."""
        load = _small_load(processes=2)
        with s3_server.in_memory("bucket", 0) as running, contextlib.ExitStack() as stack:
            trials = _trials(stack, running, tmp_path)
            (stock,) = trials.take(load, STOCK, 0)
            (through,) = trials.take(load, f"{LIBRARY} dlio", 0)
            expected = trials._expected[str(load)]
            assert trials.inspectors["main"].sizes("mine/") == {}

        names = [f"train/img_{index:02d}_of_16.npy" for index in range(16)]
        assert sorted(expected.sizes) == names
        assert sorted(expected.files) == [names[at] for at in (0, 1, 8, 9, 14, 15)]
        assert (stock.intact, through.intact) == (True, True)
        assert through.facts["objects"] == 16
        assert 0 < through.wall_s < through.facts["process_wall_s"]


def _small_load(*, processes: int = 1) -> Load:
    case = Case(
        part=plan.PROCESSES, nbytes=64 * KiB + 128, threads=2, processes=processes,
        count=16 // processes, operations=(PUT,), kinds=("kvio",),
    )  # fmt: skip
    return Load(case=case, parts=(plan.PROCESSES,), format="npy")


def _trials(stack: contextlib.ExitStack, running: s3_server.Server, scratch: Path) -> DlioTrials:
    inspector = running.inspector()
    inspector.make_bucket()
    inspector.close()
    trials = DlioTrials({"main": running}, scratch, Options(prefix="mine"), scratch)
    stack.callback(trials.close)
    return trials


class TestOptionsOfDlio:
    """The command line and environment of a run, of which nothing is started here."""

    def test_threads_processes_and_generation_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As many writing threads and ranks as the load has, and no credentials in a URL."""
        given_to: dict[str, Any] = {}

        def run_dlio(options: list[str], **named: Any) -> process.DlioRun:
            given_to.update(named, options=options)
            return process.DlioRun(status=0, text="", wall_s=1.0, user_s=1.0, system_s=1.0)

        monkeypatch.setattr(dlio, "run_dlio", run_dlio)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of other credentials")
        secrets = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "a secret"}
        running = s3_server.Server(
            name="fake", url="http://127.0.0.1:1", bucket="bucket", region="here",
            environ={**secrets, "HOME": "/"}, pid=None,
        )  # fmt: skip
        dlio.generate(_small_load(processes=2), "boto3", running, "a/b", tmp_path)

        environment = dict(given_to["environment"])
        settings = json.loads(environment.pop("KVIO_DLIO"))
        assert environment == {**secrets, "AWS_SESSION_TOKEN": ""}
        assert settings["data"] == "s3+boto3://bucket/a/b"
        assert settings["write_threads"] == 2
        assert settings["options"]["endpoint_url"] == running.url
        assert settings["options"]["payload_signing"] == "unsigned"
        assert given_to["ranks"] == 2
        given = dict(option.lstrip("+").split("=") for option in given_to["options"])
        assert given["workload.dataset.num_files_train"] == "16"
        assert given["workload.dataset.record_length"] == "65536"
        assert given["workload.workflow.generate_data"] == "True"
        assert given["workload.workflow.train"] == "False"
        assert given["workload.storage.storage_type"] == "parallel_fs"
        assert not any(
            secret in text for secret in secrets.values() for text in given_to["options"]
        )

    def test_the_error_of_a_run_that_fails_is_reported_without_credentials(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error's own line, not the traceback nor what mpirun adds."""
        text = (
            "Traceback (most recent call last):\n  raise\n"
            "kvio.errors.AccessDeniedError: access may not write img_0\nMPI_ABORT was invoked\n"
        )

        def run_dlio(options: list[str], **named: Any) -> process.DlioRun:
            del options, named
            return process.DlioRun(status=1, text=text, wall_s=1.0, user_s=1.0, system_s=1.0)

        monkeypatch.setattr(dlio, "run_dlio", run_dlio)
        running = s3_server.Server(
            name="fake", url="http://127.0.0.1:1", bucket="bucket", region="here",
            environ={"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "x" * 9}, pid=None,
        )  # fmt: skip
        with pytest.raises(kvio.UnsupportedError) as raised:
            dlio.generate(_small_load(), "boto3", running, "a/b", tmp_path)

        assert str(raised.value) == (
            "failed: processes: 1 x 2 threads, 64.1 KiB: "
            "kvio.errors.AccessDeniedError: … may not write img_0"
        )

    def test_a_run_that_hangs_is_unsupported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is left out with the time it had."""

        def run_dlio(options: list[str], **named: Any) -> process.DlioRun:
            raise TimeoutError(f"DLIO ran for more than {named['timeout_s']:.0f} s: {options[0]}")

        monkeypatch.setattr(dlio, "run_dlio", run_dlio)
        with pytest.raises(kvio.UnsupportedError, match="more than 120 s"):
            dlio.generate_stock(_small_load(), tmp_path, None)


@needs_dlio
@needs_library
@pytest.mark.slow
class TestWrongBytes:
    """A server that lies is detected."""

    def test_writes_that_stored_nothing_end_the_run(
        self, faulty: FaultyServer, tmp_path: Path
    ) -> None:
        """The server answers 200 and stores nothing: DLIO lists none, and kvio fails it."""
        assert _run(tmp_path, endpoint=faulty.url, bucket="bucket", prefix="put-lieput") == 1

        record = _recorded(tmp_path)
        assert "dlio" not in _by_kind(record)
        (why,) = [note for note in record["notes"] if f"left out: {LIBRARY} dlio: failed" in note]
        assert "PlanError" in why

    def test_a_flipped_bit_is_an_error(self, faulty: FaultyServer, tmp_path: Path) -> None:
        """The lengths are right, and the three objects that are read back are not."""
        assert _run(tmp_path, endpoint=faulty.url, bucket="bucket", prefix="get-flip") == 1
        assert _by_kind(_recorded(tmp_path))["dlio"]["facts"]["errors"] == 3

    def test_a_run_that_fails_is_left_out_and_shows_no_secret(
        self, faulty: FaultyServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """By the error of the block, also where a server that refuses repeats the key."""
        status = _run(tmp_path, endpoint=faulty.url, bucket="bucket", prefix="put-badsig")

        record = _recorded(tmp_path)
        assert status == 0
        assert [sample["contender"] for sample in record["samples"]] == [STOCK]
        (why,) = [note for note in record["notes"] if f"left out: {LIBRARY} dlio: failed" in note]
        assert re.search(r"AccessDenied|Error", why)
        said = "".join(capfd.readouterr()) + (tmp_path / "s3-dlio.json").read_text()
        assert faulty.endpoint.secret_key not in said
        assert faulty.endpoint.access_key not in said


class TestMistakes:
    """One line, status 2, nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("--via", "ftp"), "--via ftp: must be direct or dlio"),
            (("--via", "dlio", "--contenders", "boto3 direct"), "boto3 direct"),
            (("--via", "dlio", "--contenders", "floor"), "floor"),
            (("--via", "dlio", "--parts", "get"), "'get'"),
            (("--via", "dlio", "--parts", "5"), "5"),
            (("--via", "dlio", "--merge", "folder"), "--merge"),
            (("--via", "dlio", "--endpoint", "http://127.0.0.1:1"), "--bucket"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, arguments: tuple[str, ...], named: str, tmp_path: Path
    ) -> None:
        """The wrong word is in it."""
        assert named in _error(tmp_path, *arguments)

    @needs_mpirun
    @needs_dlio
    @pytest.mark.slow
    def test_a_job_of_mpirun_is_refused(self, tmp_path: Path) -> None:
        """The scenario starts mpirun itself, and would do so in every rank."""
        root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        program = str(shutil.which("mpirun", path=beside))
        command = (program, *root, "--oversubscribe", "-np", "2")

        assert "runs mpirun itself" in _error(
            tmp_path, "--via", "dlio", launcher=command, lines=None
        )

    def test_without_dlio_nothing_begins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is missing is named with the command that installs it."""
        known = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: known(name) if "dlio" not in name else None
        )
        with pytest.raises(kvio.ConfigError, match=r"--via dlio: .*pip install .*dlio-benchmark"):
            _run(tmp_path)

        assert list(tmp_path.iterdir()) == []

    @needs_dlio
    def test_without_mpirun_parts_of_several_processes_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """One process is planned all the same."""

        def missing(ranks: int = 2) -> str | None:
            return "mpirun is not installed" if ranks > 1 else None

        monkeypatch.setattr(dlio, "missing", missing)
        assert _run(tmp_path, parts=["3"], budget_s=0) == 0

        said = capfd.readouterr().out
        assert "LEFT OUT: processes other than 1: mpirun is not installed" in said
        options = _recorded(tmp_path)["options"]
        assert [load["case"]["processes"] for load in options["loads"]] == [1]


def _error(
    tmp_path: Path, *arguments: str, launcher: Sequence[str] = (), lines: int | None = 1
) -> str:
    results = tmp_path / "results"
    done = subprocess.run(
        [*launcher, *COMMAND, "s3", *arguments, "--results", results],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done
    assert lines is None or len(done.stderr.splitlines()) == lines, done.stderr
    assert not results.exists()
    return done.stderr
