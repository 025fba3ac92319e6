"""File objects of blocks: threads, forks, signals, foreign data."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvio
from kvio import KiB, MiB
from kvio.core import block_files
from kvio.core.block_files import BlockReader
from kvio.core.streams import HELD_BYTES

LONG = HELD_BYTES + 5 * MiB


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    with kvio.open_store(f"posix-tmpfile://{tmp_path}") as store:
        yield store


def writers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "kvio-writer"]


def test_a_short_block_starts_no_thread_and_takes_little_memory(store: kvio.Store) -> None:
    """A thread comes with the first byte beyond what is held, and goes with the writer."""
    with store.open_writer("short") as file:
        file.write(bytes(300 * KiB))
        assert len(file._room) == MiB
        assert writers() == []
    with store.open_writer("held") as file:
        file.write(bytes(HELD_BYTES))
        assert writers() == []
        file.write(b"x")
        assert writers() == ["kvio-writer"]

    assert writers() == []
    assert store.stat_block("held").nbytes == HELD_BYTES + 1


def test_large_pieces_are_not_copied_by_the_writer(store: kvio.Store) -> None:
    """They are taken from the caller's memory, which is free again after the call."""
    piece = bytearray(b"a" * 8 * MiB)
    with store.open_writer("block") as file:
        file.write(bytes(HELD_BYTES))
        file.write(piece)
        piece[:] = b"b" * len(piece)
        file.write(piece)
        assert len(file._room) == MiB

    found = store.read_block("block")
    assert found[HELD_BYTES :: 8 * MiB].tobytes() == b"ab"
    assert found[-1] == ord("b")


def test_data_is_taken_as_by_a_write(store: kvio.Store) -> None:
    """Arrays are their bytes; what a write refuses is refused, and ends the block."""
    with store.open_writer("array") as file:
        assert file.write(np.arange(10, dtype="<u4")) == 40
    assert store.read_block("array") == np.arange(10, dtype="<u4").tobytes()
    for wrong in ("text", np.array([object()])):
        file = store.open_writer("wrong")
        file.write(b"before")
        with pytest.raises(TypeError):
            file.write(wrong)
        for _ in range(2):
            with pytest.raises(kvio.StorageError, match="TypeError"):
                file.close()
    assert not store.contains("wrong")


def test_a_failed_write_is_not_forgotten(store: kvio.Store) -> None:
    """Who catches the error of a write, and then closes the file, is told again."""
    file = store.open_writer("block", nbytes=3)
    with pytest.raises(kvio.BlockSizeError):
        file.write(b"12345")
    with pytest.raises(kvio.StorageError, match="3 were announced"):
        file.write(b"123")
    buffered = io.BufferedWriter(store.open_writer("buffered", nbytes=3))
    buffered.write(b"12345")
    with pytest.raises(kvio.StorageError, match="3 were announced"):
        buffered.close()
    for _ in range(2):
        with pytest.raises(kvio.StorageError, match="3 were announced"):
            file.close()
    assert list(store.list_keys()) == []


def test_a_wrapper_tells_of_a_store_that_was_closed(store: kvio.Store) -> None:
    """What it still holds is not lost silently."""
    file = store.open_writer("block")
    file.write(bytes(HELD_BYTES + 1))
    buffered = io.BufferedWriter(file)
    buffered.write(b"pending")
    store.close()
    with pytest.raises(kvio.KvioError, match="closed"):
        buffered.close()


