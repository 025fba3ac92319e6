"""Entries in a bucket: nothing is dropped from a page cache, and each is an object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.connectors.mlperf_kv import KvioBackend
from kvio.testing.payloads import payload
from tests.s3.servers import NoServerError, chosen, resolve, serving

boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed")


@pytest.fixture(scope="module")
def store() -> Iterator[kvio.Store]:
    """Open a store in a bucket of a server on loopback."""
    try:
        name = resolve(chosen()[0])
    except NoServerError as exc:
        pytest.skip(str(exc))
    with serving(name) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        patch.setenv("AWS_REGION", server.region)
        client = boto3.client("s3", endpoint_url=server.url, region_name=server.region)
        client.create_bucket(Bucket="entries")
        options = {"endpoint_url": server.url, "region": server.region}
        with kvio.open_store("s3+boto3://entries/run", options=options) as opened:
            yield opened


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_entries_are_objects(store: kvio.Store, tokens: int) -> None:
    """Written, read, listed, replaced and removed."""
    data = np.frombuffer(payload(tokens * 512), np.float16).reshape(2, tokens, 128)
    backend = KvioBackend(store)

    backend.write("user_1_turn_1", data)
    found, timing = backend.read("user_1_turn_1")

    assert (found.shape, found.tobytes()) == (data.shape, data.tobytes())
    assert timing.total == pytest.approx(timing.device + timing.host)
    assert list(store.list_keys()) == ["kv-cache/user_1_turn_1"]
    assert not hasattr(backend, "base_path")
    backend.clear()
    assert list(store.list_keys()) == []
    with pytest.raises(KeyError):
        backend.read("user_1_turn_1")
