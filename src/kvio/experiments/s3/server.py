"""The servers that loads go to: one in memory, begun here; one that is given; a real one beside."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvio import ConfigError, UnsupportedError
from kvio.experiments.machine import FileSystem
from kvio.experiments.s3 import raw

REGION: Final = "us-east-1"
_START_S: Final = 60.0
_POLL_S: Final = 0.05
#: The server's own arguments hold its credentials, and every user sees those of a process.
_SERVE: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.s3mem.server import main
given = ["--access", os.environ["AWS_ACCESS_KEY_ID"]]
sys.exit(main([*given, "--secret", os.environ["AWS_SECRET_ACCESS_KEY"], *sys.argv[2:]]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where loads go.

    Attributes:
        name: for tables.
        environ: what its clients run with; holds the credentials.
        pid: its process, where that is known.
    """

    name: str
    url: str
    bucket: str
    region: str
    environ: Mapping[str, str] = field(repr=False)
    pid: int | None

    @property
    def unsigned(self) -> bool:
        """Bodies need no hash: nobody is between over TLS, and on this machine."""
        host = urlsplit(self.url).hostname or ""
        return self.url.startswith("https:") or host in ("localhost", "127.0.0.1", "::1")

    def cpu_s(self) -> float | None:
        """Give the processor seconds it has taken so far, in steps of 10 ms; None: unknown."""
        if self.pid is None:
            return None
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def inspector(self) -> raw.Inspector:
        """Connect the raw client."""
        return raw.Inspector(self.url, self.region, self.bucket, self.environ)

    def redacted(self, text: str) -> str:
        """Leave credentials out of what a library said."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            if value := self.environ.get(name):
                text = text.replace(value, "…")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium(FileSystem):
    """A server, in the place of a file system in records."""

    def lines(self) -> list[str]:
        """Say it to a reader."""
        return [f"server       {self.kind}, {self.device}, bucket {self.mount_point}"]


def medium_of(server: Server) -> Medium:
    """Describe a server as what was measured on."""
    return Medium(
        path=server.bucket,
        kind=server.name,
        device=server.url,
        mount_point=server.bucket,
        options="",
        free_bytes=0,
    )


def given(url: str, bucket: str) -> Server:
    """Take a server that runs already; credentials and region as the AWS tools read them.

    Raises:
        ConfigError: it cannot be used as it is given.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"--endpoint {url}: {exc}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--endpoint must start with http:// or https://, not {url!r:.80}")
    if "@" in parts.netloc:
        raise ConfigError("--endpoint must not hold credentials")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(f"--endpoint needs {' and '.join(missing)} in the environment")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION
    environ = raw.environment_of(os.environ[names[0]], os.environ[names[1]], region)
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        environ["AWS_SESSION_TOKEN"] = token
    return Server(
        name="given server", url=url.rstrip("/"), bucket=bucket, region=region, environ=environ,
        pid=None,
    )  # fmt: skip


@contextmanager
def in_memory(bucket: str, reserve_bytes: int) -> Iterator[Server]:
    """Run the server of a clone's ``benchmarks/s3mem`` meanwhile.

    Raises:
        UnsupportedError: there is none.
    """
    root = raw.find().parents[2]
    environ = _fresh_environment()
    options = ("--trust-bodies", "--reserve-mib", str(-(-reserve_bytes >> 20)))
    command = (sys.executable, "-c", _SERVE, str(root), *options, "--until-stdin-closes")
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        text=True,
    )
    with _ending(process):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise UnsupportedError("the server in memory did not start")
        yield Server(
            name="s3mem", url=url, bucket=bucket, region=REGION, environ=environ, pid=process.pid
        )


@contextmanager
def minio(program: Path, bucket: str) -> Iterator[Server]:
    """Run a MinIO binary meanwhile, its data in a temporary folder.

    Raises:
        ConfigError: it does not start.
    """
    environ = _fresh_environment()
    with tempfile.TemporaryDirectory(prefix="kvio-minio-") as data:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        environ |= {
            "MINIO_ROOT_USER": environ["AWS_ACCESS_KEY_ID"],
            "MINIO_ROOT_PASSWORD": environ["AWS_SECRET_ACCESS_KEY"],
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "HOME": data,
        }
        options = ("server", "--quiet", "--address", f"127.0.0.1:{port}", f"{data}/data")
        try:
            process = subprocess.Popen(
                (str(program), *options),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                text=True,
            )
        except OSError as exc:
            raise ConfigError(f"--server minio={program}: {exc.strerror}") from None
        with _ending(process):
            server = Server(
                name="MinIO", url=f"http://127.0.0.1:{port}", bucket=bucket, region=REGION,
                environ=environ, pid=process.pid,
            )  # fmt: skip
            _wait(process, server)
            yield server


def _wait(process: subprocess.Popen[str], server: Server) -> None:
    """Wait until it makes a bucket."""
    deadline = time.monotonic() + _START_S
    pause = threading.Event()
    while process.poll() is None and time.monotonic() < deadline:
        try:
            inspector = server.inspector()
            inspector.make_bucket()
        except (ConfigError, OSError):
            pause.wait(_POLL_S)
            continue
        inspector.close()
        return
    raise ConfigError(f"{server.name} did not start")


@contextmanager
def _ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()  # it ends by itself
        else:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _fresh_environment() -> dict[str, str]:
    """Make credentials that nobody else has."""
    access, secret = f"KVIO{secrets.token_hex(8).upper()}", secrets.token_hex(20)
    return raw.environment_of(access, secret, REGION)
