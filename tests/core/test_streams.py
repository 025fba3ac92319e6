"""Blocks that come, and are given out, piece by piece: what a store does below ``kvio put``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

import kvio
from kvio.core import streams
from tests.posix import mounts

MiB = kvio.MiB
LONG = streams.HELD_BYTES + 5 * MiB + 3


@pytest.fixture(params=["hybrid", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kvio.Store]:
    """A store that writes what comes at once, and one that must have all of it before."""
    root = None if request.param == "memory" else tmp_path / "root"
    if root is not None:
        root.mkdir(mode=0o700)
    with kvio.open_store(request.param, root=root) as store:
        yield store


def write(store: kvio.Store, content: bytes, nbytes: int | None = None) -> kvio.Receipt:
    return store._write_stream("k", BytesIO(content).readinto, nbytes=nbytes, if_exists="keep")


@pytest.mark.parametrize("nbytes", [0, 1, streams.HELD_BYTES, streams.HELD_BYTES + 1, LONG])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_a_stream_of_any_length_is_the_block_of_its_bytes(
    store: kvio.Store, nbytes: int, length: str
) -> None:
    """The receipt and the block are those of `write_block` with the same bytes."""
    content = os.urandom(1000) * (nbytes // 1000 + 1)
    receipt = write(store, content[:nbytes], nbytes if length == "known" else None)
    block = store.read_block("k")

    assert (receipt.nbytes, receipt.existed) == (nbytes, False)
    assert bytes(block) == content[:nbytes]
    assert receipt.checksum == store.stat_block("k").checksum
    assert store.verify_block("k").ok
    assert store.stats().bytes_written == nbytes


@pytest.mark.parametrize("there", [10, LONG])
def test_an_input_that_ends_before_its_length_stores_nothing(store: kvio.Store, there: int) -> None:
    """A file that became shorter while it was read is no block, and the key stays free."""
    with pytest.raises(kvio.BlockSizeError, match=f"ended after {there} of {there + 9}") as caught:
        write(store, bytes(there), there + 9)

    assert caught.value.key == "k"
    assert list(store.list_keys()) == []
    assert store.stats().failed == 1


def test_an_input_longer_than_its_length_is_stored_up_to_it(store: kvio.Store) -> None:
    """A file that grows while it is read is stored as long as it was."""
    assert write(store, bytes(LONG + 100), LONG).nbytes == LONG
    assert store.stat_block("k").nbytes == LONG


@pytest.mark.parametrize("there", [10, LONG])
def test_an_input_that_fails_leaves_nothing(store: kvio.Store, there: int, tmp_path: Path) -> None:
    """The error of the input reaches the caller; no name, temporary or descriptor stays."""
    content = BytesIO(bytes(there))

    def source(room: memoryview) -> int:
        count = content.readinto(room)
        if not count:
            raise OSError(5, "the input failed")
        return count

    before = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    with pytest.raises(OSError, match="the input failed"):
        store._write_stream("k", source, nbytes=None, if_exists="keep")

    assert list(store.list_keys()) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert write(store, b"abc").nbytes == 3
    store.delete_block("k")
    left = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not any("(deleted)" in path for path in left if path not in before)


def test_a_block_that_is_replaced_while_it_is_read_is_not_mixed(store: kvio.Store) -> None:
    """Pieces of two blocks never pass for one: the reader is asked to read again."""
    write(store, b"a" * LONG)
    pieces = store._read_stream("k", 0, None, checked_first=True)
    first = bytes(next(pieces))
    store.write_block("k", b"b" * LONG, if_exists="replace")

    with pytest.raises((kvio.TransientStorageError, kvio.CorruptBlockError)):
        list(pieces)
    assert set(first) == {ord("a")}


@pytest.mark.parametrize("nbytes", [10, LONG])
def test_pieces_that_are_left_unread_do_not_hold_up_close(store: kvio.Store, nbytes: int) -> None:
    """A reader that fails, or just stops, is no call under way."""
    write(store, bytes(nbytes))
    pieces = store._read_stream("k", 0, None, checked_first=False)
    next(pieces)

    store.close()
    with pytest.raises(kvio.StoreClosedError):
        next(pieces)


@pytest.mark.root
def test_a_place_for_the_bytes_that_is_full_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that needs all bytes at once holds them in TMPDIR; what it lacks is named."""
    with kvio.open_store("memory") as store:
        with mounts.memory_filesystem(tmp_path, "size=10m") as small:
            monkeypatch.setenv("TMPDIR", str(small))
            with pytest.raises(kvio.StorageFullError, match=f"{small}.*TMPDIR") as caught:
                write(store, bytes(LONG))
            assert os.listdir(small) == []
        assert caught.value.key == "k"
        monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
        with pytest.raises(kvio.StorageError, match="missing"):
            write(store, bytes(LONG))
        assert list(store.list_keys()) == []
