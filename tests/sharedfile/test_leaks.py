"""What a handle holds: nothing after its end or a failure, and nothing in a forked child."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import SharedFile
from kvio._native import faults
from kvio.sharedfile.state import lock
from kvio.types import KiB, MiB
from tests.posix import children

from . import raw
from .conftest import Create

pytestmark = pytest.mark.usefixtures("nothing_open")

SIZE = 50_000
DATA = raw.random_bytes(SIZE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_gets_nothing(create: Create, join: Create, disk_path: Path) -> None:
    """A handle does not cross a fork: the child is notified, and keeps neither locks nor files."""
    file = create("file", SIZE, writers=2)
    own = join("file", 1)
    script = threading.Event()
    assert not script.is_set()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            reported = 0
            for handle in (file, own):
                try:
                    handle.pwrite(b"x", own.domain(1)[0].offset)
                except kvio.StoreClosedError as exc:
                    reported += "parent" in str(exc)
                handle.close()
            left = [name for name in raw.descriptors() if str(disk_path) in name]
            code = 0 if (reported, left) == (2, []) else 2
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    own.pwrite(DATA[own.domain()[0].offset :], own.domain()[0].offset)
    file.pwrite(DATA[: own.domain()[0].offset], 0)
    file.seal()
    assert raw.sealed(disk_path / "file").payload == DATA


_FORK = """
import os, signal, sys, threading
import kvio

file = kvio.SharedFile.create(sys.argv[1], 4096, writers=1, durability="visible")
waiting = threading.Event()


def seal():
    try:
        file.seal(3600)
    except kvio.KvioError as exc:
        print(exc)


