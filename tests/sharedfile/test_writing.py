"""Writing: any pieces, in any order, from any thread or handle, are the file in the end."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvio
from kvio import Missing, SharedFile, aligned_buffer
from kvio._native import faults
from kvio.sharedfile import writing
from kvio.types import KiB, MiB

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 300 * KiB + 123
#: Layouts by the arguments of `create`: three ranks each.
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"writers": 3},
    "round-robin": {"writers": 3, "stripe_bytes": 16 * KiB},
    "odd sizes": {"writers": 3, "sizes": (100_001, 5, SIZE - 100_006)},
    "two shared blocks": {"writers": 3, "sizes": (50_001, 100_000, SIZE - 150_001)},
    "small cells": {"writers": 3, "cell_bytes": 4 * KiB},
    "empty rank": {"writers": 3, "sizes": (SIZE - 4097, 0, 4097)},
}


def pieces_of(file: SharedFile, rank: int, seed: int) -> list[tuple[int, int]]:
    """Cut a rank's domain into pieces of odd sizes, in random order."""
    shuffled = random.Random(seed)
    found = []
    for offset, nbytes in file.domain(rank):
        inner = sorted(shuffled.sample(range(1, nbytes), min(5, nbytes - 1)))
        found += [(offset + a, offset + b) for a, b in pairwise([0, *inner, nbytes])]
    shuffled.shuffle(found)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_in_random_order_are_the_file(
    create: Create, disk_path: Path, mode: str, layout: str
) -> None:
    """One handle writes every domain in odd pieces; without kvio the bytes are the same."""
    data = raw.random_bytes(SIZE)
    with create("file", SIZE, mode=mode, **LAYOUTS[layout]) as file:
        for rank in range(3):
            for start, end in pieces_of(file, rank, rank):
                assert file.pwrite(data[start:end], start) == end - start
        receipt = file.seal()

    assert raw.sealed(disk_path / "file").payload == data
    assert (receipt.checksum, receipt.nbytes) == (raw.crc32c(data), SIZE)
    assert receipt.mode.value == mode


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_handle_for_each_rank(
    create: Create, join: Create, disk_path: Path, mode: str, layout: str
) -> None:
    """Ranks write at once, each through its own handle; blocks that they share are whole too."""
    data = raw.random_bytes(SIZE)
    file = create("file", SIZE, mode=mode, **LAYOUTS[layout])

    def write(rank: int) -> None:
        with join("file", rank) as own:
            for start, end in pieces_of(own, rank, rank):
                own.pwrite(data[start:end], start)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    receipt = file.seal()

    assert raw.sealed(disk_path / "file").payload == data
    assert receipt.checksum == raw.crc32c(data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_checksums_of_cells_are_those_of_their_bytes(
    create: Create, disk_path: Path, mode: str, layout: str
) -> None:
    """Each checksum in the index is that of a piece, and the pieces are the file, in order."""
    data = raw.random_bytes(SIZE)
    with create("file", SIZE, mode=mode, **{"cell_bytes": 32 * KiB, **LAYOUTS[layout]}) as file:
        for rank in range(3):
            for start, end in pieces_of(file, rank, 7):
                file.pwrite(data[start:end], start)
        file.seal()
    found = raw.sealed(disk_path / "file")
    assert found.checksums is not None
    expected = []
    for start, end in _stripes(found):
        at = start
        while at < end:
            origin = start // found.align * found.align
            stop = min(end, origin + ((at - origin) // found.cell_bytes + 1) * found.cell_bytes)
            expected.append(raw.crc32c(data[at:stop]))
            at = stop

    assert list(found.checksums) == expected


def _stripes(found: raw.Sealed) -> Iterator[tuple[int, int]]:
    if found.stripe_bytes:
        for start in range(0, SIZE, found.stripe_bytes):
            yield start, min(start + found.stripe_bytes, SIZE)
        return
    at = 0
    for nbytes in found.sizes:
        yield at, at + nbytes
        at += nbytes


def test_many_threads_write_one_domain(create: Create, disk_path: Path, mode: str) -> None:
    """Pieces from eight threads that share cells and file blocks are counted and merged right."""
    size = 200 * 1001
    data = raw.random_bytes(size)
    order = random.Random(3).sample(range(200), 200)
    with create("file", size, mode=mode, cell_bytes=8 * KiB) as file:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: file.pwrite(data[n * 1001 :][:1001], n * 1001), order))
        receipt = file.seal()

    assert receipt.checksum == raw.crc32c(data)
    assert raw.sealed(disk_path / "file").payload == data


@pytest.mark.parametrize("shift", [0, 1, 8, 511, 512, 4095])
def test_memory_need_not_be_aligned(create: Create, disk_path: Path, mode: str, shift: int) -> None:
    """Direct I/O takes memory at any address."""
    size = 5 * MiB + 4096
    data = kvio.aligned_buffer(size + shift)[shift:]
    data[:] = raw.random_bytes(size)
    with create("file", size, mode=mode) as file:
        file.pwrite(data, 0)
        file.seal()

    assert raw.sealed(disk_path / "file").payload == bytes(data)


def test_buffers_of_all_kinds(create: Create, disk_path: Path, mode: str) -> None:
    """Bytes, read-only views, arrays, bfloat16, DLPack tensors, lists of them and empty ones."""
    array = np.arange(600, dtype=np.float64)
    half = np.arange(100, dtype=np.float32).astype(ml_dtypes.bfloat16)

    class Tensor:
        """Speaks DLPack alone."""

        def __dlpack__(self, **how: Any) -> Any:
            return array.__dlpack__(**how)

        def __dlpack_device__(self) -> Any:
            return array.__dlpack_device__()

    pieces: list[Any] = [
        b"bytes",
        memoryview(b"read-only").toreadonly(),
        bytearray(b"bytearray"),
        array,
        half,
        Tensor(),
        [b"a", [], array[:3], b"", bytearray(7)],
        [],
        b"",
        array.reshape(20, 30),
    ]
    pieces[6] = [b"a", b"", array[:3], bytearray(7)]
    flat = [
        b"".join(bytes(memoryview(part).cast("B")) if len(part) else b"" for part in piece)
        if isinstance(piece, list)
        else (half.tobytes() if piece is half else array.tobytes())
        if isinstance(piece, (np.ndarray, Tensor))
        else bytes(piece)
        for piece in pieces
    ]
    data = b"".join(flat)
    with create("file", len(data), mode=mode) as file:
        at = 0
        for piece, own in zip(pieces, flat, strict=True):
            assert file.pwrite(piece, at) == len(own)
            at += len(own)
        file.seal()

    assert raw.sealed(disk_path / "file").payload == data


def test_long_gather_lists(create: Create, disk_path: Path, mode: str) -> None:
    """A write of more pieces than one system call takes, over blocks and cells, is one write."""
    parts = [raw.random_bytes(n % 97, n) for n in range(3000)]
    data = b"".join(parts)
    with create("file", len(data) + 5, mode=mode, cell_bytes=8 * KiB) as file:
        file.pwrite(parts, 5)
        file.pwrite(b"first", 0)
        file.seal()

    assert raw.sealed(disk_path / "file").payload == b"first" + data


def test_a_source_may_be_reused_at_once(create: Create, disk_path: Path, mode: str) -> None:
    """When `pwrite` returns, the memory is the caller's again, also of parts that wait."""
    memory = bytearray(1000)
    data = raw.random_bytes(10_000)
    with create("file", 10_000, mode=mode, sizes=(4500, 5500), writers=2) as file:
        for at in range(0, 10_000, 500):
            memory[:500] = data[at : at + 500]
            file.pwrite(memoryview(memory)[:500], at)
            memory[:] = bytes(1000)
        file.seal()

    assert raw.sealed(disk_path / "file").payload == data


def test_futures_write_and_count(create: Create, mode: str) -> None:
    """Every future of `submit_pwrite` gives its count; seal waits for those not done yet."""
    data = raw.random_bytes(64 * 5000)
    with create("file", len(data), mode=mode, io_threads=3) as file:
        futures = [file.submit_pwrite(data[at:][:5000], at) for at in range(0, len(data), 5000)]
        receipt = file.seal()

        assert [future.result(0) for future in futures] == [5000] * 64
    assert receipt.checksum == raw.crc32c(data)


def test_a_future_carries_the_error_of_its_write(create: Create) -> None:
    """What `pwrite` would raise, the future raises."""
    file = create("file", 100)

    with pytest.raises(kvio.BlockSizeError):
        file.submit_pwrite(bytes(9), 99).result(30)
    with faults.inject("write", error=5), pytest.raises(kvio.StorageError):
        file.submit_pwrite(bytes(9), 0).result(30)


def test_no_name_before_the_seal(create: Create, disk_path: Path) -> None:
    """While it is written there is no name a reader would look for, and others cannot read it."""
    with create("file", 100_000) as file:
        file.pwrite(bytes(50_000), 0)

        assert raw.names(disk_path) == [".file.kvio-data", ".file.kvio-map"]
        assert {raw.permissions(disk_path / name) for name in raw.names(disk_path)} == {0o600}
        with pytest.raises(kvio.BlockNotFoundError):
            SharedFile.open(disk_path / "file")


def test_all_blocks_are_allocated_before_the_first_write(create: Create, real_disk: Path) -> None:
    """A new file has its full size and no hole; without preallocation it has no blocks."""
    create("full", 10 * MiB)
    create("hole", 10 * MiB, preallocate=False)
    full, hole = ((real_disk / f".{name}.kvio-data").stat() for name in ("full", "hole"))

    assert full.st_size >= 10 * MiB
    assert full.st_blocks * 512 >= 10 * MiB
    assert (hole.st_size, hole.st_blocks * 512 < MiB) == (full.st_size, True)


def test_missing_names_cells_and_ranks(create: Create, join: Create) -> None:
    """Each handle sees what all have left to write, cell by cell, in file order."""
    file = create("file", 40 * KiB, writers=2, cell_bytes=8 * KiB)
    other = join("file", 1)
    other.pwrite(bytes(8 * KiB), 24 * KiB + 4 * KiB)
    file.pwrite(bytes(20 * KiB - 1), 0)

    expected = [
        Missing(0, 16 * KiB, 4 * KiB),
        Missing(1, 20 * KiB, 8 * KiB),
        Missing(1, 36 * KiB, 4 * KiB),
    ]
    assert file.missing() == other.missing() == expected
    assert file.missing(0) == other.missing(0) == expected[:1]
    assert file.missing(1) == other.missing(1) == expected[1:]


def test_a_rank_goes_on_where_another_handle_left_off(
    create: Create, join: Create, disk_path: Path, mode: str
) -> None:
    """Whole cells count for the next handle of a rank; parts of cells are written anew."""
    data = raw.random_bytes(64 * KiB)
    file = create("file", 64 * KiB, writers=2, cell_bytes=16 * KiB, mode=mode)
    with join("file", 1) as first:
        first.pwrite(b"x" * 5000, 48 * KiB)
        first.pwrite(data[32 * KiB : 48 * KiB], 32 * KiB)
    with join("file", 1) as second:
        assert second.missing(1) == [Missing(1, 48 * KiB, 16 * KiB)]
        with pytest.raises(kvio.BlockSizeError, match="overlap"):
            second.pwrite(data[32 * KiB :][:10], 32 * KiB)
        second.pwrite(data[48 * KiB :], 48 * KiB)
    file.pwrite(data[: 32 * KiB], 0)
    file.seal()

    assert raw.sealed(disk_path / "file").payload == data


def test_a_handle_writes_for_whom_nobody_else_does(create: Create, join: Create) -> None:
    """The creator may write any rank without a handle, and gives ranks back when it is done."""
    file = create("file", 40 * KiB, writers=2, cell_bytes=4 * KiB)
    other = join("file", 0)
    with pytest.raises(kvio.BlockExistsError, match="rank 0"):
        file.pwrite(bytes(10), 0)
    file.pwrite(bytes(20 * KiB), 20 * KiB)
    other.close()
    file.pwrite(bytes(20 * KiB), 0)

    assert file.missing() == []


def test_more_writers_than_blocks(create: Create, join: Create, disk_path: Path) -> None:
    """The last ranks have empty domains, need not come, and may."""
    file = create("file", 5000, writers=40)
    late = join("file", 39)

    assert [file.domain(rank) for rank in range(40)] == [((0, 4096),), ((4096, 904),), *[()] * 38]
    assert late.missing(39) == []
    file.pwrite(raw.random_bytes(5000), 0)
    file.seal()
    assert raw.sealed(disk_path / "file").payload == raw.random_bytes(5000)


def test_an_empty_file(create: Create, join: Create, disk_path: Path, mode: str) -> None:
    """A file of no bytes is whole at once; what is sealed is its index alone."""
    with create("file", 0, writers=3, mode=mode) as file:
        assert file.pwrite(b"", 0) == 0
        receipt = file.seal()

        assert (receipt.nbytes, receipt.checksum) == (0, 0)
        assert file.pread_into(bytearray(), 0) == 0
    assert raw.sealed(disk_path / "file").payload == b""
    assert join("file").size == 0


def test_writers_may_come_and_go_while_others_write(create: Create, join: Create) -> None:
    """A handle that is closed in the middle of another's write disturbs nobody."""
    file = create("file", 2 * MiB, writers=2)
    other = join("file", 1)
    started = threading.Barrier(2)

    def write() -> None:
        started.wait()
        file.pwrite(bytes(MiB), 0)

    thread = threading.Thread(target=write)
    thread.start()
    started.wait()
    other.close()
    thread.join()

    assert [cell.rank for cell in file.missing()] == [1]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_only_what_the_kernel_took_is_counted(
    create: Create, disk_path: Path, mode: str, nth: int
) -> None:
    """Where a write fails in its n-th cell, the cells before it are whole, and no other."""
    cell = 16 * KiB
    data = raw.random_bytes(3 * cell)
    file = create("file", 3 * cell, cell_bytes=cell, mode=mode)
    with faults.inject("write", nth=nth, error=5), pytest.raises(kvio.StorageError):
        file.pwrite(data, 0)
    written = (nth - 1) * cell

    assert [missing.offset for missing in file.missing()] == [*range(written, 3 * cell, cell)]
    assert (disk_path / ".file.kvio-data").read_bytes()[:written] == data[:written]


def test_every_cell_that_becomes_whole_wakes_who_waits(create: Create) -> None:
    """A waiting seal hears of it at once, not when it looks again."""
    with create("file", 5 * 8 * KiB, cell_bytes=8 * KiB) as file:
        assert file._shared is not None
        for number in range(5):
            before = file._shared.progress()
            file.pwrite(bytes(8 * KiB - 1), number * 8 * KiB)
            part = file._shared.progress()
            file.pwrite(b"x", (number + 1) * 8 * KiB - 1)

            assert part == before
            assert file._shared.progress() != before
        file.seal()


def test_a_file_system_without_fallocate_is_reported(create: Create, disk_path: Path) -> None:
    """The file is made all the same, in its full size, and its receipt says what is lost."""
    with (
        faults.inject("fallocate", error=errno.EOPNOTSUPP),
        create("file", 50_000, preallocate=True) as file,
    ):
        assert (disk_path / ".file.kvio-data").stat().st_size >= 50_000
        file.pwrite(bytes(50_000), 0)
        assert "cannot preallocate" in file.seal().reason


@pytest.mark.parametrize("layout", ["block", "plain"])
def test_an_unfinished_file_has_its_size_in_whole_blocks(
    create: Create, disk_path: Path, layout: str
) -> None:
    """With room for the index where it gets one."""
    with create("file", 8 * KiB, layout=layout, preallocate=True) as file:
        size = (disk_path / ".file.kvio-data").stat().st_size
        file.pwrite(bytes(8 * KiB), 0)
        file.seal()

    assert (size == 8 * KiB) is (layout == "plain")
    assert size % 4096 == 0


@pytest.mark.parametrize("shift", [0, 1, 511])
@pytest.mark.parametrize("ranks", ["even", "odd"])
def test_large_pieces_are_summed_beside_their_write(
    create: Create,
    join: Create,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    shift: int,
    ranks: str,
) -> None:
    """Two threads at it, where processors are: the same file, and every byte counted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(writing, "_COUNTED_BYTES", 4 * MiB)
    monkeypatch.setattr(writing, "_SIDE_BY_SIDE_BYTES", 768 * KiB)
    size = 12 * MiB + 4097
    sizes = (5 * MiB + 777, size - 5 * MiB - 777) if ranks == "odd" else None
    data = raw.random_bytes(size)
    memory = aligned_buffer(size + shift)[shift:]
    memory[:] = data
    options = {"writers": 2, "sizes": sizes, "cell_bytes": 768 * KiB}
    with create("file", size, mode=mode, **options) as file:
        for rank in range(2):
            for start, nbytes in file.domain(rank):
                middle = start + nbytes // 2 // 4096 * 4096
                for first, last in ((middle, start + nbytes), (start, middle)):
                    assert file.pwrite(memory[first:last], first) == last - first
            assert file.missing(rank) == []
        assert "kvio-io" in {thread.name for thread in threading.enumerate()}
        receipt = file.seal()
    out = bytearray(size)
    join("file").pread_into(out)

    assert receipt.checksum == raw.crc32c(data)
    assert out == data


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_large_piece_that_fails_is_not_counted(
    create: Create, monkeypatch: pytest.MonkeyPatch, mode: str, nth: int
) -> None:
    """The error of either thread fails the file; what came before it is counted, and no more."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(writing, "_COUNTED_BYTES", 4 * MiB)
    size = 12 * MiB
    file = create("file", size, mode=mode)
    with (
        faults.inject("write", nth=nth, error=errno.EIO),
        pytest.raises(kvio.StorageError, match="write of rank 0"),
    ):
        file.pwrite(memoryview(aligned_buffer(size)), 0)

    assert sum(piece.nbytes for piece in file.missing()) >= size - (nth - 1) * 4 * MiB
    with pytest.raises(kvio.StorageError):
        file.seal()
    file.abort()
