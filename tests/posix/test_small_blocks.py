"""Small blocks take short cuts: no look before a write, no fstat before a read."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import kvio
from kvio import KiB
from kvio._native import faults
from tests.posix import children, faultlab

SMALL = faultlab.pattern(1, 4 * KiB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    """A store on the page cache."""
    root = tmp_path / "root"
    with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
        yield store


@pytest.mark.parametrize("site", ["open_temp", "write"])
def test_a_full_disk_does_not_refuse_a_block_that_is_there(store: kvio.Store, site: str) -> None:
    """``keep`` needs no room for a block that stands; other blocks fail as they must."""
    store.write_block("taken", SMALL)
    with faults.inject(site, times=1 << 20, error=errno.ENOSPC):
        receipt = store.write_block("taken", SMALL)
        with pytest.raises(kvio.BlockExistsError):
            store.write_block("taken", SMALL, if_exists="error")
        with pytest.raises(kvio.StorageError, match="No space left"):
            store.write_block("free", SMALL)
        with pytest.raises(kvio.StorageError, match="No space left"):
            store.write_block("taken", SMALL, if_exists="replace")
        results = store.write_blocks([("free", SMALL), ("taken", SMALL)])

    assert receipt.existed
    assert [result.status for result in results] == ["failed", "kept"]


def test_a_full_disk_keeps_no_block_of_another_length(store: kvio.Store) -> None:
    """What would have to be replaced cannot be kept."""
    store.write_block("taken", SMALL[:-1])
    with (
        faults.inject("write", times=1 << 20, error=errno.ENOSPC),
        pytest.raises(kvio.StorageError, match="No space left"),
    ):
        store.write_block("taken", SMALL)
    assert bytes(store.read_block("taken")) == bytes(SMALL[:-1])


def test_taken_keys_are_written_in_vain_once(store: kvio.Store) -> None:
    """After a key that was taken the next ones are looked for first."""
    keys = [f"k{number}" for number in range(32)]
    store.write_blocks([(key, SMALL) for key in keys])
    with faults.inject("write", nth=1 << 30) as batch:
        results = store.write_blocks([(key, SMALL) for key in keys])
    with faults.inject("write", nth=1 << 30) as single:
        receipts = [store.write_block(key, SMALL) for key in keys]

    assert {result.status for result in results} == {"kept"}
    assert all(receipt.existed for receipt in receipts)
    assert batch.seen[faults.sites()["write"]] <= 1
    assert single.seen[faults.sites()["write"]] == 1


def test_free_keys_are_not_looked_for(store: kvio.Store) -> None:
    """A batch of new small blocks opens nothing but its temporaries."""
    items = [(f"k{number}", SMALL) for number in range(32)]
    with faults.inject("open_read", nth=1 << 30) as fault:
        results = store.write_blocks(items)

    assert {result.status for result in results} == {"ok"}
    assert fault.seen[faults.sites()["open_read"]] == 0


def test_a_small_block_is_read_by_three_system_calls(store: kvio.Store) -> None:
    """Open, read, close."""
    store.write_block("key", SMALL)
    out = bytearray(len(SMALL))
    with faults.inject("open_read", nth=1 << 30) as fault:
        store.read_block_into("key", out)

    sites = faults.sites()
    assert sum(fault.seen) == 3
    assert [fault.seen[sites[name]] for name in ("open_read", "read", "close")] == [1, 1, 1]
    assert out == bytes(SMALL)


@settings(deadline=None, max_examples=300)
@given(
    nbytes=st.integers(0, 300),
    spare=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 500), max_size=6),
    verify=st.sampled_from(["full", "length", "off"]),
)
def test_memory_that_is_larger_than_the_block(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, spare: int, cuts: list[int], verify: str
) -> None:
    """The trailer may land anywhere in the caller's pieces; what counts is the block's bytes."""
    root = tmp_path_factory.mktemp("root", numbered=True)
    data = faultlab.pattern(3, nbytes)
    memory = bytearray(b"\xee" * (nbytes + spare))
    edges = [0, *sorted(min(cut, len(memory)) for cut in cuts), len(memory)]
    pieces = [memoryview(memory)[a:b] for a, b in pairwise(edges)]
    with kvio.open_store(
        "posix-tmpfile", root=root / "r", options={"create": True, "verify": verify}
    ) as store:
        store.write_block("key", data)
        got = store.read_block_into("key", pieces)
        (result,) = store.read_blocks_into([("key", pieces)])

    assert got == result.nbytes == nbytes
    assert result.status == ("short" if spare else "ok")
    assert memory[:nbytes] == bytes(data)


@pytest.mark.parametrize("junk", [1, 64, 65, 200])
def test_bytes_after_the_trailer_are_noticed(store: kvio.Store, tmp_path: Path, junk: int) -> None:
    """A file that goes on after its block is no block, even if only by a byte."""
    store.write_block("key", SMALL)
    path = faultlab.file_of(tmp_path / "root", "key")
    with path.open("ab") as file:
        file.write(bytes(junk))
    with pytest.raises(kvio.CorruptBlockError):
        store.read_block_into("key", bytearray(len(SMALL)))
    with pytest.raises(kvio.CorruptBlockError):
        store.read_block_into("key", bytearray(len(SMALL) + 500))


def test_a_failed_write_is_reported_although_the_key_cannot_be_looked_at(tmp_path: Path) -> None:
    """The error names the call that failed first, not the one of the look for an existing block."""

    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with (
            kvio.open_store("posix-tmpfile", root=tmp_path) as store,
            faults.inject("open_read", error=errno.EIO),
            pytest.raises(kvio.StorageFullError, match=r"write failed.*EFBIG"),
        ):
            store.write_block("key", SMALL)

    children.in_child(work)


def test_a_file_that_is_cut_while_it_is_looked_at_is_truncated(store: kvio.Store) -> None:
    """What the trailer's memory held before is not taken for a trailer."""
    store.write_block("key", SMALL)
    for _ in range(2):  # the second has the first one's trailer on the stack
        assert store.stat_block("key").nbytes == len(SMALL)
    with (
        faults.inject("read", transfer=0),
        pytest.raises(kvio.CorruptBlockError, match="truncated"),
    ):
        store.stat_block("key")


def test_a_range_of_a_file_that_is_cut_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    """Bytes that were not read are not returned, also where no checksum covers them."""
    with kvio.open_store("posix-tmpfile", root=tmp_path, layout="plain") as store:
        store.write_block("key", SMALL)
        with (
            faults.inject("read", transfer=0),
            pytest.raises(kvio.CorruptBlockError, match="truncated"),
        ):
            store.read_block("key", offset=100, nbytes=1000)


def test_a_block_that_cannot_be_examined_is_not_read(store: kvio.Store) -> None:
    """Memory that is larger than the block makes the store ask how long its file is."""
    store.write_block("key", SMALL)
    with (
        faults.inject("fstat", error=errno.EPERM),
        pytest.raises(kvio.AccessDeniedError, match="fstat failed"),
    ):
        store.read_block_into("key", bytearray(len(SMALL) + 500))
