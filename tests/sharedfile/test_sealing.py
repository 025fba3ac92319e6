"""Sealing: the whole file appears under its name, or an error says why not."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults
from kvio.types import Level
from tests.inside import wait_until_inside

from . import raw
from .conftest import Create
from .kills import sealed_mode

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 50_000
DATA = raw.random_bytes(SIZE)


def test_a_receipt_says_what_was_sealed(create: Create, real_disk: Path, mode: str) -> None:
    """Path, bytes, CRC32C, level and mode are in the receipt, with a reason."""
    for durability, level in (("durable", Level.DURABLE), ("visible", Level.VISIBLE)):
        with create(durability, SIZE, durability=durability, mode=mode) as file:
            file.pwrite(DATA, 0)
            receipt = file.seal()

        assert (receipt.key, receipt.nbytes) == (str(real_disk / durability), SIZE)
        assert (receipt.checksum, receipt.level) == (raw.crc32c(DATA), level)
        assert (receipt.mode.value, receipt.existed) == (mode, False)
        assert "asked for" in receipt.reason


def test_only_the_file_is_left(create: Create, disk_path: Path, mode: str) -> None:
    """After a seal the final name stands alone, read-only, exactly as long as the format says."""
    with create("file", SIZE, mode=mode, writers=2) as file:
        file.pwrite(DATA, 0)
        file.seal()

    assert raw.names(disk_path) == ["file"]
    assert raw.permissions(disk_path / "file") == sealed_mode()
    assert (disk_path / "file").stat().st_size == 53_248 + 2 * 8 + 2 * 4 + 96
    assert raw.sealed(disk_path / "file").padding == bytes(53_248 - SIZE)


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o777, 0o400), (0o077, 0o400), (0o027, 0o440), (0o022, 0o444), (0, 0o444)]
)
def test_the_umask_says_who_reads_a_sealed_file(
    create: Create, disk_path: Path, umask: int, mode: int
) -> None:
    """0600 while it is written, whatever the umask; sealed 0444 less the umask, 0400 at least."""
    before = os.umask(umask)
    try:
        file = create("file", SIZE)
        found = {raw.permissions(disk_path / name) for name in raw.names(disk_path)}
        file.pwrite(DATA, 0)
        file.seal()
    finally:
        os.umask(before)

    assert (found, raw.permissions(disk_path / "file")) == ({0o600}, mode)


def test_a_plain_file_is_the_payload_alone(create: Create, disk_path: Path, mode: str) -> None:
    """With `layout="plain"` other programs find the bytes and nothing else; so does the handle."""
    with create(
        "file", SIZE, layout="plain", mode=mode, writers=2, sizes=(777, SIZE - 777)
    ) as file:
        file.pwrite(DATA, 0)
        receipt = file.seal()
        out = bytearray(SIZE)
        file.pread_into(out)

        assert out == DATA
    assert (disk_path / "file").read_bytes() == DATA
    assert (receipt.nbytes, receipt.checksum) == (SIZE, raw.crc32c(DATA))


def test_a_plain_file_is_no_shared_file_to_open(create: Create, disk_path: Path) -> None:
    """Without an index it cannot be verified: opening it says what it is not."""
    with create("file", SIZE, layout="plain") as file:
        file.pwrite(DATA, 0)
        file.seal()

    with pytest.raises(kvio.CorruptBlockError, match="cannot be read as a shared file"):
        SharedFile.open(disk_path / "file")


def test_without_checksums_there_are_none(create: Create, join: Create, disk_path: Path) -> None:
    """With `checksum=False` the receipt has none, the index has none, and reads check none."""
    with create("file", SIZE, checksum=False) as file:
        file.pwrite(DATA, 0)
        receipt = file.seal()
    raw.flip(disk_path / "file", 3)
    out = bytearray(SIZE)
    join("file").pread_into(out)

    assert receipt.checksum is None
    assert raw.sealed(disk_path / "file").checksums is None
    assert out[3] == DATA[3] ^ 1


def test_an_unwritten_byte_keeps_the_file_from_being_sealed(
    create: Create, disk_path: Path, mode: str
) -> None:
    """One byte short: no seal and no name, and the message names the rank and the place."""
    file = create("file", SIZE, writers=4, mode=mode)
    last = file.domain(3)[0]
    file.pwrite(DATA[: SIZE - 1], 0)

    with pytest.raises(kvio.StorageTimeoutError, match="rank 3") as caught:
        file.seal()
    assert str(last.offset) in str(caught.value)
    assert not any(f"rank {rank}" in str(caught.value) for rank in range(3))
    assert "file" not in raw.names(disk_path)


def test_a_seal_that_came_too_early_is_called_again(
    create: Create, disk_path: Path, mode: str
) -> None:
    """After a timeout the same handle writes what is missing, and seals."""
    file = create("file", SIZE, mode=mode)
    file.pwrite(DATA[:20_001], 0)
    with pytest.raises(kvio.StorageTimeoutError):
        file.seal()
    file.pwrite(DATA[20_001:], 20_001)
    file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA


def test_who_never_came_is_reported_from_who_is_late(create: Create, join: Create) -> None:
    """The message says of each rank that owes bytes whether a handle writes for it."""
    file = create("file", SIZE, writers=3)
    join("file", 2)
    file.pwrite(DATA[:100], 0)
    with pytest.raises(kvio.StorageTimeoutError) as caught:
        file.seal(0.01)
    said = str(caught.value)

    assert "rank 1, which no process writes" in said
    assert "rank 2 (" in said


def test_many_absent_ranks_are_counted(create: Create) -> None:
    """A message about hundreds of ranks stays short."""
    file = create("file", 4096 * 300, writers=300)
    with pytest.raises(kvio.StorageTimeoutError, match="and 292 more") as caught:
        file.seal()

    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("timeout", [30.0, None])
def test_seal_waits_for_the_others(
    create: Create, join: Create, disk_path: Path, timeout: float | None
) -> None:
    """A seal that may wait returns when the last byte was written by another handle."""
    file = create("file", SIZE, writers=2)
    begin, nbytes = file.domain(1)[0]
    other = join("file", 1)
    file.pwrite(DATA[:begin], 0)
    receipts: list[kvio.Receipt] = []
    sealing = threading.Thread(target=lambda: receipts.append(file.seal(timeout)))
    sealing.start()
    wait_until_inside(sealing, "wait")
    other.pwrite(DATA[begin:], begin)
    sealing.join()

    assert nbytes == SIZE - begin
    assert [receipt.checksum for receipt in receipts] == [raw.crc32c(DATA)]
    assert raw.sealed(disk_path / "file").payload == DATA


def test_seal_waits_for_nothing_unless_it_is_asked_to(create: Create) -> None:
    """What is not whole is an error at once, and not a file that is whole a moment later."""
    file = create("file", SIZE)
    errors: list[kvio.KvioError] = []

    def seal() -> None:
        try:
            file.seal()
        except kvio.KvioError as exc:
            errors.append(exc)

    sealing = threading.Thread(target=seal)
    sealing.start()
    wait_until_inside(sealing, "wait")
    file.pwrite(DATA, 0)
    sealing.join()

    assert [type(error) for error in errors] == [kvio.StorageTimeoutError]


def test_a_sealed_file_is_sealed_once(create: Create) -> None:
    """Sealing, writing and aborting afterwards say that it is sealed."""
    file = create("file", SIZE)
    file.pwrite(DATA, 0)
    file.seal()
    for call in (file.seal, file.abort, lambda: file.pwrite(b"x", 0)):
        with pytest.raises(kvio.StoreClosedError, match="is sealed"):
            call()


def test_other_handles_learn_of_the_seal(create: Create, join: Create) -> None:
    """A rank that writes after the seal gets the error that the file is sealed."""
    file = create("file", SIZE, writers=2)
    other = join("file", 1)
    file.pwrite(DATA[: other.domain()[0].offset], 0)
    other.pwrite(DATA[other.domain()[0].offset :], other.domain()[0].offset)
    file.seal()

    with pytest.raises(kvio.StoreClosedError, match="is sealed"):
        other.pwrite(b"x", other.domain()[0].offset)


def test_only_who_created_it_seals_or_aborts(create: Create, join: Create) -> None:
    """The error of a rank's handle names who may."""
    create("file", SIZE, writers=2)
    other = join("file", 1)
    for call in (other.seal, other.abort):
        with pytest.raises(kvio.UnsupportedError, match="created or recovered"):
            call()


