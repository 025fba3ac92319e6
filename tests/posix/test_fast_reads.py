"""Whole blocks that are read through the page cache take one call of C, and behave as all reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import kvio
from kvio import KiB
from tests.posix import children, faultlab
from tests.posix.gate import SlowFile

DATA = faultlab.pattern(1, 4 * KiB)
#: A timeout takes a read past the fast path.
SLOWLY = 60.0
KEY_CHARACTERS = "abzABZ019_.=@+-/"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    """A store on the page cache, with one block."""
    with kvio.open_store("posix-tmpfile", root=tmp_path / "root", create=True) as store:
        store.write_block("block", DATA)
        yield store


@pytest.mark.parametrize(
    ("url", "nbytes", "fast"),
    [
        ("posix-tmpfile", 4 * KiB, "fast"),
        ("posix-tmpfile", 1024 * KiB, "fast"),
        ("posix-tmpfile", 0, "fast"),
        ("hybrid", 4 * KiB, "fast"),
        ("hybrid", 64 * KiB, "slow"),
        ("posix-tmpfile?layout=plain", 4 * KiB, "slow"),
        ("posix-direct", 4 * KiB, "slow"),
    ],
)
def test_what_is_always_buffered_is_read_fast(
    tmp_path: Path, url: str, nbytes: int, fast: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other reads go through the backend, which chooses how."""
    name, _, query = url.partition("?")
    try:
        store = kvio.open_store(f"{name}://{tmp_path}/other?{query}", create=True)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")
    with store:
        if name == "hybrid" and not store.capabilities.direct_io:
            pytest.skip("the temporary directory's file system has no direct I/O")
        data, out = faultlab.pattern(2, nbytes), bytearray(nbytes)
        store.write_block("block", data)
        calls: list[str] = []
        slow = store._backend.read_block_into

        def note(key: str, *args: Any, **more: Any) -> int:
            calls.append(key)
            return slow(key, *args, **more)

        monkeypatch.setattr(store._backend, "read_block_into", note)
        assert store.read_block_into("block", out) == nbytes
        assert out == data
        assert calls == ([] if fast == "fast" else ["block"])
        assert store.stats().reads == 1
        assert store.stats().bytes_read == nbytes


def outcome(read: Callable[[], int]) -> tuple[object, ...]:
    """Return the count of a read, or the type and text of its error."""
    try:
        return (read(),)
    except (kvio.KvioError, TypeError, ValueError) as exc:
        return type(exc), str(exc)


@given(
    key=st.one_of(
        st.text(KEY_CHARACTERS, max_size=12),
        st.text(max_size=6),
        st.integers(198, 203).map("k".__mul__),
        st.sampled_from(["block", "\ud800", "block\0", "block\n", "block/", "blöck"]),
    )
)
@settings(max_examples=300, deadline=None)
def test_both_paths_take_the_same_keys(key: str) -> None:
    """C checks a key by itself: a key is refused, missing or found as on the slow path."""
    store = shared_store()
    out = bytearray(len(DATA))
    fast = outcome(lambda: store.read_block_into(key, out))
    assert fast == outcome(lambda: store.read_block_into(key, out, timeout=SLOWLY))


_stores: list[kvio.Store] = []


def shared_store() -> kvio.Store:
    """Return the store of all examples of a test."""
    return _stores[-1]


@pytest.fixture(autouse=True)
def _offer(store: kvio.Store) -> Iterator[None]:
    _stores.append(store)
    yield
    _stores.pop()


def strided() -> memoryview:
    """Every other byte of a buffer."""
    return memoryview(bytearray(2 * len(DATA)))[::2]


