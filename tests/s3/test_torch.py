"""What is special about s3torchconnectorclient: its words, its credentials, its uploads, forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import kvio
from kvio import MiB
from kvio.backends.s3.errors import ERRORS, ErrorKind
from kvio.backends.s3.options import S3Options
from kvio.url import Secret
from tests.s3.failing import unfinished
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3, require
from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint

LIBRARY = "s3+torch"
BODY = bytes(range(250)) * 4

require(LIBRARY)

from kvio.backends.s3 import torch as s3_torch  # noqa: E402  # its library may be missing

READS = [
    ("none", ErrorKind.MISSING),
    ("e500", ErrorKind.BUSY),
    ("e503", ErrorKind.BUSY),
    ("e403", ErrorKind.DENIED),
    ("expired", ErrorKind.DENIED),
    ("badsig", ErrorKind.DENIED),
    ("e416", ErrorKind.RANGE),
    ("no-bucket", ErrorKind.NO_BUCKET),
    ("redirect", ErrorKind.ELSEWHERE),
    ("reset", ErrorKind.LOST),
    ("resetmid", ErrorKind.LOST),
    ("trunc", ErrorKind.LOST),
    ("hang", ErrorKind.TIMEOUT),
    ("stall", ErrorKind.TIMEOUT),
    ("slowdrip", ErrorKind.TIMEOUT),
]
WRITES = [
    ("create-e500", ErrorKind.BUSY),
    ("create-e503", ErrorKind.BUSY),
    ("create-e403", ErrorKind.DENIED),
    ("create-expired", ErrorKind.DENIED),
    ("create-no-bucket", ErrorKind.NO_BUCKET),
    ("create-redirect", ErrorKind.ELSEWHERE),
    ("create-reset", ErrorKind.LOST),
    ("create-hang", ErrorKind.TIMEOUT),
    ("part-e503", ErrorKind.BUSY),
    ("part-e403", ErrorKind.DENIED),
    ("part-reset", ErrorKind.LOST),
    ("complete-e503", ErrorKind.BUSY),
    ("completeerror", ErrorKind.BUSY),
]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    """Yield one server that misbehaves: each new address is one more client for good."""
    with FaultyServer() as faulty:
        yield faulty


def open_faulty(
    server: FaultyServer, layout: Literal["block", "plain"] = "plain", **options: Any
) -> kvio.Store:
    return open_s3(
        LIBRARY,
        server.endpoint,
        "bucket",
        prefix="p",
        layout=layout,
        options={
            "retries": 0,
            "retry_s": 0.0,
            "request_timeout_s": 4,
            "part_bytes": 5 * MiB,
            **options,
        },
    )


def same_as(kind: ErrorKind, error: BaseException) -> bool:
    expected = ERRORS[kind]("", "key", "")
    return type(error) is type(expected) and getattr(error, "errno", None) == getattr(
        expected, "errno", None
    )


@pytest.mark.slow
@pytest.mark.parametrize(("word", "kind"), READS)
def test_failed_reads(server: FaultyServer, word: str, kind: ErrorKind) -> None:
    """A failed read raises the error of its kind, with its text."""
    if word != "none":
        server.put("bucket", f"p/get-{word}/block", BODY)
    with open_faulty(server) as store, pytest.raises(kvio.KvioError) as caught:
        store.read_block_into(f"get-{word}/block", bytearray(2000))

    assert same_as(kind, caught.value), repr(caught.value)
    assert kind.value in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "kind"), WRITES)
def test_failed_writes(server: FaultyServer, word: str, kind: ErrorKind) -> None:
    """A failed write raises the error of its kind and leaves no object."""
    with open_faulty(server) as store, pytest.raises(kvio.KvioError) as caught:
        store.write_block(f"{word}/block", BODY, if_exists="replace")

    assert same_as(kind, caught.value), repr(caught.value)
    assert server.get("bucket", f"p/{word}/block") is None
    server.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "kind"),
    [("head-e503", ErrorKind.BUSY), ("head-e403", ErrorKind.DENIED), ("none", ErrorKind.MISSING)],
)
def test_failed_heads(server: FaultyServer, word: str, kind: ErrorKind) -> None:
    """A HEAD, whose answer has no body, raises the same errors as a GET."""
    with open_faulty(server) as store, pytest.raises(kvio.KvioError) as caught:
        store.stat_block(f"{word}/block")

    assert same_as(kind, caught.value), repr(caught.value)


@pytest.mark.slow
def test_retries_are_counted(server: FaultyServer) -> None:
    """The library makes a failed request twice, and kvio retries up to the limit."""
    with open_faulty(server, retries=1) as store, pytest.raises(kvio.TransientStorageError):
        store.read_block_into("get-e503/again", bytearray(2000))

    assert store._backend.retries_made == 1
    assert server.count("p/get-e503/again", "GetObject") == 4


def test_a_server_that_is_down() -> None:
    """A refused connection is no timeout."""
    with FaultyServer() as gone:
        pass
    with pytest.raises(kvio.TransientStorageError, match=ErrorKind.UNREACHABLE.value):
        open_faulty(gone)


def test_nothing_is_visible_before_an_upload_is_closed(server: FaultyServer) -> None:
    """A write that is interrupted after bytes were sent leaves no object and no upload."""
    objects = s3_torch.TorchObjects(_options(server.endpoint))
    sent = [memoryview(bytes(5 * MiB)), Interrupting()]

    with pytest.raises(KeyboardInterrupt):
        objects.put("cut", sent, crc32c=None, if_none_match=False, run_all=lambda _: [])  # type: ignore[arg-type]
    objects.put("whole", sent[:1], crc32c=None, if_none_match=False, run_all=lambda _: [])  # type: ignore[arg-type]

    assert server.get("bucket", "cut") is None
    assert server.get("bucket", "whole") == bytes(5 * MiB)
    assert server.count("cut", "CreateMultipartUpload") == 1
    assert server.count("cut", "CompleteMultipartUpload") == 0
    assert "cut" not in unfinished(server, LIBRARY)


class Interrupting:
    """Five megabytes that the user interrupts when they are looked at."""

    def __len__(self) -> int:
        return 5 * MiB

    def __getitem__(self, _: object) -> memoryview:
        raise KeyboardInterrupt


def _options(endpoint: Endpoint) -> S3Options:
    return S3Options(
        bucket="bucket",
        endpoint_url=endpoint.url,
        region=endpoint.region,
        access_key=Secret(endpoint.access_key),
        secret_key=Secret(endpoint.secret_key),
        part_bytes=5 * MiB,
    )


def test_bytes_go_up_and_down_in_few_requests(server: FaultyServer) -> None:
    """A small block takes three requests to write, and one to read."""
    with open_faulty(server) as store:
        store.write_block("few", BODY, if_exists="replace")
        written = server.count("p/few")
        assert store.read_block_into("few", bytearray(1000)) == 1000

    assert (written, server.count("p/few")) == (3, 4)


def test_the_largest_single_read_is_one_request(server: FaultyServer) -> None:
    """A payload of part_bytes and its trailer come in one request, not in two."""
    with open_faulty(server, layout="block") as store:
        store.write_block("full", bytes(5 * MiB), if_exists="replace")
        before = server.count("p/full", "GetObject")
        assert store.read_block_into("full", bytearray(5 * MiB)) == 5 * MiB

    assert server.count("p/full", "GetObject") == before + 1


GIVEN_ALONE = """
import os, sys
import kvio
store = kvio.open_store("s3+torch://" + sys.argv[1] + "/p", options={
    "endpoint_url": sys.argv[2], "region": sys.argv[3],
    "access_key": sys.argv[4], "secret_key": sys.stdin.read()})
