"""Which I/O mode is chosen, reported and really used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import pytest

import kvio
from kvio import MiB, _native
from kvio.filesystem.io_mode import Calibration, Step, dump_calibration
from kvio.types import IOMode
from kvio.url import OptionValue
from tests.posix import faultlab

TINY, SMALL = faultlab.pattern(3, 60_000), faultlab.pattern(1, 100_000)
LARGE = faultlab.pattern(2, 9 * MiB + 5)


@pytest.fixture
def root(real_disk: Path) -> Path:
    """A root directory on a disk."""
    path = real_disk / "root"
    path.mkdir(mode=0o700)
    return path


def open_or_skip(backend: str, root: Path, **options: OptionValue) -> kvio.Store:
    """Open a store, or skip where direct I/O does not bypass the page cache."""
    try:
        store = kvio.open_store(backend, root=root, options=options)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    if not store.capabilities.direct_io:
        store.close()
        pytest.skip("needs direct I/O that bypasses the page cache")
    return store


def cached(root: Path, key: str, *, layout: str = "block") -> float:
    """Return how much of a block's file is in the page cache."""
    path = faultlab.file_of(root, key, layout=layout)
    fd = os.open(path, os.O_RDONLY)
    try:
        fraction = _native.cached_fraction(fd, path.stat().st_size)
    finally:
        os.close(fd)
    if fraction is None:
        pytest.skip("needs cachestat (Linux 6.5)")
    return fraction


def cached_pages(root: Path, key: str, layout: str) -> int:
    """Count the pages of a block's file that are in the page cache."""
    nbytes = faultlab.file_of(root, key, layout=layout).stat().st_size
    return round(cached(root, key, layout=layout) * nbytes / 4096 + 0.49) if nbytes else 0


