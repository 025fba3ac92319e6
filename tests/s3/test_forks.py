"""A child process never reads wrong bytes and never hangs; it works or gets an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

import kvio
from kvio.backends.s3.client import Objects
from kvio.backends.s3.options import S3Options
from kvio.registry import backend_names, load_backend
from kvio.testing.payloads import payload
from kvio.testing.sharing import runs_in_child
from kvio.url import Secret
from tests.s3.failing import honoured, registered
from tests.s3.libraries import LIBRARIES, open_s3
from tests.s3.servers import Endpoint

BLOCKS: Final = 40
NBYTES: Final = 20_000
ROUNDS: Final = 6
#: Much longer than everything takes; a child that hangs is ended by it.
LIMIT_S: Final = 60.0


def _data(block: int) -> bytes:
    return payload(NBYTES, block)


def _all_right(read: Callable[[int], bytes], rounds: int = ROUNDS) -> bool:
    """Read every block several times, and compare each with what was written."""
    with ThreadPoolExecutor(3) as pool:  # leaves connections of several threads in a pool
        blocks = [block for _ in range(rounds) for block in range(BLOCKS)]
        return all(pool.map(lambda block: read(block) == _data(block), blocks))


def _both_right(read: Callable[[int], bytes]) -> tuple[bool, bool]:
    """Read in a forked child, and here meanwhile; whether every byte was right in each."""
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(_all_right, read)
        child = runs_in_child(lambda: _all_right(read))
        return child, here.result(LIMIT_S)


@pytest.mark.parametrize("library", ["s3+boto3", "s3+minio"])
def test_parent_and_child_read_their_own_bytes(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """After a fork with a warm pool both read 240 blocks at once, and every byte is right."""
    registered(library)
    with open_s3(library, s3_endpoint, s3_bucket) as store:
        for block in range(BLOCKS):
            store.write_block(f"block/{block}", _data(block))

        def read(block: int) -> bytes:
            out = bytearray(NBYTES)
            store.read_block_into(f"block/{block}", out)
            return bytes(out)

        assert _all_right(read, 1)
        assert store.capabilities.usable_after_fork

        assert _both_right(read) == (True, True)

        assert _all_right(read, 1)


@pytest.mark.xfail(strict=False, reason="a pool that was warm before a fork mixes up answers")
@pytest.mark.parametrize("library", ["s3+boto3", "s3+minio"])
def test_a_client_shared_by_a_fork_mixes_up_answers(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """Kvio connects again because the library's client, shared by a fork, mixes up responses."""
    registered(library)
    objects = _naive(library, s3_endpoint, s3_bucket)
    for block in range(BLOCKS):
        data = memoryview(_data(block))
        objects.put(f"naive/{block}", [data], crc32c=None, if_none_match=False, run_all=_in_turn)

    def read(block: int) -> bytes:
        out = bytearray(NBYTES)
        objects.get_into(f"naive/{block}", [memoryview(out)], 0, None)
        return bytes(out)

    assert _all_right(read, 1)

    assert _both_right(read) == (True, True)


def _naive(library: str, endpoint: Endpoint, bucket: str) -> Objects:
    options = S3Options(
        bucket=bucket,
        endpoint_url=endpoint.url,
        region=endpoint.region,
        access_key=Secret(endpoint.access_key),
        secret_key=Secret(endpoint.secret_key),
        read_timeout_s=2.0,
    )
    made: Objects = load_backend(library).library(options)  # type: ignore[attr-defined]
    return made


