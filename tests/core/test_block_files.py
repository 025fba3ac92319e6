"""File objects of blocks: threads, forks, signals, foreign data."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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
        with pytest.raises(TypeError), store.open_writer("wrong") as file:
            file.write(wrong)
    assert not store.contains("wrong")


def test_a_failed_write_is_not_forgotten(store: kvio.Store) -> None:
    """Who catches the error of a write, and then closes the file, is told again."""
    file = store.open_writer("block", nbytes=3)
    with pytest.raises(kvio.BlockSizeError):
        file.write(b"12345")
    with pytest.raises(kvio.StorageError, match="3 were announced"):
        file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"123")


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
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)
