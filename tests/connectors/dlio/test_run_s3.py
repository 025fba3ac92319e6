"""DLIO on an object store: a real server on loopback, two ranks, checkpoints on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvio
from tests.s3.servers import Endpoint, NoServerError, chosen, resolve, serving

from .running import (
    arrays_of,
    expected_states,
    files_below,
    later_release,
    needs_boto3_in_dlio,
    needs_dlio,
    run_dlio,
    saved_states,
    stock_options,
)

boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed")

pytestmark = [needs_dlio, needs_boto3_in_dlio, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    """Yield a server with a bucket ``dlio``."""
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


def _options(server: Endpoint, root: str, *, backend: str = "s3+boto3") -> tuple[str, ...]:
    endpoint = f"+kvio.options.endpoint_url={server.url}"
    return f"+kvio={backend}", f"kvio.root={root}", endpoint


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
    saved = len(expected_states(checkpoints=1))
    assert run.counts == [(2, 4, saved, 0), (2, 4, 0, 0)]
    found = _client(server).list_objects_v2(Bucket="dlio")["Contents"]
    assert [one["Key"] for one in found] == [
        f"sets/data/unet3d/train/img_{number}_of_4.npz" for number in range(4)
    ]
    assert len(files_below(disk / "checkpoints/unet3d")) == saved


def test_the_check_for_read_only_roots_writes_nothing_to_a_bucket(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server supports is found by writing to it, which a run may not need or may not do."""
    from kvio.connectors.dlio import benchmark, blocks

    for name, value in _credentials(server).items():
        monkeypatch.setenv(name, value)
    with kvio.open_store("s3+boto3://dlio", options={"endpoint_url": server.url}) as store:
        monkeypatch.setattr(blocks, "data_store", lambda: store)
        benchmark.check_writable(SimpleNamespace(generate_data=True, do_checkpoint=False))
        backend: Any = store._backend

        assert backend._server._conditions._known is None


#: Each backend, the package it needs, and how many ranks: one library with two.
_LIBRARIES = [
    ("s3+minio", "minio", 1),
    ("s3+obstore", "obstore", 2),
    ("s3+s3dlio", "s3dlio", 1),
    ("s3+torch", "s3torchconnectorclient", 1),
]


@pytest.mark.parametrize(("backend", "package", "ranks"), _LIBRARIES)
def test_every_library_stores_what_is_generated_and_saved(
    backend: str, package: str, ranks: int, server: Endpoint, tmp_path: Path
) -> None:
    """Samples and checkpoints are objects that another library reads: the same bytes."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    prefix = backend.partition("+")[2]
    run = run_dlio(
        tmp_path,
        *_options(server, f"dlio/{prefix}", backend=backend),
        "++workload.workflow.checkpoint=True",
        "++workload.checkpoint.checkpoint_after_epoch=2",
        "++workload.checkpoint.model_size=5000",
        "++workload.checkpoint.layer_parameters=[1000]",
        ranks=ranks,
        environment=_credentials(server),
    )

    assert run.status == 0, run.text
    states = expected_states(checkpoints=1)
    assert run.counts[0] == (4 // ranks, 8 // ranks, len(states), 0)
    options = stock_options(tmp_path / "stock")
    stock = run_dlio(tmp_path, *options, "++workload.train.epochs=0", ranks=ranks)
    assert stock.status == 0, stock.text
    found = _objects(server, f"{prefix}/")
    generated = files_below(tmp_path / "stock")
    assert len(generated) == 4
    for name, content in generated.items():
        stored, other = arrays_of(found.pop(f"data/unet3d/{name}"))["x"], arrays_of(content)["x"]
        assert (stored.shape, stored.dtype) == (other.shape, other.dtype)
        # Later releases draw the samples of each run anew.
        assert later_release() or np.array_equal(stored, other)
    assert saved_states(found) == states


def _objects(server: Endpoint, prefix: str) -> dict[str, bytes]:
    client = _client(server)
    listed = client.list_objects_v2(Bucket="dlio", Prefix=prefix)["Contents"]
    return {
        one["Key"].removeprefix(prefix): client.get_object(Bucket="dlio", Key=one["Key"])[
            "Body"
        ].read()
        for one in listed
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_key_that_is_denied_ends_the_run_with_the_bucket(
    ranks: int, server: Endpoint, tmp_path: Path
) -> None:
    """On all ranks, before anything is generated."""
    run = run_dlio(
        tmp_path,
        *_options(server, "dlio"),
        ranks=ranks,
        environment={"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"},
    )

    assert run.status != 0
    assert "open the bucket 'dlio': the server denies access" in run.text, run.text
    assert "Starting data generation" not in run.text


def test_a_missing_bucket_is_known_before_anything_is_generated(
    server: Endpoint, tmp_path: Path
) -> None:
    """The sentence names the bucket."""
    run = run_dlio(tmp_path, *_options(server, "not-there"), environment=_credentials(server))

    assert run.status != 0
    assert "open the bucket 'not-there': no such bucket" in run.text, run.text
    assert "Starting data generation" not in run.text
