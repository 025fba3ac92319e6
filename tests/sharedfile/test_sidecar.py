"""Checksums beside a plain file: written before it has its name, and never taken for another's."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults

from . import raw
from .conftest import Create
from .kills import sidecar_of

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 300_001
DATA = raw.random_bytes(SIZE)
PLAIN = {"layout": "plain", "sidecar": True, "cell_bytes": 65536}


def make(create: Create, name: str = "file", data: bytes = DATA, **options: object) -> Path:
    """Seal a plain file with a sidecar."""
    with create(name, len(data), **PLAIN, **options) as file:
        file.pwrite(data, 0)
        file.seal()
    return Path(file.path)


def test_a_plain_file_is_read_and_verified(create: Create, join: Create, mode: str) -> None:
    """It has the payload alone; opened by its path it knows its domains and finds every change."""
    path = make(create, mode=mode, writers=3, sizes=(100_000, 1, 200_000))
    out = bytearray(SIZE)
    with join("file") as file:
        assert (file.size, file.writers, file.domain(1)) == (SIZE, 3, ((100_000, 1),))
        file.pread_into(out)

    assert path.read_bytes() == DATA == out
    assert raw.names(path.parent) == [sidecar_of(path).name, "file"]
    for at in (0, 65_535, 65_536, 100_000, SIZE - 1):
        raw.flip(path, at)
        with join("file") as file, pytest.raises(kvio.CorruptBlockError, match="not what was"):
            file.pread_into(out)
        raw.flip(path, at)


def test_every_byte_of_a_sidecar_counts(create: Create, join: Create) -> None:
    """A changed bit anywhere in it, a shorter and a longer one: an error, never other bytes."""
    path = make(create, data=DATA[:70_000])
    beside = sidecar_of(path)
    whole = beside.read_bytes()
    beside.chmod(0o600)
    wrong = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in range(len(whole))]

    for content in [*wrong, whole[:-1], whole + b"\0", whole[:64], whole[:63], b""]:
        beside.write_bytes(content)
        with pytest.raises(kvio.CorruptBlockError, match="cannot be read as a shared file"):
            join("file")
    beside.write_bytes(whole)
    join("file").close()


def test_without_its_sidecar_a_plain_file_cannot_be_verified(create: Create, join: Create) -> None:
    """The message says what is missing."""
    path = make(create)
    sidecar_of(path).unlink()

    with pytest.raises(kvio.CorruptBlockError, match="has no sidecar"):
        join("file")


def test_a_copy_with_the_name_is_not_what_was_sealed(create: Create, join: Create) -> None:
    """Another inode: the sidecar of the first is not asked, whatever the bytes."""
    path = make(create)
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)

    with pytest.raises(kvio.CorruptBlockError, match="has no sidecar"):
        join("file")


@pytest.mark.parametrize("attributes", [True, False])
def test_a_file_that_got_the_inode_later_is_not_what_was_sealed(
    create: Create, join: Create, monkeypatch: pytest.MonkeyPatch, *, attributes: bool
) -> None:
    """Its id, or where there are no attributes its time, shows it; its bytes may be the same."""
    if not attributes:
        monkeypatch.setattr(os, "setxattr", _refuse)
    path = make(create)
    beside = sidecar_of(path)
    again = make(create, "other")
    # The same as if the number of the inode were in use again.
    content = bytearray(beside.read_bytes())
    struct.pack_into("<Q", content, 16, again.stat().st_ino)
    struct.pack_into("<I", content, 60, raw.crc32c(content[:60]))
    sidecar_of(again).chmod(0o600)
    sidecar_of(again).write_bytes(content)

    with pytest.raises(kvio.CorruptBlockError, match="was written for another file"):
        join("other")
    join("file").close()


def _refuse(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "no attributes here")


def test_where_attributes_were_lost_the_time_of_the_last_change_tells(
    create: Create, join: Create
) -> None:
    """As by a copy of the file system, or a power cut on one that writes them late."""
    path = make(create)
    path.chmod(0o600)
    os.removexattr(path, "user.kvio.id")
    join("file").close()
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with pytest.raises(kvio.CorruptBlockError, match="was written for another file"):
        join("file")


def test_a_replaced_file_takes_its_sidecar_along(create: Create, join: Create) -> None:
    """The new one has its own; readers of the old one read on."""
    first = make(create)
    old = join("file")
    beside = sidecar_of(first)
    make(create, data=DATA[::-1], if_exists="replace")
    out = bytearray(SIZE)
    old.pread_into(out)

    assert out == DATA
    assert not beside.exists()
    assert raw.names(first.parent) == [sidecar_of(first).name, "file"]
    with join("file") as file:
        file.pread_into(out)
    assert out == DATA[::-1]


def test_what_a_removed_file_left_is_swept(create: Create, join: Create) -> None:
    """By the next creation of its path, and of no other; what stands keeps its own."""
    path = make(create)
    other = make(create, "file2")
    left = sidecar_of(path)
    with path.open("rb"):  # so that its inode is not in use again
        path.unlink()
        make(create, "unrelated")
        assert left.exists()
        make(create)

    assert not left.exists()
    assert sidecar_of(path).exists()
    assert sidecar_of(other).exists()
    join("file2").close()


def test_an_abort_removes_the_sidecar_of_a_seal_that_failed(
    create: Create, disk_path: Path
) -> None:
    """It was written, and the file got no name."""
    file = create("file", SIZE, **PLAIN)
    file.pwrite(DATA, 0)
    with faults.inject("rename", error=errno.EIO), pytest.raises(kvio.StorageError):
        file.seal()
    assert any("kvio-sums" in name for name in raw.names(disk_path))
    file.abort()

    assert raw.names(disk_path) == []


@pytest.mark.parametrize(
    ("site", "nth"), [("open_temp", 1), ("write", 1), ("fdatasync", 3), ("fsync_dir", 1)]
)
def test_a_sidecar_that_cannot_be_written_is_written_by_the_next_seal(
    disk_path: Path, site: str, nth: int
) -> None:
    """The data is whole and synced: a full disk at that moment costs nothing but another try.

    So the sidecar and its name are written and synced before the file has its own.
    """
    options = {**PLAIN, "durability": "durable", "mode": "buffered"}
    file = SharedFile.create(disk_path / "file", SIZE, **options)  # type: ignore[arg-type]
    file.pwrite(DATA, 0)
    with (
        faults.inject(site, nth=nth, error=errno.ENOSPC),
        pytest.raises(kvio.StorageFullError),
    ):
        file.seal()
    assert "file" not in raw.names(disk_path)
    file.seal()
    file.close()

    with SharedFile.open(disk_path / "file") as again:
        out = bytearray(SIZE)
        again.pread_into(out)
    assert out == DATA


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "block", "sidecar": True}, "keeps the checksums of layout='plain'"),
        ({"layout": "plain", "sidecar": True, "checksum": False}, "checksum=True"),
        ({"file_mode": 0o1000}, "file_mode must be 0 to 0o777, such as 0o640, not 512"),
        ({"file_mode": "0640"}, "such as 0o640, not '0640'"),
        ({"file_mode": True}, "file_mode must be"),
        ({"file_mode": 0o040}, "does not let the owner read"),
        ({"dir_mode": 0o40000}, "dir_mode must be 0 to 0o3777, such as 0o750, not 16384"),
        ({"dir_mode": "0750"}, "such as 0o750, not '0750'"),
        ({"dir_mode": 0o570}, "dir_mode 0o570 does not let the owner read, write and search"),
        ({"group": "no such group"}, "there is no group 'no such group'"),
        ({"group": -1}, "there is no group -1"),
        ({"group": (1 << 32) - 1}, "there is no group 4294967295"),
        ({"group": b"root"}, "there is no group b'root'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    create: Create, disk_path: Path, options: dict[str, object], says: str
) -> None:
    """A ConfigError that says what to do instead, and nothing is made."""
    with pytest.raises(kvio.ConfigError, match=says):
        create("file", SIZE, **options)

    assert raw.names(disk_path) == []


def test_a_file_is_readable_by_whom_it_says(create: Create, disk_path: Path) -> None:
    """The mode that was asked for, and the group, on the file and its sidecar; 0600 until then."""
    gid = os.getgid()
    file = create("file", SIZE, file_mode=0o640, group=gid, **PLAIN)
    while_written = {raw.permissions(disk_path / name) for name in raw.names(disk_path)}
    file.pwrite(DATA, 0)
    file.seal()

    assert while_written == {0o600}
    for path in (disk_path / "file", sidecar_of(disk_path / "file")):
        assert (raw.permissions(path), path.stat().st_gid) == (0o640, gid)


@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_missing_directories_are_made_as_asked(disk_path: Path, durability: str) -> None:
    """Whatever the umask, those that are missing and no other; each is synced in its parent."""
    path = disk_path / "a" / "b" / "file"
    disk_path.joinpath("a").mkdir(mode=0o711)
    before = os.umask(0o077)
    try:
        with faults.inject("fsync_dir", nth=1 << 30) as fault:
            file = SharedFile.create(
                path.parent / "c" / "file", 1, dir_mode=0o2750, group=os.getgid(),
                durability=durability,
            )  # fmt: skip
            synced = fault.seen[faults.sites()["fsync_dir"]]
    finally:
        os.umask(before)
    file.abort()

    assert [raw.permissions(path.parents[n]) for n in (1, 0)] == [0o711, 0o2750]
    assert raw.permissions(path.parent / "c") == 0o2750
    assert synced >= (2 if durability == "durable" else 0)


def test_a_directory_that_cannot_be_made_is_an_error(disk_path: Path) -> None:
    """A file stands in its place; and without `dir_mode` none is made."""
    (disk_path / "file").write_bytes(b"mine")
    with pytest.raises(kvio.StorageError, match=r"make directory '.*/file/a'"):
        SharedFile.create(disk_path / "file" / "a" / "x", 1, dir_mode=0o755)
    with pytest.raises(kvio.StorageError, match="open the directory"):
        SharedFile.create(disk_path / "none" / "x", 1)

    assert raw.names(disk_path) == ["file"]