store.write_block("block", b"bytes")
assert store.read_block("block") == b"bytes"
seen_by_a_child = os.popen("env").read().splitlines()
for name in (*os.environ, *seen_by_a_child):
    assert not name.startswith(("AWS_", "SSL_")), name
print("as it was")
"""


def run_alone(
    script: str, *arguments: str, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, with no AWS variable but those given; it is killed if it hangs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "SSL_"))}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=stdin,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_credentials_do_not_stay_in_the_environment(s3_endpoint: Endpoint, s3_bucket: str) -> None:
    """Given credentials work, and neither Python nor a child's environment has them."""
    done = run_alone(
        GIVEN_ALONE,
        s3_bucket,
        s3_endpoint.url,
        s3_endpoint.region,
        s3_endpoint.access_key,
        stdin=s3_endpoint.secret_key,
    )

    assert done.stdout == "as it was\n", done.stderr


FORKING = """
import os, sys, threading
import kvio
def open_store():
    return kvio.open_store("s3+torch://" + sys.argv[1] + "/p", options={
        "endpoint_url": sys.argv[2], "region": sys.argv[3]})
for _ in range(3):
    with open_store() as closed_before:
        closed_before.write_block("block", b"bytes")
store = open_store()
enough = threading.Event()
def load():
    while not enough.is_set():
        store.read_block("block")
loading = threading.Thread(target=load, daemon=True)
loading.start()
for _ in range(5):
    child = os.fork()
    if not child:
        assert store.read_block("block", timeout=20) == b"bytes"
        store.write_block(f"child/{os.getpid()}", b"mine")
        store.close()
        for _ in range(3):  # what a closed store leaves to the library happens meanwhile
            with open_store() as again:
                assert again.read_block("block", timeout=20) == b"bytes"
        sys.exit(7)  # by the interpreter's end, not around it
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(sum(1 for _ in store.list_keys("child/")))
enough.set()  # CPython before 3.14 ends a thread inside C++ at its own end by an abort
loading.join()
"""


