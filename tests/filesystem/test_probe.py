"""What is known of a fs, and for how long."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from kvio.filesystem.probe import FileSystem, examine, recall
from tests.posix import mounts

_MOUNTS = Path("/proc/self/mountinfo")


def recalled_twice(directory: Path) -> tuple[FileSystem, FileSystem | None]:
    """Ask, and ask again when no file can be made any more; None: one had to be."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        first, again = recall(fd, ".probe"), None
        os.rmdir(directory)
        with suppress(FileNotFoundError):
            again = recall(fd, ".probe")
        os.mkdir(directory)
    finally:
        os.close(fd)
    return first, again


def test_a_medium_is_tried_once_and_known_then(disk_path: Path) -> None:
    """The second answer is the first one, which is that of trying; no file is made for it."""
    while True:
        before = _MOUNTS.read_bytes()
        first, again = recalled_twice(disk_path)
        if _MOUNTS.read_bytes() == before:  # else others mounted something meanwhile
            break
    fresh = os.open(disk_path, os.O_RDONLY)
    try:
        assert examine(fresh, ".probe") == first
    finally:
        os.close(fresh)

    assert again is first


@pytest.mark.root
def test_a_medium_is_tried_anew_when_something_was_mounted(disk_path: Path, tmp_path: Path) -> None:
    """Options may have changed: what was known before a mount is not trusted after it."""
    fd = os.open(disk_path, os.O_RDONLY)
    try:
        before = recall(fd, ".probe")
        with mounts.memory_filesystem(tmp_path, "size=1m"):
            during = recall(fd, ".probe")
    finally:
        os.close(fd)

    assert during == before
    assert during is not before


def test_an_alignment_that_is_not_reported_is_assumed() -> None:
    """By tmpfs, which takes any: the doctor does not say that statx reported it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        directory = os.open(path, os.O_RDONLY)
        try:
            fs = examine(directory, ".probe")
        finally:
            os.close(directory)
    if fs.name != "tmpfs":
        pytest.skip("needs tmpfs at /dev/shm")

    assert not fs.probe["dio_reported"]
    assert (fs.memory_align, fs.offset_align) == (4096, 4096)
