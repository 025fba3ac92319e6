"""S3 servers to measure: one in memory, one that is given, a real one; and a raw client.

The raw client is that of `benchmarks.s3mem`: it signs requests and reads answers, without any of
the libraries that are compared.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from xml.sax.saxutils import unescape

from benchmarks.harness.machine import FileSystem
from benchmarks.s3mem.rawcalls import Client, Endpoint
from kvio import ConfigError, StorageError, UnsupportedError

REGION: Final = "us-east-1"
_START_S: Final = 60.0
_POLL_S: Final = 0.05
_ENTRY: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY: Final = re.compile(rb"<Key>([^<]*)</Key>")
_SIZE: Final = re.compile(rb"<Size>(\d+)</Size>")
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
        environ: of its clients; holds the credentials.
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
        """Bodies need no hash: no third party reads along over TLS, nor on this machine."""
        host = urlsplit(self.url).hostname or ""
        return self.url.startswith("https:") or host in ("localhost", "127.0.0.1", "::1")

    def cpu_s(self) -> float | None:
        """Return the processor seconds it has taken so far, in steps of 10 ms; None: unknown."""
        if self.pid is None:
            return None
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def inspector(self) -> Inspector:
        """Connect a client that lists, checks and removes objects."""
        return Inspector(self.url, self.region, self.bucket, self.environ)

    def client(self, most_bytes: int) -> Client:
        """Connect the raw client, for answers of up to *most_bytes*."""
        return Client(endpoint_of(self.url, self.region, self.environ), most_bytes=most_bytes)

    def redacted(self, text: str) -> str:
        """Leave credentials out of what a library said."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            if value := self.environ.get(name):
                text = text.replace(value, "…")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Storage(FileSystem):
    """A server, in the place of a file system in records."""

    def lines(self) -> list[str]:
        """Describe it for a reader."""
        return [f"server       {self.kind}, {self.device}, bucket {self.mount_point}"]


def storage_of(server: Server) -> S3Storage:
    """Describe a server as what was measured on."""
    return S3Storage(
        path=server.bucket,
        kind=server.name,
        device=server.url,
        mount_point=server.bucket,
        options="",
        free_bytes=0,
    )


def given(url: str, bucket: str) -> Server:
    """Return a server that runs already; credentials and region as the AWS tools read them.

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
    environ = environment_of(os.environ[names[0]], os.environ[names[1]], region)
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        environ["AWS_SESSION_TOKEN"] = token
    return Server(
        name="given server", url=url.rstrip("/"), bucket=bucket, region=region, environ=environ,
        pid=None,
    )  # fmt: skip


@contextmanager
def in_memory(
    bucket: str, reserve_bytes: int, *, round_trip_ms: float = 0.0, connection_mib_s: float = 0.0
) -> Iterator[Server]:
    """Run the server of `benchmarks.s3mem` meanwhile, behind a simulated network if wanted.

    Raises:
        UnsupportedError: there is none.
    """
    root = Path(__file__).resolve().parents[2]
    environ = _fresh_environment()
    options = (
        *("--trust-bodies", "--reserve-mib", str(-(-reserve_bytes >> 20))),
        *("--round-trip-ms", str(round_trip_ms), "--connection-mib-s", str(connection_mib_s)),
    )
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
    """Make fresh credentials."""
    access, secret = f"KVIO{secrets.token_hex(8).upper()}", secrets.token_hex(20)
    return environment_of(access, secret, REGION)


def endpoint_of(url: str, region: str, environ: Mapping[str, str]) -> Endpoint:
    """Return the raw client's endpoint; credentials and CA as the environment has them."""
    tls = None
    if url.startswith("https:"):
        tls = ssl.create_default_context(cafile=environ.get("AWS_CA_BUNDLE"))
    made = Endpoint.of(url, environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], tls=tls)
    return replace(made, region=region)


class Inspector:
    """Looks at what was stored, without any of the libraries that stored it."""

    def __init__(self, url: str, region: str, bucket: str, environ: Mapping[str, str]) -> None:
        self._bucket = bucket
        self._endpoint = endpoint_of(url, region, environ)
        try:
            self._client = self._connect()
        except OSError as exc:
            raise ConfigError(f"{url}: {exc.strerror or exc}") from None

    def make_bucket(self) -> None:
        """Make the bucket of a private server."""
        self._expect(self._call("PUT", f"/{self._bucket}", body=b""), "make the bucket")

    def check_bucket(self) -> None:
        """Check that the bucket exists and may be read.

        Raises:
            ConfigError: it does not, or may not.
        """
        answer = self._call("GET", f"/{self._bucket}", {"list-type": "2", "max-keys": "1"})
        if answer.status != 200:
            said = re.search(rb"<Code>(\w+)</Code>", answer.body)
            code = said[1].decode() if said else ""
            raise ConfigError(f"bucket {self._bucket!r}: the server answers {answer.status} {code}")

    def sizes(self, prefix: str) -> dict[str, int]:
        """List every object below a prefix with its length."""
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix, "max-keys": "1000"}
        after = ""
        while True:
            extra = {"start-after": after} if after else {}
            answer = self._call("GET", f"/{self._bucket}", {**query, **extra})
            self._expect(answer, "list")
            page = dict(_entries(answer.body))
            found |= page
            if b"<IsTruncated>true" not in answer.body or not page:
                return found
            after = max(page)

    def holds(self, key: str, payload: bytes) -> bool:
        """Report whether an object begins with these bytes."""
        extent = {"range": f"bytes=0-{len(payload) - 1}"}
        first = self._call("GET", f"/{self._bucket}/{key}", headers=extent)
        return bool(first.status == 206 and first.body == payload)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        for key in keys:
            self._call("DELETE", f"/{self._bucket}/{key}")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _connect(self) -> Client:
        return Client(self._endpoint, most_bytes=32 << 20)

    def _call(self, *request: Any, **more: Any) -> Any:
        try:
            return self._client.call(*request, **more)
        except OSError:  # servers close a connection on which nothing is asked for a while
            self._client.close()
            self._client = self._connect()
            return self._client.call(*request, **more)

    def _expect(self, answer: Any, what: str) -> None:
        if answer.status != 200:
            raise StorageError(f"cannot {what}: the server answers {answer.status}")


def _entries(page: bytes) -> Iterator[tuple[str, int]]:
    for entry in _ENTRY.findall(page):
        key, size = _KEY.search(entry), _SIZE.search(entry)
        if key and size:
            yield unescape(key[1].decode()), int(size[1])


def environment_of(access: str, secret: str, region: str) -> dict[str, str]:
    """Return this process's environment with other credentials, for a child."""
    kept = {name: value for name, value in os.environ.items() if name != "AWS_SESSION_TOKEN"}
    return {
        **kept,
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
