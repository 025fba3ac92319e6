"""The S3 scenario measures what it says, checks every byte, and shows no credentials."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness import report, s3_server
from benchmarks.harness.run import Limits, Run, Scenario
from benchmarks.scenarios.s3 import plan, scenario
from benchmarks.scenarios.s3.client import Relay
from benchmarks.scenarios.s3.libraries import (
    CONTENDERS,
    FLOOR,
    GET,
    HEAD,
    LIST,
    PUT,
    RANGE,
    JobSpec,
)
from benchmarks.scenarios.s3.scenario import Options
from tests.benchmarks.running import COMMAND
from tests.cli.running import read_to_end, terminal
from tests.s3.faulty import FaultyServer

_MODULES = {"obstore": "obstore", "boto3": "boto3", "minio": "minio"}
LONG_S = 1000.0
LIBRARY = next((name for name, module in _MODULES.items() if importlib.util.find_spec(module)), "")
needs_library = pytest.mark.skipif(not LIBRARY, reason="needs obstore, boto3 or minio")


def _run(results: Path, *, budget_s: float = 60, patient: bool = True, **options: Any) -> int:
    """Run what the budget has room for; *patient*: however long that takes on this machine."""
    limits = Limits(root=Path(), results=results, max_rounds=1, budget_s=budget_s)
    given = {"objects": 8, "contenders": [f"{LIBRARY} kvio", f"{LIBRARY} direct"], "parts": ["2"]}

    def planned(what: Scenario, limits: Limits, options: Any) -> Run:
        return Run(what, replace(limits, budget_s=LONG_S) if patient else limits, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "Run", planned)
        return scenario.run(limits, Options(**{**given, **options}))


def _recorded(results: Path) -> Any:
    return json.loads((results / "s3.json").read_text())


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Run a server that misbehaves by key name, and let the environment hold its credentials."""
    with FaultyServer() as running:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", running.endpoint.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", running.endpoint.secret_key)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield running


