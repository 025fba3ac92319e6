"""Prefix lookups: where they stop, and directories that are gone or new."""

from __future__ import annotations

import shutil
from pathlib import Path

import kvio
from kvio._native import faults
from tests.posix import faultlab

KEYS = [f"prefix/{number:04x}" for number in range(48)]


def test_a_lookup_goes_on_in_a_directory_that_was_made_again(tmp_path: Path) -> None:
    """Directories that another process removed and filled anew end no prefix."""
    root = tmp_path / "root"
    with (
        kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store,
        kvio.open_store("posix-tmpfile", root=root) as other,
    ):
        store.write_blocks([(key, b"data") for key in KEYS])
        for key in (KEYS[3], KEYS[20]):
            shutil.rmtree(faultlab.file_of(root, key).parent)
        other.write_blocks([(key, b"data") for key in KEYS])

        assert store.count_leading(KEYS) == len(KEYS)
        shutil.rmtree(faultlab.file_of(root, KEYS[0]).parent)
        assert store.count_leading(KEYS) == 0


def test_a_lookup_opens_nothing_beyond_the_first_gap(tmp_path: Path) -> None:
    """A miss in a store without directories looks for one directory, however many keys follow."""
    with kvio.open_store(
        "posix-tmpfile", root=tmp_path / "root", options={"create": True}
    ) as store:
        with faults.inject("open_dir", nth=1 << 30) as fault:
            assert store.count_leading(KEYS) == 0
        assert fault.seen[faults.sites()["open_dir"]] <= 3
