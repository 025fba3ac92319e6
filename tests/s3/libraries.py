"""The S3 backends that are tested here, and how a store is opened through each."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

import pytest

import kvio
from tests.s3.servers import Endpoint

#: Registered name and the module it needs.
MODULES: Final = {
    "s3+boto3": "boto3",
    "s3+minio": "minio",
    "s3+obstore": "obstore",
    "s3+s3dlio": "s3dlio",
    "s3+torch": "s3torchconnectorclient",
}
LIBRARIES: Final = tuple(MODULES)


def require(library: str) -> None:
    """Skip the running test where a library is not installed."""
    if importlib.util.find_spec(MODULES[library]) is None:
        extra = library.replace("+", "-")
        pytest.skip(
            f"needs {MODULES[library]} (pip install 'kvio[{extra}]')", allow_module_level=True
        )


def open_s3(
    library: str,
    endpoint: Endpoint,
    bucket: str,
    *,
    prefix: str | None = None,
    layout: Literal["block", "plain"] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> kvio.Store:
    """Open a store on a server of the tests, in a prefix of its own unless one is given."""
    require(library)
    return kvio.open_store(
        f"{library}://{bucket}/{prefix or secrets.token_hex(4)}",
        layout=layout,
        options={
            "endpoint_url": endpoint.url,
            "region": endpoint.region,
            "access_key": endpoint.access_key,
            "secret_key": endpoint.secret_key,
            **(options or {}),
        },
        **settings,
    )
