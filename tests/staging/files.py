"""What tests of files share: a small tier, and waiting for what happens on other threads."""

from __future__ import annotations

import io
import threading

import kvio
from tests.staging.controlled import LONG_S
from tests.staging.engines import local

PAGE = 4096
CAPACITY = 64 * kvio.KiB  # pieces and window of 8 KiB


def absolute(model: io.BytesIO, offset: int, whence: int) -> int:
    """BytesIO goes to 0 where others refuse; the game asks it only for what both do."""
    return offset + (0, model.tell(), len(model.getvalue()))[whence]


def returned(tier: kvio.StagingTier) -> None:
    """Wait until what was dropped before has been given back."""
    there = threading.Event()
    local(tier).files.later(there.set)
    assert there.wait(LONG_S)


def start_and_wait(tier: kvio.StagingTier, writer: threading.Thread) -> None:
    """Start a thread, and return when it waits for room."""
    writer.start()
    while not tier.stats().waiting_writers:
        assert writer.is_alive(), "the writer did not have to wait"
