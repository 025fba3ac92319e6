"""Bad input: the error that is documented, with a message that says what to do."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import SharedFile

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 50_000
DATA = raw.random_bytes(SIZE)


@pytest.fixture
def ranks(create: Create, join: Create) -> tuple[SharedFile, SharedFile]:
    """Make a file of two ranks: the creator's handle and that of rank 1."""
    return create("file", SIZE, writers=2), join("file", 1)


# Ranges.


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(1, SIZE), (SIZE + 1, 0), (2, SIZE - 1), (1, -1), (0, -1), (1, 1 << 70)]
)
def test_a_write_beyond_the_file_is_refused(create: Create, nbytes: int, offset: int) -> None:
    """It does not fit: the message gives the file's size, and nothing is counted."""
    file = create("file", SIZE)
    with pytest.raises(kvio.BlockSizeError, match=f"do not fit .* of {SIZE} bytes"):
        file.pwrite(bytes(nbytes), offset)

    assert file.pwrite(DATA, 0) == SIZE
    assert file.seal().checksum == raw.crc32c(DATA)


@pytest.mark.parametrize("range_", [(0, 100), (50, 150), (99, 100), (0, SIZE), (40, 60), (99, 200)])
def test_an_overlapping_write_is_refused(
    create: Create, disk_path: Path, range_: tuple[int, int]
) -> None:
    """A byte is written once: the message gives both ranges, and the file keeps the first bytes."""
    file = create("file", SIZE, sizes=(70, SIZE - 70), writers=2)
    file.pwrite(DATA[:100], 0)
    start, end = range_
    with pytest.raises(kvio.BlockSizeError, match=f"{start} to {end} .* overlap bytes 0 to 100"):
        file.pwrite(b"\0" * (end - start), start)
    file.pwrite(DATA[100:], 100)
    file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA


def test_a_write_into_another_domain_is_refused(ranks: tuple[SharedFile, SharedFile]) -> None:
    """A rank's handle writes its own domain alone; the message says whose the byte is."""
    _, other = ranks
    edge = other.domain()[0].offset
    with pytest.raises(kvio.BlockSizeError, match="rank 0, not in that of rank 1"):
        other.pwrite(b"xx", edge - 1)
    with pytest.raises(kvio.BlockSizeError, match=f"byte {edge - 4096} .* rank 0"):
        other.pwrite(bytes(4097), edge - 4096)

    assert other.pwrite(bytes(SIZE - edge), edge) == SIZE - edge


def test_a_creator_with_a_rank_writes_that_alone(create: Create) -> None:
    """`create(rank=…)` gives a handle with a domain of its own."""
    file = create("file", SIZE, writers=2, rank=0)
    edge = file.domain(1)[0].offset
    assert file.domain() == file.domain(0)
    with pytest.raises(kvio.BlockSizeError, match="rank 1, not in that of rank 0"):
        file.pwrite(b"x", edge)


def test_a_refused_write_can_be_written_right(create: Create, disk_path: Path) -> None:
    """Whatever was wrong with a call, the same bytes may be written after it."""
    file = create("file", SIZE, writers=2)
    calls: list[tuple[Any, Any, type[Exception]]] = [
        (DATA[:10], 0.0, TypeError),
        (DATA[:10], "0", TypeError),
        (DATA[:10], None, TypeError),
        (object(), 0, TypeError),
        ("text", 0, TypeError),
        ([b"x", 7], 0, TypeError),
        (memoryview(DATA)[::2], 0, kvio.BlockSizeError),
    ]
    for data, offset, error in calls:
        with pytest.raises(error):
            file.pwrite(data, offset)
    file.pwrite(DATA, 0)
    file.seal()

    assert raw.sealed(disk_path / "file").payload == DATA


# Ranks.


@pytest.mark.parametrize("rank", [2, -1, 1 << 70])
@pytest.mark.parametrize("options", [{}, {"stripe_bytes": 4096}], ids=str)
def test_a_rank_that_is_none_is_refused(
    create: Create, join: Create, rank: int, options: dict[str, Any]
) -> None:
    """Wherever a rank is named, the message says which there are."""
    file = create("file", SIZE, writers=2, **options)
    for call in (lambda: join("file", rank), lambda: file.domain(rank), lambda: file.missing(rank)):
        with pytest.raises(kvio.ConfigError, match="ranks are 0 to 1"):
            call()


def test_a_rank_is_claimed_once(ranks: tuple[SharedFile, SharedFile], join: Create) -> None:
    """While a handle writes for a rank no other may; the message names the rank."""
    _, other = ranks
    with pytest.raises(kvio.BlockExistsError, match="rank 1"):
        join("file", 1)
    other.close()

    assert join("file", 1).rank == 1


def test_a_handle_without_a_rank_has_no_domain(create: Create) -> None:
    """`domain()` of a creator without a rank asks for one."""
    with pytest.raises(kvio.ConfigError, match="has no rank"):
        create("file", SIZE).domain()


# Creators.


def test_of_many_creating_threads_one_wins(disk_path: Path) -> None:
    """One gets the file; the others are notified that the name is taken."""
    for attempt in range(10):
        path, barrier = disk_path / f"file{attempt}", threading.Barrier(4)

        def race(
            number: int, path: Path = path, barrier: threading.Barrier = barrier
        ) -> SharedFile | None:
            barrier.wait()
            try:
                return SharedFile.create(path, 4096 * (number + 1), durability="visible")
            except kvio.BlockExistsError:
                return None

        with ThreadPoolExecutor(4) as pool:
            won = [file for file in pool.map(race, range(4)) if file is not None]
        assert len(won) == 1
        won[0].pwrite(bytes(won[0].size), 0)
        won[0].seal()
        won[0].close()
        assert raw.names(disk_path) == [f"file{n}" for n in range(attempt + 1)]


