"""The pytest plugin: an option that names a store, fixtures that open it, and one marker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio

_SUITE = ("batches", "closing", "damaged", "looking", "reading", "sharing", "submitted", "writing")

pytest.register_assert_rewrite(
    *(f"kvio.testing.{name}" for name in _SUITE), "kvio.testing.stateful", "kvio.testing.payloads"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kvio-url``."""
    parser.getgroup("kvio").addoption(
        "--kvio-url",
        metavar="URL",
        help="store that kvio_url, kvio_store and kvio.testing.test_url use; {tmp} stands for a "
        "fresh directory, as in 'hybrid://{tmp}?durability=durable'",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, so that strict markers work downstream."""
    config.addinivalue_line("markers", "kvio_large: writes blocks of several MiB")


@pytest.fixture
def kvio_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of ``--kvio-url``; skip without one."""
    url = request.config.getoption("--kvio-url")
    if url is None:
        pytest.skip("no store was named: give --kvio-url")
    return str(url).replace("{tmp}", str(tmp_path))


@pytest.fixture
def kvio_store(kvio_url: str) -> Iterator[kvio.Store]:
    """Open the store of ``--kvio-url`` for one test."""
    with kvio.open_store(kvio_url) as store:
        yield store