def forget(root: Path, key: str, layout: str = "block") -> None:
    """Drop a block's file from the page cache."""
    fd = os.open(faultlab.file_of(root, key, layout=layout), os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if cached(root, key, layout=layout) > 0.0:
        pytest.skip("the page cache keeps the file here")


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("data", [SMALL, LARGE, b"", b"x"], ids=["small", "large", "empty", "byte"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_direct_writes_leave_nothing_in_the_page_cache(
    root: Path,
    layout: Literal["block", "plain"],
    data: bytes,
    aligned: bool,  # noqa: FBT001  # a parameter
) -> None:
    """posix-direct writes and reads past the page cache, whatever memory it is given.

    Only the page with a block's end may come there: stat reads the trailer, trimming ends in it.
    """
    memory = faultlab.aligned(data) if aligned else faultlab.unaligned(data)
    with open_or_skip("posix-direct", root, layout=layout) as store:
        receipt = store.write_block("k", memory)
        assert receipt.mode == "direct"
        assert cached_pages(root, "k", layout) <= (layout == "plain")
        out = faultlab.aligned(data) if aligned else faultlab.unaligned(data)
        assert store.read_block_into("k", out) == len(data)
        assert bytes(out) == data
        assert cached_pages(root, "k", layout) <= (layout == "plain")
        assert store.read_block("k", offset=len(data) // 2, nbytes=1) == data[len(data) // 2 :][:1]
        assert store.verify_block("k").ok
        assert store.write_block("k", memory).existed
        assert cached_pages(root, "k", layout) <= 1


def test_buffered_writes_fill_the_page_cache(root: Path) -> None:
    """posix-tmpfile is distinguished from posix-direct by what is cached afterwards."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        assert store.write_block("k", SMALL).mode == "buffered"
        assert cached(root, "k") == 1.0


def test_hybrid_writes_by_size(root: Path) -> None:
    """Without calibration: buffered below 2 MiB, direct from there, and the receipt says why."""
    with open_or_skip("hybrid", root) as store:
        for nbytes, mode in ((0, "buffered"), (2 * MiB - 1, "buffered"), (2 * MiB, "direct")):
            receipt = store.write_block(f"k{nbytes}", bytes(nbytes))
            assert receipt.mode == mode
            assert str(nbytes) in receipt.reason
            assert "default thresholds" in receipt.reason
        assert cached(root, f"k{2 * MiB - 1}") == 1.0
        assert cached(root, f"k{2 * MiB}") == 0.0
        assert store.stats().modes == {"buffered": 2, "direct": 1}


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_hybrid_reads_direct_what_is_cold(root: Path, aligned: bool) -> None:  # noqa: FBT001
    """From 64 KiB a block that is not cached is read past the cache; a smaller one fills it."""
    with open_or_skip("hybrid", root) as store:
        store.write_blocks([("tiny", TINY), ("small", SMALL), ("large", LARGE)])
        for key, data, expected in (("tiny", TINY, 1), ("small", SMALL, 0), ("large", LARGE, 0)):
            forget(root, key)
            out = faultlab.aligned(data) if aligned else faultlab.unaligned(data)
            assert store.read_block_into(key, out) == len(data)
            assert bytes(out) == data
            assert cached(root, key) == expected, key


def read_whole(store: kvio.Store, key: str, data: bytes) -> None:
    """Read a block and compare it."""
    out = bytearray(len(data))
    assert store.read_block_into(key, out) == len(data)
    assert out == data


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["block", "plain"])
def test_hybrid_brings_to_the_cache_what_is_read_twice(
    root: Path, data: bytes, layout: Literal["block", "plain"]
) -> None:
    """The second cold read of a block goes through the page cache; the third finds it there."""
    with open_or_skip("hybrid", root, layout=layout) as store:
        store.write_block("k", data)
        forget(root, "k", layout)
        read_whole(store, "k", data)
        assert cached(root, "k", layout=layout) <= 4096 / len(data), "after the first"
        read_whole(store, "k", data)
        assert cached(root, "k", layout=layout) == 1.0, "after the second"
        before = read_from_device()
        read_whole(store, "k", data)
        assert read_from_device() - before < len(data) // 2, "the third read"


def test_what_the_cache_did_not_keep_is_read_direct_again(root: Path) -> None:
    """A block that was brought to the page cache and lost from there counts as new."""
    with open_or_skip("hybrid", root) as store:
        store.write_block("k", SMALL)
        for expected in (0.0, 1.0, 0.0, 1.0):
            forget(root, "k")
            read_whole(store, "k", SMALL)
            assert cached(root, "k") == expected


def test_a_new_block_of_a_known_name_counts_as_new(root: Path) -> None:
    """Replacing a block forgets that its predecessor was read."""
    with open_or_skip("hybrid", root) as store:
        for seed in (1, 2):
            data = faultlab.pattern(seed, len(SMALL))
            store.write_block("k", data, if_exists="replace")
            forget(root, "k")
            read_whole(store, "k", data)
            assert cached(root, "k") == 0.0


def test_blocks_of_one_time_are_reported_apart(root: Path) -> None:
    """Blocks whose files were written at the same moment, as by a restored backup, are not one."""
    with open_or_skip("hybrid", root) as store:
        for key in ("a", "b"):
            store.write_block(key, SMALL)
            forget(root, key)
            os.utime(faultlab.file_of(root, key), ns=(1, 1))
        for key in ("a", "b"):
            read_whole(store, key, SMALL)
            assert cached(root, key) == 0.0


def test_checking_a_store_brings_nothing_to_the_cache(root: Path) -> None:
    """Blocks that are verified do not count as read, however often."""
    with open_or_skip("hybrid", root) as store:
        store.write_block("k", LARGE)
        forget(root, "k")
        for _ in range(3):
            assert store.verify_block("k").ok
        assert cached(root, "k") == 0.0


def test_hybrid_reads_what_is_hot_from_the_cache(root: Path) -> None:
    """A large block that is in the page cache is read buffered: direct reads do not count there."""
    with open_or_skip("hybrid", root) as store:
        store.write_block("k", LARGE)
        faultlab.file_of(root, "k").read_bytes()
        assert cached(root, "k") == 1.0
        before = read_from_device()
        out = faultlab.aligned(LARGE)
        assert store.read_block_into("k", out) == len(LARGE)

        assert bytes(out) == LARGE
        assert read_from_device() - before < len(LARGE) // 2, "a hot block was read from the device"
        assert cached(root, "k") == 1.0


def read_from_device() -> int:
    """Count the bytes that this process has caused to be read from storage: proc(5), io."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        pytest.skip("needs /proc/self/io")
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def calibrate(root: Path, calibration: Calibration) -> None:
    """Leave a calibration file, as ``kvio tune`` does."""
    (root / ".kvio-calibration.json").write_text(dump_calibration(calibration, {}))


def steps(below: int, first: IOMode, then: IOMode) -> dict[int, tuple[Step, ...]]:
    """Make a table of one threshold."""
    return {1: (Step(below, first), Step(None, then))}


def test_hybrid_follows_its_calibration(root: Path) -> None:
    """Thresholds come from the file in the root, and the receipt says that they were measured."""
    buffered_then_direct = steps(50_000, IOMode.BUFFERED, IOMode.DIRECT)
    upside_down = steps(50_000, IOMode.DIRECT, IOMode.BUFFERED)
    for number, (table, modes) in enumerate(
        ((buffered_then_direct, ["buffered", "direct"]), (upside_down, ["direct", "buffered"]))
    ):
        calibrate(root, Calibration(table, table, "measured on a Tuesday"))
        with open_or_skip("hybrid", root) as store:
            receipts = [
                store.write_block(f"k{number}-{nbytes}", bytes(nbytes))
                for nbytes in (49_999, 50_000)
            ]
            assert [receipt.mode for receipt in receipts] == modes
            assert all("measured on a Tuesday" in receipt.reason for receipt in receipts)
        with open_or_skip("hybrid", root, calibration="none") as store:
            receipt = store.write_block(f"other{number}", bytes(60_000))
            assert receipt.mode == "buffered"
            assert "default thresholds" in receipt.reason


READ = '{"1": [{"below_nbytes": null, "mode": "direct"}]}'
TABLES = (
    "{}",
    '{"x": []}',
    '{"1": []}',
    '{"1": [{"below_nbytes": -1, "mode": "direct"}]}',
    '{"1": [{"below_nbytes": null, "mode": "fast"}]}',
    '{"1": [{"mode": "direct"}]}',
)
BROKEN = (
    *("", "{", "[]", "null", "1e999", '{"version": 2}', '{"version": 1}', "\x00", "[" * 100_000),
    *(f'{{"version": 1, "reason": "r", "read": {READ}, "write": {write}}}' for write in TABLES),
)


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_calibration_is_a_config_error(root: Path, content: str) -> None:
    """A file that is none is named in the error; it is not guessed at."""
    open_or_skip("hybrid", root).close()
    (root / ".kvio-calibration.json").write_text(content)

    with pytest.raises(kvio.ConfigError, match=r"kvio-calibration\.json"):
        kvio.open_store("hybrid", root=root)


def test_a_calibration_that_is_no_text_is_a_config_error(root: Path) -> None:
    """Bytes that are no UTF-8, a directory, and a FIFO are refused at once as well."""
    open_or_skip("hybrid", root).close()
    path = root / ".kvio-calibration.json"

    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(kvio.ConfigError):
        kvio.open_store("hybrid", root=root)
    path.unlink()
    path.mkdir()
    with pytest.raises(kvio.KvioError):
        kvio.open_store("hybrid", root=root)


def test_dontcache_is_used_where_the_kernel_has_it(root: Path) -> None:
    """A calibrated dontcache write is reported in the receipt and reads back right."""
    table = steps(1, IOMode.BUFFERED, IOMode.DONTCACHE)
    calibrate(root, Calibration(table, table, "a test"))
    with open_or_skip("hybrid", root) as store:
        if not faultlab.engine_of(store).fs.dontcache:
            pytest.skip("needs RWF_DONTCACHE (Linux 6.14) on this file system")
        receipt = store.write_block("k", LARGE)
        assert receipt.mode == "dontcache"
        fd = os.open(faultlab.file_of(root, "k"), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        assert bytes(store.read_block("k")) == LARGE
        assert faultlab.peek(root, "k") == LARGE


def test_one_file_is_never_written_in_two_modes(root: Path) -> None:
    """A direct block's odd end is written direct as well: padded, never buffered."""
    with open_or_skip("posix-direct", root) as store:
        for nbytes in (1, 4095, 4097, 65537, 2 * MiB + 1):
            store.write_block("k", faultlab.aligned(bytes(nbytes)), if_exists="replace")
            assert faultlab.file_of(root, "k").stat().st_size % 512 == 0
            assert cached(root, "k") == 0.0


def test_direct_is_refused_where_it_has_no_effect() -> None:
    """On tmpfs posix-direct does not open, and hybrid says it has no direct I/O."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("needs a tmpfs on /dev/shm")
    root = Path(tempfile.mkdtemp(prefix="kvio-test-modes-", dir=shm))
    try:
        with pytest.raises(kvio.UnsupportedError, match=r"O_DIRECT|direct I/O"):
            kvio.open_store("posix-direct", root=root)
        with kvio.open_store("hybrid", root=root) as store:
            assert not store.capabilities.direct_io
            assert store.capabilities.memory_alignment == 1
            assert store.write_block("k", bytes(3 * MiB)).mode == "buffered"
            assert store.delete_block("k")
    finally:
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir()
        root.rmdir()
