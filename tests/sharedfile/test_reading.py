"""Reading a sealed file: any range is what was written, or an error."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio import SharedFile, _native
from kvio._native import faults
from kvio.sharedfile.reading import read_fully
from kvio.types import KiB, MiB

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 100_003
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"writers": 3},
    "round-robin": {"writers": 3, "stripe_bytes": 12 * KiB},
    "odd sizes": {"writers": 3, "sizes": (30_001, 5, SIZE - 30_006)},
}


@pytest.fixture(params=LAYOUTS)
def data(request: pytest.FixtureRequest, create: Create) -> bytes:
    """Seal a file called "file" with cells of 8 KiB; its payload."""
    payload = raw.random_bytes(SIZE)
    with create("file", SIZE, cell_bytes=8 * KiB, **LAYOUTS[request.param]) as file:
        file.pwrite(payload, 0)
        file.seal()
    return payload


def test_any_range_is_what_was_written(data: bytes, join: Create) -> None:
    """Ranges over the edges of cells and domains, whole and empty ones, read as written."""
    file = join("file")

    @given(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 30_000))
    def check(a: int, b: int, nbytes: int) -> None:
        start, end = min(a, b), min(max(a, b), min(a, b) + nbytes)
        out = bytearray(b"\xee" * (end - start))
        assert file.pread_into(out, start) == end - start
        assert out == data[start:end]

    check()
    whole = bytearray(SIZE)
    assert file.pread_into(whole) == SIZE
    assert whole == data


@pytest.mark.parametrize("verify", ["full", "length", "off"])
def test_lists_of_buffers_are_filled_in_order(data: bytes, join: Create, verify: str) -> None:
    """A scatter list takes consecutive bytes, empty pieces included, at every level."""
    file = join("file", verify=verify)
    parts = [bytearray(n) for n in (1, 0, 4095, 8192, 20_000, 3)]

    assert file.pread_into(parts, 777) == sum(map(len, parts))
    assert b"".join(parts) == data[777:][: sum(map(len, parts))]


def test_a_gather_of_small_parts_reads_a_cell_once(data: bytes, join: Create) -> None:
    """The bytes read do not grow with the number of pieces that a range is scattered over."""
    file = join("file")
    parts = [bytearray(64) for _ in range(1024)]
    before = _read_bytes()
    file.pread_into(parts, 3)

    assert b"".join(parts) == data[3 : 3 + 64 * 1024]
    assert _read_bytes() - before < 4 * SIZE


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_domains_are_read_side_by_side(data: bytes, join: Create) -> None:
    """Threads read their domains through one handle."""
    file = join("file")
    out = bytearray(SIZE)

    def read(rank: int) -> None:
        for offset, nbytes in file.domain(rank):
            file.pread_into(memoryview(out)[offset : offset + nbytes], offset)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, [0, 1, 2] * 4))

    assert out == data


def test_the_handle_that_sealed_reads(create: Create) -> None:
    """After `seal` the same handle reads what was sealed, and reports so."""
    payload = raw.random_bytes(SIZE)
    file = create("file", SIZE, writers=2)
    file.pwrite(payload, 0)
    file.seal()
    out = bytearray(SIZE)
    file.pread_into(out)

    assert out == payload
    assert (file.size, file.writers, file.mode, file.missing()) == (SIZE, 2, None, [])
    assert "sealed" in repr(file)


def test_domains_survive_the_seal(data: bytes, join: Create, create: Create) -> None:
    """A sealed file reports the same domains as it had while it was written."""
    options = next(
        choices for choices in LAYOUTS.values() if _domains(create, choices) == _read(join)
    )

    assert options["writers"] == join("file").writers
    assert len(data) == join("file").size


def _domains(create: Create, choices: dict[str, Any]) -> list[object]:
    with create("other", SIZE, cell_bytes=8 * KiB, **choices) as file:
        found: list[object] = [file.domain(rank) for rank in range(3)]
        file.abort()
    return found


def _read(join: Create) -> list[object]:
    return [join("file").domain(rank) for rank in range(3)]


@pytest.mark.parametrize("through", ["part of a cell", "whole cells", "one byte"])
def test_every_changed_payload_byte_is_found(
    data: bytes, join: Create, disk_path: Path, through: str
) -> None:
    """Whichever byte changed, a read of it or of its cell is a CorruptBlockError without bytes."""
    shuffled = random.Random(5)
    offsets = [0, 8191, 8192, 30_000, 30_001, 30_005, 30_006, SIZE - 1]
    for at in offsets + shuffled.sample(range(SIZE), 60):
        raw.flip(disk_path / "file", at, 1 << shuffled.randrange(8))
        with SharedFile.open(disk_path / "file") as file:
            start, end = {
                "part of a cell": (max(0, at - 50), min(SIZE, at + 50)),
                "whole cells": (0, SIZE),
                "one byte": (at, at + 1),
            }[through]
            out = bytearray(b"\xee" * (end - start))
            with pytest.raises(kvio.CorruptBlockError, match="not what was written") as caught:
                file.pread_into(out, start)
            assert caught.value.key == str(disk_path / "file")
            assert out[at - start] in (0xEE, 0)
        (disk_path / "file").write_bytes(
            data[:at] + data[at : at + 1] + (disk_path / "file").read_bytes()[at + 1 :]
        )
    file = join("file")
    assert file.pread_into(bytearray(SIZE)) == SIZE


def test_corrupt_bytes_are_not_left_in_the_target(
    data: bytes, join: Create, disk_path: Path
) -> None:
    """Where a cell does not verify, the caller's memory holds none of its bytes."""
    raw.flip(disk_path / "file", 10)
    cell = bytearray(8 * KiB)
    part = bytearray(b"\xee" * 100)
    for out in (cell, part):
        with pytest.raises(kvio.CorruptBlockError):
            join("file").pread_into(out)

    assert cell == bytes(8 * KiB)
    assert part in (b"\xee" * 100, bytes(100))
    assert data[:20] != bytes(20)


