"""Memory that is read into again and again, and stores that a process opens once."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvio
from kvio.connectors.dlio import blocks, counts
from kvio.connectors.dlio.settings import VARIABLE


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configure a store, and count into a directory of the test."""
    root, counted = tmp_path / "store", tmp_path / "counts"
    root.mkdir()
    counted.mkdir()
    monkeypatch.setenv(VARIABLE, f"posix-tmpfile://{root}")
    monkeypatch.setenv(counts.VARIABLE, str(counted))
    monkeypatch.setattr(counts, "_counters", None)
    return root


def test_a_rereader_gives_each_block_whole_whatever_came_before(store: Path) -> None:
    """Larger after smaller, smaller after larger, and none: the bytes are those of the file."""
    sizes = [1, 100_000, 5, 300_000, 299_999, 0, 7]
    for number, nbytes in enumerate(sizes):
        (store / f"a{number}").write_bytes(bytes([number + 1]) * nbytes)
    reader = blocks.Rereader()

    for number, nbytes in enumerate(sizes):
        assert bytes(reader.read(f"a{number}")) == bytes([number + 1]) * nbytes
    assert counts.total() == counts.Counts(reads=counts.Moved(len(sizes), sum(sizes)))


def test_a_block_that_is_not_there_is_named_and_not_counted(store: Path) -> None:
    """By a rereader that has memory and by one that has none."""
    (store / "a").write_bytes(b"a")
    reader = blocks.Rereader()

    for _ in range(2):
        with pytest.raises(kvio.BlockNotFoundError, match="nowhere"):
            reader.read("nowhere")
        reader.read("a")
    assert counts.total().reads.blocks == 2


def test_checkpoints_share_the_store_of_the_samples_unless_they_have_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is opened once a process."""
    assert blocks.checkpoint_store() is blocks.data_store() is blocks.data_store()

    other = tmp_path / "other"
    other.mkdir()
    both = f'{{"data": "posix-tmpfile://{store}", "checkpoint": "posix-direct://{other}"}}'
    monkeypatch.setenv(VARIABLE, both)
    blocks.write_checkpoint("a", b"123")
    assert (other / "a").read_bytes() == b"123"
    assert blocks.checkpoint_store() is not blocks.data_store()


def test_without_settings_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sentence says what to add to the command."""
    monkeypatch.delenv(VARIABLE, raising=False)

    with pytest.raises(kvio.ConfigError, match=r"\+kvio=BACKEND"):
        blocks.data_store()
