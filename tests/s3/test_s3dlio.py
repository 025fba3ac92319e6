"""What is special about s3dlio: one configuration a process, its words, forks.

s3dlio keeps its first configuration for as long as the process lives, so all that needs another
server runs in programs of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.backends.s3.errors import ERRORS, ErrorKind
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3, require
from tests.s3.servers import Endpoint

LIBRARY = "s3+s3dlio"
BODY = bytes(range(250)) * 4

require(LIBRARY)

from kvio.backends.s3 import s3dlio as s3_s3dlio  # noqa: E402  # its library may be missing

#: Verb, key, and what the failure means.
FAILURES = [
    ("read", "none/block", ErrorKind.MISSING),
    ("read", "get-e500/block", ErrorKind.BUSY),
    ("read", "get-e503/block", ErrorKind.BUSY),
    ("read", "get-e403/block", ErrorKind.DENIED),
    ("read", "get-expired/block", ErrorKind.DENIED),
    ("read", "get-badsig/block", ErrorKind.DENIED),
    ("read", "get-e416/block", ErrorKind.RANGE),
    ("read", "get-no-bucket/block", ErrorKind.NO_BUCKET),
    ("read", "get-redirect/block", ErrorKind.ELSEWHERE),
    ("read", "get-reset/block", ErrorKind.LOST),
    ("read", "get-resetmid/block", ErrorKind.LOST),
    ("read", "get-trunc/block", ErrorKind.LOST),
    ("read", "get-hang/block", ErrorKind.TIMEOUT),
    ("read", "get-stall/block", ErrorKind.TIMEOUT),
    ("write", "put-e500/block", ErrorKind.BUSY),
    ("write", "put-e503/block", ErrorKind.BUSY),
    ("write", "put-e403/block", ErrorKind.DENIED),
    ("write", "put-expired/block", ErrorKind.DENIED),
    ("write", "put-no-bucket/block", ErrorKind.NO_BUCKET),
    ("write", "put-redirect/block", ErrorKind.ELSEWHERE),
    ("write", "put-reset/block", ErrorKind.LOST),
    ("write", "put-hang/block", ErrorKind.TIMEOUT),
    ("write", "put-e412/block", ErrorKind.EXISTS),
    ("write large", "create-e503/block", ErrorKind.BUSY),
    ("write large", "part-e503/block", ErrorKind.BUSY),
    ("write large", "part-e403/block", ErrorKind.DENIED),
    ("write large", "part-reset/block", ErrorKind.LOST),
    ("write large", "complete-e503/block", ErrorKind.BUSY),
    ("write large", "completeerror/block", ErrorKind.BUSY),
    ("write large", "lostpart/block", ErrorKind.MANGLED),
    ("look", "none/block", ErrorKind.MISSING),
    ("look", "head-e500/block", ErrorKind.BUSY),
    ("look", "head-e403/block", ErrorKind.DENIED),
    ("look", "head-redirect/block", ErrorKind.ELSEWHERE),
    ("delete", "delete-e500/block", ErrorKind.BUSY),
    ("delete", "delete-e403/block", ErrorKind.DENIED),
    ("list", "list-e403/", ErrorKind.DENIED),
    ("list", "list-e503/", ErrorKind.BUSY),
]

ASKING = """
import json, os, sys
import kvio

asked = json.load(sys.stdin)
store = kvio.open_store("s3+s3dlio://bucket/p", layout="plain", options=asked["options"])
verbs = {
    "read": lambda key: store.read_block_into(key, bytearray(2000)),
    "write": lambda key: store.write_block(key, b"new", if_exists="replace"),
    "write large": lambda key: store.write_block(key, bytes(11 << 20), if_exists="replace"),
    "look": store.stat_block,
    "delete": store.delete_block,
    "list": lambda prefix: list(store.list_keys(prefix)),
}
answers = []
for verb, key in asked["calls"]:
    before = store._backend.retries_made
    try:
        verbs[verb](key)
        name, number, text = "", None, ""
    except kvio.KvioError as exc:
        name, number, text = type(exc).__name__, getattr(exc, "errno", None), str(exc)
    answers.append([name, number, text, store._backend.retries_made - before])
