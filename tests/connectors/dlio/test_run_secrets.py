"""No key of an account is in anything a run prints or leaves, whatever way it was given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3.servers import Endpoint, NoServerError, chosen, resolve, serving

from .running import Run, needs_boto3_in_dlio, needs_dlio, run_dlio

boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed")

pytestmark = [needs_dlio, needs_boto3_in_dlio, pytest.mark.slow]

CANARY = "CANARYsEcReT0123456789"
_CLAIMED = "++workload.storage.storage_type=parallel_fs"


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    """Yield a server with a bucket ``secrets``."""
    try:
        name = resolve(chosen()[0])
    except NoServerError as exc:
        pytest.skip(str(exc))
    with serving(name) as endpoint:
        client = boto3.client(
            "s3",
            endpoint_url=endpoint.url,
            region_name=endpoint.region,
            aws_access_key_id=endpoint.access_key,
            aws_secret_access_key=endpoint.secret_key,
        )
        client.create_bucket(Bucket="secrets")
        yield endpoint


def _reported(secret: str, run: Run, work: Path) -> list[str]:
    """Name every place where the secret is: the output, and each file of the run."""
    places = ["the output"] if secret in run.text else []
    files = [path for path in work.rglob("*") if path.is_file()]
    return places + [str(path) for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize("route", ["AWS", "KVIO_DLIO"])
def test_a_run_tells_no_key(route: str, server: Endpoint, tmp_path: Path) -> None:
    """Given in the environment, the key works and is in no log, dump or trace of DLIO's."""
    keys = {"access_key": server.access_key, "secret_key": server.secret_key}
    if route == "AWS":
        options = ["+kvio=s3+boto3", "kvio.root=secrets/aws"]
        options += [f"+kvio.options.endpoint_url={server.url}"]
        environment = {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
        }
    else:
        options = [_CLAIMED]
        reported = {
            "data": "s3+boto3://secrets/json",
            "options": {"endpoint_url": server.url, **keys},
        }
        environment = {"KVIO_DLIO": json.dumps(reported)}
    run = run_dlio(tmp_path, *options, environment={**environment, "TMPDIR": str(tmp_path)})

    assert run.status == 0, run.text
    assert list(tmp_path.rglob("*.yaml"))  # Hydra did dump its settings
    assert _reported(server.secret_key, run, tmp_path) == []


def test_a_key_that_is_refused_is_not_reported(server: Endpoint, tmp_path: Path) -> None:
    """Nor is it in the error, which names the bucket."""
    run = run_dlio(
        tmp_path,
        "+kvio=s3+boto3",
        "kvio.root=secrets",
        f"+kvio.options.endpoint_url={server.url}",
        environment={"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": CANARY},
    )

    assert run.status != 0
    assert "open the bucket 'secrets'" in run.text, run.text
    assert _reported(CANARY, run, tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        ["kvio.root=b", f"+kvio.options.secret_key={CANARY}", "+kvio.options.access_key=x"],
        ["kvio.root=b", f"+kvio.options.session_token={CANARY}"],
        [f'kvio.root="s3://x:{CANARY}@b"'],
        [f'kvio.root="b?secret_key={CANARY}"'],
        ["kvio.root=b", f'kvio.checkpoint="s3+boto3://b?access_key=x&secret_key={CANARY}"'],
        ["kvio.root=b", f'kvio.checkpoint="s3+boto3://x:{CANARY}@b"'],
    ],
)
def test_a_key_on_the_command_line_is_refused_before_it_is_written(
    options: list[str], tmp_path: Path
) -> None:
    """Hydra would dump it beside the results; the sentence does not repeat it."""
    run = run_dlio(tmp_path, "+kvio=s3+boto3", *options)

    assert run.status != 0
    assert "[KVIO]" in run.text, run.text
    assert _reported(CANARY, run, tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data": "memory://", "checkpoint": [f"s3://b?secret_key={CANARY}"]}),
        json.dumps({"data": "memory://", "options": [f"secret_key={CANARY}"]}),
        json.dumps({"data": f"s3+boto3://b?access_key=x&secret_key={CANARY}"}),
        json.dumps({"data": f"s3+boto3://b?access_key=x&secret_key={CANARY}"})[:-2],
        f"s3+boto3:/b?secret_key={CANARY}",
        f"s3+boto3://x:{CANARY}@b",
    ],
)
def test_a_key_in_settings_that_are_wrong_is_not_reported(text: str, tmp_path: Path) -> None:
    """The sentence says what is wrong with them, not what they are."""
    run = run_dlio(tmp_path, _CLAIMED, environment={"KVIO_DLIO": text})

    assert run.status != 0
    assert _reported(CANARY, run, tmp_path) == []
