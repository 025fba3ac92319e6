"""What the tests of S3 share: a server, a bucket of one's own, and a server that misbehaves."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.s3 import servers
from tests.s3.faulty import FaultyServer
from tests.s3.gaps import known_gap
from tests.s3.rawsig import RawS3
from tests.s3.servers import Certificate, Endpoint

if TYPE_CHECKING:
    import trustme

_MOCK = (
    "S3 tests run against moto, a mock: it checks no signatures and no checksums "
    "(install go for a real server, or set KVIO_S3_ENDPOINT)"
)
_mock_used = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; let the warning of a mock be a warning where others are errors."""
    config.addinivalue_line(
        "markers",
        "s3_property(name): what is tested; a server known to lack it (KNOWN_GAPS) must fail",
    )
    config.addinivalue_line("filterwarnings", "default:S3 tests run against moto:UserWarning")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the server before the first test: it takes minutes once, more than a test may."""
    wanted = any({"s3_endpoint", "tls_endpoint"} & set(_fixtures(item)) for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    for name in servers.chosen():
        # What is missing or fails here, the fixture finds again and says.
        with contextlib.suppress(servers.ServerError):
            _build(servers.resolve(name), session.config)


def pytest_sessionfinish() -> None:
    """Let cancelled calls return before Python ends.

    A native thread that comes back while the interpreter is torn down ends the process (CPython
    before 3.14), whatever the tests said.
    """
    deadline = time.monotonic() + 10  # others wait for work that never comes, and harm nobody
    for thread in threading.enumerate():
        if thread.name == "kvio-io":
            thread.join(max(0.0, deadline - time.monotonic()))


def _build(name: str, config: pytest.Config) -> None:
    program = servers.PROGRAMS.get(name)
    if program is None or program.binary.exists():
        return
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(f"building {program.package}@{program.version}: some minutes, once")
    servers.build(name)


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print again at the end that the server was a mock."""
    if config.stash.get(_mock_used, False):
        terminalreporter.write_line(f"NOTE: {_MOCK}", yellow=True, bold=True)


@pytest.fixture(scope="session", params=servers.chosen())
def s3_endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Yield an S3 server; the tests run once for each name in KVIO_S3_SERVER."""
    name = _resolved(request.param, request)
    if name == "given":
        yield servers.given()
        return
    with servers.serving(name) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def tls_endpoint(
    s3_endpoint: Endpoint, certificate: Certificate, request: pytest.FixtureRequest
) -> Iterator[Endpoint]:
    """Yield an https server of the same kind as `s3_endpoint`; its CA is in `ca_file`."""
    name = s3_endpoint.name
    if name in ("given", "s3mem", "garage"):
        pytest.skip(f"no certificate can be given to the server {name!r}")
    with servers.serving(_resolved(name, request), certificate=certificate) as endpoint:
        yield endpoint


def _resolved(name: str, request: pytest.FixtureRequest) -> str:
    """Find out what *name* means here; a mock is never used silently, nothing never by error."""
    try:
        found = servers.resolve(name)
    except servers.NoServerError as error:
        pytest.skip(str(error))
    if found == "moto" and not request.config.stash.get(_mock_used, False):
        request.config.stash[_mock_used] = True
        warnings.warn(_MOCK, UserWarning, stacklevel=1)
    return found


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """Make a certificate authority that nobody trusts yet."""
    found = pytest.importorskip("trustme", reason="no trustme to make certificates with")
    authority: trustme.CA = found.CA()
    return authority


@pytest.fixture(scope="session")
def certificate(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Return a certificate for loopback, signed by `authority`, as files in PEM."""
    folder = tmp_path_factory.mktemp("certificate")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = Certificate(chain=folder / "chain.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    files.chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(files.ca))
    return files


@pytest.fixture(scope="session")
def foreign_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of an authority that signed no server's certificate."""
    trustme = pytest.importorskip("trustme", reason="no trustme to make certificates with")
    path = tmp_path_factory.mktemp("foreign") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(scope="session")
def raw_s3(s3_endpoint: Endpoint) -> RawS3:
    """Return a client of `s3_endpoint` that shares no code with kvio."""
    return RawS3(s3_endpoint)


@pytest.fixture
def s3_bucket(raw_s3: RawS3) -> Iterator[str]:
    """Yield the name of an empty bucket of `s3_endpoint` that is the test's own."""
    bucket = f"kvio-test-{secrets.token_hex(8)}"
    raw_s3.create_bucket(bucket)
    yield bucket
    # A server of ours goes with its data.
    if raw_s3.endpoint.name == "given":
        raw_s3.remove_bucket(bucket)


@pytest.fixture
def tls_bucket(tls_endpoint: Endpoint) -> str:
    """Return the name of an empty bucket of `tls_endpoint` that is the test's own."""
    bucket = f"kvio-test-{secrets.token_hex(8)}"
    RawS3(tls_endpoint).create_bucket(bucket)
    return bucket


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """Yield an S3 server that misbehaves by key name; what hangs is released in the end."""
    with FaultyServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _known_gaps(request: pytest.FixtureRequest) -> None:
    """Expect the failure of a test whose property the server is known to lack."""
    for marker in request.node.iter_markers("s3_property"):
        endpoint: Endpoint = request.getfixturevalue("s3_endpoint")
        reason = known_gap(endpoint.name, marker.args[0])
        if reason is not None:
            surely = endpoint.name != "given"
            request.applymarker(pytest.mark.xfail(reason=reason, strict=surely))
