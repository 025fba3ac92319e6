"""What stands beside a shared file already: probes, data of another length, maps of other boots."""

from __future__ import annotations

import errno
import os
import struct
import time
from pathlib import Path

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults
from kvio.sharedfile import lifecycle

from . import raw
from .conftest import Create
from .kills import data_of, map_of

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 20_000
DATA = raw.random_bytes(SIZE)


def test_old_probes_go_and_young_ones_stay(create: Create, disk_path: Path) -> None:
    """A young one belongs to a process that examines the file system right now."""
    young, old = (disk_path / f".file.kvio-probe.{digit * 16}" for digit in "ab")
    for probe in (young, old):
        probe.touch()
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    create("file", SIZE)

    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize("nbytes", [0, 4096, SIZE - 1, 1 << 20])
def test_data_of_another_length_is_not_what_the_map_was_made_for(
    create: Create, join: Create, nbytes: int
) -> None:
    """It was cut or made longer: neither a writer nor a recovery takes it."""
    file = create("file", SIZE, writers=2)
    path = Path(file.path)
    os.truncate(data_of(path), nbytes)
    with pytest.raises(kvio.CorruptBlockError, match="is not the file its map was made for"):
        join("file", 1)
    file.close()
    with pytest.raises(kvio.CorruptBlockError, match="is not the file its map was made for"):
        SharedFile.recover(path)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0xFE, 0xFF])
def test_a_map_of_another_boot_is_refused(create: Create, join: Create, byte: int) -> None:
    """Whatever number that boot had."""
    path = Path(create("file", SIZE, writers=2).path)
    content = bytearray(map_of(path).read_bytes())
    content[32:48] = bytes([byte]) * 16
    sizes_at = 192 + 16 * 2
    covered = content[:124] + content[sizes_at : sizes_at + 8 * 2]
    struct.pack_into("<I", content, 124, raw.crc32c(covered))
    map_of(path).write_bytes(content)

    with pytest.raises(kvio.UnsupportedError, match="on another machine, or before a restart"):
        join("file", 1)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOSYS, errno.EIO])
def test_without_an_exchange_of_names_a_file_is_replaced_by_a_move(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """As on file systems that have none; an error of the disk is one."""
    monkeypatch.setattr(lifecycle, "is_journaled", lambda _: False)
    path = disk_path / "file"
    path.write_bytes(b"old")
    with SharedFile.create(path, SIZE, if_exists="replace", layout="plain") as file:
        file.pwrite(DATA, 0)
        with faults.inject("rename", error=refusal):
            if refusal == errno.EIO:
                with pytest.raises(kvio.StorageError):
                    file.seal()
                file.abort()
            else:
                file.seal()

    assert path.read_bytes() == (b"old" if refusal == errno.EIO else DATA)
    assert raw.names(disk_path) == ["file"]
