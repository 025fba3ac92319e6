"""No memory for a block: an error that names it and its size, for that block alone."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio import _native
from kvio.core.buffers import free_bytes, most_bytes, ram_bytes
from kvio.filesystem.sysfs import Tree
from tests.limited import run_limited

TiB = 1 << 40

_STORE = """
size = 64 * MiB  # above what malloc keeps, so that each of them is mapped anew
store = kvio.open_store("hybrid", root=sys.argv[1], io_threads=1)
store.write_block("big", bytes(size))
store.write_block("small", b"abc")
out, small = bytearray(size), bytearray(3)
store.read_block("small", timeout=60)  # its thread is there
before = descriptors()

def check(error):
    assert type(error) is kvio.OutOfMemoryError, repr(error)
    assert isinstance(error, MemoryError)
    assert error.key == "big", error
    assert str(error.nbytes) in str(error), error
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again), str(again)) == (type(error), vars(error), str(error))
    return error.nbytes

def leave_as_it_was():
    assert descriptors() == before
    assert store.stats().queued_bytes == 0
    assert len(store.read_block("big", timeout=60)) == size
    store.close(timeout=60)
"""


def test_a_block_without_memory_is_named_with_its_size(tmp_path: Path) -> None:
    """Reads and writes that find no memory say which block it was for, and how much it was."""
    run_limited(
        _STORE
        + """
with at_most(2 * MiB):
    errors = [
        error_of(lambda: store.read_block("big")),
        error_of(lambda: store.read_block("big", nbytes=size - 1)),
        error_of(lambda: store.read_block("big", timeout=60)),
        error_of(lambda: store.read_block_into("big", out, timeout=60)),
    ]
    assert store.read_block("small") == b"abc"
    nameless = error_of(lambda: kvio.aligned_buffer(size))
assert [check(error) for error in errors] == [size, size - 1, size, size]
assert (type(nameless), nameless.key, nameless.nbytes) == (kvio.OutOfMemoryError, None, size)
assert store.stats().failed == len(errors)
leave_as_it_was()
""",
        tmp_path,
    )


def test_a_block_of_a_batch_without_memory_fails_alone(tmp_path: Path) -> None:
    """Of a batch only the blocks fail for which there is no memory; the others are read."""
    run_limited(
        _STORE
        + """
with at_most(2 * MiB):
    timed = store.read_blocks_into([("small", small), ("big", out)], timeout=60)
assert [one.status for one in timed] == ["ok", "failed"], timed
assert check(timed[1].error) == size
assert small == b"abc"
leave_as_it_was()
""",
        tmp_path,
    )


def test_a_block_without_a_bounce_buffer_fails_alone(real_disk: Path) -> None:
    """Direct I/O that must copy names the block too; of a batch what needs no copy is done."""
    with kvio.open_store("hybrid", root=real_disk, durability="durable") as store:
        if not store.capabilities.direct_io:
            pytest.skip("no direct I/O here: nothing is copied")
        store.write_block("big", bytes(64 * kvio.MiB))
        store.write_block("small", b"abc")
    (path,) = real_disk.glob("?/?/big")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    run_limited(
        """
        size = 64 * MiB
        hybrid = kvio.open_store("hybrid", root=sys.argv[1], io_threads=2)
        direct = kvio.open_store("posix-direct", root=sys.argv[1], io_threads=2)
        out, small = memoryview(bytearray(size + 1))[1:], bytearray(3)
        with at_most(2 * MiB):
            results = hybrid.read_blocks_into([("small", small), ("big", out)])
            errors = [
                results[1].error,
                error_of(lambda: direct.read_block_into("big", out)),
                error_of(lambda: direct.write_block("big", out, if_exists="replace")),
                *[one.error for one in direct.write_blocks([("big", out)], if_exists="replace")],
            ]
        assert results[0].ok and small == b"abc"
        assert {(type(error), error.key) for error in errors} == {(kvio.OutOfMemoryError, "big")}
        assert {error.nbytes for error in errors} == {4 * MiB}
        assert direct.read_block_into("big", out) == size
        for store in (hybrid, direct):
            store.close(timeout=60)
        """,
        real_disk,
    )


def test_a_submitted_read_without_memory_has_the_error_in_its_future(tmp_path: Path) -> None:
    """The future of a submitted read fails, and so does the task of an `AsyncStore`."""
    run_limited(
        _STORE
        + """
store.submit_read_into("small", small, timeout=60).result()  # its clock is there
with at_most(2 * MiB):
    future = store.submit_read_into("big", out, timeout=60)
    check(future.exception(60))