def test_a_name_that_was_taken_meanwhile_stays(create: Create, disk_path: Path) -> None:
    """A file that someone put under the name is kept; once it is gone the seal succeeds."""
    file = create("file", SIZE)
    file.pwrite(DATA, 0)
    (disk_path / "file").write_text("mine")
    with pytest.raises(kvio.BlockExistsError):
        file.seal()
    assert (disk_path / "file").read_text() == "mine"
    (disk_path / "file").unlink()
    file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA


def test_replace_replaces_when_sealed(create: Create, join: Create, disk_path: Path) -> None:
    """The standing file is read until the new one is whole; an abort leaves it."""
    for number, fate in enumerate(("seal", "abort", "seal")):
        before = (disk_path / "file").read_bytes() if number else b""
        file = create("file", SIZE, if_exists="replace")
        file.pwrite(raw.random_bytes(SIZE, number), 0)
        assert (disk_path / "file").exists() == bool(number)
        if number:
            assert (disk_path / "file").read_bytes() == before
            assert join("file").size == SIZE
        getattr(file, fate)()
        assert raw.sealed(disk_path / "file").payload == raw.random_bytes(
            SIZE, number if fate == "seal" else number - 1
        )
        assert raw.names(disk_path) == ["file"]


@pytest.mark.parametrize("site", ["write", "fdatasync", "truncate", "fchmod", "rename"])
def test_a_seal_that_failed_leaves_no_name_and_can_be_aborted(
    create: Create, real_disk: Path, site: str
) -> None:
    """Whichever step fails, no reader finds a file, and an abort removes what there is."""
    file = create("file", SIZE, durability="durable")
    file.pwrite(DATA, 0)
    with faults.inject(site, error=errno.EIO, times=99), pytest.raises(kvio.StorageError):
        file.seal()
    assert "file" not in raw.names(real_disk)
    file.abort()

    assert raw.names(real_disk) == []