@needs_library
class TestARun:
    """What is left of a run."""

    def test_every_operation_is_measured_and_checked(self, tmp_path: Path) -> None:
        """Contenders and the floor take each operation; every sample says that all bytes held."""
        assert _run(tmp_path, parts=["2", "get"], contenders=[LIBRARY]) == 0

        samples = _recorded(tmp_path)["samples"]
        names = {FLOOR, *(name for name in CONTENDERS if name.startswith(LIBRARY))}
        assert len(names) == 5
        for operation in (PUT, GET, RANGE, HEAD, LIST):
            own = [s for s in samples if s["operation"] == operation]
            assert {s["contender"] for s in own} == names
            assert {s["intact"] for s in own} == {True}
        for sample in samples:
            assert len(sample["latencies_s"]) >= 8
            assert max(sample["latencies_s"]) <= sample["wall_s"]
            facts = sample["facts"]
            assert facts["user_s"] + facts["system_s"] > 0
            assert facts["server_s"] is not None
            if facts["part"] == plan.LIBRARIES:
                assert facts["process_wall_s"] > sample["wall_s"]
                assert facts["process_cpu_s"] > facts["user_s"] + facts["system_s"]
        sizes = {s["operation"]: s["block_nbytes"] for s in samples}
        assert (sizes[GET], sizes[RANGE]) == (322_957, 322_957 // 4)

    def test_tables_and_a_plot_are_left_and_reported(self, tmp_path: Path) -> None:
        """Markdown holds ratios to the floor and a line for every claim; the report reads it."""
        assert _run(tmp_path, parts=["4", "get"], contenders=[LIBRARY], budget_s=15) == 0

        text = (tmp_path / "s3.md").read_text()
        for heading in ("## 4. Object sizes", "## HEAD, and LIST", "## Claims"):
            assert heading in text
        assert text.count("- claim: ") == len(scenario.claims([]))
        assert "| x floor |" in text
        assert "LEFT OUT to end within 15 s" in text
        page = report.page(report.load(tmp_path))
        assert f"<td>{LIBRARY} direct</td>" in page
        if importlib.util.find_spec("matplotlib"):
            assert (tmp_path / "s3.png").read_bytes().startswith(b"\x89PNG")

    def test_processes_share_a_fixed_total(self, tmp_path: Path) -> None:
        """More processes make as many calls together as one does, each with its own objects."""
        options: dict[str, Any] = {"parts": ["3"], "objects": 64, "contenders": [f"{LIBRARY} kvio"]}
        assert _run(tmp_path, budget_s=8, **options) == 0

        calls = {
            s["facts"]["processes"]: len(s["latencies_s"]) for s in _recorded(tmp_path)["samples"]
        }
        assert len(calls) >= 2
        assert set(calls.values()) == {64}

    def test_what_has_no_time_is_named(self, tmp_path: Path) -> None:
        """A budget of nothing has time for one trial, and says what was not reached."""
        assert _run(tmp_path, budget_s=0, patient=False) == 0

        record = _recorded(tmp_path)
        assert {s["contender"] for s in record["samples"]} == {FLOOR}
        [note] = [note for note in record["notes"] if note.startswith("NOT REACHED within 0 s")]
        assert f"libraries: 32 threads, 315 KiB, PUT, {LIBRARY} " in note

    def test_a_library_that_is_missing_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others are measured."""
        known = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "s3dlio" else known(name)
        )
        assert _run(tmp_path, contenders=[f"{LIBRARY} kvio", "s3dlio direct"]) == 0

        record = _recorded(tmp_path)
        assert any("s3dlio direct: needs s3dlio" in note for note in record["notes"])
        assert {s["contender"] for s in record["samples"]} == {FLOOR, f"{LIBRARY} kvio"}

    def test_objects_are_jpegs_if_asked(self, tmp_path: Path) -> None:
        """The notes say so; without matplotlib, which makes them, that is an error."""
        if importlib.util.find_spec("matplotlib") is None:
            with pytest.raises(kvio.UnsupportedError, match="matplotlib"):
                _run(tmp_path, payload="jpeg")
            return
        assert _run(tmp_path, payload="jpeg") == 0
        assert any("JPEG" in note for note in _recorded(tmp_path)["notes"])


@needs_library
class TestWrongBytes:
    """A server that lies is detected."""

    def test_a_flipped_bit_is_noticed(self, faulty: FaultyServer, tmp_path: Path) -> None:
        """Status 1, and the contender is named."""
        status = _run(
            tmp_path, parts=["get"], endpoint=faulty.url, bucket="bucket", prefix="get-flip"
        )

        assert status == 1
        record = _recorded(tmp_path)
        reads = [s for s in record["samples"] if s["operation"] == GET]
        assert {s["intact"] for s in reads} == {False}
        assert any(f"BYTES DIFFER: {LIBRARY} direct" in note for note in record["notes"])

    def test_a_write_that_stored_nothing_is_noticed(
        self, faulty: FaultyServer, tmp_path: Path
    ) -> None:
        """The server answers 200 and stores nothing: only reading it back shows that."""
        assert _run(tmp_path, endpoint=faulty.url, bucket="bucket", prefix="lieput") == 1
        assert {s["intact"] for s in _recorded(tmp_path)["samples"]} == {False}

    def test_nothing_is_left_in_the_bucket(self, faulty: FaultyServer, tmp_path: Path) -> None:
        """Objects are written below the prefix only, and all are removed."""
        assert _run(tmp_path, endpoint=faulty.url, bucket="bucket", prefix="mine") == 0

        seen = faulty.requests
        put = {one.key for one in seen if one.operation == "PutObject"}
        assert len(put) > 8
        assert all(key.startswith("mine/") for key in put)
        assert all(faulty.get("bucket", key) is None for key in put)


class TestMistakes:
    """One line, status 2, nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("--contenders", "boto4"), "boto4"),
            (("--contenders", "boto3 rapid"), "boto3 rapid"),
            (("--parts", "5"), "5"),
            (("--objects", "0"), "objects"),
            (("--payload", "gif"), "gif"),
            (("--endpoint", "127.0.0.1:9000", "--bucket", "b"), "http:// or https://"),
            (("--endpoint", "http://127.0.0.1:9000"), "--bucket"),
            (("--endpoint", "http://a:b@127.0.0.1:9000", "--bucket", "b"), "credentials"),
            (("--endpoint", "http://127.0.0.1:1", "--bucket", "b"), "127.0.0.1:1"),
            (("--bucket", "b"), "--endpoint"),
            (("--prefix", "a b"), "a b"),
            (("--server", "garage=x"), "garage"),
            (("--merge",), "--merge"),
            (("--merge", "/nonexistent"), "/nonexistent"),
            (("folder",), "--merge"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, arguments: tuple[str, ...], named: str, tmp_path: Path
    ) -> None:
        """The wrong word is in it."""
        credentials = {"AWS_ACCESS_KEY_ID": "a key", "AWS_SECRET_ACCESS_KEY": "a secret"}
        line = _error(tmp_path, *arguments, **credentials)

        assert named in line

    def test_a_missing_bucket_is_named(self, tmp_path: Path) -> None:
        """With the code that the server answers."""
        with s3_server.in_memory("there", 0) as running:
            arguments = ("--endpoint", running.url, "--bucket", "missing")
            line = _error(tmp_path, *arguments, **dict(running.environ))

        assert "'missing'" in line
        assert "NoSuchBucket" in line

    def test_missing_credentials_are_named(self, tmp_path: Path) -> None:
        """By the variables they are expected in."""
        arguments = ("--endpoint", "http://127.0.0.1:9000", "--bucket", "b")
        absent = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}

        assert "AWS_SECRET_ACCESS_KEY" in _error(tmp_path, *arguments, **absent)