print(json.dumps(answers))
"""


def run_alone(
    script: str, *arguments: str, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, with no variable of AWS or s3dlio but those given, to its end."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3DLIO_"))}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=stdin,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def ask(
    server: FaultyServer, calls: list[tuple[str, str]], **options: object
) -> list[tuple[str, int | None, str, int]]:
    """Make calls in a program; for each the error's type, number and words, and the retries."""
    given = {
        "endpoint_url": server.url,
        "access_key": "anyone",
        "secret_key": "anything",
        "read_timeout_s": 4,
        "retries": 0,
        "retry_s": 0.0,
        "part_bytes": 5 << 20,
        **options,
    }
    done = run_alone(ASKING, stdin=json.dumps({"options": given, "calls": calls}))
    assert done.returncode == 0, done.stderr
    answers: list[tuple[str, int | None, str, int]] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[FaultyServer, dict[tuple[str, str], Any]]]:
    """Yield the server, and the outcome of every call in FAILURES."""
    with FaultyServer() as server:
        for verb, key, kind in FAILURES:
            if kind is not ErrorKind.MISSING and not verb.startswith("write"):
                server.put("bucket", f"p/{key}", BODY)
        calls = [(verb, key) for verb, key, _ in FAILURES]
        yield server, dict(zip(calls, ask(server, calls), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "key", "kind"), FAILURES)
def test_failures(
    asked: tuple[FaultyServer, dict[tuple[str, str], Any]],
    verb: str,
    key: str,
    kind: ErrorKind,
) -> None:
    """A failed call raises the error of its kind, with its text."""
    name, number, text, _ = asked[1][verb, key]
    expected = ERRORS[kind]("", "key", "")

    assert (name, number) == (type(expected).__name__, getattr(expected, "errno", None)), text
    assert kind.value in text
    assert "anything" not in text


@pytest.mark.slow
def test_failed_writes_leave_nothing(
    asked: tuple[FaultyServer, dict[tuple[str, str], Any]],
) -> None:
    """What was not written is not there, nor are its parts."""
    server, _ = asked
    for verb, key, _kind in FAILURES:
        if verb.startswith("write"):
            assert server.get("bucket", f"p/{key}") is None, key
    assert server.uploads("bucket") == []


@pytest.mark.slow
def test_the_library_makes_no_request_twice(
    asked: tuple[FaultyServer, dict[tuple[str, str], Any]],
) -> None:
    """One request is made for one read or write that fails."""
    server, _ = asked
    assert server.count("p/get-e500/block") == 1
    assert server.count("p/get-trunc/block") == 1
    assert server.count("p/put-e503/block") == 1
    assert server.count("p/part-e503/block", "UploadPart") == 3  # of three parts


@pytest.mark.slow
def test_retries_are_counted(faulty: FaultyServer) -> None:
    """Kvio retries up to the limit, and counts the retries."""
    faulty.put("bucket", "p/get-e503/block", BODY)
    faulty.put("bucket", "p/get-e503once/block", BODY)
    calls = [("read", "get-e503/block"), ("read", "get-e503once/block")]
    worn_out, recovered = ask(faulty, calls, retries=2)

    assert (worn_out[0], worn_out[3]) == ("TransientStorageError", 2)
    assert (recovered[0], recovered[3]) == ("", 1)
    assert faulty.count("p/get-e503/block") == 3
    assert faulty.count("p/get-e503once/block") == 2


def test_a_small_block_is_one_request_each_way(faulty: FaultyServer) -> None:
    """No HEAD goes before a GET, nor after a PUT."""
    faulty.put("bucket", "p/block", BODY)
    read, written = ask(faulty, [("read", "block"), ("write", "other")])

    assert (read[0], written[0]) == ("", "")
    assert [seen.operation for seen in faulty.requests][1:] == ["GetObject", "PutObject"]


OTHERWISE = """
import os, subprocess, sys
import kvio
first = {"endpoint_url": sys.argv[1], "access_key": "anyone", "secret_key": "anything"}
kept = kvio.open_store("s3+s3dlio://bucket/p", options=first)
kvio.open_store("s3+s3dlio://bucket/q", options=first).close()
kvio.open_store("s3+s3dlio://another/q", options=first).close()
for change in (
    {"endpoint_url": "http://127.0.0.1:9"}, {"secret_key": "geheimnis"}, {"region": "eu-north-1"},
    {"read_timeout_s": 7}, {"payload_signing": "unsigned"}, {"session_token": "geheimnis"},
):
    try:
        kvio.open_store("s3+s3dlio://bucket/r", options={**first, **change})
    except kvio.ConfigError as exc:
        assert next(iter(change)) in str(exc) and "geheimnis" not in str(exc), exc
    else:
        raise AssertionError(change)
kept.write_block("block", b"bytes")
assert kept.read_block("block") == b"bytes"
assert not [name for name in os.environ if name.startswith(("AWS_", "S3DLIO_"))], os.environ
inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
assert "AWS_" not in inherited, "programs that are started see them"
threads = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print(sum(name.startswith("s3dlio-rt-worke") for name in threads), len(os.sched_getaffinity(0)))
"""


def test_one_configuration_in_a_process(faulty: FaultyServer) -> None:
    """Another endpoint, credential or timeout is refused by name; the first store works on."""
    done = run_alone(OTHERWISE, faulty.url)

    assert done.returncode == 0, done.stderr
    workers, cores = map(int, done.stdout.split())
    assert workers == cores