def released() -> memoryview:
    """A view of nothing any more."""
    view = memoryview(bytearray(len(DATA)))
    view.release()
    return view


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(len(DATA)),
        lambda: bytearray(len(DATA) + 7),
        lambda: bytearray(len(DATA) - 1),
        lambda: memoryview(bytearray(len(DATA))),
        lambda: memoryview(bytearray(len(DATA))).cast("d"),
        lambda: memoryview(bytearray(len(DATA))).cast("B", (2, len(DATA) // 2)),
        lambda: np.zeros(len(DATA) // 4, "<f4"),
        lambda: np.zeros((4, len(DATA) // 16), "=i4"),
        lambda: np.zeros((4, len(DATA) // 16), "=i4", order="F"),
        lambda: np.zeros(len(DATA) // 4, ">f4"),
        lambda: np.zeros(len(DATA) // 8, object),
        lambda: np.zeros(len(DATA) // 8, [("a", "<i4"), ("b", "<f4")]),
        lambda: np.zeros(len(DATA) // 8, [("a", ">i4"), ("b", "<f4")]),
        lambda: np.zeros(len(DATA) // 8, "<c8"),
        lambda: np.zeros(0, "<f4"),
        strided,
        released,
        lambda: bytes(len(DATA)),
        lambda: [bytearray(len(DATA) // 2), bytearray(len(DATA) // 2)],
        lambda: "text",
        lambda: 4096,
        lambda: None,
    ],
)
def test_both_paths_take_the_same_memory(store: kvio.Store, make: Callable[[], Any]) -> None:
    """The same bytes arrive, or the same error says why they cannot."""
    fast, slow = make(), make()
    found = outcome(lambda: store.read_block_into("block", fast))
    assert found == outcome(lambda: store.read_block_into("block", slow, timeout=SLOWLY))
    if found == (len(DATA),) and not isinstance(fast, list):
        assert memoryview(fast).cast("B")[: len(DATA)] == DATA


def test_blocks_of_any_lengths_are_read_into_fresh_memory(store: kvio.Store) -> None:
    """The length of the last block is only a guess: longer and shorter ones are read as well."""
    lengths = [4096, 4096, 4097, 0, 1, 2048, 2049, 1 << 20, 5000, 17 << 20, 4096, 0, 0, 4096]
    blocks = {f"k{at}": faultlab.pattern(at, nbytes) for at, nbytes in enumerate(lengths)}
    for key, data in blocks.items():
        store.write_block(key, data)
    before = store.stats()
    for key, data in blocks.items():
        assert store.read_block(key) == data
    stats = store.stats()
    assert stats.reads - before.reads == len(blocks)
    assert stats.bytes_read - before.bytes_read == sum(lengths)
    for key in ("k0", "missing"):
        store.delete_block(key)
        with pytest.raises(kvio.BlockNotFoundError):
            store.read_block(key)
    assert store.stats().missing == 2
    store.write_block("k1", b"new", if_exists="replace")
    assert bytes(store.read_block("k1")) == b"new"


def test_every_kind_of_failure_is_counted_once(store: kvio.Store, tmp_path: Path) -> None:
    """A missing block, a damaged one and one that does not fit are one read each."""
    out = bytearray(len(DATA))
    store.write_block("rotten", DATA)
    store.write_block("long", DATA * 2)
    faultlab.rot(tmp_path / "root", "rotten")
    for key, error in (
        ("missing", kvio.BlockNotFoundError),
        ("rotten", kvio.CorruptBlockError),
        ("long", kvio.BlockSizeError),
    ):
        with pytest.raises(error) as caught:
            store.read_block_into(key, out)
        assert caught.value.key == key
    assert store.read_block_into("block", out) == len(DATA)
    stats = store.stats()
    assert (stats.reads, stats.missing, stats.corrupt, stats.failed) == (4, 1, 1, 1)
    assert stats.bytes_read == len(DATA)
    assert not store.write_block("rotten", DATA).existed, "it was known to be damaged"


@pytest.mark.root
def test_close_waits_for_a_fast_read(
    store: kvio.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later reads are refused, and nothing is closed under a read that the kernel holds."""
    out = bytearray(len(DATA))
    ended: list[object] = []
    close = store._backend.close

    def note_and_close() -> None:
        ended.append("closed")
        close()

    monkeypatch.setattr(store._backend, "close", note_and_close)
    reader = threading.Thread(target=lambda: ended.append(store.read_block_into("block", out)))
    closer = threading.Thread(target=store.close)
    with SlowFile(faultlab.file_of(tmp_path / "root", "block")) as slow:
        reader.start()
        slow.wait_for_reader()
        closer.start()
        while "no block" in str(outcome(lambda: store.read_block_into("other", out))):
            pass  # the other thread has not refused reads yet
        assert ended == []
    reader.join(60)
    closer.join(60)
    assert ended == [len(DATA), "closed"]
    assert out == DATA


def test_a_forked_child_reads_and_counts_for_itself(store: kvio.Store) -> None:
    """The counts of the parent stay there, and its descriptors are not used."""
    out = bytearray(len(DATA))
    assert store.read_block_into("block", out) == len(DATA)

    def child() -> None:
        assert store.stats().reads == 0
        assert store.read_block_into("block", bytearray(len(DATA))) == len(DATA)
        assert store.stats().reads == 1
        store.close()

    children.in_child(child)
    assert store.stats().reads == 1


def test_a_store_with_a_timeout_reads_on_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline cannot be kept by the caller's own thread."""
    with kvio.open_store(
        "posix-tmpfile", root=tmp_path / "timed", create=True, timeout=60
    ) as timed:
        timed.write_block("block", DATA)
        readers: list[int] = []
        slow = timed._backend.read_block_into

        def note_thread(*args: Any, **more: Any) -> int:
            readers.append(threading.get_ident())
            return slow(*args, **more)

        monkeypatch.setattr(timed._backend, "read_block_into", note_thread)
        assert timed.read_block_into("block", bytearray(len(DATA))) == len(DATA)
    assert readers != [threading.get_ident()]
    assert len(readers) == 1