@pytest.mark.slow
def test_a_forked_child_connects_again(s3_endpoint: Endpoint, s3_bucket: str) -> None:
    """Children of a busy process use the store and exit normally; none hangs or aborts."""
    done = run_alone(
        FORKING,
        s3_bucket,
        s3_endpoint.url,
        s3_endpoint.region,
        AWS_ACCESS_KEY_ID=s3_endpoint.access_key,
        AWS_SECRET_ACCESS_KEY=s3_endpoint.secret_key,
    )

    assert done.stdout == "5\n", done.stderr


HANGING = """
import sys
import kvio
store = kvio.open_store("s3+torch://bucket/p", layout="plain", options={
    "endpoint_url": sys.argv[1], "access_key": "a", "secret_key": "b",
    "request_timeout_s": 3, "retries": 0})
try:
    store.read_block_into("hang/block", bytearray(10))
except kvio.StorageTimeoutError:
    print("abandoned", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_although_a_call_hangs(faulty: FaultyServer) -> None:
    """A call that never returns does not keep a program from exiting."""
    done = run_alone(HANGING, faulty.url)

    assert (done.stdout, done.returncode) == ("abandoned\n", 0), done.stderr


def test_an_untrusted_certificate_is_a_tls_error() -> None:
    """The library's text for it, which takes too long for a test, is classified as TLS."""
    text = (
        "Client error: Unknown CRT error: CRT error 1029: aws-c-io: "
        "AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE, TLS (SSL) negotiation failed"
    )
    assert s3_torch.parse_error(text).kind is ErrorKind.TLS


@pytest.mark.slow
def test_tls_with_a_given_authority(
    tls_endpoint: Endpoint, tls_bucket: str, foreign_ca: Path
) -> None:
    """A server is trusted by ca_file alone, although the library does not say so in time."""
    options: dict[str, Any] = {"ca_file": str(tls_endpoint.ca_file)}
    with open_s3(LIBRARY, tls_endpoint, tls_bucket, options=options) as store:
        store.write_block("block", BODY)
        assert store.read_block("block") == BODY
    for untrusted in ({}, {"ca_file": str(foreign_ca)}):
        options = {"retries": 0, "request_timeout_s": 2, **untrusted}
        with pytest.raises(kvio.ConfigError, match="TLS"):
            open_s3(LIBRARY, tls_endpoint, tls_bucket, options=options)


def test_a_silent_server_is_not_taken_for_an_untrusted_one() -> None:
    """A handshake that never ends is a timeout, because the server may only be slow."""
    standing = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        keys = {"access_key": "a", "secret_key": "b"}
        options: dict[str, Any] = {"endpoint_url": url, "retries": 0, "request_timeout_s": 1.5}
        with pytest.raises(kvio.StorageTimeoutError):
            kvio.open_store("s3+torch://bucket", options={**options, **keys})
    # A call of the library's that returned while Python is ending would abort the process.
    for thread in set(threading.enumerate()) - standing:
        thread.join(20)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("connect_timeout_s", 1),
        ("read_timeout_s", 1),
        ("payload_signing", "signed"),
        ("conditional", "trust"),
    ],
)
def test_unsupported_options_are_refused(server: FaultyServer, option: str, value: Any) -> None:
    """An option that the library does not support is refused by name."""
    with pytest.raises(kvio.ConfigError, match=option):
        open_faulty(server, **{option: value})


def test_tls_verification_cannot_be_left_out() -> None:
    """Certificate checks cannot be turned off, and the option is refused."""
    with pytest.raises(kvio.ConfigError, match="tls_verify"):
        kvio.open_store("s3+torch://bucket", options={"tls_verify": False})


def test_no_unsigned_bodies_over_a_network(server: FaultyServer) -> None:
    """Bodies go unsigned over plain http to this machine alone."""
    with pytest.raises(kvio.ConfigError, match="https"):
        open_faulty(server, endpoint_url="http://storage.example:9000")


@pytest.mark.parametrize("secret", ["two\nlines", " spaces ", "a #comment"])
def test_credentials_that_fit_no_profile(server: FaultyServer, secret: str) -> None:
    """A value that a profile would change is refused, and not shown."""
    with pytest.raises(kvio.ConfigError, match="secret_access_key") as caught:
        open_faulty(server, secret_key=secret)

    assert secret not in str(caught.value)


def test_unsigned_bodies_are_sent_as_such(raw_s3: RawS3, s3_bucket: str) -> None:
    """A block written by the library is what other clients read."""
    with open_s3(LIBRARY, raw_s3.endpoint, s3_bucket, prefix="p", layout="plain") as store:
        store.write_block("block", BODY)

    assert raw_s3.get(s3_bucket, "p/block") == BODY
