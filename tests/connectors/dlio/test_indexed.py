"""indexed_binary: ranges of a block, an index read once, and damage that is named."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio.connectors.dlio import blocks, counts, indexed
from kvio.connectors.dlio.settings import VARIABLE, Settings

CONTENT = bytes(range(100))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the directory of this process's samples: 3 in ``a``, which lie apart."""
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "counts").mkdir()
    monkeypatch.setenv(VARIABLE, Settings(data=f"posix-tmpfile://{store}").to_text())
    monkeypatch.setenv(counts.VARIABLE, str(tmp_path / "counts"))
    monkeypatch.setattr(counts, "_counters", None)
    (store / "a").write_bytes(CONTENT)
    _write_index(store, offsets=[0, 50, 90], sizes=[20, 30, 10])
    yield store
    blocks.data_store().close()
    blocks._open.cache_clear()


def _write_index(root: Path, *, offsets: list[int], sizes: list[int]) -> None:
    (root / "a.off.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    (root / "a.sz.idx").write_bytes(struct.pack(f"<{len(sizes)}Q", *sizes))


@pytest.mark.usefixtures("root")
def test_a_sample_is_the_range_that_the_index_says() -> None:
    """Not a byte more is read."""
    index = indexed.Indexes().of("a")
    found = [bytes(index.read(number)) for number in range(3)]

    assert found == [CONTENT[0:20], CONTENT[50:80], CONTENT[90:100]]
    assert counts.total().reads.nbytes == 2 * 24 + 60


@pytest.mark.usefixtures("root")
def test_an_index_is_read_once_however_many_threads_ask() -> None:
    """Its two blocks, and no more."""
    both, ready = indexed.Indexes(), threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        both.of("a")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts.total().reads.blocks == 2


def test_readers_share_indexes_until_the_last_is_gone() -> None:
    """The next epoch reads them anew."""
    first = indexed.shared("train")

    assert indexed.shared("train") is first
    assert indexed.shared("valid") is not first
    was = id(first)
    del first
    other = indexed.Indexes()  # so that the address is taken, if it was freed
    assert id(indexed.shared("train")) != was or id(other) != was
    assert "train" not in indexed._shared


@pytest.mark.parametrize(
    ("offsets", "sizes", "said"),
    [
        ([0, 50, 90], [20, 30, 11], "'a' does not have the 11 bytes at 90"),
        ([0, 50, 200], [20, 30, 10], "'a' does not have the 10 bytes at 200"),
        (
            [0, 50, 2**64 - 1],
            [20, 30, 10],
            "'a' does not have the 10 bytes at 18446744073709551615",
        ),
        ([0, 50, 90], [20, 30, 2**63], "'a' does not have the 9223372036854775808 bytes at 90"),
        ([0, 50], [20, 30], "'a.off.idx' has 2 samples, not 3"),
        ([0, 50, 90], [20, 30], "'a.off.idx' has 3 offsets for 2 sizes"),
    ],
)
def test_an_index_that_is_wrong_is_named(
    offsets: list[int], sizes: list[int], said: str, root: Path
) -> None:
    """Whatever it says of a sample that is not there."""
    _write_index(root, offsets=offsets, sizes=sizes)

    with pytest.raises(kvio.CorruptBlockError, match=said):
        indexed.Indexes().of("a").read(2)


def test_an_index_that_is_cut_is_named(root: Path) -> None:
    """A number of it is not whole."""
    (root / "a.sz.idx").write_bytes(bytes(23))

    with pytest.raises(kvio.CorruptBlockError, match=r"'a\.sz\.idx' ends within a number"):
        indexed.Indexes().of("a")


def test_an_index_that_is_missing_is_named(root: Path) -> None:
    """And a later try finds it."""
    offsets = (root / "a.off.idx").read_bytes()
    (root / "a.off.idx").unlink()
    indexes = indexed.Indexes()

    with pytest.raises(kvio.BlockNotFoundError, match=r"a\.off\.idx"):
        indexes.of("a")
    (root / "a.off.idx").write_bytes(offsets)
    assert bytes(indexes.of("a").read(2)) == CONTENT[90:]


@pytest.mark.usefixtures("root")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_forked_while_others_read_can_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that threads of the parent held at the fork are nobody's in the child."""
    indexes = indexed.shared("dataset")
    monkeypatch.setattr(indexes, "_reading", {"a": threading.Lock()})
    held = [
        blocks._opening,
        counts._creating,
        indexed._sharing,
        indexes._lock,
        indexes._reading["a"],
    ]
    with contextlib.ExitStack() as locks:
        for lock in held:
            locks.enter_context(lock)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # a child that waits must not stay
            code = 1
            try:
                code = int(bytes(indexed.shared("dataset").of("a").read(0)) != CONTENT[:20])
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
