"""Drains give way to whatever else the program does."""

from __future__ import annotations

import os
import threading

import pytest

import kvio


def priorities(name: str) -> set[int]:
    """Give the nice values of this process's threads whose names begin so."""
    return {
        os.getpriority(os.PRIO_PROCESS, thread.native_id)
        for thread in threading.enumerate()
        if thread.name.startswith(name) and thread.native_id is not None
    }


@pytest.mark.parametrize("nice", [0, 7])
def test_drains_are_nicer_by_what_was_asked(nice: int) -> None:
    """Their threads alone: the caller's priority stays as it was."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own + nice > 19:
        pytest.skip("this process is as nice as can be")
    with (
        kvio.open_store("memory") as store,
        kvio.stage(store, "1MiB", drain_nice=nice) as tier,
    ):
        tier.write_block("k", b"bytes").wait()
        assert priorities("kvio-drain") == {own + nice}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("nice", [-1, 20])
def test_what_is_no_niceness_is_refused(nice: int) -> None:
    """Priority is only ever lowered."""
    with kvio.open_store("memory") as store, pytest.raises(kvio.ConfigError, match="drain_nice"):
        kvio.stage(store, "1MiB", drain_nice=nice)
