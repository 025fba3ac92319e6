"""Recovering: what was left is gone on with, checked, or removed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults
from kvio.types import KiB

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 50_000
DATA = raw.random_bytes(SIZE)


def test_a_closed_file_is_gone_on_with(create: Create, disk_path: Path, mode: str) -> None:
    """What a creator left is reported by `create`, and `recover` seals it from where it stood."""
    with create("file", SIZE, mode=mode, cell_bytes=8 * KiB) as file:
        file.pwrite(DATA[: 16 * KiB + 5], 0)
    with pytest.raises(kvio.BlockExistsError, match="recover"):
        create("file", SIZE)
    with SharedFile.recover(disk_path / "file") as file:
        assert [cell.offset for cell in file.missing()] == [*range(16 * KiB, SIZE, 8 * KiB)]
        file.pwrite(DATA[16 * KiB :], 16 * KiB)
        receipt = file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA
    assert receipt.checksum == raw.crc32c(DATA)


def test_a_recovery_reads_what_was_written_before(create: Create, disk_path: Path) -> None:
    """A byte that changed on the disk between two processes keeps the file from being sealed."""
    with create("file", SIZE, cell_bytes=8 * KiB) as file:
        file.pwrite(DATA, 0)
    raw.flip(disk_path / ".file.kvio-data", 9 * KiB)
    with SharedFile.recover(disk_path / "file") as file:
        with pytest.raises(kvio.CorruptBlockError, match="8192 to 16384"):
            file.seal()
        file.abort()

    assert raw.names(disk_path) == []


def test_without_checksums_a_recovery_is_not_sealed(create: Create, disk_path: Path) -> None:
    """What cannot be checked is not trusted."""
    with create("file", SIZE, checksum=False) as file:
        file.pwrite(DATA, 0)
    with SharedFile.recover(disk_path / "file") as file:
        with pytest.raises(kvio.CorruptBlockError, match="no checksums"):
            file.seal()
        file.abort()


@pytest.mark.parametrize("boot", [b"\1" * 16, b"another boot    ", b"\xff" * 16, bytes(16)])
def test_after_a_restart_nothing_counts(create: Create, disk_path: Path, boot: bytes) -> None:
    """A map of another boot says nothing of what is on the disk: all is written anew."""
    with create("file", SIZE) as file:
        file.pwrite(bytes(SIZE), 0)
    (disk_path / ".file.kvio-map").write_bytes(
        _of_another_boot((disk_path / ".file.kvio-map").read_bytes(), boot)
    )
    with SharedFile.recover(disk_path / "file") as file:
        assert sum(cell.nbytes for cell in file.missing()) == SIZE
        file.pwrite(DATA, 0)
        file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA


def _of_another_boot(data: bytes, boot: bytes) -> bytes:
    """Change the boot in a map's head, and its checksum, which covers one domain of SIZE bytes."""
    head = bytearray(data[:124])
    head[32:48] = boot
    sizes = data[192 + 16 : 192 + 16 + 8]
    crc = raw.crc32c(bytes(head) + sizes)
    return bytes(head) + crc.to_bytes(4, "little") + data[128:]


def test_who_is_alive_is_not_recovered(create: Create, disk_path: Path) -> None:
    """A file whose creator is there is not taken from it."""
    file = create("file", SIZE)
    with pytest.raises(kvio.BlockExistsError, match="is being written"):
        SharedFile.recover(disk_path / "file")
    file.pwrite(DATA, 0)
    file.seal()


def test_a_seal_cut_short_after_the_rename_is_finished(create: Create, disk_path: Path) -> None:
    """A map that outlived its sealed file is removed, and the file opened for reading."""
    file = create("file", SIZE)
    file.pwrite(DATA, 0)
    with faults.inject("unlink", error=errno.EIO):
        file.seal()
    file.close()
    assert raw.names(disk_path) == [".file.kvio-map", "file"]
    with SharedFile.recover(disk_path / "file") as file:
        out = bytearray(SIZE)
        file.pread_into(out)

    assert out == DATA
    assert raw.names(disk_path) == ["file"]


def test_a_recovery_reads_from_the_disk(create: Create, real_disk: Path) -> None:
    """What was written before is read past the page cache, which may hide what the disk lost."""
    with create("file", SIZE, cell_bytes=8 * KiB) as file:
        file.pwrite(DATA, 0)
    with SharedFile.recover(real_disk / "file") as file:
        before = _bytes_from_disks()
        file.seal()

    assert _bytes_from_disks() - before >= SIZE


def _bytes_from_disks() -> int:
    """Return what this process has made disks read; see proc_pid_io(5)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