_RACE = """
import sys, kvio
print("ready", flush=True)
sys.stdin.readline()
try:
    file = kvio.SharedFile.create(sys.argv[1], 4096, durability="visible")
except kvio.BlockExistsError:
    print("lost", flush=True)
else:
    print("won", flush=True)
    sys.stdin.readline()
    file.abort()
"""


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_many_creating_processes_one_wins(disk_path: Path) -> None:
    """The same between processes; nothing is left of those that lost."""
    command = [sys.executable, "-c", _RACE, str(disk_path / "file")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    crowd = [subprocess.Popen(command, **pipes) for _ in range(3)]
    said = [_line_of(process) for process in crowd]
    for process in crowd:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said += [_line_of(process) for process in crowd]
    for process in crowd:
        process.communicate("\n", timeout=60)

    assert sorted(said) == ["lost", "lost", "ready", "ready", "ready", "won"]
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert raw.names(disk_path) == []


def test_a_name_that_stands_is_kept(create: Create, disk_path: Path) -> None:
    """Whatever stands under the path stays: a file, a directory, a link, also one to nowhere."""
    (disk_path / "file").write_text("mine")
    (disk_path / "directory").mkdir()
    (disk_path / "link").symlink_to("file")
    (disk_path / "dangling").symlink_to("nowhere")
    before = raw.names(disk_path)
    for name in before:
        with pytest.raises(kvio.BlockExistsError, match="exists"):
            create(name, SIZE)

    assert raw.names(disk_path) == before
    assert (disk_path / "file").read_text() == "mine"


# Maps.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:0], "shorter"),
        (lambda data: data[:100], "shorter"),
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"\0", "bytes, not"),
        (lambda data: b"not ours" + data[8:], "does not begin"),
        (lambda data: data[:8] + struct.pack("<H", 0) + data[10:], "version 0"),
        (lambda data: data[:8] + struct.pack("<H", 3) + data[10:], "version 3"),
        (lambda data: data[:50] + b"\xff" + data[51:], "checksum"),
    ],
    ids=["empty", "short", "cut", "longer", "foreign", "older", "newer", "damaged"],
)
def test_a_map_that_cannot_be_used_is_not(
    create: Create, disk_path: Path, change: Any, says: str
) -> None:
    """A foreign, older or damaged map is named with the reason; nothing is touched."""
    create("x", SIZE).close()
    path = disk_path / ".x.kvio-map"
    path.write_bytes(change(path.read_bytes()))
    before = raw.names(disk_path), path.read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: SharedFile.open(disk_path / "x", 0),
        lambda: SharedFile.recover(disk_path / "x"),
    ]
    for call in calls:
        with pytest.raises(kvio.CorruptBlockError, match=rf"\.x\.kvio-map.*{says}"):
            call()
    with pytest.raises(kvio.BlockExistsError, match="is another program"):
        create("x", SIZE)

    assert (raw.names(disk_path), path.read_bytes()) == before


@pytest.mark.root
def test_the_map_of_another_user_is_not_used(create: Create, disk_path: Path) -> None:
    """Someone else's map could point anywhere: AccessDeniedError."""
    if os.geteuid():
        pytest.skip("giving a file to another user needs root")
    create("x", SIZE).close()
    os.chown(disk_path / ".x.kvio-map", 12345, 12345)
    calls: list[Callable[[], object]] = [
        lambda: SharedFile.open(disk_path / "x", 0),
        lambda: SharedFile.recover(disk_path / "x"),
    ]
    for call in calls:
        with pytest.raises(kvio.AccessDeniedError, match="another user"):
            call()


def test_a_closed_handle_says_so(create: Create) -> None:
    """After `close` nothing pretends that the file is sealed or whole."""
    file = create("file", SIZE)
    file.close()
    file.close()
    calls = (lambda: file.pwrite(b"x", 0), lambda: file.submit_pwrite(b"x", 0), file.seal,
             file.abort, lambda: file.pread_into(bytearray(1)), file.missing)  # fmt: skip
    for call in calls:
        with pytest.raises(kvio.StoreClosedError, match="closed"):
            call()
    assert "sealed" not in repr(file)


def test_a_write_during_which_its_handle_was_closed_is_refused(
    create: Create, disk_path: Path
) -> None:
    """A call that had begun writes nothing once `close` has returned."""
    file = create("file", SIZE)

    class Late:
        """An offset for which one waits until the handle is closed."""

        def __index__(self) -> int:
            file.close()
            return 0

    with pytest.raises(kvio.StoreClosedError, match="is closed"):
        file.pwrite(b"x", Late())  # type: ignore[arg-type]  # a number all the same
    with SharedFile.recover(disk_path / "file") as recovered:
        assert sum(missing.nbytes for missing in recovered.missing()) == SIZE
        recovered.abort()


def test_a_file_that_is_not_sealed_is_not_read(ranks: tuple[SharedFile, SharedFile]) -> None:
    """Reading before the seal is an UnsupportedError that says why."""
    for handle in ranks:
        with pytest.raises(kvio.UnsupportedError, match="not sealed"):
            handle.pread_into(bytearray(1))