@pytest.mark.parametrize("held", [0, 64 * KiB])
def test_a_store_may_close_at_any_moment(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor the writer hangs, and what is stored is whole."""
    monkeypatch.setattr(block_files, "HELD_BYTES", held or HELD_BYTES)
    monkeypatch.setattr(block_files, "_PIECE_BYTES", 16 * KiB)
    total, stored = 1000 * KiB, 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(150):
            store = kvio.open_store(f"posix-tmpfile://{tmp_path}")
            file = store.open_writer(f"block-{number}")
            closing = pool.submit(store.close)
            with contextlib.suppress(kvio.KvioError):
                for _ in range(total // (number * KiB + KiB)):
                    file.write(bytes(number * KiB + KiB))
                file.close()
            closing.result(60)
            stored += file.receipt is not None
            assert (file.receipt is None) or file.receipt.nbytes == file.nbytes
    with kvio.open_store(f"posix-tmpfile://{tmp_path}") as store:
        assert len(list(store.list_keys())) == stored
    assert writers() == []


def test_a_dropped_writer_is_freed_whoever_collects_it(store: kvio.Store) -> None:
    """Its destructor waits for nobody: this thread may hold what the writer's needs."""

    def drop() -> None:
        file = store.open_writer("block")
        file.write(bytes(HELD_BYTES + 1))
        itself: list[object] = [file]
        itself.append(itself)
        del file, itself
        with store._counters._lock:
            gc.collect()

    with pytest.warns(ResourceWarning, match="dropped"):
        drop()

    store.close()
    for thread in threading.enumerate():
        if thread.name == "kvio-writer":
            thread.join(60)
    assert writers() == []


def test_a_program_may_end_with_an_open_writer(tmp_path: Path) -> None:
    """Nothing of it is stored, and the program ends."""
    program = (
        "import kvio, sys\n"
        f"store = kvio.open_store('posix-tmpfile://{tmp_path}')\n"
        "file = store.open_writer('block')\n"
        f"file.write(bytes({HELD_BYTES + 1}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=100, check=False)

    assert ended.returncode == 0
    with kvio.open_store(f"posix-tmpfile://{tmp_path}") as store:
        assert list(store.list_keys()) == []


def test_a_failed_writer_keeps_no_memory(store: kvio.Store) -> None:
    """Neither its own nor the caller's, whose buffer can be resized."""
    mine = bytearray(2 * MiB)
    with pytest.raises(kvio.BlockSizeError), store.open_writer("block", nbytes=1) as file:
        file.write(mine)
    mine.extend(b"x")
    with store.open_writer("block") as file:
        file.write(bytes(HELD_BYTES))
        file.write(mine)
        mine.clear()
        mine.extend(bytes(2 * MiB))
        file.write(mine)
        mine.clear()
    long = store.open_writer("long")
    long.write(bytes(HELD_BYTES + 1))
    long.abort()
    assert len(long._room) == 0
    assert long._flow.thread is not None
    assert not long._flow.thread.is_alive()


@pytest.mark.parametrize("nbytes", [10, LONG])
def test_a_forked_child_stores_nothing(store: kvio.Store, nbytes: int) -> None:
    """A writer belongs to the process that opened it, which goes on with it."""
    file = store.open_writer("block")
    file.write(bytes(nbytes))
    pid = os.fork()
    if not pid:
        try:
            file.write(b"child")
        except kvio.UnsupportedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    file.write(b"parent")
    file.close()

    assert store.stat_block("block").nbytes == nbytes + 6


def test_a_signal_ends_a_writer_that_waits(
    store: kvio.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception of a handler leaves nothing stored, and no thread."""

    def stop(*_: object) -> None:
        raise InterruptedError

    def write() -> None:
        with store.open_writer("block") as file:
            file.write(bytes(HELD_BYTES + 1))

    taken = threading.Event()
    take = block_files._Flow._take

    def slow(flow: block_files._Flow, room: memoryview) -> int:
        if not taken.is_set():
            taken.set()
            os.kill(os.getpid(), signal.SIGUSR1)
        with flow._lock:
            flow._changed.wait_for(lambda: flow._cancel.requested, 60)
        return take(flow, room)

    monkeypatch.setattr(block_files._Flow, "_take", slow)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(InterruptedError):
            write()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert writers() == []
    assert not store.contains("block")


def test_a_reader_that_failed_goes_on_failing() -> None:
    """An error is no end of the block for who reads on."""

    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"12345")
        raise kvio.CorruptBlockError("wrong", key="block")

    reader = BlockReader("block", pieces())
    assert reader.read(5) == b"12345"
    for _ in range(3):
        with pytest.raises(kvio.CorruptBlockError):
            reader.read(1)
    with pytest.raises(kvio.CorruptBlockError):
        reader.readall()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.readinto(bytearray())
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)


def test_a_reader_that_was_interrupted_returns_no_more() -> None:
    """Bytes that an interrupted read had taken are not skipped silently."""

    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"12345")
        if int("1"):
            raise InterruptedError
        yield memoryview(b"67890")

    reader = BlockReader("block", pieces())
    with pytest.raises(InterruptedError):
        reader.read(10)
    with pytest.raises(kvio.StorageError, match="interrupted"):
        reader.readall()
