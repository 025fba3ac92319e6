"""Shared files on file systems of their own: ext4, xfs, btrfs, and memory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.sharedfile import SharedFile
from tests.posix import mounts
from tests.sharedfile import kills
from tests.sharedfile.kills import CASES, WRITERS, Case

MiB = 1 << 20
LONG_S = 60.0
#: Where hybrid has nothing of its own to show: what it chooses is direct or buffered.
SHORT = tuple(case for case in CASES if case.mode != "hybrid")
#: Directories and inodes cost a little; a file's blocks would cost much more.
SLACK_BYTES = MiB
FREEZE, THAW = 0xC0045877, 0xC0045878  # ioctl_fs: FIFREEZE, FITHAW

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system and give a directory on it."""
    with mounts.loop_filesystem(request.param, tmp_path) as root:
        yield root


def free_bytes(root: Path) -> int:
    """How much room there is once what was removed is given back: a freeze waits for that."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FREEZE, 0)
        fcntl.ioctl(fd, THAW, 0)
    finally:
        os.close(fd)
    found = os.statvfs(root)
    return found.f_bfree * found.f_frsize


def write_rank(path: Path, rank: int, case: Case) -> None:
    """What a process does that writes one rank."""
    with SharedFile.open(path, rank) as file:
        kills.write_domain(file, rank, case)


def live(root: Path, case: Case) -> None:
    """Let processes write a file, one of which dies and is followed by another."""
    path = root / "f"
    with case.create(path) as file:
        assert file.mode == case.mode

        def die() -> None:
            with SharedFile.open(path, 1) as writer:
                start, end = next(kills.pieces(writer, 1, case.piece))
                writer.pwrite(case.payload[start:end], start)
                os.kill(os.getpid(), 9)

        assert kills.killed(kills.in_child(die))
        pids = [
            kills.start(lambda rank=rank: write_rank(path, rank, case))  # type: ignore[misc]
            for rank in range(WRITERS)
            if rank != 1
        ]
        with SharedFile.open(path, 1) as again:
            kills.write_missing(again, 1, case.payload)
        receipt = file.seal(timeout=LONG_S)
        kills.end_well(pids)
    assert receipt.level == "durable"
    assert kills.check_name(path, case.payload)
    kills.remove(path)


def test_processes_in_every_mode_and_layout(filesystem: Path) -> None:
    """Whole and durable; a dead writer is followed by another of its rank."""
    for case in SHORT:
        live(filesystem, case)
    assert os.listdir(filesystem) == []


def test_what_the_dead_left_is_gone_on_with(filesystem: Path) -> None:
    """The creator dies in every mode and layout; recover goes on, reading again what was there."""
    path = filesystem / "f"
    for case in SHORT:
        kills.leave_half(path, case)
        kills.second_life(path, case)
        assert kills.check_name(path, case.payload)
        kills.remove(path)
    assert os.listdir(filesystem) == []


def test_a_plain_file_is_the_payload_alone(filesystem: Path) -> None:
    """Unaligned to its end, in both modes, also after a recovery."""
    for case in SHORT:
        path = filesystem / "f"

        def die(path: Path = path, case: Case = case) -> None:
            file = case.create(path, **{**case.options, "layout": "plain"})
            kills.write_missing(file, None, case.payload)
            os.kill(os.getpid(), 9)

        assert kills.killed(kills.in_child(die))
        with SharedFile.recover(path) as file:
            file.seal()
        assert path.read_bytes() == case.payload
        kills.remove(path)


def test_a_file_that_does_not_fit_leaves_nothing(filesystem: Path) -> None:
    """Refused before a byte is written; the room is what it was, and so is the directory."""
    kills.whole_life(filesystem / "warm", CASES[0])
    (filesystem / "warm").unlink()
    before = free_bytes(filesystem)
    assert before > 8 * MiB
    for mode in ("buffered", "direct"):
        with pytest.raises(kvio.StorageFullError) as caught:
            SharedFile.create(filesystem / "f", before + 8 * MiB, writers=4, mode=mode)
        assert caught.value.errno is not None
        assert os.listdir(filesystem) == []
        assert abs(free_bytes(filesystem) - before) < SLACK_BYTES
    kills.whole_life(filesystem / "f", CASES[0])


def test_preallocation_allocates(filesystem: Path) -> None:
    """All blocks are there before the first write, and none where that is not asked for."""
    path, size = filesystem / "f", 6 * MiB + 5
    before = free_bytes(filesystem)
    file = SharedFile.create(path, size, writers=2)
    assert kills.data_of(path).stat().st_blocks * 512 >= size
    assert before - free_bytes(filesystem) > size - SLACK_BYTES
    file.abort()
    assert abs(free_bytes(filesystem) - before) < SLACK_BYTES

    file = SharedFile.create(path, size, writers=2, preallocate=False)
    assert kills.data_of(path).stat().st_blocks * 512 < SLACK_BYTES
    kills.write_missing(file, None, kills.pattern(size))
    file.seal()
    file.close()
    assert kills.check_name(path, kills.pattern(size))


def fill(path: Path) -> None:
    """Write to a file until there is no room left."""
    with path.open("wb") as ballast:
        try:
            while True:
                os.write(ballast.fileno(), bytes(MiB))
        except OSError as exc:
            assert exc.errno == errno.ENOSPC  # noqa: PT017  # what ends the loop


def test_a_full_file_system_does_not_stop_what_was_allocated(filesystem: Path) -> None:
    """Whoever fills the rest, a file that was preallocated is written and sealed.

    Btrfs, which copies its own records on every write, may refuse: then by a typed error.
    """
    path = filesystem / "f"
    case = Case("direct", "odd-sizes", options={"sizes": (100_001, 200_000, 100_000)})

    def work() -> None:
        file = case.create(path)
        fill(filesystem / "ballast")
        try:
            kills.write_missing(file, None, case.payload)
            file.seal()
        except kvio.StorageFullError:
            assert filesystem.parent.name == "btrfs"
            (filesystem / "ballast").unlink()
            with pytest.raises(kvio.KvioError):
                file.seal()
            file.abort()
        file.close()

    # In a process of its own: a map that cannot be written any more would end it by SIGBUS.
    assert not kills.killed(kills.in_child(work))
    left = set(os.listdir(filesystem))
    assert left == ({"f", "ballast"} if kills.check_name(path, case.payload) else set())


def test_domains_begin_on_the_stripes_that_xfs_tells_of(tmp_path: Path) -> None:
    """Even domains are whole stripe units; other file systems and a given align have blocks."""
    unit, size = 256 << 10, 5 * MiB + 1
    with mounts.loop_filesystem("xfs", tmp_path, "-d", f"agcount=2,su={unit},sw=4") as root:
        with SharedFile.create(root / "f", size, writers=3) as file:
            starts = [extent.offset for rank in range(3) for extent in file.domain(rank)]
            file.abort()
        with SharedFile.create(root / "f", size, writers=3, align=4096) as file:
            blocks = [extent.offset for rank in range(3) for extent in file.domain(rank)]
            file.abort()

    assert [start % unit for start in starts] == [0, 0, 0]
    assert starts == [0, 7 * unit, 14 * unit]
    assert blocks != starts
    assert [start % 4096 for start in blocks] == [0, 0, 0]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs and give a directory on it."""
    with mounts.memory_filesystem(tmp_path, "size=32m") as root:
        yield root


def test_memory_is_visible_and_never_durable(memory: Path) -> None:
    """A promise that tmpfs cannot keep is refused at once; the one it can keep is kept."""
    for case in CASES[:3]:
        with pytest.raises(kvio.ConfigError, match=r"durable.*tmpfs"):
            case.create(memory / "f")
        assert os.listdir(memory) == []
        with case.create(memory / "f", durability="visible") as file:
            kills.write_missing(file, None, case.payload)
            assert file.seal().level == "visible"
        assert kills.check_name(memory / "f", case.payload)
        (memory / "f").unlink()


def test_memory_has_no_direct_mode(memory: Path) -> None:
    """Asked for it is refused; hybrid chooses the page cache, and says why."""
    with pytest.raises(kvio.ConfigError, match="direct"):
        SharedFile.create(memory / "f", 100, mode="direct", durability="visible")
    hybrid = CASES[6]
    with hybrid.create(memory / "f", durability="visible") as file:
        assert file.mode == "buffered"
        kills.write_missing(file, None, hybrid.payload)
        assert "direct" in file.seal().reason
    with pytest.raises(kvio.StorageFullError):
        SharedFile.create(memory / "g", 64 * MiB, durability="visible")
    assert os.listdir(memory) == ["f"]