async def main():
    async_store = kvio.AsyncStore(store)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await async_store.read_block("small")
    errors = []
    with at_most(2 * MiB):
        for call in (
            async_store.read_block("big"),
            async_store.read_block_into("big", out, timeout=60),
        ):
            try:
                await call
            except kvio.OutOfMemoryError as exc:
                errors.append(exc)
        results = await async_store.read_blocks_into([("big", out), ("small", small)], timeout=60)
    assert [check(error) for error in [*errors, results[0].error]] == [size] * 3
    assert results[1].ok

asyncio.run(main())
before.clear()
before.update(descriptors())
leave_as_it_was()
""",
        tmp_path,
    )


def test_a_tier_without_memory_says_how_much_it_asked_for(tmp_path: Path) -> None:
    """Staging memory, and copies out of it, fail with the size; what is staged stays there."""
    run_limited(
        _STORE
        + """
kvio.stage(store, "1MiB").close()
with at_most(2 * MiB):
    error = error_of(lambda: kvio.stage(store, size))
assert (type(error), error.nbytes) == (kvio.OutOfMemoryError, size), error

tier = kvio.stage(store, 2 * size, drain_from="high_water", timeout=60)
tier.write_block("big", out)
with at_most(2 * MiB):
    assert check(error_of(lambda: tier.read_block("big"))) == size
assert len(tier.read_block("big")) == size
tier.close(timeout=60)
leave_as_it_was()
""",
        tmp_path,
    )


def test_a_shared_file_without_memory_names_its_path(tmp_path: Path) -> None:
    """A read of a part of a cell, which needs memory for all of it, names the file and the size."""
    run_limited(
        """
        cell = 64 * MiB
        path = os.path.join(sys.argv[1], "file")
        with kvio.SharedFile.create(path, cell, writers=1, rank=0, cell_bytes=cell) as file:
            file.pwrite(bytes(cell), 0)
            file.seal()
        with kvio.SharedFile.open(path) as file:
            out = bytearray(100)
            with at_most(2 * MiB):
                error = error_of(lambda: file.pread_into(out, 100))
            assert (type(error), error.key) == (kvio.OutOfMemoryError, path), error
            assert error.nbytes == cell
            assert file.pread_into(out, 100) == 100
        """,
        tmp_path,
    )


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[kvio.Store]:
    with kvio.open_store("hybrid", root=tmp_path, layout="plain", io_threads=2) as store:
        yield store


def test_a_block_longer_than_any_memory_is_refused_at_once(
    plain: kvio.Store, tmp_path: Path
) -> None:
    """A sparse file of 1 TiB is no reason to ask for 1 TiB; a range of it is read."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, TiB)

    with pytest.raises(kvio.OutOfMemoryError, match="can have") as caught:
        plain.read_block("sparse")
    assert (caught.value.key, caught.value.nbytes) == ("sparse", TiB)
    assert plain.read_block("sparse", offset=TiB - 5) == bytes(5)
    with pytest.raises(kvio.OutOfMemoryError):
        kvio.stage(plain, TiB)


def test_a_forged_length_is_compared_with_the_file_first(tmp_path: Path) -> None:
    """A trailer of 1 TiB over some KiB is corrupt; over a sparse TiB it is a block of that size."""
    with kvio.open_store(f"hybrid://{tmp_path}?checksum=none", io_threads=2) as store:
        store.write_block("key", bytes(5000))
        (path,) = tmp_path.glob("?/?/key")
        trailer = bytearray(path.read_bytes()[-64:])
        struct.pack_into("<Q", trailer, 16, TiB)
        struct.pack_into("<I", trailer, 60, _native.crc32c(trailer[:60]))
        with path.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(trailer)

        with pytest.raises(kvio.CorruptBlockError):
            store.read_block("key")
        with path.open("r+b") as file:
            file.truncate(TiB)
            file.seek(TiB)
            file.write(trailer)
        with pytest.raises(kvio.OutOfMemoryError) as caught:
            store.read_block("key")
        assert (caught.value.key, caught.value.nbytes) == ("key", TiB)


