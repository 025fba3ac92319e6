"""What a server says of conditions and checksums is tried before kvio promises it."""

from __future__ import annotations

import os
import sys
import threading
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio import GiB, MiB
from kvio.backends.s3 import probing
from kvio.backends.s3.body import crc32c
from tests.s3.failing import BUCKET, LARGE, PART_BYTES, SMALL, look, open_faulty, place, stored
from tests.s3.faults import Request, Response, failure
from tests.s3.faulty import FaultyServer, Seen

CONDITIONAL: Final = ("s3+boto3", "s3+minio", "s3+obstore")
CHECKED: Final = ("s3+boto3", "s3+minio")
PROBING: Final = {"conditional": "probe"}


class RacyServer(FaultyServer):
    """Looks for an object first and writes later, so that several writers find none."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Condition()
        self._looking = 0

    def _respond(self, request: Request, fault: str) -> Response:
        if "if-none-match" in request.headers and self.get(request.bucket, request.key) is None:
            with self._looked:
                self._looking += 1
                self._looked.notify_all()
                # One writer alone goes on after a moment.
                self._looked.wait_for(lambda: self._looking > 1, 0.2)
            fault = "ignores-conditions"
        response = super()._respond(request, fault)
        with self._looked:
            self._looking = 0
        return response


@pytest.mark.parametrize("library", CONDITIONAL)
def test_a_condition_that_is_not_atomic_is_not_promised(library: str) -> None:
    """A server that refuses a second write, but not a simultaneous one, is told by a race."""
    with RacyServer() as server, open_faulty(library, server, PROBING) as store:
        capabilities = store.capabilities
        store.write_block("key", SMALL, if_exists="error")

        assert not capabilities.exclusive_create
        assert any("at the same time" in note for note in capabilities.notes)
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("key", SMALL, if_exists="error")
        findings = {found.name: found for found in store.probe()}
        assert findings["If-None-Match"].good
        assert not findings["If-None-Match at once"].good
        assert list(store.list_keys()) == ["key"]


class CheckingServer(FaultyServer):
    """Verifies the CRC32C that comes with a body; `FaultyServer` takes any."""

    def _respond(self, request: Request, fault: str) -> Response:
        sent = request.headers.get("x-amz-checksum-crc32c")
        right = crc32c([memoryview(request.body)]).to_bytes(4, "big")
        if sent is not None and b64decode(sent) != right:
            return failure(request, 400, "BadDigest")
        return super()._respond(request, fault)


class BusyAtFirst(FaultyServer):
    """Answers 503 to the first conditional writes."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = 2

    def _do(self, request: Request, fault: str) -> Response:
        if "if-none-match" in request.headers and self.busy:
            self.busy -= 1
            return failure(request, 503, "SlowDown")
        return super()._do(request, fault)


