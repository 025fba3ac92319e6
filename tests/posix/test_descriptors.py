"""How many descriptors a store holds, and that none stays open beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.backends.posix.engine import Request
from kvio.types import Blocks
from tests.posix import faultlab

#: More directories than a store keeps open.
_DIRECTORIES = 400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    """A store with a directory for every key."""
    root = tmp_path / "root"
    with kvio.open_store(
        "posix-tmpfile", root=root, layout="plain", options={"create": True}
    ) as store:
        store.write_blocks([(f"{number}/k", b"data") for number in range(_DIRECTORIES)])
        yield store


def unaccounted(store: kvio.Store) -> int:
    """Count descriptors beside the directories that the store keeps."""
    kept = faultlab.engine_of(store).directories.kept
    return len(faultlab.open_descriptors()) - len(kept)


def test_directories_that_are_not_kept_are_closed(store: kvio.Store) -> None:
    """Beyond what a store keeps open, a directory is open only while it is used."""
    before = unaccounted(store)
    results = store.read_blocks_into(
        [(f"{number}/k", bytearray(4)) for number in range(_DIRECTORIES)]
    )

    assert all(result.ok for result in results)
    assert len(faultlab.engine_of(store).directories.kept) < _DIRECTORIES
    assert unaccounted(store) == before


def test_directories_that_are_not_kept_are_closed_after_an_error(store: kvio.Store) -> None:
    """Also where the call itself is broken off by an exception."""
    before = unaccounted(store)
    keys = [f"{number}/k" for number in range(_DIRECTORIES)]
    blocks = Blocks(keys, [(memoryview(bytearray(4)),)] * _DIRECTORIES, [4] * _DIRECTORIES)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    request = Request(function=interrupted, blocks=blocks, modes=(0,) * _DIRECTORIES, flags=0)
    with pytest.raises(KeyboardInterrupt):
        faultlab.engine_of(store).run(request)
    assert unaccounted(store) == before