wait = type(file._shared).wait
type(file._shared).wait = lambda *all: (waiting.set(), wait(*all))[1]
thread = threading.Thread(target=seal)
thread.start()
waiting.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    file.close()
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
file.pwrite(bytes(4096), 0)
thread.join()
file.close()
print(code)
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent(disk_path: Path) -> None:
    """A handle that is busy in a thread while the process forks can be closed in the child."""
    command = [sys.executable, "-W", "ignore", "-c", _FORK, str(disk_path / "file")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert run.stdout.split() == ["7"]
    assert raw.names(disk_path) == ["file"]


def test_a_forked_reader_keeps_nothing(create: Create, disk_path: Path) -> None:
    """A child holds no descriptor of a sealed file that its parent reads."""
    file = create("file", SIZE)
    file.pwrite(DATA, 0)
    file.seal()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            file.close()
            code = sum(str(disk_path) in name for name in raw.descriptors())
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.pread_into(bytearray(SIZE)) == SIZE


def test_an_abort_waits_for_the_calls_of_other_threads(create: Create, disk_path: Path) -> None:
    """No write reaches a descriptor number that was given to another file meanwhile."""
    for _ in range(10):
        file = create("file", 16 * MiB, mode="buffered")
        futures = [file.submit_pwrite(b"K" * MiB, n * MiB) for n in range(16)]
        file.abort()
        victims = [os.open(disk_path / f"victim{n}", os.O_RDWR | os.O_CREAT) for n in range(6)]
        for future in futures:
            try:
                future.result(30)
            except (kvio.StoreClosedError, CancelledError):
                continue
        written = [os.fstat(fd).st_size for fd in victims]
        for number, fd in enumerate(victims):
            os.close(fd)
            (disk_path / f"victim{number}").unlink()

        assert written == [0] * 6


@pytest.mark.parametrize("fate", ["seal", "abort", "fail"])
def test_threads_of_a_rank_end_with_its_handle(create: Create, join: Create, fate: str) -> None:
    """However the file ended, closing a handle ends the threads that it wrote with."""
    before = raw.threads()
    file = create("file", SIZE, writers=2)
    other = join("file", 1)
    begin = other.domain()[0].offset
    other.submit_pwrite(DATA[begin:], begin).result(30)
    if fate == "seal":
        file.pwrite(DATA[:begin], 0)
        file.seal()
    elif fate == "abort":
        file.abort()
    else:
        with failing("write"), pytest.raises(kvio.StorageError):
            file.pwrite(DATA[:begin], 0)
    other.close()
    for thread in raw.threads() - before:
        thread.join(10)

    assert not raw.threads() - before


def failing(site: str) -> Any:
    """Let the next call of a site fail."""
    return faults.inject(site, error=errno.EIO)


def test_every_failed_call_leaves_descriptors_as_they_were(
    create: Create, join: Create, disk_path: Path
) -> None:
    """Errors of opening and creating close what they opened, without the collector's work."""
    file = create("x", SIZE, writers=2)
    join("x", 0)
    (disk_path / "text").write_text("no shared file")
    calls: list[Callable[[], object]] = [
        lambda: create("x", SIZE),
        lambda: create("text", SIZE),
        lambda: create("y", SIZE, cell_bytes=5),
        lambda: create("y", -1),
        lambda: join("x"),
        lambda: join("x", 0),
        lambda: join("x", 7),
        lambda: join("text"),
        lambda: join("none"),
        lambda: SharedFile.recover(disk_path / "x"),
        lambda: SharedFile.recover(disk_path / "none"),
    ]
    before = raw.descriptors()
    for call in calls:
        with pytest.raises(kvio.KvioError):
            call()
        assert raw.descriptors() == before
    assert file.mode is not None


def test_a_closed_handle_holds_nothing(create: Create, join: Create, disk_path: Path) -> None:
    """A handle that is kept after its end keeps neither descriptors nor mapped memory."""
    for fate in ("close", "abort", "seal"):
        file, other = create(fate, SIZE, writers=2), join(fate, 1)
        other.close()
        file.pwrite(DATA, 0)
        getattr(file, fate)()
        file.close()

        assert [name for name in raw.descriptors() if str(disk_path) in name] == []
        assert raw.mapped(disk_path) == []


_CYCLE = """
import errno, gc, sys
import kvio
from kvio._native import faults

for number in range(40):
    file = kvio.SharedFile.create(f"{sys.argv[1]}/{number}", 8 << 10, durability="visible")
    with faults.inject("write", error=errno.EIO, times=99):
        try:
            if number % 2:
                file.submit_pwrite(bytes(4 << 10), 0).result(30)
            else:
                file.pwrite(memoryview(bytearray(4 << 10)), 0)
        except kvio.StorageError as exc:
            exc.itself = exc  # as frameworks do that keep errors and their tracebacks
    if number % 4 < 2:
        file.abort()
    del file
    gc.collect()
"""


def test_a_failed_write_in_a_reference_cycle_is_collected(disk_path: Path) -> None:
    """No crash, and no complaint of the collector; see tests/core/test_garbage.py."""
    command = [sys.executable, "-c", _CYCLE, str(disk_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert (run.returncode, run.stderr) == (0, "")


def test_threads_may_end_a_handle_at_once(create: Create, disk_path: Path) -> None:
    """Of many threads that seal one file one gets the receipt; the others an error of kvio."""
    for attempt in range(5):
        file = create(f"file{attempt}", 64 * KiB)
        file.pwrite(bytes(64 * KiB), 0)
        barrier = threading.Barrier(4)

        def seal(
            _: int, file: SharedFile = file, barrier: threading.Barrier = barrier
        ) -> kvio.Receipt | None:
            barrier.wait()
            try:
                return file.seal()
            except kvio.StoreClosedError:
                return None

        with ThreadPoolExecutor(4) as pool:
            receipts = [receipt for receipt in pool.map(seal, range(4)) if receipt is not None]

        assert len(receipts) == 1
        assert raw.sealed(disk_path / f"file{attempt}").payload == bytes(64 * KiB)


class ClosedMeanwhile:
    """A lock of a handle that another thread has closed when it is taken for the first time."""

    def __init__(self, file: SharedFile) -> None:
        self._file: SharedFile | None = file
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_handle_that_is_closed_meanwhile_does_not_look_whole(create: Create) -> None:
    """Nothing is missing of a file that is sealed, and of that alone."""
    file = create("f", 8192)
    file._sight = ClosedMeanwhile(file)  # type: ignore[assignment]
    with pytest.raises(kvio.StoreClosedError):
        file.missing()


def test_a_file_whose_mode_cannot_be_set_is_not_made(create: Create, disk_path: Path) -> None:
    """EPERM for a file of our own: reported, and neither a name nor a descriptor stays."""
    with (
        faults.inject("fchmod", error=errno.EPERM),
        pytest.raises(kvio.AccessDeniedError) as caught,
    ):
        create("file", SIZE)

    assert caught.value.errno == errno.EPERM
    assert raw.names(disk_path) == []


def test_a_map_that_is_closed_again_closes_nothing(create: Create) -> None:
    """It has no descriptor any more; its number, or another, may belong to another object."""

    def work() -> None:
        file = create("file", 100)
        shared = file._shared
        assert shared is not None
        file.close()
        before = os.listdir("/proc/self/fd")
        shared.close()
        assert os.listdir("/proc/self/fd") == before

    children.in_child(work)


@pytest.mark.parametrize("cell", [0, 1, 511])
def test_a_map_that_was_cut_is_an_error_and_no_signal(create: Create, cell: int) -> None:
    """A cell beyond its end cannot be noted; the process goes on."""

    def work() -> None:
        shared = create("file", 2048 * 4096, cell_bytes=4096)._shared
        assert shared is not None
        first = -(-shared.plan.cells_at // 4096) * 4096
        with open(f"/proc/self/fd/{shared.fd}", "r+b") as opened:
            opened.truncate(first)
        with pytest.raises(kvio.StorageError, match="note progress") as caught:
            shared.clear((first - shared.plan.cells_at) // 8 + cell)
        assert caught.value.errno == errno.EIO
        os._exit(0)

    children.in_child(work)


def test_a_lock_that_the_system_refuses_is_an_error(tmp_path: Path) -> None:
    """Here for a descriptor that cannot write; it is not taken for another's lock."""
    (tmp_path / "map").touch()
    with open(tmp_path / "map", "rb") as opened, pytest.raises(kvio.StorageError) as caught:
        lock(opened.fileno(), 0)

    assert caught.value.errno == errno.EBADF
