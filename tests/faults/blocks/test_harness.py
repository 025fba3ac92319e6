"""The harness is right about disks and promises: else what it says of a store means nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults.blocks import disk, kernel
from tests.faults.blocks.checks import TORN, Found, Promises, Verdicts, judge
from tests.faults.blocks.log import Image, Kind, read_log
from tests.faults.blocks.processes import tell
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
def test_a_disk_fails_as_it_is_told(server: Path, tmp_path: Path) -> None:
    """So many writes of marked bytes fail, others do not; flushes fail until it is healed."""
    disk.need("ext4")
    image = str(tmp_path / "image")

    def work() -> None:
        kernel.own_namespace()
        disk.make("ext4", image)
        with disk.Disk("ext4", image, str(tmp_path), str(server)) as faulty:
            fd = os.open(tmp_path / "disk" / "disk", os.O_RDWR)
            last = os.fstat(fd).st_size - 4096
            faulty.tell(f"fail {errno.ENOSPC} 1 marked")
            assert os.pwrite(fd, b"other", last) == 5
            with pytest.raises(OSError, match="No space") as caught:
                os.pwrite(fd, b"it is marked", last)
            assert caught.value.errno == errno.ENOSPC
            assert os.pread(fd, 5, last) == b"other"
            assert os.pwrite(fd, b"it is marked", last) == 12
            faulty.tell(f"flush {errno.EIO}")
            with pytest.raises(OSError, match="Input/output"):
                os.fsync(fd)
            faulty.tell("heal")
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
    tell("cutting", tmp_path, server, "ext4", 2, 1, "new")

    assert os.listdir(tmp_path) == []
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [line for line in backing if str(tmp_path) in line]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
