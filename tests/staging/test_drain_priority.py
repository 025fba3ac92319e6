"""Drains give way to whatever else the program does."""

from __future__ import annotations

import os

import pytest

import kvio
from tests.staging.controlled import draining_with_all


@pytest.mark.parametrize("nice", [0, 7])
def test_drains_are_nicer_by_what_was_asked(nice: int) -> None:
    """Their threads alone: the caller's priority stays as it was."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own + nice > 19:
        pytest.skip("this process is as nice as can be")
    with draining_with_all(3, drain_nice=nice) as drains:
        assert [os.getpriority(os.PRIO_PROCESS, drain) for drain in drains] == [own + nice] * 3
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("nice", [-1, 20])
def test_what_is_no_niceness_is_refused(nice: int) -> None:
    """Priority is only ever lowered."""
    with kvio.open_store("memory") as store, pytest.raises(kvio.ConfigError, match="drain_nice"):
        kvio.stage(store, "1MiB", drain_nice=nice)
