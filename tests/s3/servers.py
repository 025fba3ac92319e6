"""Real S3 servers on loopback, started for a test run and gone after it.

`KVIO_S3_SERVER` chooses, one name or several with commas between: ``auto`` (the default),
``given``, ``minio``, ``versitygw``, ``garage``, ``moto``, ``s3mem``. ``auto`` takes the server
that `KVIO_S3_ENDPOINT` names; else MinIO, built once with ``go install`` into the user's cache (as
versitygw is; Garage is with ``cargo install``); else, where there is no Go, s3mem, a server of this
project that checks signatures and keeps objects in memory. ``python -m tests.s3.servers NAME…``
builds before the tests run, so that no test waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REGION = "us-east-1"
S3MEM = Path(__file__).parents[2] / "benchmarks" / "s3mem" / "server.py"
#: A cold start of MinIO on a busy machine was seen to take six seconds.
START_S = 60.0
STOP_S = 10.0
POLL_S = 0.05


class ServerError(Exception):
    """A server could not be built or started; the message ends with what it said."""


class NoServerError(ServerError):
    """This machine has nothing to start; the message names what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an S3 server listens, and who may ask it."""

    url: str
    access_key: str
    secret_key: str = field(repr=False)
    region: str
    #: Which server it is: given, minio, versitygw, garage, moto or s3mem.
    name: str
    #: Whether it checks no signatures.
    is_mock: bool
    #: What signed the certificate of an https server, in PEM.
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Files in PEM: a server's certificate, its key, and the authority that signed it."""

    chain: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server that ``go install`` or ``cargo install`` builds, pinned."""

    package: str
    version: str
    tool: str = "go"
    options: tuple[str, ...] = ()

    @property
    def binary(self) -> Path:
        """Return its path in the user's cache, built or not."""
        name = self.package.rpartition("/")[2]
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "kvio" / "servers" / f"{name}-{self.version}" / name

    def install(self, part: str) -> tuple[list[str], dict[str, str], Path]:
        """Return the command that builds it in a folder, its environment, and the binary."""
        named, name = f"{self.package}@{self.version}", self.binary.name
        if self.tool == "cargo":
            command = ["install", "--locked", "--quiet", "--root", part, *self.options, named]
            return command, {}, Path(part, "bin", name)
        # Small, and without a C compiler.
        command = ["install", "-trimpath", "-ldflags=-s -w", named]
        return command, {"CGO_ENABLED": "0", "GOBIN": part}, Path(part, name)


PROGRAMS: Mapping[str, Program] = {
    "minio": Program(
        package="github.com/minio/minio", version="v0.0.0-20260212201848-7aac2a2c5b7c"
    ),
    "versitygw": Program(package="github.com/versity/versitygw/cmd/versitygw", version="v1.8.0"),
    "garage": Program(
        package="garage",
        version="2.5.0",
        tool="cargo",
        options=("--no-default-features", "--features", "bundled-libs,sqlite"),
    ),
}
STARTABLE = (*PROGRAMS, "moto", "s3mem")


def chosen() -> list[str]:
    """List the servers to test, as `KVIO_S3_SERVER` says; ``auto`` is not resolved yet.

    Raises:
        ServerError: it says something else.
    """
    names = [name.strip() for name in os.environ.get("KVIO_S3_SERVER", "auto").split(",")]
    known = ("auto", "given", *STARTABLE)
    if unknown := [name for name in names if name not in known]:
        raise ServerError(f"KVIO_S3_SERVER={','.join(unknown)}: one of {', '.join(known)}")
    return names


def resolve(name: str) -> str:
    """Return which server ``auto`` is here; any other name is itself.

    Raises:
        NoServerError: there is none.
    """
    if name != "auto":
        return name
    if os.environ.get("KVIO_S3_ENDPOINT"):
        return "given"
    if PROGRAMS["minio"].binary.exists() or shutil.which("go"):
        return "minio"
    if S3MEM.exists():
        return "s3mem"
    raise NoServerError("no S3 server: KVIO_S3_ENDPOINT is not set, no go, no benchmarks/s3mem")


