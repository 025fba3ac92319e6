"""Counting what every test of the campaign did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.totals import PROPERTY, Tally


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    """Count into the line of totals that ends a run."""
    counted = Tally()
    yield counted
    record_property(PROPERTY, dict(counted.counts))