def test_no_credentials(faulty: FaultyServer) -> None:
    """Without credentials a store raises an error and makes no request."""
    script = (
        "import sys, kvio\n"
        "try: kvio.open_store('s3+s3dlio://bucket', options={'endpoint_url': sys.argv[1]})\n"
        "except kvio.AccessDeniedError as exc: print(exc)"
    )
    done = run_alone(script, faulty.url)

    assert ErrorKind.NO_CREDENTIALS.value in done.stdout, done.stderr
    assert faulty.requests == []


FORKING = """
import os, sys
import kvio
options = {"endpoint_url": sys.argv[1], "access_key": "anyone", "secret_key": "anything"}
store = kvio.open_store("s3+s3dlio://bucket/p", options=options)
store.write_block("block", b"bytes")
child = os.fork()
if not child:
    try:
        store.read_block("block")
    except kvio.UnsupportedError:
        try:
            kvio.open_store("s3+s3dlio://bucket/q", options=options)
        except (kvio.UnsupportedError, kvio.ConfigError):
            sys.exit(7)
        sys.exit(8)
    sys.exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.read_block("block") == b"bytes")
"""


def test_a_forked_child_is_refused(faulty: FaultyServer) -> None:
    """In a forked child nothing hangs: old and new stores are refused there, the parent goes on."""
    done = run_alone(FORKING, faulty.url)

    assert done.stdout == "7 True\n", done.stderr


OPENING = """
import json, sys
import kvio
try:
    store = kvio.open_store(sys.argv[1], options=json.load(sys.stdin))
    store.write_block("block", b"bytes")
    print(store.read_block("block") == b"bytes")
except kvio.KvioError as exc:
    print(type(exc).__name__, exc)
"""


@pytest.mark.slow
def test_tls_with_a_given_authority(
    tls_endpoint: Endpoint, tls_bucket: str, foreign_ca: Path
) -> None:
    """A server is trusted by ca_file alone."""
    answers = []
    for ca_file in (str(tls_endpoint.ca_file), str(foreign_ca), None):
        options = {
            "endpoint_url": tls_endpoint.url,
            "region": tls_endpoint.region,
            "access_key": tls_endpoint.access_key,
            "secret_key": tls_endpoint.secret_key,
            "ca_file": ca_file,
        }
        done = run_alone(OPENING, f"s3+s3dlio://{tls_bucket}/p", stdin=json.dumps(options))
        answers.append(done.stdout)

    assert answers[0] == "True\n"
    for refused in answers[1:]:
        assert refused.startswith("ConfigError")
        assert ErrorKind.TLS.value in refused


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://no-such-host.invalid:9000"], ids=["refused", "no name"]
)
def test_a_server_that_is_not_there(url: str) -> None:
    """A refused connection and an unknown name are no timeouts."""
    options = {"endpoint_url": url, "access_key": "a", "secret_key": "b", "retries": 0}
    done = run_alone(OPENING, "s3+s3dlio://bucket/p", stdin=json.dumps(options))

    assert done.stdout.startswith("TransientStorageError"), done.stdout
    assert ErrorKind.UNREACHABLE.value in done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [("conditional", "trust"), ("addressing", "virtual"), ("tls_verify", False)],
)
def test_unsupported_options_are_refused(option: str, value: str | bool) -> None:  # noqa: FBT001
    """An option that the library does not support is refused by name."""
    with pytest.raises(kvio.ConfigError, match=option):
        kvio.open_store("s3+s3dlio://bucket", options={option: value})


def test_keys_cannot_be_taken_for_failures() -> None:
    """Words of the failures in a key or bucket do not make another failure of it."""
    text = (
        "GET range for s3://NoSuchBucket/AccessDenied/416 failed: service error: NoSuchKey "
        "(said to be InternalError) — object key does not exist"
    )
    assert s3_s3dlio.parse_error(text).kind is ErrorKind.MISSING


def test_listing_ends_where_the_prefix_does(s3_endpoint: Endpoint, s3_bucket: str) -> None:
    """A prefix selects what starts with it, at every depth, and nothing beside."""
    with open_s3(LIBRARY, s3_endpoint, s3_bucket, prefix="p") as store:
        for key in ("a/b/c", "a/bc", "ab", "b"):
            store.write_block(key, BODY)
        found = {prefix: set(store.list_keys(prefix)) for prefix in ("", "a", "a/b", "a/b/", "c")}

    assert found == {
        "": {"a/b/c", "a/bc", "ab", "b"},
        "a": {"a/b/c", "a/bc", "ab"},
        "a/b": {"a/b/c", "a/bc"},
        "a/b/": {"a/b/c"},
        "c": set(),
    }