def test_other_cells_of_a_corrupt_file_are_read(data: bytes, join: Create, disk_path: Path) -> None:
    """One bad cell does not take the rest of the file with it."""
    raw.flip(disk_path / "file", SIZE - 1)
    out = bytearray(30_000)

    assert join("file").pread_into(out) == 30_000
    assert out == data[:30_000]


@pytest.mark.parametrize("verify", ["length", "off"])
def test_less_verification_is_a_choice(
    data: bytes, join: Create, disk_path: Path, verify: str
) -> None:
    """Below "full" the bytes are read as they are."""
    raw.flip(disk_path / "file", 10)
    out = bytearray(SIZE)
    join("file", verify=verify).pread_into(out)

    assert out[:10] + out[11:] == data[:10] + data[11:]
    assert out[10] == data[10] ^ 1


def test_no_byte_of_the_end_may_change(data: bytes, join: Create, disk_path: Path) -> None:
    """A changed byte of index or trailer is found when the file is opened."""
    path = disk_path / "file"
    whole = path.read_bytes()
    for at in range(-(-len(data) // 4096) * 4096, len(whole)):
        raw.flip(path, at, 1 << at % 8)
        with pytest.raises(kvio.CorruptBlockError, match="cannot be read as a shared file"):
            SharedFile.open(path)
        raw.flip(path, at, 1 << at % 8)
    assert path.read_bytes() == whole
    assert join("file").size == SIZE


def test_a_file_that_was_cut_is_refused(data: bytes, disk_path: Path) -> None:
    """Cut at its end, at its front, or emptied: a CorruptBlockError, at every length."""
    whole = (disk_path / "file").read_bytes()
    lengths = [*range(300), len(data), len(whole) - 1, len(whole) - 96, len(whole) // 2]
    for nbytes in lengths:
        for name, kept in (("end", whole[:nbytes]), ("front", whole[len(whole) - nbytes :])):
            (disk_path / name).write_bytes(kept)
            with pytest.raises(kvio.CorruptBlockError):
                SharedFile.open(disk_path / name)
    (disk_path / "more").write_bytes(whole + b"\0")
    with pytest.raises(kvio.CorruptBlockError):
        SharedFile.open(disk_path / "more")


def test_a_file_that_is_cut_while_open_is_corrupt(
    data: bytes, join: Create, disk_path: Path
) -> None:
    """Bytes that are gone are an error at every level of verification, never zeros."""
    for verify in ("full", "length", "off"):
        file = join("file", verify=verify)
        whole = (disk_path / "file").read_bytes()
        (disk_path / "file").chmod(0o600)
        with (disk_path / "file").open("r+b") as opened:
            opened.truncate(SIZE // 2)
        with pytest.raises(kvio.CorruptBlockError, match="cut short"):
            file.pread_into(bytearray(100), SIZE - 100)
        (disk_path / "file").write_bytes(whole)
    assert len(data) == SIZE


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(1, SIZE), (SIZE + 1, 0), (2, SIZE - 1), (1, -1), (0, -1), (0, SIZE + 1)]
)
def test_a_range_beyond_the_file_is_refused(
    data: bytes, join: Create, nbytes: int, offset: int
) -> None:
    """What does not lie in the payload is a BlockSizeError that gives the size."""
    assert len(data) == SIZE
    with pytest.raises(kvio.BlockSizeError, match=str(SIZE)):
        join("file").pread_into(bytearray(nbytes), offset)


def test_a_target_that_cannot_be_filled_is_refused(data: bytes, join: Create) -> None:
    """Read-only and non-contiguous memory, and what is no buffer, are refused before I/O."""
    file = join("file")
    with pytest.raises(kvio.BlockSizeError, match="read-only"):
        file.pread_into(data)
    with pytest.raises(kvio.BlockSizeError, match="contiguous"):
        file.pread_into(memoryview(bytearray(20))[::2])
    with pytest.raises(TypeError, match="neither a buffer"):
        file.pread_into(object())


def test_a_closed_handle_does_not_read(data: bytes, join: Create) -> None:
    """After `close` reads are a StoreClosedError, and closing again is nothing."""
    file = join("file")
    file.close()
    file.close()
    with pytest.raises(kvio.StoreClosedError):
        file.pread_into(bytearray(len(data)))


def test_a_reader_writes_and_seals_nothing(data: bytes, join: Create) -> None:
    """A handle of a sealed file refuses writes, seals and aborts: the file is sealed."""
    file = join("file")
    for call in (lambda: file.pwrite(data, 0), file.seal, file.abort):
        with pytest.raises(kvio.StoreClosedError, match="is sealed"):
            call()
    with pytest.raises(kvio.StoreClosedError, match="is sealed"):
        file.submit_pwrite(data, 0)


def test_reads_that_come_short_are_gone_on_with(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may give less than it was asked for, anywhere, and also in the middle of a view."""
    data = raw.random_bytes(1000)
    path = disk_path / "data"
    path.write_bytes(data)
    views = [memoryview(bytearray(size)) for size in (10, 600, 1, 389)]
    whole = os.preadv

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        return whole(fd, [parts[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with path.open("rb") as file:
        assert read_fully(file.fileno(), views, 0) == 1000
        assert b"".join(views) == data
        assert read_fully(file.fileno(), views, 500) == 500


LARGE = 9 * MiB + 12_345


@pytest.fixture
def large(create: Create) -> bytes:
    """Seal a file called "large" with two odd domains and cells of 3 MiB; its payload."""
    payload = raw.random_bytes(LARGE)
    with create(
        "large", LARGE, writers=2, sizes=(4 * MiB + 1, LARGE - 4 * MiB - 1), cell_bytes=3 * MiB
    ) as file:
        file.pwrite(payload, 0)
        file.seal()
    return payload


@pytest.mark.parametrize("how", ["hybrid", "buffered", "direct"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_large_reads_are_what_was_written(
    large: bytes, join: Create, disk_path: Path, how: str, verify: str
) -> None:
    """By several threads, past the page cache and through it, into memory that lies anywhere."""
    file = join("large", mode=how, verify=verify)
    room = kvio.aligned_buffer(LARGE + 4096)
    for shift in (0, 1, 512, 4095):
        _forget(disk_path / "large")
        for start, end in ((0, LARGE), (3 * MiB, 9 * MiB), (5, LARGE - 7)):
            out = room[shift : shift + end - start]
            out[:] = bytes(len(out))
            assert file.pread_into(out, start) == end - start
            assert out == large[start:end]
    assert "kvio-io" in {thread.name for thread in threading.enumerate()}


def test_what_is_cold_is_read_past_the_page_cache_once(large: bytes, real_disk: Path) -> None:
    """The second read of the same handle brings it there, and so does every other mode."""
    path, out = real_disk / "large", kvio.aligned_buffer(LARGE)
    _forget(path)
    if _cached(path) != 0:
        pytest.skip("the kernel does not report what is cached, or does not forget it")
    with SharedFile.open(path, mode="direct") as file:
        if file.pread_into(out) and _cached(path):
            pytest.skip(f"no direct I/O on {real_disk}")
    with SharedFile.open(path) as file:
        shares = []
        for _ in range(2):
            file.pread_into(out)
            shares.append(_cached(path))
    _forget(path)
    with SharedFile.open(path, mode="buffered") as file:
        file.pread_into(out)
        shares.append(_cached(path))
    _forget(path)
    with SharedFile.open(path) as file:  # a part of a cell may be followed by the next
        file.pread_into(out[:4096], 0)
        shares.append(_cached(path))

    assert out[4096:] == large[4096:]
    assert shares[0] < 0.4
    assert shares[1] > 0.9
    assert shares[2] > 0.9
    assert shares[3] > 0.25


def test_a_medium_that_refuses_direct_reads_is_read_through_the_cache(
    large: bytes, join: Create, disk_path: Path
) -> None:
    """As where it asks for more than 4096 bytes of alignment."""
    _forget(disk_path / "large")
    out = bytearray(LARGE)
    with faults.inject("read", nth=1, error=errno.EINVAL):
        join("large", mode="direct").pread_into(out)

    assert out == large


@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_a_large_read_that_fails_is_an_error(large: bytes, join: Create, how: str) -> None:
    """Whichever thread meets it; the handle reads on after that."""
    file, out = join("large", mode=how), bytearray(LARGE)
    for nth in (1, 4, 8):
        with (
            faults.inject("read", nth=nth, error=errno.EIO),
            pytest.raises(kvio.StorageError, match="read "),
        ):
            file.pread_into(out)
    file.pread_into(out)

    assert out == large


def test_of_a_large_read_no_corrupt_cell_is_handed_out(
    large: bytes, join: Create, disk_path: Path
) -> None:
    """Cells of two pieces: both are zeros where one is wrong, and the first is named."""
    raw.flip(disk_path / "large", 5 * MiB)
    raw.flip(disk_path / "large", 8 * MiB)
    out = bytearray(LARGE)
    with pytest.raises(kvio.CorruptBlockError, match="bytes 4194305 to 7340032 "):
        join("large").pread_into(out)

    assert out[: 4 * MiB + 1] == large[: 4 * MiB + 1]
    assert not any(out[4 * MiB + 1 : 9 * MiB])


@pytest.mark.usefixtures("large")
def test_a_mode_that_there_is_not_is_refused(join: Create) -> None:
    """A ConfigError that names those there are."""
    with pytest.raises(kvio.ConfigError, match="mode must be one of hybrid, buffered, direct"):
        join("large", mode="fast")
    with pytest.raises(kvio.ConfigError, match="io_threads"):
        join("large", io_threads=0)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _cached(path: Path) -> float:
    """Return how much of a file is in the page cache, 0 to 1; 0 where the kernel does not say."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return _native.cached_fraction(fd, LARGE) or 0.0
    finally:
        os.close(fd)
