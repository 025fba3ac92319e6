"""DLIO on an object store: a real server on loopback, two ranks, checkpoints on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3.servers import Endpoint, NoServerError, chosen, resolve, serving

from .running import files_below, needs_dlio, run_dlio

boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed")

pytestmark = [needs_dlio, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    """Give a server with a bucket ``dlio``."""
    try:
        name = resolve(chosen()[0])
    except NoServerError as exc:
        pytest.skip(str(exc))
    with serving(name) as endpoint:
        _client(endpoint).create_bucket(Bucket="dlio")
        yield endpoint


def _client(server: Endpoint) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def _options(server: Endpoint, root: str) -> tuple[str, ...]:
    endpoint = f"+kvio.options.endpoint_url={server.url}"
    return "+kvio=s3+boto3", f"kvio.root={root}", endpoint


def _credentials(server: Endpoint) -> dict[str, str]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return dict(zip(names, (server.access_key, server.secret_key), strict=True))


def test_samples_are_objects_and_checkpoints_files(server: Endpoint, tmp_path: Path) -> None:
    """Data in a bucket, checkpoints on a file system: two backends in one run."""
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    run = run_dlio(
        tmp_path,
        *_options(server, "dlio/sets"),
        f'kvio.checkpoint="posix-tmpfile://{disk}"',
        "++workload.workflow.checkpoint=True",
        "++workload.checkpoint.checkpoint_after_epoch=2",
        "++workload.checkpoint.model_size=5000",
        "++workload.checkpoint.layer_parameters=[1000]",
        ranks=2,
        environment=_credentials(server),
    )

    assert run.status == 0, run.text
    assert run.counts == [(2, 4, 2, 0), (2, 4, 0, 0)]
    found = _client(server).list_objects_v2(Bucket="dlio")["Contents"]
    assert [one["Key"] for one in found] == [
        f"sets/data/unet3d/train/img_{number}_of_4.npz" for number in range(4)
    ]
    assert len(files_below(disk / "checkpoints/unet3d")) == 2


def test_a_missing_bucket_is_known_before_anything_is_generated(
    server: Endpoint, tmp_path: Path
) -> None:
    """The sentence names the bucket."""
    run = run_dlio(tmp_path, *_options(server, "not-there"), environment=_credentials(server))

    assert run.status != 0
    assert "open the bucket 'not-there': no such bucket" in run.text, run.text
    assert "Starting data generation" not in run.text
