"""docs/s3.md is true: its example runs."""

from __future__ import annotations

import pathlib

import pytest

from tests import snippets
from tests.s3.servers import Endpoint


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets.snippets("docs/s3.md"), ids=str)
def test_a_snippet_runs(
    snippet: snippets.Snippet, s3_endpoint: Endpoint, s3_bucket: str, tmp_path: pathlib.Path
) -> None:
    """With a server and a bucket of ours in place of those it names."""
    snippets.run(
        snippet,
        tmp_path,
        instead={"https://minio.example.org:9000": s3_endpoint.url, "my-bucket": s3_bucket},
        env={
            "AWS_ACCESS_KEY_ID": s3_endpoint.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_endpoint.secret_key,
            "AWS_REGION": s3_endpoint.region,
        },
    )
