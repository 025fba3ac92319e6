"""How servers for tests are chosen, built, started and stopped."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import pytest

from tests.s3 import servers
from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint

ROOT = Path(__file__).parents[2]


def startable(endpoint: Endpoint) -> str:
    if endpoint.name == "given":
        pytest.skip("the server is given: it is not ours to stop")
    return endpoint.name


def test_a_server_goes_with_its_data(s3_endpoint: Endpoint, tmp_path: Path) -> None:
    """After its context a server neither answers nor leaves a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with servers.serving(startable(s3_endpoint)) as endpoint:
            RawS3(endpoint).create_bucket("b-of-mine")
            RawS3(endpoint).put("b-of-mine", "k", b"x")
            assert list(tmp_path.iterdir())

    assert list(tmp_path.iterdir()) == []
    assert not servers.answers(endpoint)


def test_a_server_dies_with_a_killed_test_run(s3_endpoint: Endpoint, tmp_path: Path) -> None:
    """A test run that is killed leaves no server behind."""
    script = (
        "from tests.s3 import servers\n"
        f"with servers.serving({startable(s3_endpoint)!r}) as endpoint:\n"
        "    print(servers.answers(endpoint), flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "True\n"
        [server] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        ended = os.pidfd_open(int(server))
        run.kill()

    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(servers.STOP_S * 1000)
    os.close(ended)


def test_a_failed_start_shows_what_the_server_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends at once is an error with its last words."""
    monkeypatch.setattr(servers, "S3MEM", tmp_path / "server.py")
    (tmp_path / "server.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(servers.ServerError, match="no such luck"), servers.serving("s3mem"):
        pass


def test_a_failed_build_shows_what_go_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that fails is an error with its output, and leaves no binary."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(servers.ServerError, match="out of luck"):
        servers.build("minio")

    assert [path.name for path in (tmp_path / "cache").rglob("minio*") if path.is_dir()] == []


def test_two_test_runs_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that need a server at once one builds it, and all get the same file."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text('#!/bin/sh\necho built >> "$BUILDS"\nread x < "$GATE"\ncp "$0" "$GOBIN/minio"\n')
    go.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    locked, arrived = fcntl.flock, threading.Semaphore(0)

    def arrive(lock: TextIO, operation: int) -> None:
        arrived.release()
        locked(lock, operation)

    # A lock is between open files: threads stand for processes here.
    monkeypatch.setattr(fcntl, "flock", arrive)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(servers.build, "minio") for _ in range(3)]
        came = all(arrived.acquire(timeout=20) for _ in runs)
        os.write(gate, b"\n\n\n")
    os.close(gate)

    assert came
    assert {run.result() for run in runs} == {servers.PROGRAMS["minio"].binary}
    assert (tmp_path / "builds").read_text() == "built\n"


def test_the_module_builds_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m tests.s3.servers`` says where each named server is, and that moto needs none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binary = servers.PROGRAMS["versitygw"].binary
    binary.parent.mkdir(parents=True)
    binary.touch()
    servers.main(["versitygw", "moto"])

    assert capsys.readouterr().out == f"versitygw {binary}\nmoto needs no build\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    servers.main(["minio"])
    assert capsys.readouterr().out == "minio is not built and there is no go to build it\n"


def test_auto_prefers_what_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given server comes first, then MinIO where go or its binary is, then s3mem."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVIO_S3_ENDPOINT", raising=False)
    assert servers.resolve("auto") == "s3mem"
    with monkeypatch.context() as without:
        without.setattr(servers, "S3MEM", tmp_path / "none")
        with pytest.raises(servers.NoServerError, match=r"KVIO_S3_ENDPOINT.*go.*s3mem"):
            servers.resolve("auto")
    (tmp_path / "go").touch(mode=0o755)
    assert servers.resolve("auto") == "minio"
    monkeypatch.setenv("KVIO_S3_ENDPOINT", "http://127.0.0.1:9")
    assert servers.resolve("auto") == "given"
    assert servers.resolve("versitygw") == "versitygw"


def test_a_given_server_needs_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is named without credentials is an error naming the variables."""
    monkeypatch.setenv("KVIO_S3_ENDPOINT", "http://127.0.0.1:9/")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(servers.ServerError, match="AWS_ACCESS_KEY_ID"):
        servers.given()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")

    assert servers.given().url == "http://127.0.0.1:9"
    assert servers.given().access_key == "access"


def test_an_unknown_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in KVIO_S3_SERVER that means nothing is an error naming it and the known ones."""
    monkeypatch.setenv("KVIO_S3_SERVER", "minio, ceph")
    with pytest.raises(servers.ServerError, match=r"ceph.*versitygw"):
        servers.chosen()