def test_sizes_that_no_address_space_has_are_refused() -> None:
    """A length near 2**64, as a server may claim, is refused and never wraps around."""
    for nbytes in (1 << 62, (1 << 64) - 1, (1 << 64) - 4095, 1 << 64, 10**30):
        with pytest.raises(kvio.OutOfMemoryError):
            kvio.aligned_buffer(nbytes)
    for nbytes in ((1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 4095):
        with pytest.raises(MemoryError):
            _native.Memory(nbytes, 4096)


def test_the_errors_of_errno_and_of_memory_are_one() -> None:
    """ENOMEM of a system call is the same error, which a pickle carries."""
    error = kvio.errors.storage_error(12, "map", key="a")

    assert type(error) is kvio.OutOfMemoryError
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


# How much there is

GROUPS = [
    ("0::/\n", {"sys/fs/cgroup/memory.max": "1048576\n"}, 1 << 20, 3 << 20),
    (
        "0::/a/b\n",
        {
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "4096\n",
            "sys/fs/cgroup/a/memory.swap.max": "0\n",
        },
        4096,
        4096,
    ),
    ("0::/../host/path\n", {"sys/fs/cgroup/memory.max": "8192"}, 8192, 8192 + (2 << 20)),
    (
        "5:cpu:/c\n4:memory:/a\n0::/\n",
        {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "12288\n"},
        12288,
        12288 + (2 << 20),
    ),
    ("", {}, 4 << 20, 6 << 20),
]


@pytest.mark.parametrize(("groups", "files", "ram", "most"), GROUPS)
def test_memory_is_what_the_machine_and_each_group_above_leave(
    tmp_path: Path, groups: str, files: dict[str, str], ram: int, most: int
) -> None:
    """The smallest limit of all groups a process is in counts, of both versions of them."""
    said = {"proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1 kB\nSwapTotal: 2048 kB\n"}
    for name, text in {**said, "proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert ram_bytes(Tree(str(tmp_path))) == ram
    assert most_bytes(Tree(str(tmp_path))) == most


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 3 << 20),
        ("0::/a/b\n", {"a/memory.max": "2097152", "a/memory.current": "1048577"}, 1048575),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "1048577"}, 3 << 20),
        ("0::/a\n", {"a/memory.max": "4096", "a/memory.current": "8192"}, 0),
        (
            "4:memory:/c\n",
            {
                "memory/c/memory.limit_in_bytes": "8192",
                "memory/c/memory.usage_in_bytes": "4096",
            },
            4096,
        ),
    ],
)
def test_free_memory_is_what_each_group_has_left(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    """The least of what is available and what the limits leave; never less than nothing."""
    said = {"proc/meminfo": "MemTotal: 9216 kB\nMemAvailable: 3072 kB\n"}
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**said, "proc/self/cgroup": groups, **placed}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert free_bytes(Tree(str(tmp_path))) == free


def test_a_machine_that_says_nothing_has_what_is_installed(tmp_path: Path) -> None:
    """Without /proc the number of pages that libc knows counts."""
    assert ram_bytes(Tree(str(tmp_path))) == most_bytes(Tree(str(tmp_path))) > 1 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a control group of 128 MiB, and yield the file that takes a process into it."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, name = (
        (version_1, "memory.limit_in_bytes")
        if version_1.is_dir()
        else (Path("/sys/fs/cgroup"), "memory.max")
    )
    group = root / f"kvio-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(128 * kvio.MiB))
    except OSError as exc:
        pytest.skip(f"no control groups of memory to make: {exc}")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_block_larger_than_its_control_group_does_not_kill(
    small_group: Path, tmp_path: Path
) -> None:
    """What the group can never hold is refused, where the kernel would end the process."""
    program = """
import os, sys, kvio
with open(sys.argv[1], "w") as group:
    group.write(str(os.getpid()))
store = kvio.open_store("hybrid", root=sys.argv[2], layout="plain")
try:
    store.read_block("sparse")
except kvio.OutOfMemoryError as exc:
    print(exc.nbytes)
"""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, kvio.GiB)
    done = subprocess.run(
        [sys.executable, "-c", program, small_group, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode != -signal.SIGKILL
    assert (done.returncode, done.stdout) == (0, f"{kvio.GiB}\n"), done.stderr


def test_a_small_block_is_read_where_memory_for_the_last_one_is_short(tmp_path: Path) -> None:
    """The length of the block before is a guess: that there is no memory for it is no error."""
    run_limited(
        """
        with kvio.open_store("posix-tmpfile", root=sys.argv[1], create=True) as store:
            store.write_block("big", bytes(16 * MiB))
            store.write_block("small", b"abc")
            kept = store.read_block("big")
            with at_most(2 * MiB):
                assert bytes(store.read_block("small")) == b"abc"
            assert store.stats().reads == 2, store.stats()
        """,
        tmp_path / "root",
    )