def _in_turn(tasks: object) -> list[object]:
    raise AssertionError(f"small objects have no parts: {tasks}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forked_child_is_refused_at_once_where_it_would_hang(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """Every call in the child raises an error, and the parent continues to work."""
    registered(library)
    with open_s3(library, s3_endpoint, s3_bucket) as store:
        if store.capabilities.usable_after_fork:
            pytest.skip("the backend promises usable_after_fork")
        store.write_block("block", _data(1))
        store.submit_read_into("block", bytearray(NBYTES)).result(LIMIT_S)

        def child() -> bool:
            for _ in range(3):
                with pytest.raises(kvio.UnsupportedError, match="spawn"):
                    store.read_block("block")
                with pytest.raises(kvio.UnsupportedError, match="spawn"):
                    store.write_block("child", b"bytes", timeout=LIMIT_S)
            store.close()
            return True

        assert runs_in_child(child)
        assert store.read_block("block") == _data(1)
        assert store.write_block("after", b"bytes").nbytes == 5


#: Forks, uses the store on both sides, and lets both processes end as any program does.
PROGRAM: Final = """
import os, sys, warnings
import kvio
warnings.simplefilter("ignore", DeprecationWarning)
url, endpoint, region, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
store = kvio.open_store(url, options={"endpoint_url": endpoint, "region": region, **options})
store.write_block("block", b"bytes" * 1000, if_exists="replace")
assert store.submit_read_into("block", bytearray(5000)).result(30) == 5000
child = os.fork()
if child == 0:
    try:
        served = store.read_block("block") == b"bytes" * 1000
    except kvio.UnsupportedError:
        served = True
    sys.exit(0 if served else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert store.read_block("block") == b"bytes" * 1000
print("both ended")
"""


#: Uses a store, forks, and opens stores of its own in the child, as a DataLoader's workers do.
OPENING: Final = """
import os, sys, warnings
import kvio
warnings.simplefilter("ignore", DeprecationWarning)
url, endpoint, region, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
options = {"endpoint_url": endpoint, "region": region, **options}
where = url.partition("://")[2]

def reads(scheme):
    with kvio.open_store(f"{scheme}://{where}", options=options) as store:
        return store.read_block("block") == b"bytes"

with kvio.open_store(url, options=options) as store:
    store.write_block("block", b"bytes", if_exists="replace")
    survives = store.capabilities.usable_after_fork
child = os.fork()
if child == 0:
    try:
        same = reads(url.partition("://")[0])
    except kvio.UnsupportedError as exc:
        same = "spawn" in str(exc) and "s3+boto3" in str(exc) and not survives
    sys.exit(0 if same and (not sys.argv[5] or reads("s3")) else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert reads(url.partition("://")[0])
print("both ended")
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_store_that_a_child_opens_works_or_is_refused(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """Also once the parent has closed its own; ``s3`` takes a library that survives a fork."""
    registered_anywhere(library)
    survivors = ("s3+minio", "s3+torch", "s3+boto3")
    chosen = any(name in backend_names() and _imports(name) for name in survivors)

    ended = _run(OPENING, library, s3_endpoint, s3_bucket, "s3" if chosen else "")

    assert (ended.returncode, ended.stdout.strip()) == (0, "both ended"), ended.stderr[-2000:]


def _imports(name: str) -> bool:
    try:
        load_backend(name)
    except kvio.MissingDependencyError:
        return False
    return True


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_child_ends_as_any_program_does(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """A forked child that ends with sys.exit, with its exit handlers, does not hang."""
    registered_anywhere(library)

    ended = _run(PROGRAM, library, s3_endpoint, s3_bucket)

    assert (ended.returncode, ended.stdout.strip()) == (0, "both ended"), ended.stderr[-2000:]


def _run(
    program: str, library: str, endpoint: Endpoint, bucket: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": endpoint.access_key,
        "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
    }
    options = honoured(library, {"request_timeout_s": 30.0, "read_timeout_s": 20.0})
    command = [sys.executable, "-c", program, f"{library}://{bucket}/p", endpoint.url]
    return subprocess.run(
        [*command, endpoint.region, repr(options), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        start_new_session=True,
    )


def registered_anywhere(library: str) -> None:
    """Skip if kvio has no such backend; a library that needs a separate process gets one here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVIO_TEST_ALONE", "1")
        registered(library)
