"""Prefix lookups: where they stop, and directories that are gone or new."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import kvio
from kvio._native import faults
from kvio.backends.posix.engine import Choice, Chooser
from kvio.url import OptionValue
from tests.posix import faultlab

CREATE: dict[str, OptionValue] = {"create": True}
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


def test_a_lookup_asks_for_names_and_lengths_alone(tmp_path: Path) -> None:
    """Nothing is opened or read; what can hold no block is not counted, the rest is when read."""
    root = tmp_path / "root"
    with kvio.open_store("posix-tmpfile", root=root, options={"create": True}) as store:
        store.write_blocks([(key, b"data") for key in KEYS])
        damaged = faultlab.file_of(root, KEYS[5])
        damaged.write_bytes(bytes(damaged.stat().st_size))
        with faults.inject("open_read", nth=1 << 30) as opened, faults.inject("read") as read:
            assert store.count_leading(KEYS) == len(KEYS)
        sites = faults.sites()
        assert (opened.seen[sites["open_read"]], read.seen[sites["read"]]) == (0, 0)
        results = store.read_blocks_into([(key, bytearray(4)) for key in KEYS])
        assert [r.ok for r in results] == [key != KEYS[5] for key in KEYS]

        os.truncate(damaged, 63)
        assert store.count_leading(KEYS) == 5
        damaged.unlink()
        damaged.mkdir()
        assert store.count_leading(KEYS) == 5
        damaged.rmdir()
        damaged.symlink_to(faultlab.file_of(root, KEYS[0]))
        assert store.count_leading(KEYS) == 5


def test_a_listing_of_plain_files_reads_what_its_prefix_can_reach(tmp_path: Path) -> None:
    """Directories beside the prefix are not opened, nor those above it."""
    keys = [f"d{number}/{name}" for number in range(20) for name in ("a", "b/c", "b/d", "bb")]
    root = tmp_path / "root"
    with kvio.open_store("posix-tmpfile", root=root, layout="plain", options=CREATE) as store:
        store.write_blocks([(key, b"data") for key in keys])
        for prefix in (
            "d7/",
            "d7/b",
            "d7/b/",
            "d7/b/c",
            "d7/b/c/",
            "d",
            "",
            "d7",
            "d7//",
            "..",
            "/",
        ):
            expected = sorted(key for key in keys if key.startswith(prefix))
            with faults.inject("open_dir", nth=1 << 30) as fault:
                assert sorted(store.list_keys(prefix)) == expected, prefix
            opened = fault.seen[faults.sites()["open_dir"]]
            assert opened <= 6 or not prefix.startswith("d7/"), (prefix, opened)


@pytest.mark.parametrize("batch", [True, False], ids=["batch", "alone"])
def test_a_call_counts_among_the_calls_in_flight(tmp_path: Path, batch: bool) -> None:  # noqa: FBT001
    """The policy is asked for as many calls as there are with this one."""
    with kvio.open_store("hybrid", root=tmp_path) as store:
        engine = faultlab.engine_of(store)
        asked: list[int] = []
        write, read = engine.for_write, engine.for_read

        def noting(chooser: Chooser) -> Chooser:
            def choose(nbytes: int, in_flight: int) -> Choice:
                asked.append(in_flight)
                return chooser(nbytes, in_flight)

            return choose

        engine.for_write, engine.for_read = noting(write), noting(read)
        if batch:
            store.write_blocks([("a", b"1"), ("b", b"2")])
            store.read_blocks_into([("a", bytearray(1)), ("b", bytearray(1))])
        else:
            store.write_block("a", b"1")
            store.read_block_into("a", bytearray(1))

    assert set(asked) == {1}


@pytest.mark.parametrize("name", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_errors_of_a_store_name_its_backend(real_disk: Path, name: str) -> None:
    """By the name that opens it."""
    with (
        kvio.open_store(name, root=real_disk) as store,
        faults.inject("write", times=2, error=errno.EIO),
        pytest.raises(kvio.StorageError) as caught,
    ):
        store.write_block("k", b"data")

    assert caught.value.backend == name


@pytest.mark.parametrize(
    ("options", "checksum"),
    [({}, True), ({"checksum": "none"}, False), ({"layout": "plain"}, False)],
)
def test_a_store_says_whether_it_keeps_checksums(
    tmp_path: Path, options: dict[str, OptionValue], checksum: object
) -> None:
    """It keeps them in trailers, unless it is asked not to, and has none in plain files."""
    with kvio.open_store("posix-tmpfile", root=tmp_path, options=options) as store:
        assert store.capabilities.checksum is checksum


def test_a_block_that_is_too_large_is_reported_with_both_sizes(tmp_path: Path) -> None:
    """In a batch as alone."""
    with kvio.open_store("posix-tmpfile", root=tmp_path) as store:
        store.write_block("k", bytes(777))
        (result,) = store.read_blocks_into([("k", bytearray(33))])
        with pytest.raises(kvio.BlockSizeError, match="has 777 bytes, the buffer 33"):
            store.read_block_into("k", bytearray(33))

    assert str(result.error) == "block 'k' has 777 bytes, the buffer 33"
