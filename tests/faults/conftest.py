"""Counting what every test of the campaign did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.totals import PROPERTY, Tally


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, whole suites, or one of them is left alone at the end."""
    items.sort(key=lambda item: "/without/" not in item.nodeid)


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    """Count into the line of totals that ends a run."""
    counted = Tally()
    yield counted
    record_property(PROPERTY, dict(counted.counts))
