"""An S3 server on loopback for recipes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import pytest

from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint, NoServerError, chosen, resolve, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Endpoint]:
    """Yield a server; the first that is chosen."""
    try:
        name = resolve(chosen()[0])
    except NoServerError as exc:
        pytest.skip(str(exc))
    with serving(name) as endpoint:
        yield endpoint


@pytest.fixture
def bucket(server: Endpoint) -> str:
    """Return the name of an empty bucket that is the test's own."""
    name = f"kvio-test-{secrets.token_hex(8)}"
    RawS3(server).create_bucket(name)
    return name


@pytest.fixture(scope="session")
def s3_env(server: Endpoint) -> Mapping[str, str]:
    """Return the variables by which a program finds the server."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_REGION": server.region,
    }
