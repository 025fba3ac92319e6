"""The harness is right about disks and promises: else what it says of a store means nothing."""

from __future__ import annotations

import errno
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from tests.faults.blocks import disk, kernel
from tests.faults.blocks.checks import TORN, Found, Promises, Verdicts, judge, looks
from tests.faults.blocks.log import Image, Kind, Record, read_log
from tests.faults.blocks.processes import report
from tests.faults.blocks.sameness import Piece, Sameness
from tests.faults.blocks.workload import content
from tests.posix import children

_KEY: Final = "k"
_OLD, _NEW, _NEWER = (content(_KEY, version) for version in (0, 1, 2))
_ONE_PROMISED: Final = (
    {"begin": [[_KEY, 0]]},
    {"done": [[_KEY, 0]]},
    {"begin": [[_KEY, 1]]},
    {"done": [[_KEY, 1]]},
    {"begin": [[_KEY, 2]]},
)
_DELETED: Final = (
    {"begin": [[_KEY, 0]]},
    {"done": [[_KEY, 0]]},
    {"begin": [[_KEY, None]]},
    {"done": [[_KEY, None]]},
)
_BEGUN: Final = ({"begin": [[_KEY, 0]]},)
#: The kernel detaches a loop device a little after its last user has ended.
_DETACHED_S: Final = 30.0


@pytest.mark.parametrize(
    ("marks", "found", "verdict"),
    [
        (_ONE_PROMISED, _NEW, None),
        (_ONE_PROMISED, _NEWER, None),
        (_ONE_PROMISED, _OLD, "lost"),
        (_ONE_PROMISED, None, "lost"),
        (_ONE_PROMISED, TORN, "lost"),
        (_ONE_PROMISED, b"else", "wrong"),
        (_DELETED, None, None),
        (_DELETED, _OLD, "lost"),
        (_BEGUN, None, None),
        (_BEGUN, _OLD, None),
        (_BEGUN, TORN, "torn"),
        (_BEGUN, _NEW, "wrong"),
    ],
)
def test_a_promise_allows_itself_and_what_was_begun_after_it(
    marks: Any, found: Found, verdict: str | None
) -> None:
    """Older versions are lost ones; a deletion is a promise; unknown bytes are wrong."""
    promises, verdicts = Promises(), Verdicts()
    for mark in marks:
        promises.learn(mark)

    judge(found, _KEY, promises, verdicts, tearable=False)

    assert dict(verdicts.counts) == ({verdict: 1} if verdict else {})


def test_disks_have_one_number_if_they_have_the_same_bytes() -> None:
    """Whatever was written, in whatever order and pieces; other bytes have another number."""
    source, sector = random.Random(1), 512
    before = Image(8 * sector)
    records = []
    for _ in range(12):
        first, count = source.randrange(7), source.randint(1, 2)
        data = b"".join(bytes([source.randrange(3)]) * sector for _ in range(count))
        records.append(Record(Kind.WRITE, first * sector, len(data), memoryview(data)))
    numbers = Sameness(before, records)
    bytes_of: dict[int, bytes] = {}
    for _ in range(2000):
        until = source.randrange(len(records))
        tail = source.sample(range(until, len(records)), source.randint(0, len(records) - until))
        pieces: list[Piece] = [
            (number, source.choice((0, records[number].nbytes - sector)), records[number].nbytes)
            for number in tail
        ]
        disk_now = bytearray(8 * sector)
        for number, start, stop in [(n, 0, records[n].nbytes) for n in range(until)] + pieces:
            at = records[number].offset
            disk_now[at + start : at + stop] = records[number].data[start:stop]
        assert bytes_of.setdefault(numbers.of(until, pieces), bytes(disk_now)) == disk_now

    assert 10 < len(bytes_of) == len(set(bytes_of.values()))


def test_looks_that_disagree_with_a_read_are_named(tmp_path: Path) -> None:
    """Of a block that stands, and of one that does not."""
    with kvio.open_store("posix-tmpfile", root=tmp_path, options={"create": True}) as store:
        store.write_block(_KEY, _OLD)

        assert looks(store, _KEY, _OLD) == []
        assert len(looks(store, _KEY, _OLD + b"more")) == 2
        assert len(looks(store, _KEY, None)) == 2
        assert len(looks(store, _KEY, TORN)) == 1
        assert looks(store, "other", None) == []
        assert len(looks(store, "other", _OLD)) == 2
        assert len(looks(store, "other", TORN)) == 2


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", disk.FILESYSTEMS)
def test_the_log_makes_the_disk_again(kind: str, server: Path, tmp_path: Path) -> None:
    """Every record, applied in order to the disk as it was, gives the disk as it is."""
    disk.need(kind)
    image = str(tmp_path / "image")

    def work() -> None:
        kernel.own_namespace()
        disk.make(kind, image)
        before = Image.of_file(image)
        with disk.Disk(kind, image, str(tmp_path), str(server)) as faulty:
            _churn(Path(faulty.root))
        records = read_log(faulty.log)
        for record in records:
            before.apply(record)
        assert {Kind.WRITE, Kind.FLUSH} <= {record.kind for record in records}
        assert before.same_as(Image.of_file(image))

    children.in_child(work)


def _churn(root: Path) -> None:
    for number in range(20):
        path = root / f"file{number % 7}"
        with open(path, "wb") as file:
            file.write(os.urandom(3000 * number))
            file.flush()
            os.fsync(file.fileno())
        if number % 3 == 0:
            path.unlink()


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_fails_as_it_is_reported(server: Path, tmp_path: Path) -> None:
    """So many writes of marked bytes fail, others do not; flushes fail until it is healed."""
    disk.need("ext4")
    image = str(tmp_path / "image")

    def work() -> None:
        kernel.own_namespace()
        disk.make("ext4", image)
        with disk.Disk("ext4", image, str(tmp_path), str(server)) as faulty:
            fd = os.open(tmp_path / "disk" / "disk", os.O_RDWR)
            last = os.fstat(fd).st_size - 4096
            faulty.send(f"fail {errno.ENOSPC} 1 marked")
            assert os.pwrite(fd, b"other", last) == 5
            with pytest.raises(OSError, match="No space") as caught:
                os.pwrite(fd, b"it is marked", last)
            assert caught.value.errno == errno.ENOSPC
            assert os.pread(fd, 5, last) == b"other"
            assert os.pwrite(fd, b"it is marked", last) == 12
            faulty.send(f"flush {errno.EIO}")
            with pytest.raises(OSError, match="Input/output"):
                os.fsync(fd)
            faulty.send("heal")
            os.fsync(fd)
            os.close(fd)

    children.in_child(work)


@pytest.mark.root
@pytest.mark.slow
def test_nothing_stays_mounted_when_a_process_of_the_campaign_ends(
    server: Path, tmp_path: Path
) -> None:
    """Loop devices and mounts go with the process, and the directory is empty again."""
    disk.need("ext4")
    report("cutting", tmp_path, server, "ext4", 2, 1, "new")

    assert os.listdir(tmp_path) == []
    deadline = time.monotonic() + _DETACHED_S
    while (left := _loops_over(tmp_path)) and time.monotonic() < deadline:
        pass
    assert not left
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def _loops_over(directory: Path) -> list[str]:
    """List the files of a directory that loop devices are over."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it may be detached right now
            found.append(file.read_text())
    return [line for line in found if str(directory) in line]
