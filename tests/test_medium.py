"""What is known of a medium, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvio.medium import examine, recall
from tests.posix import mounts


def test_a_medium_is_tried_once_and_known_then(disk_path: Path) -> None:
    """The second answer is the first one, which is that of trying; no file is made for it."""
    fd = os.open(disk_path, os.O_RDONLY)
    try:
        first = recall(fd, ".probe")
        os.rmdir(disk_path)  # a file could not be made any more
        again = recall(fd, ".probe")
        os.mkdir(disk_path)
    finally:
        os.close(fd)
    fresh = os.open(disk_path, os.O_RDONLY)
    try:
        assert examine(fresh, ".probe") == first
    finally:
        os.close(fresh)

    assert again is first


@pytest.mark.root
def test_a_medium_is_tried_anew_when_something_was_mounted(disk_path: Path, tmp_path: Path) -> None:
    """Options may have changed: what was known before a mount is not believed after it."""
    fd = os.open(disk_path, os.O_RDONLY)
    try:
        before = recall(fd, ".probe")
        with mounts.memory_filesystem(tmp_path, "size=1m"):
            during = recall(fd, ".probe")
    finally:
        os.close(fd)

    assert during == before
    assert during is not before