@pytest.mark.parametrize("library", CONDITIONAL)
def test_a_busy_moment_decides_nothing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that a transient error leaves open is looked for again, and not kept."""
    with BusyAtFirst() as server, open_faulty(library, server, PROBING) as store:
        assert store.capabilities.exclusive_create
    monkeypatch.setattr(probing, "_PAUSE_S", 0.0)
    with BusyAtFirst() as server, open_faulty(library, server, PROBING) as store:
        server.busy = 1000
        assert not store.capabilities.exclusive_create
        server.busy = 0
        assert store.capabilities.exclusive_create


@pytest.mark.parametrize("library", CONDITIONAL)
def test_what_must_be_new_has_a_condition_while_nothing_is_known(library: str) -> None:
    """It cannot harm; and nobody probes again with every block."""
    with BusyAtFirst() as server, open_faulty(library, server, PROBING) as store:
        server.busy = 3  # the probe has three names
        store.write_block("other", SMALL, if_exists="replace")
        place(server, "key", SMALL[::-1])
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("key", SMALL, if_exists="error")
        for number in range(5):
            store.write_block(f"k{number}", SMALL, if_exists="error")

        assert look(server, "key") == stored("key", SMALL[::-1])
        probes = [seen for seen in server.requests if ".kvio-probe-" in seen.key]
        assert [seen.operation for seen in probes].count("PutObject") == 3


@pytest.mark.parametrize("library", CHECKED)
def test_a_durable_block_needs_no_right_to_delete(library: str) -> None:
    """The probe that cannot be removed is no error of the block."""
    with (
        CheckingServer() as server,
        open_faulty(library, server, {"durability": "durable"}, prefix="delete-e403") as store,
    ):
        assert store.write_block("key", SMALL, if_exists="replace").level == "durable"


@pytest.mark.parametrize("library", CONDITIONAL)
def test_a_write_does_not_wait_for_the_race(library: str, faulty: FaultyServer) -> None:
    """While one thread looks at the capabilities, another writes on."""
    racing, written = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        if seen.operation == "PutObject" and ".kvio-probe-" in seen.key:
            racing.set()
            assert written.wait(60)

    with open_faulty(library, faulty, PROBING) as store, ThreadPoolExecutor(1) as pool:
        store.write_block("first", SMALL)  # finds out whether conditions are honoured
        faulty.watch = hold
        capabilities = pool.submit(lambda: store.capabilities)
        assert racing.wait(60)
        store.write_block("second", SMALL)
        written.set()

        assert capabilities.result(60).exclusive_create


def test_where_obstore_signs_nothing_the_other_library_may_have_no_credentials(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then obstore sends a large block itself, and a listing says what it cannot list."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    faulty.put(BUCKET, "p/x//y", b"")
    options: dict[str, Any] = {
        "endpoint_url": faulty.url,
        "part_bytes": PART_BYTES,
        "conditional": "trust",
    }
    with kvio.open_store(f"s3+obstore://{BUCKET}/p", options=options) as store:
        store.write_block("large", LARGE, if_exists="error")

        assert faulty.count("p/large", "PutObject") == 1
        assert store.read_block("large") == LARGE
        with pytest.raises(kvio.StorageError, match="x//y"):
            list(store.list_keys())


@pytest.mark.parametrize("library", CHECKED)
def test_a_durable_block_costs_one_request_where_checksums_are_verified(library: str) -> None:
    """The server is tried once; then its check of a body is enough."""
    with (
        CheckingServer() as server,
        open_faulty(library, server, {"durability": "durable"}) as store,
    ):
        store.write_block("first", SMALL, if_exists="replace")
        since = len(server.requests)
        store.write_block("second", SMALL, if_exists="replace")
        asked = [seen.operation for seen in server.requests[since:]]

        assert asked == ["PutObject"]
        assert list(store.list_keys()) == ["first", "second"]


@pytest.mark.parametrize("library", CONDITIONAL)
def test_a_large_new_block_is_sent_in_parts_and_completed_on_a_condition(
    library: str, faulty: FaultyServer
) -> None:
    """Also by obstore, whose own uploads know no condition: another installed library sends it."""
    with open_faulty(library, faulty) as store:
        receipt = store.write_block("large", LARGE, if_exists="error")
        parts = faulty.count("p/large", "UploadPart")
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("large", LARGE, if_exists="error")

        assert receipt.mode == "multipart"
        assert parts == 2
        assert faulty.count("p/large", "UploadPart") == parts  # nothing is sent in vain
        assert look(faulty, "large") == stored("large", LARGE)


class LateServer(FaultyServer):
    """Lets another writer's block appear between the first look at a key and the end."""

    def _respond(self, request: Request, fault: str) -> Response:
        if request.operation == "CompleteMultipartUpload":
            self.put(request.bucket, request.key, stored("large", SMALL))
        return super()._respond(request, fault)


@pytest.mark.parametrize("library", CONDITIONAL)
def test_the_condition_decides_at_the_end_of_a_large_upload(library: str) -> None:
    """A writer that came between keeps its block, and no upload stays behind."""
    with LateServer() as server, open_faulty(library, server) as store:
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("large", LARGE, if_exists="error")

        assert look(server, "large") == stored("large", SMALL)
        assert server.uploads(BUCKET) == []


def test_alone_obstore_sends_one_request_and_refuses_what_that_cannot_hold(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 5 GiB nothing is sent, and the error names what to install."""
    for module in ("boto3", "minio"):
        monkeypatch.delitem(sys.modules, f"kvio.backends.s3.{module}", raising=False)
        monkeypatch.setitem(sys.modules, module, None)
    piece = bytes(64 * MiB)
    with open_faulty("s3+obstore", faulty) as store:
        store.write_block("large", LARGE, if_exists="error")
        assert faulty.count("p/large", "PutObject") == 1
        since = len(faulty.requests)
        with pytest.raises(kvio.UnsupportedError, match="boto3 or minio"):
            store.write_block("larger", [piece] * (5 * GiB // len(piece)), if_exists="error")

    assert {seen.operation for seen in faulty.requests[since:]} <= {"GetObject", "HeadObject"}


class EagerServer(FaultyServer):
    """Refuses a condition as soon as it has the headers, and takes no body."""

    def _fault_of(self, request: Request) -> str:
        taken = self.get(request.bucket, request.key) is not None
        refused = request.operation == "PutObject" and "if-none-match" in request.headers and taken
        return "resetsend" if refused else super()._fault_of(request)


@pytest.mark.parametrize("library", CONDITIONAL)
def test_a_connection_cut_by_a_refusal_is_a_block_that_exists(library: str) -> None:
    """Where the key has other bytes than those sent; with the same bytes nobody can tell."""
    with EagerServer() as server, open_faulty(library, server) as store:
        store.write_block("key", SMALL, if_exists="error")
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("key", SMALL[::-1], if_exists="error")
        with pytest.raises(kvio.TransientStorageError):
            store.write_block("key", SMALL, if_exists="error")
        assert store.read_block("key") == SMALL
