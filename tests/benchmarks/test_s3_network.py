"""S3 over a simulated network: what is measured, and that the network takes its time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.harness.s3_server import in_memory
from benchmarks.scenarios.s3_network import KVIO, OWN
from kvio import KiB, MiB
from tests.benchmarks.running import run

for _module in ("boto3", "minio", "obstore", "s3dlio", "s3torchconnectorclient"):
    pytest.importorskip(_module, reason=f"{_module} is not installed")


def test_every_library_writes_and_reads_every_load(tmp_path: Path) -> None:
    """By kvio and by its own way, in one process, and every byte comes back."""
    results = tmp_path / "results"
    done = run(
        *("s3-network", "--rounds", "1", "--objects", "8", "--large", "20MiB"),
        *("--round-trip-ms", "1", "--connection-mib-s", "0", "--results", results),
    )

    assert done.returncode == 0, done.stderr
    record = json.loads((results / "s3-network.json").read_text())
    taken = {(s["contender"], s["subject"], s["operation"]) for s in record["samples"]}
    assert taken == {
        (name, load, operation)
        for name in (*KVIO, *OWN)
        for load in ("batch of 8", "one object")
        for operation in ("write", "read")
    }
    assert all(s["intact"] for s in record["samples"] if s["operation"] == "read")
    assert (results / "s3-network.md").read_text().startswith("# S3 over a simulated network")


def test_a_network_takes_at_least_its_time() -> None:
    """A round trip for the connection and for each request, and each body at its rate."""
    with in_memory("bucket", 8 * MiB, round_trip_ms=30, connection_mib_s=10) as server:
        inspector = server.inspector()
        inspector.make_bucket()
        begun = time.monotonic()
        client = server.client(8 * MiB)
        for _ in range(2):
            client.call("GET", "/bucket/missing")
        requests = time.monotonic() - begun
        begun = time.monotonic()
        client.call("PUT", "/bucket/key", body=bytes(1000 * KiB))
        body = time.monotonic() - begun
        client.close()
        inspector.close()

    assert requests >= 3 * 0.030
    assert body >= 0.030 + 1000 / 1024 / 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--contenders", "kvio obstor"), "kvio obstor"),
        (("--objects", "0"), "--objects"),
        (("--round-trip-ms", "-1"), "round-trip-ms"),
        (("--large", "big"), "big"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, str], named: str) -> None:
    """One line names it."""
    done = run("s3-network", *arguments)

    assert done.returncode == 2
    assert named in done.stderr.decode()
