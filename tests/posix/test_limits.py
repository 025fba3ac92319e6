"""Full devices, exhausted tables and blocks of unusual size."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

import kvio
from kvio._native import faults
from kvio.url import OptionValue
from tests.posix import children, faultlab, mounts

BLOCK = 256 << 10
KINDS = ("ext4", "xfs", "btrfs", "tmpfs")
TWO_GIB = 2 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, disk_path: Path) -> Iterator[Path]:
    """A root on a small file system of each kind."""
    kind = str(request.param)
    if kind == "tmpfs":
        with mounts.memory_filesystem(disk_path, "size=8m") as root:
            yield root
    else:
        with mounts.loop_filesystem(kind, disk_path) as root:
            fill(root, leave=24 << 20)
            yield root


def fill(root: Path, *, leave: int) -> None:
    """Take most of a file system's room with one file."""
    info = os.statvfs(root)
    free = info.f_bavail * info.f_frsize
    if free > leave:
        with open(root.parent / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free - leave)


def fill_with_blocks(store: kvio.Store) -> tuple[list[str], kvio.StorageError]:
    """Write blocks until one fails; those that were stored, and the failure."""
    stored: list[str] = []
    for number in range(4000):
        key = f"k{number}"
        try:
            store.write_block(key, faultlab.pattern(number % 7, BLOCK))
        except kvio.StorageError as exc:
            return stored, exc
        stored.append(key)
    raise AssertionError("the file system never got full")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
def test_a_full_device_fails_typed_and_gives_its_space_back(small: Path, backend: str) -> None:
    """ENOSPC: a StorageFullError, stored blocks whole, the failed one gone, its room too."""
    try:
        store = kvio.open_store(backend, root=small)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    with store:
        store.write_block("first", b"x" * BLOCK)
        store.delete_block("first")
        before = mounts.free_bytes(small)
        stored, failure = fill_with_blocks(store)

        assert type(failure) is kvio.StorageFullError
        assert failure.errno == errno.ENOSPC
        assert failure.key == f"k{len(stored)}"
        assert len(stored) >= 8
        assert not store.contains(f"k{len(stored)}")
        for number, key in enumerate(stored):
            assert bytes(store.read_block(key)) == faultlab.pattern(number % 7, BLOCK)
        with pytest.raises(kvio.StorageFullError):
            store.write_block(stored[0], os.urandom(16 * BLOCK), if_exists="replace")
        assert faultlab.peek(small, stored[0]) == faultlab.pattern(0, BLOCK)
        results = store.write_blocks([(f"big{i}", bytes(16 * BLOCK)) for i in range(3)])
        assert {result.status for result in results} == {"failed"}
        assert all(isinstance(result.error, kvio.StorageFullError) for result in results)
        assert not faultlab.temporaries(small)

        assert all(result.ok for result in store.delete_blocks(stored))
        lost = mounts.lost_bytes(before, lambda: mounts.free_bytes(small), 16 * BLOCK)
        assert lost <= 16 * BLOCK, f"{lost} bytes did not come back"
        assert store.write_block("after", b"y" * BLOCK).nbytes == BLOCK


@pytest.mark.root
def test_exhausted_inodes_fail_typed(disk_path: Path) -> None:
    """No inode left is a full device as well, also where only the directory cannot be made."""
    with (
        mounts.memory_filesystem(disk_path, "size=64m,nr_inodes=40") as root,
        kvio.open_store("posix-tmpfile", root=root) as store,
    ):
        stored, failure = fill_with_blocks(store)
        results = store.write_blocks([(f"z{i}", b"data") for i in range(9)])

        assert type(failure) is kvio.StorageFullError
        assert 5 <= len(stored) < 40
        assert all(isinstance(r.error, kvio.StorageFullError) for r in results)
        assert all(store.verify_block(key).ok for key in stored)
        assert store.delete_block(stored[0])
        assert store.write_block(stored[0], b"data").nbytes == 4


def unlinks(fault: Any) -> int:
    """How often a name was to be removed, the times included that failed."""
    return int(fault.seen[faults.sites()["unlink"]])


@pytest.mark.parametrize("times", [1, 2])
def test_a_temporary_that_a_full_disk_keeps_is_removed_after_all(root: Path, times: int) -> None:
    """Btrfs was seen to answer ENOSPC to unlink, until what it held was committed."""
    with kvio.open_store("posix-tmpfile", root=root, options={"publish": "rename"}) as store:
        store.write_block("key", b"first")

        with (
            faults.inject("unlink", error=errno.ENOSPC, times=times) as fault,
            pytest.raises(kvio.BlockExistsError),
        ):
            store.write_block("key", b"later", if_exists="error")

        assert unlinks(fault) == times + 1
        assert not faultlab.temporaries(root)
        assert bytes(store.read_block("key")) == b"first"