@pytest.mark.parametrize(
    ("site", "nth"),
    [("write", 1), ("write", 2), ("fdatasync", 1), ("fdatasync", 2), ("truncate", 1)],
)
def test_an_inode_that_lost_bytes_is_never_sealed(
    create: Create, real_disk: Path, site: str, nth: int
) -> None:
    """The kernel reports a lost write once: a second seal must not trust a sync that succeeds."""
    file = create("file", SIZE, durability="durable", writers=2, sizes=(777, SIZE - 777))
    file.pwrite(DATA, 0)
    with faults.inject(site, nth=nth, error=errno.EIO), pytest.raises(kvio.StorageError):
        file.seal()
    with pytest.raises((kvio.StorageError, kvio.StoreClosedError)):
        file.seal()
    assert "file" not in raw.names(real_disk)


def test_a_writer_that_failed_fails_the_seal(create: Create, join: Create, disk_path: Path) -> None:
    """The seal, and every other writer, gets the error that a rank's I/O failed and which."""
    file = create("file", SIZE, writers=2)
    other = join("file", 1)
    with faults.inject("write", error=errno.EIO), pytest.raises(kvio.StorageError) as caught:
        other.pwrite(b"x" * 4096, other.domain()[0].offset)
    assert caught.value.errno == errno.EIO
    with pytest.raises(kvio.StoreClosedError, match="abort"):
        file.pwrite(b"x", 0)
    with pytest.raises(kvio.StorageError, match="rank 1"):
        file.seal()
    file.abort()

    assert raw.names(disk_path) == []


def test_a_failed_sync_of_the_directory_is_reported(create: Create, real_disk: Path) -> None:
    """The name may not survive a power cut: an error and no receipt, though the file stands."""
    file = create("file", SIZE, durability="durable")
    file.pwrite(DATA, 0)
    with (
        faults.inject("sync_dir" if "sync_dir" in faults.sites() else "fsync_dir", error=errno.EIO),
        pytest.raises(kvio.StorageError),
    ):
        file.seal()

    assert raw.sealed(real_disk / "file").payload == DATA


@pytest.mark.parametrize("site", ["write", "fdatasync", "truncate", "rename", "fsync_dir", "alive"])
def test_the_error_of_a_seal_comes_out_of_the_block(real_disk: Path, site: str) -> None:
    """What went wrong is not hidden by what the end of the with block does about it."""

    def life() -> None:
        with SharedFile.create(real_disk / "file", SIZE, writers=2, sizes=(7, SIZE - 7)) as file:
            file.pwrite(DATA, 0)
            with faults.inject(site, error=errno.EIO):
                file.seal()

    with pytest.raises(kvio.StorageError) as caught:
        life()

    assert caught.value.errno == errno.EIO
    assert ("file" in raw.names(real_disk)) == (site in ("fsync_dir", "alive"))


def test_an_aborted_file_is_gone(create: Create, join: Create, disk_path: Path) -> None:
    """Nothing is left, and other handles are notified."""
    file = create("file", SIZE, writers=2)
    other = join("file", 1)
    file.pwrite(DATA[:100], 0)
    file.abort()

    assert raw.names(disk_path) == []
    with pytest.raises(kvio.StoreClosedError, match="aborted"):
        other.pwrite(b"x", other.domain()[0].offset)
    with pytest.raises(kvio.StoreClosedError):
        file.seal()
    with pytest.raises(kvio.StoreClosedError):
        file.pwrite(b"x", 0)


def test_an_exception_aborts_what_the_block_made(
    create: Create, join: Create, disk_path: Path
) -> None:
    """An exception removes what is not sealed, but not in the block of a rank's handle."""
    with pytest.raises(ZeroDivisionError), create("file", SIZE):
        1 / 0  # noqa: B018
    assert raw.names(disk_path) == []

    file = create("kept", SIZE, writers=2)
    with pytest.raises(ZeroDivisionError), join("kept", 1):
        1 / 0  # noqa: B018
    file.pwrite(DATA, 0)
    with pytest.raises(ZeroDivisionError), file:  # noqa: PT012
        file.seal()
        1 / 0  # noqa: B018
    assert raw.sealed(disk_path / "kept").payload == DATA
