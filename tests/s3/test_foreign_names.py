"""A bucket also holds objects of other programs, whose names no key may have."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.backends.s3.backend import S3Backend
from tests.s3.failing import BUCKET, registered
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3, require

#: s3dlio knows one server in a process: it has a test of its own.
LIBRARIES: Final = ("s3+boto3", "s3+minio", "s3+obstore", "s3+torch")
#: Names below the prefix, with what makes each one unlike a key.
FOREIGN: Final = {
    "an empty segment": "x//y",
    "a tab": "a\tb",
    "a newline": "new\nline",
    "a folder": "dir/",
    "a folder beside a block": "block-1/",
    "a dotted segment": "a/../b",
    "a dot": "./a",
    "a slash at its start": "/lead",
    "a space": "a b",
    "an escape": "a%2Fb",
    "a letter of another alphabet": "é",
}


def names(store: kvio.Store) -> list[str]:
    return list(store.list_keys())


@pytest.mark.parametrize("about", FOREIGN)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_foreign_name_is_no_key_and_harms_none(
    library: str, about: str, faulty: FaultyServer
) -> None:
    """A store opens beside it, lists its own keys and no other, and reads and writes them."""
    registered(library)
    faulty.put(BUCKET, f"p/{FOREIGN[about]}", b"")
    with open_s3(library, faulty.endpoint, BUCKET, prefix="p") as store:
        for key in ("block-1", "block-1.x", "zz/block-2"):
            store.write_block(key, b"bytes")

        assert names(store) == ["block-1", "block-1.x", "zz/block-2"]
        assert list(store.list_keys("zz/")) == ["zz/block-2"]
        assert bytes(store.read_block("zz/block-2")) == b"bytes"
        assert store.delete_block("block-1")
        assert names(store) == ["block-1.x", "zz/block-2"]


_ALONE = """
import kvio
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3
from tests.s3.test_foreign_names import FOREIGN, names

with FaultyServer() as server:
    for number, name in enumerate(FOREIGN.values()):
        server.put("bucket", f"p{number}/{name}", b"")
        with open_s3("s3+s3dlio", server.endpoint, "bucket", prefix=f"p{number}") as store:
            asked = server.requests[-1]
            assert (asked.operation, asked.key) == ("GetObject", f"p{number}/.kvio-nothing"), asked
            store.write_block("block-1", b"bytes")
            assert names(store) == ["block-1"], name
"""


def test_the_same_of_a_library_that_knows_one_server() -> None:
    """s3dlio opens beside each foreign name, asks for its own prefix, and lists its own keys."""
    require("s3+s3dlio")
    run = subprocess.run(
        [sys.executable, "-c", _ALONE],
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3DLIO_"))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 0, run.stderr


def test_a_long_listing_goes_on_behind_a_foreign_name(faulty: FaultyServer) -> None:
    """Every key is listed once, in order, whatever pages the foreign names stand on."""
    registered("s3+obstore")
    with open_s3("s3+obstore", faulty.endpoint, BUCKET, prefix="p") as store:
        wanted = [f"k{number:04}" for number in range(2500)]
        for key in wanted:
            faulty.put(BUCKET, f"p/{key}", bytes(64))
        for number in (900, 1700, 2400):
            faulty.put(BUCKET, f"p/k{number:04}//x", b"")

        assert names(store) == wanted


def test_without_another_library_the_error_names_one(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone obstore opens, reads and writes; a listing says what can list such a name."""
    registered("s3+obstore")
    for module in ("boto3", "minio"):
        monkeypatch.delitem(sys.modules, f"kvio.backends.s3.{module}", raising=False)
        monkeypatch.setitem(sys.modules, module, None)
    faulty.put(BUCKET, "p/x//y", b"")
    with open_s3("s3+obstore", faulty.endpoint, BUCKET, prefix="p") as store:
        store.write_block("key", b"bytes")

        assert bytes(store.read_block("key")) == b"bytes"
        with pytest.raises(kvio.StorageError, match="boto3 and minio") as caught:
            names(store)
        assert "x//y" in str(caught.value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_opening_asks_for_its_own_prefix_and_lists_nothing(
    library: str, faulty: FaultyServer
) -> None:
    """A user may be allowed one prefix and no listing; two stores share one client."""
    registered(library)
    with open_s3(library, faulty.endpoint, BUCKET, prefix="a") as store:
        store.write_block("key", b"bytes")
        since = len(faulty.requests)
        with open_s3(library, faulty.endpoint, BUCKET, prefix="b"):
            asked = faulty.requests[since:]

    assert asked
    assert {seen.operation for seen in asked} <= {"GetObject"}
    assert {seen.key for seen in asked} == {"b/.kvio-nothing"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_stores_that_fail_to_open_leave_nothing_open(library: str, faulty: FaultyServer) -> None:
    """Neither a descriptor nor a client stays behind."""
    registered(library)

    def fail(times: int) -> int:
        for number in range(times):
            with pytest.raises(kvio.KvioError):
                open_s3(
                    library,
                    faulty.endpoint,
                    f"bucket-no-bucket-{number}",
                    options={"retries": 0},
                )
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    from kvio.backends.s3 import backend

    before = fail(3)
    clients = len(backend._clients)

    assert fail(20) <= before + 2
    assert len(backend._clients) == clients
    assert not [one for one in gc.get_objects() if isinstance(one, S3Backend) and one._connected]