@pytest.mark.parametrize("times", [1, 2])
def test_a_full_disk_gives_up_a_block_that_is_deleted(root: Path, times: int) -> None:
    """Deleting is how one makes room: a btrfs without room even for that is asked again."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("key", b"bytes")

        with faults.inject("unlink", error=errno.ENOSPC, times=times) as fault:
            assert store.delete_block("key")

        assert unlinks(fault) == times + 1
        assert list(store.list_keys()) == []


def test_a_block_that_cannot_be_deleted_for_want_of_room_stands(root: Path) -> None:
    """Tried ten times, then StorageFullError, and the block is as it was."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        store.write_block("key", b"bytes")

        with (
            faults.inject("unlink", error=errno.ENOSPC, times=1 << 30) as fault,
            pytest.raises(kvio.StorageFullError),
        ):
            store.delete_block("key")

        assert unlinks(fault) == 10
        assert bytes(store.read_block("key")) == b"bytes"


@pytest.mark.parametrize("times", [1, 2])
def test_a_full_disk_gives_up_a_shared_file_that_is_aborted(root: Path, times: int) -> None:
    """Both of its names go, the file's own and its map's."""
    file = kvio.SharedFile.create(root / "f", BLOCK, writers=1, durability="visible")

    with faults.inject("unlink", error=errno.ENOSPC, times=times) as fault:
        file.abort()

    assert unlinks(fault) == times + 2
    assert os.listdir(root) == []


@pytest.mark.parametrize("limit", [24 * 4096, 98 * 1024], ids=["pages", "KiB"])
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
def test_a_file_size_limit_is_a_full_device(root: Path, backend: str, limit: int) -> None:
    """RLIMIT_FSIZE: a StorageFullError with EFBIG, no signal, no torn block; smaller ones go on."""
    try:
        kvio.open_store(backend, root=root).close()
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))

    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with kvio.open_store(backend, root=root) as store:
            for data in (bytes(limit - 1), bytes(limit + 1), bytes(9 << 20)):
                with pytest.raises(kvio.StorageFullError) as caught:
                    store.write_block("k", data)
                assert caught.value.errno == errno.EFBIG
            store.write_block("small", b"data")
            results = store.write_blocks([("a", b"1"), ("b", bytes(200_000)), ("c", b"3")])
            assert [result.ok for result in results] == [True, False, True]

    children.in_child(work)
    assert faultlab.peek(root, "k") is None
    assert faultlab.peek(root, "small") == b"data"
    assert not faultlab.temporaries(root)


def test_a_direct_write_that_ends_inside_a_file_block_is_an_error(real_disk: Path) -> None:
    """Less than a file block was taken, for no reason that the system reports."""
    try:
        store = kvio.open_store("posix-direct", root=real_disk)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    with store:
        cut = faults.inject("write", times=1 << 30, transfer=512)
        with cut, pytest.raises(kvio.StorageError) as caught:
            store.write_block("k", faultlab.pattern(1, BLOCK))
        assert caught.value.errno in (errno.EIO, errno.EINVAL)  # EINVAL: sectors of 4 KiB
        assert list(store.list_keys()) == []


def test_exhausted_descriptors_are_transient(root: Path) -> None:
    """EMFILE: a TransientStorageError for every call that needs a descriptor, and then it works."""

    def work() -> None:
        with kvio.open_store("posix-tmpfile", root=root) as store:
            store.write_block("k", b"data")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            with pytest.raises(kvio.TransientStorageError) as caught:
                store.write_block("k2", b"data")
            assert caught.value.errno == errno.EMFILE
            with pytest.raises(kvio.TransientStorageError):
                store.read_block("k")
            results = store.write_blocks([(f"b{i}", b"data") for i in range(5)])
            assert all(isinstance(r.error, kvio.TransientStorageError) for r in results)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert bytes(store.read_block("k")) == b"data"
            assert store.write_block("k2", b"data").nbytes == 4

    children.in_child(work)


def test_a_root_that_cannot_be_probed_is_not_opened(root: Path) -> None:
    """EMFILE after the root itself was opened: a typed error, and no descriptor stays open."""

    def work() -> None:
        kvio.open_store("posix-tmpfile", root=root).close()
        before = os.listdir("/proc/self/fd")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_fd = os.dup(0)
        os.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + 1, hard))
        with pytest.raises(kvio.TransientStorageError, match="probe root") as caught:
            kvio.open_store("posix-tmpfile", root=root)
        assert caught.value.errno == errno.EMFILE
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir("/proc/self/fd") == before

    children.in_child(work)


def test_a_durable_batch_needs_no_descriptor_for_each_block(root: Path) -> None:
    """A thousand durable blocks are stored under a limit of 512 descriptors."""

    def work() -> str:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        try:
            store = kvio.open_store(
                "posix-tmpfile", root=root, durability="durable", layout="plain"
            )
        except kvio.UnsupportedError as exc:
            return str(exc)
        with store:
            results = store.write_blocks([(f"k{i}", b"data") for i in range(1000)])
            assert all(result.ok for result in results), results[-1]
        return ""

    said = children.in_child(work)
    if said:
        pytest.skip(said)