def given() -> Endpoint:
    """Return the server that the environment names; credentials as the AWS tools read them.

    Raises:
        ServerError: a variable is missing.
    """
    names = ("KVIO_S3_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ServerError(f"not set: {', '.join(missing)}")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    ca_file = os.environ.get("AWS_CA_BUNDLE")
    return Endpoint(
        url=os.environ[names[0]].rstrip("/"),
        access_key=os.environ[names[1]],
        secret_key=os.environ[names[2]],
        region=region or REGION,
        name="given",
        is_mock=False,
        ca_file=Path(ca_file) if ca_file else None,
    )


def build(name: str) -> Path:
    """Return the binary of one of `PROGRAMS`, built if the user's cache has none.

    Of several processes one builds and the others wait; a build that dies leaves no binary.

    Raises:
        NoServerError: there is no ``go``, or ``cargo``, to build it.
        ServerError: the build failed.
    """
    program = PROGRAMS[name]
    binary = program.binary
    if binary.exists():
        return binary
    tool = shutil.which(program.tool)
    if tool is None:
        raise NoServerError(f"{name} is not built and there is no {program.tool} to build it")
    folder = binary.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _install(tool, program, folder)
    return binary


def _install(tool: str, program: Program, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as part:
        command, environment, built = program.install(part)
        done = subprocess.run(
            [tool, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise ServerError(f"{' '.join(done.args)} failed:\n{done.stdout[-6000:]}")
        folder.mkdir(exist_ok=True)
        os.replace(built, program.binary)


@contextlib.contextmanager
def serving(name: str, *, certificate: Certificate | None = None) -> Iterator[Endpoint]:
    """Run a server on a free loopback port; its data lie in a temporary folder and go with it.

    It also ends with the thread that starts it, should that not come to the end of the context.

    Args:
        name: One of `STARTABLE`.
        certificate: Listen with TLS and this.

    Raises:
        ServerError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix=f"kvio-{name}-") as scratch:
        starting = _Starting(name=name, scratch=Path(scratch), certificate=certificate)
        process, url = starting.start()
        try:
            yield starting.endpoint(url)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, make it end where it does not, and wait for it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starting:
    """A server to be started: its command line, its environment, its signs of life."""

    name: str
    scratch: Path
    certificate: Certificate | None
    # Garage takes keys of no other form.
    access_key: str = field(default_factory=lambda: "GK" + secrets.token_hex(12))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(32))

    def endpoint(self, url: str) -> Endpoint:
        return Endpoint(
            url=url,
            access_key=self.access_key,
            secret_key=self.secret_key,
            region=REGION,
            name=self.name,
            is_mock=self.name == "moto",
            ca_file=self.certificate.ca if self.certificate else None,
        )

    def start(self) -> tuple[subprocess.Popen[bytes], str]:
        """Start it; once more where another program took the port meanwhile."""
        for folder in ("data", "certs", "iam"):
            (self.scratch / folder).mkdir()
        for _ in range(3):
            port = free_port()
            process = self._spawn(self._command(port))
            try:
                url = self._wait(process, port)
            except BaseException:
                stop(process)
                raise
            if url:
                return process, url
        raise ServerError(f"{self.name} ended before it listened:\n{self._said()}")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.scratch / "log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, *command],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _command(self, port: int) -> list[str]:
        data = str(self.scratch / "data")
        address = f"127.0.0.1:{port}"
        tls = self.certificate
        if self.name == "minio":
            certs = self.scratch / "certs"
            if tls:
                shutil.copy(tls.chain, certs / "public.crt")
                shutil.copy(tls.key, certs / "private.key")
            options = ["--quiet", "--certs-dir", str(certs), "--address", address]
            return [str(build("minio")), "server", *options, data]
        if self.name == "versitygw":
            options = ["--port", address, "--keep-alive", "--quiet"]
            options += ["--iam-dir", str(self.scratch / "iam")]
            options += ["--cert", str(tls.chain), "--key", str(tls.key)] if tls else []
            return [str(build("versitygw")), *options, "posix", data]
        if self.name == "garage" and not tls:
            config = self.scratch / "garage.toml"
            config.write_text(_garage_config(self.scratch, address))
            options = ["server", "--single-node", "--default-access-key"]
            return [str(build("garage")), "-c", str(config), *options]
        if self.name == "moto":
            options = ["-H", "127.0.0.1", "-p", str(port)]
            options += ["-c", str(tls.chain), "-k", str(tls.key)] if tls else []
            return [sys.executable, "-m", "moto.server", *options]
        if self.name != "s3mem" or tls:
            raise ServerError(f"no way to start {self.name}{' with TLS' if tls else ''} is known")
        if not S3MEM.exists():
            raise NoServerError("no benchmarks/s3mem/server.py here")
        options = ["--access", self.access_key, "--secret", self.secret_key]
        return [sys.executable, str(S3MEM), "--host", "127.0.0.1", "--port", "0", *options]

    def _environment(self) -> dict[str, str]:
        """Keep the user's settings of the same programs out."""
        foreign = ("MINIO_", "VGW_", "ROOT_", "AWS_", "GARAGE_")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(foreign)}
        credentials = {
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "ROOT_ACCESS_KEY": self.access_key,
            "ROOT_SECRET_KEY": self.secret_key,
            "GARAGE_DEFAULT_ACCESS_KEY": self.access_key,
            "GARAGE_DEFAULT_SECRET_KEY": self.secret_key,
        }
        home = {"HOME": str(self.scratch)} if self.name in PROGRAMS else {}
        return {**kept, **home, "PYTHONUNBUFFERED": "1", **credentials}

    def _wait(self, process: subprocess.Popen[bytes], port: int) -> str | None:
        """Return the URL when the server answers, None when it ended."""
        deadline = time.monotonic() + START_S
        while True:
            url = self._listens(port)
            # Waiting for its end is the pause between two looks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if url else POLL_S)
                return None
            if url:
                return url
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: silent for {START_S:.0f} s:\n{self._said()}")

    def _listens(self, port: int) -> str | None:
        if self.name == "s3mem":  # which chooses its port
            said = re.search(r"127\.0\.0\.1:(\d+)", self._said())
            return f"http://{said[0]}" if said else None
        scheme = "https" if self.certificate else "http"
        url = f"{scheme}://127.0.0.1:{port}"
        return url if answers(self.endpoint(url)) else None

    def _said(self) -> str:
        return (self.scratch / "log").read_text(errors="replace")[-4000:]


def _garage_config(scratch: Path, address: str) -> str:
    return f"""
metadata_dir = "{scratch}/data/meta"
data_dir = "{scratch}/data/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:{free_port()}"
rpc_secret = "{secrets.token_hex(32)}"
[s3_api]
s3_region = "{REGION}"
api_bind_addr = "{address}"
"""


#: A server must not outlive a test run that was killed: the kernel ends it with its parent.
_WITH_PARENT = """
import ctypes, os, signal, sys
parent = os.getppid()
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == parent:
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def free_port() -> int:
    """Name a loopback port that nobody listens on; somebody else may take it any moment."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # the kernel gives nobody one of these unasked
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def answers(endpoint: Endpoint) -> bool:
    """Return whether a server is ready, and is not somebody else's: those know other keys."""
    from tests.s3.rawsig import RawS3  # it imports this module

    try:
        return RawS3(endpoint, timeout_s=10.0).request("GET", "/").status == 200
    except (OSError, http.client.HTTPException):
        return False


def main(names: list[str]) -> None:
    """Build the named servers, or the chosen ones, and say where they are; nothing is no error."""
    for name in names or chosen():
        try:
            found = resolve(name)
            print(found, build(found) if found in PROGRAMS else "needs no build", flush=True)
        except NoServerError as error:
            print(error)
        except ServerError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