def _error(tmp_path: Path, *arguments: str, **environ: str) -> str:
    results = tmp_path / "results"
    done = subprocess.run(
        [*COMMAND, "s3", *arguments, "--results", results],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        check=False,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done
    assert len(lines) == 1, lines
    assert not results.exists()
    return lines[0]


@needs_library
class TestCredentials:
    """They are in the memory of clients and servers, and in no file or command line."""

    def test_no_file_of_the_results_holds_them(
        self, faulty: FaultyServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Nor is one printed, even where a server that refuses repeats the key."""
        for prefix in ("fine", "put-badsig"):
            _run(tmp_path / prefix, endpoint=faulty.url, bucket="bucket", prefix=prefix)

        said = "".join(capfd.readouterr())
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert any(path.name == "s3.json" for path in files)
        for secret in (faulty.endpoint.access_key, faulty.endpoint.secret_key):
            assert secret not in said
            assert all(secret.encode() not in path.read_bytes() for path in files)

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_keeps_what_was_measured_and_no_command_line_holds_a_secret(
        self, tmp_path: Path
    ) -> None:
        """Status 130, a record that says rounds are missing, and no process is left."""
        results = tmp_path / "results"
        command: list[str | Path] = [*COMMAND, "s3", "--contenders", f"{LIBRARY} kvio"]
        command += ["--parts", "2", "--objects", "8", "--rounds", "10000"]
        with terminal() as (master, slave):
            process = subprocess.Popen(
                [*command, "--results", results],
                stdout=subprocess.DEVNULL,
                stderr=slave,
            )
            os.close(slave)
            shown = b""
            while b"round 2" not in shown:
                shown += os.read(master, 4096)
            children: set[int] = set()
            secrets: set[bytes] = set()
            lines: set[bytes] = set()
            while not any(b"s3.client" in line for line in lines):  # between trials there is none
                children |= set(_descendants(process.pid))
                lines |= {_proc(pid, "cmdline") for pid in (process.pid, *children)}
                secrets |= {secret for pid in children for secret in _secrets_of(pid)}
            process.send_signal(signal.SIGINT)
            read_to_end(master)
            status = process.wait(60)

        assert status == 130
        assert any("INTERRUPTED" in note for note in _recorded(results)["notes"])
        assert len(secrets) >= 2
        assert not [line for line in lines if any(secret in line for secret in secrets)]
        assert all(map(_ends, children))


def _descendants(pid: int) -> list[int]:
    """List the processes that a process started, and those that these started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _proc(int(entry.name), "stat")):
            parents[int(entry.name)] = int(stat.rpartition(b")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return [*found, *(grandchild for child in found for grandchild in _descendants(child))]


def _ends(pid: int) -> bool:
    """Return whether a process ends within half a minute, or has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(fd, "rb", buffering=0):
        return bool(select.select([fd], [], [], 30)[0])


def _secrets_of(pid: int) -> list[bytes]:
    names = (b"AWS_SECRET_ACCESS_KEY=", b"AWS_ACCESS_KEY_ID=")
    variables = _proc(pid, "environ").split(b"\0")
    return [one.partition(b"=")[2] for one in variables if one.startswith(names)]


def _proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


@needs_library
class TestMerging:
    """Runs of several environments become one."""

    def test_two_runs_are_joined(self, tmp_path: Path) -> None:
        """Every sample of both is there, and ratios are made within a run.

        kvio and the direct calls were not measured in the same run: no claim compares them.
        """
        for name, kind in (("one", "direct"), ("other", "kvio")):
            assert _run(tmp_path / name, contenders=[f"{LIBRARY} {kind}"]) == 0
        merged = tmp_path / "merged"
        assert scenario.merge([tmp_path / "one", tmp_path / "other"], merged) == 0

        record = _recorded(merged)
        names = [s["contender"] for s in record["samples"]]
        assert sorted(names) == sorted([FLOOR, FLOOR, f"{LIBRARY} direct", f"{LIBRARY} kvio"])
        assert len({(s["contender"], s["round"]) for s in record["samples"]}) == 4
        assert all(s["ratio"] is not None for s in record["summaries"])
        assert "2 runs joined" in record["notes"][0]
        assert record["claims"] == []
        [said] = [line for line in record["conclusions"] if "as fast as the library called" in line]
        assert said.endswith("NOT MEASURED")

    def test_claims_compare_what_one_run_measured(self, tmp_path: Path) -> None:
        """A pair of one run is a round; the same pair in another run is another round."""
        for name in ("one", "other"):
            assert _run(tmp_path / name) == 0
        assert scenario.merge([tmp_path], tmp_path / "merged") == 0

        found = [
            one
            for one in _recorded(tmp_path / "merged")["claims"]
            if one["rival"] == f"{LIBRARY} direct"
        ]
        assert {one["rounds"] for one in found} == {2}
        assert {one["verdict"] for one in found} == {"undecided"}

    def test_what_a_busy_machine_measured_stays_undecided(self, tmp_path: Path) -> None:
        """One busy run is enough; its note is not repeated."""
        assert _run(tmp_path / "one") == 0
        record = _recorded(tmp_path / "one")
        record["machine"]["load_of_others"] = 3.0
        record["notes"].append("BUSY: other programs had 3.0 runnable tasks per processor")
        (tmp_path / "one" / "s3.json").write_text(json.dumps(record))
        assert scenario.merge([tmp_path], tmp_path / "merged") == 0

        merged = _recorded(tmp_path / "merged")
        assert [n.partition(" runn")[0] for n in merged["notes"] if n.startswith("BUSY")] == [
            "BUSY: other programs had 3.0"
        ]
        assert merged["machine"]["load_of_others"] == 3.0
        assert {one["verdict"] for one in merged["claims"]} == {"undecided"}

    def test_a_folder_of_folders_is_enough(self, tmp_path: Path) -> None:
        """And what was merged into it before is not merged again."""
        assert _run(tmp_path / "one") == 0
        for _ in range(2):
            assert scenario.merge([tmp_path], tmp_path / "merged") == 0
            assert len(_recorded(tmp_path / "merged")["samples"]) == 3

    def test_a_folder_without_a_run_is_named(self, tmp_path: Path) -> None:
        """Nothing is guessed from other JSON."""
        with pytest.raises(kvio.ConfigError, match=r"no s3\.json"):
            scenario.merge([tmp_path], None)
        (tmp_path / "s3.json").write_text('{"experiment": "hybrid"}')
        with pytest.raises(kvio.ConfigError, match="no run of this experiment"):
            scenario.merge([tmp_path], None)


@needs_library
def test_a_rank_of_a_job_runs_each_load_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A relay ends the process of a load; the next load has another."""
    path = tmp_path / "payload"
    distinct = scenario.write_payloads(path, "random", 1000)
    pids = []
    with s3_server.in_memory("bucket", 0) as running:
        inspector = running.inspector()
        inspector.make_bucket()
        inspector.close()
        relay = Relay()
        for prefix in ("one", "other"):
            spec = JobSpec(
                contender=f"{LIBRARY} direct", endpoint=running.url, bucket="bucket",
                region=running.region, prefix=prefix, payload=str(path), distinct=distinct,
                nbytes=1000, count=4, threads=2, operations=(PUT,), unsigned=True, limit_s=LONG_S,
            )  # fmt: skip
            environ = {n: v for n, v in running.environ.items() if n.startswith("AWS_")}
            assert relay.start(spec=asdict(spec), environ=environ) == {}
            assert relay.prepare(operation=PUT) == {}
            assert len(relay.run(operation=PUT)["latencies_s"]) == 4
            pids += [
                pid for pid in _descendants(os.getpid()) if b"s3.client" in _proc(pid, "cmdline")
            ]
            end = relay.end()
            assert end["cpu_s"] > 0
            assert end["wall_s"] > 0
            assert all(map(_ends, pids))

    assert len(set(pids)) == 2


def test_a_job_of_mpirun_without_mpi4py_is_refused(tmp_path: Path) -> None:
    """Each rank would be a run of its own."""
    if importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is installed")
    assert "mpi4py" in _error(tmp_path, OMPI_COMM_WORLD_SIZE="2")


def test_a_client_process_needs_no_numpy() -> None:
    """The time of a whole process is measured; it must not be that of the harness's imports."""
    code = "import sys, benchmarks.scenarios.s3.client; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