def test_a_durable_write_needs_one_descriptor(disk_path: Path) -> None:
    """A block that has its name is not refused its receipt because no descriptor is left."""

    def work() -> str:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        options: dict[str, OptionValue] = {"create": True}
        try:
            store = kvio.open_store(
                "posix-tmpfile", root=disk_path / "root", durability="durable", options=options
            )
        except kvio.UnsupportedError as exc:
            return str(exc)
        with store, faultlab.free_descriptors(1):
            receipt = store.write_block("k", b"data")
            assert (receipt.level, receipt.existed) == ("durable", False)
        return ""

    said = children.in_child(work)
    if said:
        pytest.skip(said)


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct", "hybrid"])
def test_more_parts_than_one_call_takes(root: Path, backend: str) -> None:
    """Three thousand pieces, empty ones among them, are written joined and read split."""
    data = faultlab.pattern(9, 1_500_000)
    sizes = [(i * 7919) % 1000 for i in range(3000)]
    try:
        store = kvio.open_store(backend, root=root)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    with store:
        parts, at = [], 0
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        assert store.write_block("k", parts).nbytes == at
        room = [bytearray(size) for size in reversed(sizes)]
        assert store.read_block_into("k", room) == at

    assert faultlab.peek(root, "k") == data[:at]
    assert b"".join(room) == data[:at]


@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
@pytest.mark.parametrize("count", [254, 255, 256, 257, 511, 512, 1025])
def test_part_counts_around_the_kernels_list(root: Path, backend: str, count: int) -> None:
    """Aligned pieces, as many as one system call takes and one more or less."""
    data = faultlab.pattern(count, count * 4096 + 17)
    memory = faultlab.aligned(data)
    cuts = [memory[i * 4096 : (i + 1) * 4096] for i in range(count)] + [memory[count * 4096 :]]
    try:
        store = kvio.open_store(backend, root=root)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    with store:
        store.write_block("k", cuts)
        out = faultlab.aligned(bytes(len(data)))
        room = [out[i * 4096 : (i + 1) * 4096] for i in range(count)] + [out[count * 4096 :]]
        assert store.read_block_into("k", room) == len(data)

    assert faultlab.peek(root, "k") == data
    assert bytes(out) == data


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["posix-tmpfile", "posix-direct"])
def test_a_block_over_two_gib_is_written_whole(disk_path: Path, backend: str) -> None:
    """No system call takes more than 2 GiB; a block of more is stored and verified."""
    nbytes = TWO_GIB + (1 << 20) + 4097
    if shutil.disk_usage(disk_path).free < 6 << 30:
        pytest.skip("needs 6 GiB of free disk")
    root = disk_path / "root"
    root.mkdir(mode=0o700)
    mark = b"the last bytes"
    options: dict[str, OptionValue] = {"chunk_bytes": 0x7FFF0000, "segment_bytes": 16 << 20}
    try:
        store = kvio.open_store(backend, root=root, options=options)
    except kvio.UnsupportedError as exc:
        pytest.skip(str(exc))
    # Private zero pages cost no memory until they are written.
    zeros = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros[-len(mark) :] = mark
    with store:
        receipt = store.write_block("k", zeros)
        stat = store.stat_block("k")
        assert receipt.nbytes == stat.nbytes == nbytes
        assert store.verify_block("k").ok
        assert bytes(store.read_block("k", offset=nbytes - 20)) == bytes(6) + mark
        assert bytes(store.read_block("k", offset=TWO_GIB - 2, nbytes=4)) == bytes(4)
    crc = 0
    chunk = bytes(1 << 20)
    for _ in range(nbytes >> 20):
        crc = google_crc32c.extend(crc, chunk)
    assert receipt.checksum == google_crc32c.extend(crc, bytes(4097 - len(mark)) + mark)
    with open(faultlab.file_of(root, "k"), "rb") as raw:
        raw.seek(nbytes - len(mark))
        assert raw.read(len(mark)) == mark
    zeros.close()


def test_empty_blocks_are_blocks(root: Path) -> None:
    """Nothing can be stored, found, kept and read."""
    for layout in ("block", "plain"):
        own = root / layout
        own.mkdir(mode=0o700)
        with kvio.open_store("posix-tmpfile", root=own, layout=layout) as store:
            assert store.write_block("k", b"").nbytes == 0
            assert store.write_block("k", []).existed
            assert store.contains("k")
            assert bytes(store.read_block("k")) == b""
            assert store.read_block_into("k", []) == 0
        assert faultlab.peek(own, "k", layout=layout) == b""
